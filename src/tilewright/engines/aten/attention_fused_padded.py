"""ATen's fused attention on a CPU where lengths pad dense sequences.

The lengths become an additive mask of one call over all sequences, which is faster than a call a
sequence as long as little is computed that nobody sees; how much is decided by the lengths of each
call. What is said of the fused function in ``attention_fused`` holds here: a result that is not
finite is computed again by the composition, so NaN and infinity beyond a length never come through.

A row without a key, and a row beyond its length, is dead: O = 0, Stats = -inf. In the backward its
Stats are taken as +inf, which makes each of its probabilities exp(score - inf) = 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tilewright.engines.aten import attention_fused
from tilewright.engines.aten.attention_fused import LOG2_E, Attempt, is_finite, readable
from tilewright.engines.aten.attention_operands import Lengths
from tilewright.engines.aten.attention_spec import AttentionSpec
from tilewright.engines.aten.casts import storer

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]

# Elements of the mask: 4 MiB in float32, as a block of scores of the composition.
MASK_ELEMENTS = 1 << 20
# Scores times head size that nobody sees, a sequence: about what a part of the composition costs
# beside its arithmetic (0.1 ms on one core).
WASTE_A_SEQUENCE = 1 << 21


class _Padding(NamedTuple):
    """What the lengths of a call hide.

    ``mask`` is added to the scores and broadcasts to (B, Hq, Sq, Skv). ``dead`` (B, 1, Sq, 1) rows
    see no key; ``beyond`` (B, 1, Skv, 1) keys are behind a length.
    """

    mask: Tensor
    dead: Tensor
    beyond: Tensor

    def cleaned(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The operands with zeros in dead rows and beyond the lengths of keys."""
        hidden = ((q, self.dead), (k, self.beyond), (v, self.beyond))
        return [operand.masked_fill(rows, 0.0) for operand, rows in hidden]


def padded_forward(op: Any, spec: AttentionSpec, device: torch.device) -> Attempt | None:
    """A function that fills O and Stats of a call with lengths, or None if it is none."""
    if not _serves(op, spec, device) or set(op.outputs) - {"O", "Stats"}:
        return None
    masks = PaddingMask(op, spec)
    has_stats, stats_factor = "Stats" in op.outputs, LOG2_E if spec.stats_log2 else 1.0
    store = storer(op.outputs["O"])

    def attempt(inputs: Operands, outputs: Operands) -> bool:
        padding = masks.of(inputs)
        if padding is None:
            return False
        operands = [readable(inputs[port], spec.compute) for port in ("q", "k", "v")]
        factor = float(inputs["attn_scale"]) if spec.scale is None else spec.scale

        def attend() -> tuple[Tensor, Tensor]:
            o, stats = attention_fused._flash(
                *operands, 0.0, masks.causal, attn_mask=padding.mask, scale=factor
            )
            return o.masked_fill_(padding.dead, 0.0), stats

        o, stats = attend()
        if not is_finite(o):
            operands = padding.cleaned(*operands)
            o, stats = attend()
            if not is_finite(o):
                return False
        stats = stats.unsqueeze(-1).masked_fill_(padding.dead, -math.inf)
        # What it gives for a row that the bias hides all of.
        if spec.has_bias and bool((stats == 0.0).any()):
            return False
        store(outputs["O"], o)
        if has_stats:
            outputs["Stats"].copy_(stats if stats_factor == 1.0 else stats * stats_factor)
        return True

    return attempt


