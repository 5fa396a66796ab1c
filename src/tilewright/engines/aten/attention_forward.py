"""Attention forward, composed of matrix products and a softmax a row block at a time.

S = scale Q K^T, finished by ``attention_scores``; P = exp(S - max S) / (sum + exp(sink - max S));
O = dropout(P) V; Stats = log-sum-exp of a row. Rows that see nothing give O = 0 and Stats = -inf
(the sink, if there is one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright.engines.aten.attention_blocks import (
    OPEN_BAND,
    Block,
    Chunk,
    blocks,
    choose_tiling,
    chunks,
)
from tilewright.engines.aten.attention_scores import (
    Part,
    finish_scores,
    grouped_rows,
    keep_factor,
    ungrouped,
)

Tensor = torch.Tensor
Store = Callable[[Tensor, Tensor], None]
_LOG2_E = 1.0 / math.log(2.0)


@dataclass(slots=True)
class RoundedProducts:
    """What FP8 attention does between its products, and the maxima that it reports.

    P * ``scale_p`` is rounded by ``round_p``; the second product is multiplied by ``descale_o``.
    ``amax_p`` and ``amax_o`` (0-d) grow in place; the output is stored times ``scale_o``.
    """

    round_p: Callable[[Tensor], Tensor] | None
    scale_p: float | Tensor
    descale_o: float | Tensor
    scale_o: float | Tensor
    amax_p: Tensor
    amax_o: Tensor


@dataclass(slots=True)
class ForwardOutputs:
    """Where the results of a part go: views (B, Hq, Sq, Dv) and (B, Hq, Sq, 1)."""

    o: Tensor
    store_o: Store
    stats: Tensor | None = None
    score_max: Tensor | None = None
    score_sum_exp: Tensor | None = None
    stats_log2: bool = False
    rounded: RoundedProducts | None = None


def attend(part: Part, outputs: ForwardOutputs) -> None:
    """Fill the outputs of ``part``."""
    batches, _, rows, _ = part.q.shape
    heads_kv, keys = part.k.shape[1], part.k.shape[2]
    band = OPEN_BAND if part.shift_by_lengths else part.band
    tiling = choose_tiling(batches, heads_kv, part.group, rows, keys, band, part.block_budget)
    for chunk in chunks(batches, heads_kv, tiling):
        k, v = converted_keys(part, chunk)
        clean = part.is_clean(k, v, _queries(part, chunk))
        values = v if clean else _with_marks(v)
        for block in blocks(chunk, part.group, rows, keys, band, tiling):
            if block.key[0] == block.key[1]:
                _write_unseeing(part, outputs, block)
            else:
                _attend_block(part, outputs, block, k, values, clean)


def _queries(part: Part, chunk: Chunk) -> Tensor:
    heads = slice(chunk.head_kv[0] * part.group, chunk.head_kv[1] * part.group)
    return part.q[slice(*chunk.batch), heads]


def converted_keys(part: Part, chunk: Chunk) -> tuple[Tensor, Tensor]:
    """The keys and values of a chunk as (sequences * key heads, Skv, X) in the compute type."""
    return chunk_of(part.k, chunk, part.compute), chunk_of(part.v, chunk, part.compute)


def chunk_of(operand: Tensor, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """(B, Hkv, S, X) cut to a chunk, as (sequences * key heads, S, X) that products read fast."""
    part = operand[slice(*chunk.batch), slice(*chunk.head_kv)].to(dtype)
    count = part.shape[0] * part.shape[1]
    flat = part.reshape(count, *part.shape[2:])
    # A product would copy a matrix without a unit stride again for each block.
    return flat if 1 in flat.stride()[1:] else flat.contiguous()


def _attend_block(
    part: Part, outputs: ForwardOutputs, block: Block, k: Tensor, values: Tensor, clean: bool
) -> None:
    first_key, last_key = block.key
    q = grouped_rows(part.q, block, part.compute)
    products = torch.bmm(q * part.scale, k[:, first_key:last_key].transpose(1, 2))
    scores, _ = finish_scores(part, products, block, clean)
    highest, sink = scores.amax(-1, keepdim=True), None
    if part.sink is not None:
        sink = sink_rows(part.sink, block)
        highest = torch.maximum(highest, sink)
    top = highest
    if not part.trusted:
        # A row of -inf alone: exp(-inf - 0) is 0 where exp(-inf + inf) would be NaN.
        highest = highest.masked_fill(highest == -torch.inf, 0.0)
    probabilities = scores.sub_(highest).exp_()
    total = probabilities.sum(-1, keepdim=True)
    if sink is not None:
        total.add_((sink - highest).exp_())
    if sink is not None and part.len_q is not None:
        # Rows beyond a length have no sink either.
        beyond = _rows_beyond(part.len_q, block)
        top, total = top.masked_fill(beyond, -torch.inf), total.masked_fill(beyond, 0.0)
    _put_statistics(outputs, block, top, highest, total)
    if not part.trusted:
        total.masked_fill_(total == 0.0, 1.0)
    rounded = outputs.rounded
    keep = keep_factor(part, block)
    if keep is not None:
        probabilities.mul_(keep)
    if rounded is None or rounded.round_p is None:
        result = _weighted(probabilities, values[:, first_key:last_key], part.v.shape[3])
        result.div_(total)
    else:
        probabilities.div_(total)
        torch.maximum(rounded.amax_p, probabilities.amax(), out=rounded.amax_p)
        probabilities = rounded.round_p(probabilities.mul_(rounded.scale_p))
        result = _weighted(probabilities, values[:, first_key:last_key], part.v.shape[3])
    if rounded is not None:
        result.mul_(rounded.descale_o)
        if result.numel():
            torch.maximum(rounded.amax_o, result.abs().amax(), out=rounded.amax_o)
        result.mul_(rounded.scale_o)
    outputs.store_o(_rows_of(outputs.o, block), ungrouped(result, block))


def sink_rows(sink: Tensor, block: Block) -> Tensor:
    """The sink of each row of a block: (sequences * key heads, group * rows, 1)."""
    batches, heads_kv, group, rows, _ = block.shape
    heads = sink[slice(*block.head)].view(1, heads_kv, group, 1)
    return heads.expand(batches, heads_kv, group, rows).reshape(batches * heads_kv, group * rows, 1)


def _rows_beyond(len_q: Tensor, block: Block) -> Tensor:
    batches, heads_kv, group, rows, _ = block.shape
    index = torch.arange(*block.row, device=len_q.device)
    beyond = index >= len_q[slice(*block.batch)].view(-1, 1, 1, 1)
    return beyond.expand(batches, heads_kv, group, rows).reshape(
        batches * heads_kv, group * rows, 1
    )


def _put_statistics(
    outputs: ForwardOutputs, block: Block, top: Tensor, shift: Tensor, total: Tensor
) -> None:
    """Stats = shift + ln(total); ``top`` is the row maximum, -inf where ``shift`` is 0 for it."""
    if outputs.score_max is not None:
        _put(outputs.score_max, block, top)
    if outputs.score_sum_exp is not None:
        _put(outputs.score_sum_exp, block, total)
    if outputs.stats is not None:
        stats = total.log().add_(shift)
        _put(outputs.stats, block, stats.mul_(_LOG2_E) if outputs.stats_log2 else stats)


def _with_marks(values: Tensor) -> Tensor:
    """Values with what is not finite set to 0, then three marks: NaN, +inf, -inf there.

    A probability of 0 times one of those would be NaN; the weighted marks tell instead which
    rows really see one.
    """
    finite = torch.isfinite(values)
    marks = (torch.isnan(values), torch.isposinf(values), torch.isneginf(values))
    zeroed = values.masked_fill(~finite, 0.0)
    return torch.cat((zeroed, *(mark.to(values.dtype) for mark in marks)), dim=-1)


def _weighted(probabilities: Tensor, values: Tensor, depth: int) -> Tensor:
    product = torch.bmm(probabilities, values)
    if values.shape[-1] == depth:
        return product
    result, nan, positive, negative = torch.split(product, depth, dim=-1)
    sees_positive, sees_negative = positive != 0.0, negative != 0.0
    result = result.masked_fill(sees_positive, torch.inf)
    result = result.masked_fill_(sees_negative, -torch.inf)
    return result.masked_fill_((nan != 0.0) | (sees_positive & sees_negative), torch.nan)


def _rows_of(output: Tensor, block: Block) -> Tensor:
    return output[slice(*block.batch), slice(*block.head), slice(*block.row)]


def _put(output: Tensor, block: Block, values: Tensor) -> None:
    _rows_of(output, block).copy_(ungrouped(values, block))


def _write_unseeing(part: Part, outputs: ForwardOutputs, block: Block) -> None:
    """Write what rows that see no key give."""
    outputs.store_o(_rows_of(outputs.o, block), part.q.new_zeros((), dtype=part.compute))
    batches, heads_kv, group, rows, _ = block.shape
    top = torch.full(
        (batches * heads_kv, group * rows, 1), -torch.inf, dtype=part.compute, device=part.q.device
    )
    total = torch.zeros_like(top)
    if part.sink is not None:
        top = sink_rows(part.sink, block)
        if part.len_q is not None:
            top = top.masked_fill(_rows_beyond(part.len_q, block), -torch.inf)
        # A sink of -inf is as none.
        total = (top != -torch.inf).to(part.compute)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    _put_statistics(outputs, block, top, shift, total)
