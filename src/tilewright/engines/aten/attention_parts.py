"""From one call's operands to the parts that attention is computed in.

One part holds every sequence where all have the declared extent, or where lengths stay on the
device; otherwise each sequence is a part of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilewright.engines.aten.attention_blocks import OPEN_BAND, Band
from tilewright.engines.aten.attention_operands import Lengths, PagedPort, RaggedPort
from tilewright.engines.aten.attention_score_mod import ScoreModifier
from tilewright.engines.aten.attention_scores import MaskDropout, Part
from tilewright.engines.aten.attention_spec import AttentionSpec, alibi_slopes
from tilewright.engines.aten.dropout import PhiloxDropout, Region, Word
from tilewright.records import record

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]
# Elements of a dropout mask that are made at a time for a dump: 2 MiB of int64 counters.
_DUMP_ELEMENTS = 1 << 18


@record(frozen=True)
class Sequence:
    """One sequence of a call, by what the host read: its index, lengths and used pages."""

    batch: int
    rows: int
    keys: int
    pages: Mapping[str, Tensor]


class PartBuilder:
    """Prepared from a declaration; reads one call's operands."""

    def __init__(self, op: Any, spec: AttentionSpec, device: torch.device, on_host: bool) -> None:
        self.spec = spec
        self.device = device
        self.on_host = on_host
        self._op = op
        self.len_q = Lengths(spec, "q")
        self.len_kv = Lengths(spec, "kv")
        self.paged = {side: PagedPort(op, spec, side) for side in sorted(spec.paged)}
        self.ragged = {
            port: RaggedPort(port, mapping[port], spec.title)
            for mapping in (op.inputs, op.outputs)
            for port in mapping
            if port in spec.ragged
        }
        self._slopes = (
            torch.tensor(alibi_slopes(spec.heads_q), dtype=spec.compute, device=device)
            if spec.alibi
            else None
        )
        self._modifier = ScoreModifier(op) if spec.has_score_mod else None
        hides = spec.banded or spec.has_bias or spec.has_block_mask or spec.has_score_mod
        self._trusted = not hides

    def scalar(self, inputs: Operands, port: str) -> float | Tensor:
        """A one-element operand: a host number on a CPU, else a 0-d tensor there."""
        operand = inputs.get(port)
        if operand is None:
            return float(self._op.inputs[port].value)
        if operand.device.type == "cpu":
            return float(operand.to(torch.float64).reshape(-1)[0])
        return operand.reshape(-1)[0].to(self.spec.compute)

    def scale(self, inputs: Operands) -> float | Tensor:
        """The attention scale."""
        scale = self.spec.scale
        return self.scalar(inputs, "attn_scale") if scale is None else scale

    def philox(self, inputs: Operands) -> PhiloxDropout | None:
        """Dropout by seed and offset, if declared."""
        spec = self.spec
        if not spec.philox:
            return None
        words = [self._word(inputs, port) for port in ("dropout_seed", "dropout_offset")]
        return PhiloxDropout(
            spec.drop_probability, words[0], words[1], spec.heads_q, spec.rows, spec.keys
        )

    def whole(self, inputs: Operands, q: Tensor, k: Tensor, v: Tensor) -> Part:
        """All sequences as one part of dense q, k and v; lengths, if any, on the device."""
        common = self._common(inputs)
        band = self._band(q.shape[2], k.shape[2])
        if not self.spec.sequences_differ:
            return replace(common, q=q, k=k, v=v, band=band)
        return replace(
            common,
            q=q,
            k=k,
            v=v,
            band=band,
            trusted=False,
            len_q=self.len_q.on_device(inputs, self.device),
            len_kv=self.len_kv.on_device(inputs, self.device),
            shift_by_lengths=self.spec.bottom_right,
        )

    def dense(self, inputs: Operands, port: str) -> Tensor:
        """An operand as (B, H, S, X), gathered on the device if it is ragged or paged."""
        if port in self.paged:
            return self.paged[port].gather(inputs)
        if port in self.ragged:
            return self.ragged[port].gather(inputs[port], inputs)
        return inputs[port]

    def sequences(self, inputs: Operands) -> list[Sequence]:
        """Every sequence, its facts read and checked on the host."""
        rows, keys = self.len_q.on_host(inputs), self.len_kv.on_host(inputs)
        return [
            Sequence(
                batch,
                rows[batch],
                keys[batch],
                {
                    side: paged.pages(inputs, batch, keys[batch])
                    for side, paged in self.paged.items()
                },
            )
            for batch in range(self.spec.batch)
        ]

    def starts(self, inputs: Operands) -> dict[str, list[int]]:
        """The first element of each sequence of each ragged port, read on the host."""
        return {port: ragged.starts(inputs).tolist() for port, ragged in self.ragged.items()}

    def view(
        self,
        operands: Operands,
        port: str,
        batch: int,
        rows: int,
        starts: Mapping[str, list[int]],
    ) -> Tensor:
        """The first ``rows`` rows of a sequence of a (B, H, S, X) operand, as a view."""
        ragged = self.ragged.get(port)
        if ragged is not None:
            return ragged.sequence(operands[port], starts[port][batch], rows)
        return operands[port][batch : batch + 1, :, :rows]

    def parts(
        self, inputs: Operands, facts: list[Sequence], starts: Mapping[str, list[int]]
    ) -> Iterator[tuple[Sequence, Part]]:
        """A part a sequence, each made when its turn comes; all are known to fit before the first.

        Raises:
            BindingError: if a sequence reaches beyond its operand.
        """
        for fact in facts:
            for port, rows in (("q", fact.rows), ("k", fact.keys), ("v", fact.keys)):
                if port in self.ragged:
                    self.view(inputs, port, fact.batch, rows, starts)
        common = self._common(inputs)
        for fact in facts:
            batch = fact.batch
            program = common.program
            yield (
                fact,
                replace(
                    common,
                    q=self.view(inputs, "q", batch, fact.rows, starts),
                    k=self._keys(inputs, "k", fact, starts),
                    v=self._keys(inputs, "v", fact, starts),
                    band=self._band(fact.rows, fact.keys),
                    first_batch=batch,
                    bias=_of_batch(common.bias, batch),
                    block_mask=_of_batch(common.block_mask, batch),
                    drop_mask=None
                    if common.drop_mask is None
                    else MaskDropout(
                        one_batch(common.drop_mask.mask, batch), common.drop_mask.scale
                    ),
                    program=None if program is None else program.narrow_batch(batch),
                ),
            )

    def _common(self, inputs: Operands) -> Part:
        """A part with what all sequences share; its q, k, v and band are to be replaced."""
        spec, q = self.spec, inputs["q"]
        drop_mask = None
        if spec.drop_mask:
            factor = inputs["dropout_scale"].reshape(-1)[0].to(self.device, spec.compute)
            drop_mask = MaskDropout(inputs["dropout_mask"], factor)
        return Part(
            q=q,
            k=q,
            v=q,
            compute=spec.compute,
            scale=self.scale(inputs),
            band=OPEN_BAND,
            trusted=self._trusted,
            bias=inputs["bias"] if spec.has_bias else None,
            block_mask=inputs["block_mask"] if spec.has_block_mask else None,
            sink=self._sink(inputs) if spec.has_sink else None,
            slopes=self._slopes,
            philox=self.philox(inputs),
            drop_mask=drop_mask,
            program=self._modifier.bind(inputs, spec.compute) if self._modifier else None,
        )

    def _keys(
        self, inputs: Operands, side: str, fact: Sequence, starts: Mapping[str, list[int]]
    ) -> Tensor:
        paged = self.paged.get(side)
        if paged is not None:
            return paged.sequence(inputs[side], fact.pages[side], fact.keys)
        return self.view(inputs, side, fact.batch, fact.keys, starts)

    def _band(self, rows: int, keys: int) -> Band:
        spec = self.spec
        return Band(spec.left, spec.right, keys - rows if spec.bottom_right else 0)

    def _sink(self, inputs: Operands) -> Tensor:
        sink = inputs["sink_token"].reshape(-1).to(self.device, self.spec.compute)
        return sink.expand(self.spec.heads_q)

    def _word(self, inputs: Operands, port: str) -> Word:
        operand = inputs.get(port)
        if operand is None:
            return int(self._op.inputs[port].value)
        first = operand.reshape(-1)[0]
        return int(first) if first.device.type == "cpu" else first.to(torch.int64)


def one_batch(operand: Tensor, batch: int) -> Tensor:
    """The slice of a sequence of an operand that may broadcast over sequences."""
    return operand if operand.shape[0] == 1 else operand[batch : batch + 1]


def dump_keep(philox: PhiloxDropout, output: Tensor) -> None:
    """Write 1 where dropout keeps an element of (B, Hq, Sq, Skv) and 0 elsewhere."""
    batches, heads, rows, keys = output.shape
    step = max(1, _DUMP_ELEMENTS // max(keys, 1))
    for batch in range(batches):
        for head in range(heads):
            for row in range(0, rows, step):
                last = min(row + step, rows)
                region = Region((batch, batch + 1), (head, head + 1), (row, last), (0, keys))
                kept = philox.keep(region, output.device)
                output[batch : batch + 1, head : head + 1, row:last].copy_(kept)


def _of_batch(operand: Tensor | None, batch: int) -> Tensor | None:
    return None if operand is None else one_batch(operand, batch)
