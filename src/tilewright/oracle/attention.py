"""Scaled dot product attention and its gradients in float64, a head and a block of rows at a time.

For query head h, which reads KV head g = h // (Hq / Hkv):

    S = score_mod(scale * Q_h K_g^T) + bias + slope_h * (col - aligned row)
    P = exp(S - Stats) over visible keys, Stats = ln(sum exp S over visible keys [+ exp sink_h])
    O = (Z * P) V_g, with Z the dropout factor (0 or 1 / (1 - p)), 1 without dropout

    dV_g += (Z * P)^T dO      dP = Z * (dO V_g^T)      D = rowsum(dO * O)
    dS = P * (dP - D)         dBias += dS              dsink_h -= sum exp(sink_h - Stats) * D
    dQ = scale * dS' K_g      dK_g += scale * dS'^T Q_h,   dS' = dS through score_mod

A loss that reads Stats as well adds P * dStats to dS: D - dStats stands for D everywhere.

Sources: Vaswani et al. 2017 (arXiv:1706.03762); Dao et al. 2022 (arXiv:2205.14135) for D; Press et
al. 2021 (arXiv:2108.12409) for ALiBi and its slopes.

A hidden key contributes nothing, whatever it holds: NaN and infinities of keys, values and rows
that are masked or padded never reach a result. A row that sees no key gives O = 0 and Stats = -inf
(Stats = sink with a sink); a padded row gives O = 0 and Stats = -inf in both cases.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.oracle.attention_problem import (
    NEGATIVE_INFINITY,
    AttentionOptions,
    Block,
    HeadSource,
    MaskedDropout,
    Problem,
    SeededDropout,
    alibi_slopes,
    masked_product,
    softmax,
)
from tilewright.oracle.formats import to_float64

__all__ = [
    "AttentionGradients",
    "AttentionOptions",
    "AttentionResult",
    "HeadSource",
    "MaskedDropout",
    "Products",
    "SeededDropout",
    "alibi_slopes",
    "backward",
    "forward",
    "gradients",
    "merge_states",
]


class AttentionResult(NamedTuple):
    """What `forward` gives, all float64.

    `output` (B, Hq, Sq, Dv); `stats` (natural log-sum-exp), `row_max` and `sum_exp` (B, Hq, Sq, 1)
    with stats = row_max + ln(sum_exp); a sink joins both. Rows that see nothing: row_max -inf and
    sum_exp 0 (without a sink).
    """

    output: torch.Tensor
    stats: torch.Tensor
    row_max: torch.Tensor
    sum_exp: torch.Tensor


class AttentionGradients(NamedTuple):
    """What `backward` gives, all float64, in the shapes of their tensors."""

    d_q: torch.Tensor
    d_k: torch.Tensor
    d_v: torch.Tensor
    d_bias: torch.Tensor | None
    d_sink: torch.Tensor | None


def forward(
    q: torch.Tensor | HeadSource,
    k: torch.Tensor | HeadSource,
    v: torch.Tensor | HeadSource,
    **options: Any,
) -> AttentionResult:
    """Attention of q (B, Hq, Sq, D) over k (B, Hkv, Skv, D) and v (B, Hkv, Skv, Dv).

    Any dtype, computed in float64; Hq is a multiple of k's and of v's heads. Keyword options are
    the fields of `AttentionOptions`.
    """
    problem = Problem(q, k, v, AttentionOptions(**options))
    shape = (problem.batch, problem.heads, problem.rows)
    output = torch.zeros((*shape, problem.v.dim[3]), dtype=torch.float64, device=problem.device)
    stats, row_max, sum_exp = (
        torch.zeros((*shape, 1), dtype=torch.float64, device=problem.device) for _ in range(3)
    )
    for block in problem.blocks():
        q_head = problem.q.read(block.batch, block.head)
        k_head = problem.k.read(block.batch, problem.kv_head(problem.k, block.head))
        v_head = problem.v.read(block.batch, problem.kv_head(problem.v, block.head))
        visible = problem.visible(block)
        soft = softmax(problem, block, problem.raw_scores(block, q_head, k_head), visible)
        weights = problem.weights(block, soft.probabilities)
        at = (block.batch, block.head, slice(block.start, block.end))
        output[at] = masked_product(weights, visible, v_head)
        stats[at], row_max[at], sum_exp[at] = soft.stats, soft.row_max, soft.sum_exp
    return AttentionResult(output, stats, row_max, sum_exp)


def backward(
    q: torch.Tensor | HeadSource,
    k: torch.Tensor | HeadSource,
    v: torch.Tensor | HeadSource,
    d_o: torch.Tensor | HeadSource,
    *,
    output: torch.Tensor | HeadSource | None = None,
    stats: torch.Tensor | None = None,
    d_stats: torch.Tensor | None = None,
    **options: Any,
) -> AttentionGradients:
    """Gradients of `forward`'s output, given dO (B, Hq, Sq, Dv).

    Args:
        output, stats: The forward's results (natural log). Those that are given are used as they
            are, so that the result is what the gradient formulas make of rounded ones; those that
            are not are computed in float64.
        d_stats: The gradient of a loss that reads Stats too, (B, Hq, Sq, 1); D becomes D - dStats.

    Keyword options are the fields of `AttentionOptions`; with `score_mod` a `score_mod_gradient`
    is needed.
    """
    problem = Problem(q, k, v, AttentionOptions(**options))
    gradient = HeadSource.of(d_o)
    saved = None if output is None else HeadSource.of(output)
    products = Products(problem.q, problem.k, gradient, gradient, gradient, saved, stats, d_stats)
    return gradients(problem, products)


class Products(NamedTuple):
    """The operands of each product of the backward, which differ where each is quantized apart.

    `d_p_gradient` meets V in dP, `d_v_gradient` meets P in dV, and `dot_gradient` meets `output`
    (None: recomputed) in D; `d_k_query` and `d_q_key` meet dS. `stats` None is recomputed, and
    `d_stats` None is 0.
    """

    d_k_query: HeadSource
    d_q_key: HeadSource
    d_p_gradient: HeadSource
    d_v_gradient: HeadSource
    dot_gradient: HeadSource
    output: HeadSource | None
    stats: torch.Tensor | None
    d_stats: torch.Tensor | None = None


def gradients(problem: Problem, products: Products) -> AttentionGradients:
    """Gradients of a problem, given each product's operands."""
    chosen = problem.options
    d_q, d_k, d_v = (
        torch.zeros(source.dim, dtype=torch.float64, device=problem.device)
        for source in (problem.q, problem.k, problem.v)
    )
    bias, sink = chosen.bias, chosen.sink
    d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float64)
    d_sink = None if sink is None else torch.zeros_like(sink, dtype=torch.float64)
    for block in problem.blocks():
        rows = slice(block.start, block.end)
        at = (block.batch, block.head, rows)
        here = (block.batch, block.head)
        key = (block.batch, problem.kv_head(problem.k, block.head))
        value = (block.batch, problem.kv_head(problem.v, block.head))
        visible = problem.visible(block)
        across = visible.transpose(0, 1)
        raw = problem.raw_scores(block, problem.q.read(*here), problem.k.read(*key))
        probabilities, lse = _probabilities(problem, block, raw, visible, products.stats)
        d_p = torch.matmul(
            products.d_p_gradient.read(*here)[rows], problem.v.read(*value).transpose(0, 1)
        )
        factor = problem.dropout_factor(block)
        d_p = torch.where(visible, d_p if factor is None else d_p * factor, 0.0)
        if products.output is None:
            row_dot = (probabilities * d_p).sum(dim=1, keepdim=True)
        else:
            paired = products.dot_gradient.read(*here)[rows] * products.output.read(*here)[rows]
            row_dot = paired.sum(dim=1, keepdim=True)
        if products.d_stats is not None:
            row_dot = row_dot - to_float64(products.d_stats[at]).reshape(-1, 1)
        d_scores = torch.where(visible, probabilities * (d_p - row_dot), 0.0)
        if d_bias is not None:
            _accumulate(problem, d_bias, block, d_scores)
        if d_sink is not None:
            share = torch.exp((problem.sink(block.head) or 0.0) - lse) * row_dot
            alive = visible.any(dim=1, keepdim=True)
            d_sink.reshape(-1)[block.head] -= torch.where(alive, share, 0.0).sum()
        d_raw = problem.scale * _through_score_mod(problem, block, d_scores, raw, visible)
        if chosen.d_scores_map is not None:
            d_raw = torch.where(visible, chosen.d_scores_map(d_raw), 0.0)
        d_q[at] = masked_product(d_raw, visible, products.d_q_key.read(*key))
        d_k[key] += masked_product(
            d_raw.transpose(0, 1), across, products.d_k_query.read(*here)[rows]
        )
        weights = problem.weights(block, probabilities)
        d_v[value] += masked_product(
            weights.transpose(0, 1), across, products.d_v_gradient.read(*here)[rows]
        )
    return AttentionGradients(d_q, d_k, d_v, d_bias, d_sink)