def padded_backward(op: Any, spec: AttentionSpec, device: torch.device) -> Attempt | None:
    """A function that fills dQ, dK and dV of a call with lengths, or None if it is none."""
    if not _serves(op, spec, device) or set(op.outputs) - {"dQ", "dK", "dV"}:
        return None
    masks = PaddingMask(op, spec)
    stores = [(port, storer(op.outputs[port])) for port in ("dQ", "dK", "dV")]

    def attempt(inputs: Operands, outputs: Operands) -> bool:
        padding = masks.of(inputs)
        if padding is None:
            return False
        *operands, o, d_o = (
            readable(inputs[port], spec.compute) for port in ("q", "k", "v", "o", "dO")
        )
        stats = inputs["stats"].to(spec.compute)
        if spec.has_bias and not is_finite(stats.masked_fill(padding.dead, 0.0)):
            return False
        stats = stats.masked_fill(padding.dead, math.inf).squeeze(-1)
        # 0 * NaN: what a caller left in dead rows must not count.
        o, d_o = o.masked_fill(padding.dead, 0.0), d_o.masked_fill(padding.dead, 0.0)
        factor = float(inputs["attn_scale"]) if spec.scale is None else spec.scale

        def attend() -> tuple[Tensor, ...]:
            given = (d_o, *operands, o, stats)
            found: tuple[Tensor, ...] = attention_fused._flash_backward(
                *given, 0.0, masks.causal, attn_mask=padding.mask, scale=factor
            )
            return found

        found = attend()
        if not all(map(is_finite, found)):
            operands = padding.cleaned(*operands)
            found = attend()
            if not all(map(is_finite, found)):
                return False
        for (port, store), gradient in zip(stores, found, strict=True):
            store(outputs[port], gradient)
        return True

    return attempt


class PaddingMask:
    """Makes the mask of a call from its lengths; prepared from a declaration.

    A causal band that starts at the top left is the fused function's own (``causal``); any other
    joins the mask.
    """

    def __init__(self, op: Any, spec: AttentionSpec) -> None:
        self.causal = spec.right == 0 and spec.left is None and not spec.bottom_right
        self._spec = spec
        self._in_mask = spec.banded and not self.causal
        self._len_q, self._len_kv = Lengths(spec, "q"), Lengths(spec, "kv")
        self._rows = torch.arange(spec.rows, device="cpu").view(1, 1, -1, 1)
        self._columns = torch.arange(spec.keys, device="cpu")
        self.elements = mask_elements(op, spec)

    def of(self, inputs: Operands) -> _Padding | None:
        """The mask and the dead rows, or None if too much would be computed for nothing."""
        spec, cpu = self._spec, self._columns.device
        len_q, len_kv = self._len_q.on_device(inputs, cpu), self._len_kv.on_device(inputs, cpu)
        seen = 0 if self._in_mask else int(torch.dot(len_q, len_kv))
        hidden_scores = spec.batch * spec.rows * spec.keys - seen
        if hidden_scores * spec.heads_q * spec.depth > spec.batch * WASTE_A_SEQUENCE:
            return None
        len_q, len_kv = len_q.view(-1, 1, 1, 1), len_kv.view(-1, 1, 1, 1)
        hidden, dead = self._columns >= len_kv, self._rows >= len_q
        beyond = hidden.transpose(2, 3)
        if self._in_mask:
            diagonal = self._rows + (len_kv - len_q) if spec.bottom_right else self._rows
            if spec.right is not None:
                hidden = hidden | (self._columns > diagonal + spec.right)
            if spec.left is not None:
                hidden = hidden | (self._columns <= diagonal - spec.left)
            dead = dead | hidden.all(-1, keepdim=True)
        else:
            dead = dead | (len_kv == 0)
        bias = inputs["bias"].to(spec.compute) if spec.has_bias else _zero(spec.compute)
        return _Padding(torch.where(hidden, -math.inf, bias), dead, beyond)


def mask_elements(op: Any, spec: AttentionSpec) -> int:
    """How many elements the mask of a declaration has."""
    in_mask = spec.banded and (spec.right != 0 or spec.left is not None or spec.bottom_right)
    heads, rows = (op.inputs["bias"].dim[1:3]) if spec.has_bias else (1, 1)
    return int(spec.batch * heads * max(rows, spec.rows if in_mask else 1) * spec.keys)


def _zero(dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device="cpu")


def _serves(op: Any, spec: AttentionSpec, device: torch.device) -> bool:
    if not spec.lengths or not attention_fused.reads_scores_alone(op, spec, device):
        return False
    return mask_elements(op, spec) <= MASK_ELEMENTS
