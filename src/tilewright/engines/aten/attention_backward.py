"""Attention backward, a row block at a time; no matrix of rows x keys beyond a block is kept.

With P = exp(S - Stats), M the dropout factor, Delta = rowsum(dO * O):
dV = (M P)^T dO; dP = M (dO V^T); dS = P (dP - Delta); dBias = dS summed over broadcast axes;
dQ = scale dS' K; dK = scale dS'^T Q, where dS' is dS taken back through the score program;
dSink = -sum(exp(sink - Stats) Delta). The query heads of one key head lie along the summed axis of
the products for dK and dV, so their sum is made in the compute type and in a fixed order.
"""

from __future__ import annotations

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
from tilewright.engines.aten.attention_forward import chunk_of, sink_rows
from tilewright.engines.aten.attention_scores import (
    Part,
    broadcast_slice,
    finish_scores,
    grouped_rows,
    keep_factor,
    ungrouped,
)

Tensor = torch.Tensor
Store = Callable[[Tensor, Tensor], None]


@dataclass(slots=True)
class Saved:
    """What the forward left and the incoming gradient: o, dO (B, Hq, Sq, Dv), stats (B, Hq, Sq, 1).

    ``stats`` is in natural log. The optional operands are other copies of the same values, of
    which MX block-scaled attention has one a direction of reduction: ``q_grad``, ``k_grad`` and
    ``d_o_grad`` enter the products for dK, dQ and dV, and ``d_o_delta`` enters Delta.
    """

    o: Tensor
    d_o: Tensor
    stats: Tensor
    q_grad: Tensor | None = None
    k_grad: Tensor | None = None
    d_o_grad: Tensor | None = None
    d_o_delta: Tensor | None = None


@dataclass(slots=True)
class RoundedGradients:
    """What FP8 backward does between its products.

    Factors multiply: Delta by ``delta``, dO V^T by ``d_p``; P by ``scale_p`` and dS (with the
    attention scale in it) by ``scale_d_s`` before ``round_p`` and ``round_d_s``; dQ, dK and dV by
    ``d_q``, ``d_k`` and ``d_v`` after their products. ``amax_d_s`` (0-d) grows in place.
    """

    round_p: Callable[[Tensor], Tensor]
    round_d_s: Callable[[Tensor], Tensor]
    attn_scale: float | Tensor
    delta: float | Tensor
    d_p: float | Tensor
    scale_p: float | Tensor
    scale_d_s: float | Tensor
    d_q: float | Tensor
    d_k: float | Tensor
    d_v: float | Tensor
    amax_d_s: Tensor


@dataclass(slots=True)
class Gradients:
    """Where the gradients of a part go, and how: views of the operands' shapes.

    ``d_bias`` (the bias's shape) and ``d_sink`` (Hq,) are sums in the compute type that grow.
    """

    d_q: Tensor
    d_k: Tensor
    d_v: Tensor
    store_q: Store
    store_k: Store
    store_v: Store
    d_bias: Tensor | None = None
    d_sink: Tensor | None = None
    rounded: RoundedGradients | None = None


@dataclass(slots=True)
class _Keys:
    """A chunk's keys and values in the compute type, and the sums of their gradients."""

    k: Tensor
    v: Tensor
    k_grad: Tensor
    d_k: Tensor
    d_v: Tensor
    clean: bool


def attend_backward(part: Part, saved: Saved, gradients: Gradients) -> None:
    """Write dQ, dK and dV of ``part``, and add to dBias and dSink."""
    batches, _, rows, _ = part.q.shape
    heads_kv, keys = part.k.shape[1], part.k.shape[2]
    band = OPEN_BAND if part.shift_by_lengths else part.band
    tiling = choose_tiling(batches, heads_kv, part.group, rows, keys, band, part.block_budget)
    for chunk in chunks(batches, heads_kv, tiling):
        held = _hold(part, saved, chunk)
        for block in blocks(chunk, part.group, rows, keys, band, tiling):
            if block.key[0] == block.key[1]:
                _write_unseeing(part, saved, gradients, block)
            else:
                _block_backward(part, saved, gradients, block, held)
        batch, head = slice(*chunk.batch), slice(*chunk.head_kv)
        shape = (chunk.batch[1] - chunk.batch[0], chunk.head_kv[1] - chunk.head_kv[0], keys, -1)
        if keys:
            gradients.store_k(gradients.d_k[batch, head], held.d_k.view(shape))
            gradients.store_v(gradients.d_v[batch, head], held.d_v.view(shape))


def _hold(part: Part, saved: Saved, chunk: Chunk) -> _Keys:
    k = chunk_of(part.k, chunk, part.compute)
    v = chunk_of(part.v, chunk, part.compute)
    k_grad = k if saved.k_grad is None else chunk_of(saved.k_grad, chunk, part.compute)
    heads = slice(chunk.head_kv[0] * part.group, chunk.head_kv[1] * part.group)
    batch = slice(*chunk.batch)
    clean = part.is_clean(
        k, v, *(x[batch, heads].to(part.compute) for x in (part.q, saved.d_o, saved.o))
    )
    if not clean:
        # Where dS is 0 the key must not matter; a NaN key that a row sees is in dS already.
        k_grad = k_grad.masked_fill(~torch.isfinite(k_grad), 0.0)
    return _Keys(k, v, k_grad, torch.zeros_like(k), torch.zeros_like(v), clean)