def _through_score_mod(
    problem: Problem,
    block: Block,
    d_scores: torch.Tensor,
    raw: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    """The gradient by the raw scores."""
    if problem.options.score_mod is None:
        return d_scores
    if problem.options.score_mod_gradient is None:
        raise ValueError("score_mod_gradient: needed for the gradients of a score_mod")
    # Raw scores of hidden keys may be NaN: what they give is dropped.
    through = problem.options.score_mod_gradient(d_scores, raw, block)
    return torch.where(visible, through, 0.0)


def _probabilities(
    problem: Problem,
    block: Block,
    raw: torch.Tensor,
    visible: torch.Tensor,
    stats: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """P (rows, Skv) and the log-sum-exp (rows, 1) it was made with."""
    if stats is None:
        soft = softmax(problem, block, raw, visible)
        return soft.probabilities, soft.stats
    saved = stats[block.batch, block.head, block.start : block.end]
    given_stats = to_float64(saved).reshape(-1, 1)
    dead = given_stats == NEGATIVE_INFINITY
    exponent = problem.scores(block, raw) - torch.where(dead, 0.0, given_stats)
    return torch.where(visible & ~dead, torch.exp(exponent), 0.0), given_stats


def _accumulate(problem: Problem, total: torch.Tensor, block: Block, share: torch.Tensor) -> None:
    """Add a block's share to a tensor that broadcasts to (B, Hq, Sq, Skv)."""
    target = problem.part(total, block)
    if target.shape[0] == 1 and share.shape[0] != 1:
        share = share.sum(dim=0, keepdim=True)
    if target.shape[1] == 1 and share.shape[1] != 1:
        share = share.sum(dim=1, keepdim=True)
    target += share


def merge_states(
    output_1: torch.Tensor, stats_1: torch.Tensor, output_2: torch.Tensor, stats_2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    Args:
        output_1, output_2: (..., Dv).
        stats_1, stats_2: Natural log-sum-exp, the outputs' shape without the last axis or with 1
            there. -inf marks an empty state, whose output is not read.

    Returns:
        Output and stats in float64; two empty states give 0 and -inf.
    """
    first, second = to_float64(stats_1), to_float64(stats_2)
    top = torch.where(first > second, first, second)
    shift = torch.where(top == NEGATIVE_INFINITY, 0.0, top)
    weight_1, weight_2 = torch.exp(first - shift), torch.exp(second - shift)
    total = weight_1 + weight_2
    empty = total == 0
    stats = torch.where(empty, NEGATIVE_INFINITY, shift + torch.log(total))

    def share(weight: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        part = torch.where(weight == 0, 0.0, weight / torch.where(empty, 1.0, total))
        part = part if part.dim() == output.dim() else part.unsqueeze(-1)
        return torch.where(part == 0, 0.0, part * to_float64(output))

    return share(weight_1, output_1) + share(weight_2, output_2), stats