def _block_backward(
    part: Part, saved: Saved, gradients: Gradients, block: Block, held: _Keys
) -> None:
    compute, rounded = part.compute, gradients.rounded
    keys = slice(*block.key)
    q = grouped_rows(part.q, block, compute) * part.scale
    d_o = grouped_rows(saved.d_o, block, compute)
    delta = _delta(saved, block, compute)
    stats = grouped_rows(saved.stats, block, compute)
    products = torch.bmm(q, held.k[:, keys].transpose(1, 2))
    scores, before = finish_scores(part, products, block, held.clean)
    if not part.trusted:
        # A row that sees nothing has Stats -inf and P = 0.
        stats = stats.masked_fill(stats == -torch.inf, torch.inf)
    # Scores are not read again, so they become P; a program's input is another tensor.
    p = scores.sub_(stats).exp_()
    d_p = torch.bmm(d_o, held.v[:, keys].transpose(1, 2))
    if rounded is not None:
        d_p.mul_(rounded.d_p)
        delta.mul_(rounded.delta)
    q_grad = _rows_for_sum(saved.q_grad, block, compute)
    d_o_grad = _rows_for_sum(saved.d_o_grad, block, compute)
    q_grad = q if q_grad is None else q_grad * part.scale
    d_o_grad = d_o if d_o_grad is None else d_o_grad
    if not held.clean:
        # A row whose P is all 0 has nothing to give, whatever it holds.
        unseeing = p.sum(-1, keepdim=True) == 0.0
        q_grad = q_grad.masked_fill(unseeing, 0.0)
        d_o_grad = d_o_grad.masked_fill(unseeing, 0.0)
        delta = delta.masked_fill(unseeing, 0.0)
    keep = keep_factor(part, block)
    if keep is not None:
        d_p.mul_(keep)
    d_s = d_p.sub_(delta).mul_(p)
    unseen = None if held.clean and part.program is None else p == 0.0
    if unseen is not None:
        d_s.masked_fill_(unseen, 0.0)
    if gradients.d_sink is not None and part.sink is not None:
        _add_sink(part.sink, gradients.d_sink, block, stats, delta)
    if keep is not None:
        p.mul_(keep)
    if gradients.d_bias is not None:
        _add_bias(gradients.d_bias, d_s, block)
    if part.program is not None and before is not None:
        d_s = part.program.gradient(
            ungrouped(before, block), ungrouped(d_s, block), block, part.first_batch
        ).view(d_s.shape)
        if unseen is not None:
            # The slope of a score program at what a mask hides may be anything, NaN too.
            d_s.masked_fill_(unseen, 0.0)
    if rounded is None:
        held.d_v[:, keys].baddbmm_(p.transpose(1, 2), d_o_grad)
        held.d_k[:, keys].baddbmm_(d_s.transpose(1, 2), q_grad)
        d_q = torch.bmm(d_s, held.k_grad[:, keys]).mul_(part.scale)
    else:
        d_q = _rounded_products(part, gradients, rounded, block, held, p, d_s, d_o_grad)
    rows = gradients.d_q[slice(*block.batch), slice(*block.head), slice(*block.row)]
    gradients.store_q(rows, ungrouped(d_q, block))


def _rounded_products(
    part: Part,
    gradients: Gradients,
    rounded: RoundedGradients,
    block: Block,
    held: _Keys,
    p: Tensor,
    d_s: Tensor,
    d_o: Tensor,
) -> Tensor:
    """Add to dK and dV and return dQ, with P and dS rounded to their 8-bit types."""
    keys = slice(*block.key)
    p = rounded.round_p(p.mul_(rounded.scale_p))
    held.d_v[:, keys].add_(torch.bmm(p.transpose(1, 2), d_o).mul_(rounded.d_v))
    d_s.mul_(rounded.attn_scale)
    if d_s.numel():
        torch.maximum(rounded.amax_d_s, d_s.abs().amax(), out=rounded.amax_d_s)
    d_s = rounded.round_d_s(d_s.mul_(rounded.scale_d_s))
    q = grouped_rows(part.q, block, part.compute)
    if not held.clean:
        q = q.masked_fill(~torch.isfinite(q), 0.0)
    held.d_k[:, keys].add_(torch.bmm(d_s.transpose(1, 2), q).mul_(rounded.d_k))
    return torch.bmm(d_s, held.k_grad[:, keys]).mul_(rounded.d_q)


def _rows_for_sum(operand: Tensor | None, block: Block, dtype: torch.dtype) -> Tensor | None:
    return None if operand is None else grouped_rows(operand, block, dtype)


def _delta(saved: Saved, block: Block, dtype: torch.dtype) -> Tensor:
    o = grouped_rows(saved.o, block, dtype)
    d_o = grouped_rows(saved.d_o if saved.d_o_delta is None else saved.d_o_delta, block, dtype)
    return (o * d_o).sum(-1, keepdim=True)


def _add_bias(d_bias: Tensor, d_s: Tensor, block: Block) -> None:
    target = broadcast_slice(d_bias, block)
    summed = [axis for axis in range(5) if target.shape[axis] == 1 and block.shape[axis] != 1]
    values = d_s.view(block.shape)
    target.add_(values.sum(summed, keepdim=True) if summed else values)


def _add_sink(sink: Tensor, d_sink: Tensor, block: Block, stats: Tensor, delta: Tensor) -> None:
    weight = (sink_rows(sink, block) - stats).exp_()
    per_row = (weight * delta).view(block.shape[:4])
    d_sink[slice(*block.head)] -= per_row.sum((0, 3)).flatten()


def _write_unseeing(part: Part, saved: Saved, gradients: Gradients, block: Block) -> None:
    """Rows that see no key: dQ is 0, and O is 0, so the sink has no gradient from them."""
    rows = gradients.d_q[slice(*block.batch), slice(*block.head), slice(*block.row)]
    gradients.store_q(rows, part.q.new_zeros((), dtype=part.compute))
