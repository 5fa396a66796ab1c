"""Attention operands with their options, read a block of scores at a time.

`tilewright.oracle.attention` has the formulas; this file has their parts: options, blocks of rows,
scores before masking, visibility, dropout factors, and the softmax of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.philox import dropout_keep
from tilewright.oracle.visibility import visible_block

__all__ = [
    "AttentionOptions",
    "Block",
    "HeadSource",
    "MaskedDropout",
    "Problem",
    "SeededDropout",
    "Softmax",
    "alibi_slopes",
    "masked_product",
    "softmax",
]

BLOCK_BYTES = 64 * 2**20
"""Bound on one block of float64 scores; `row_block` follows from it unless given."""

NEGATIVE_INFINITY = float("-inf")


class Block(NamedTuple):
    """Where a block of scores lies: batch index, query head, rows start .. end - 1."""

    batch: int
    head: int
    start: int
    end: int


ScoreMod = Callable[[torch.Tensor, Block], torch.Tensor]
ScoreModGradient = Callable[[torch.Tensor, torch.Tensor, Block], torch.Tensor]


@dataclass(frozen=True)
class HeadSource:
    """Operands that are made a head at a time: `read(batch, head)` gives (S, D).

    `dim` is (B, H, S, D). This is how pages and block scales come in without a dense copy.
    """

    dim: tuple[int, int, int, int]
    device: torch.device
    read: Callable[[int, int], torch.Tensor]

    @staticmethod
    def of(tensor: torch.Tensor | HeadSource) -> HeadSource:
        """A source of a tensor (B, H, S, D), itself if it is one."""
        if isinstance(tensor, HeadSource):
            return tensor
        batch, heads, rows, depth = tensor.shape
        return HeadSource(
            (batch, heads, rows, depth), tensor.device, lambda b, h: to_float64(tensor[b, h])
        )


@dataclass(frozen=True)
class SeededDropout:
    """Dropout drawn by Philox: see `tilewright.oracle.philox.dropout_keep`."""

    probability: float
    seed: int
    offset: int = 0


@dataclass(frozen=True)
class MaskedDropout:
    """Dropout by a given mask, broadcasting to (B, Hq, Sq, Skv), and a factor on what is kept."""

    mask: torch.Tensor
    scale: float


@dataclass(frozen=True)
class AttentionOptions:
    """Everything that `forward` and `backward` take beyond their tensors, all optional.

    Attributes:
        scale: Factor on Q K^T; None is D ** -0.5.
        left_bound, right_bound, bottom_right, block_mask, mask: See `visibility`; block_mask
            is uint8 (B, Hq, ceil(Sq / 128), ceil(ceil(Skv / 128) / 8)), mask boolean and
            broadcasts to (B, Hq, Sq, Skv).
        seq_len_q, seq_len_kv: Actual lengths, B integers each.
        bias: Added to the scores; broadcasts to (B, Hq, Sq, Skv).
        alibi: Add slope_h * (col - aligned row).
        sink: (Hq,) scores that join the denominators.
        dropout: Seeded or masked.
        score_mod: `(scores, block) -> scores` on a block (rows, Skv) of scaled scores.
        score_mod_gradient: `(dS, scores, block) -> dS'` for `backward`.
        weights_map: What becomes of the weights Z * P (rows, Skv) before they meet V and dO, as
            where they are rounded to 8 bits.
        d_scores_map: What becomes of scale * dS (rows, Skv) before it meets K and Q.
        row_block: Rows a block; by default a block of scores takes at most 64 MiB.
    """

    scale: float | None = None
    left_bound: int | None = None
    right_bound: int | None = None
    bottom_right: bool = False
    block_mask: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    seq_len_q: Sequence[int] | None = None
    seq_len_kv: Sequence[int] | None = None
    bias: torch.Tensor | None = None
    alibi: bool = False
    sink: torch.Tensor | None = None
    dropout: SeededDropout | MaskedDropout | None = None
    score_mod: ScoreMod | None = None
    score_mod_gradient: ScoreModGradient | None = None
    weights_map: Callable[[torch.Tensor], torch.Tensor] | None = None
    d_scores_map: Callable[[torch.Tensor], torch.Tensor] | None = None
    row_block: int | None = None


class Problem:
    """Attention operands with their options, read a block at a time."""

    def __init__(
        self,
        q: torch.Tensor | HeadSource,
        k: torch.Tensor | HeadSource,
        v: torch.Tensor | HeadSource,
        options: AttentionOptions,
    ) -> None:
        self.q, self.k, self.v = HeadSource.of(q), HeadSource.of(k), HeadSource.of(v)
        self.options = options
        self.batch, self.heads, self.rows, depth = self.q.dim
        self.columns = self.k.dim[2]
        self.device = self.q.device
        for name, source in (("k", self.k), ("v", self.v)):
            if source.dim[1] < 1 or self.heads % source.dim[1]:
                raise ValueError(
                    f"{name}: {source.dim[1]} heads must divide the {self.heads} heads of q"
                )
        self.scale = depth**-0.5 if options.scale is None else options.scale
        self.slopes = alibi_slopes(self.heads) if options.alibi else None

    def blocks(self) -> Iterator[Block]:
        """Every block of rows of every head."""
        step = self.options.row_block or max(1, BLOCK_BYTES // 8 // max(self.columns, 1))
        for batch in range(self.batch):
            for head in range(self.heads):
                for start in range(0, self.rows, step):
                    yield Block(batch, head, start, min(start + step, self.rows))

    def kv_head(self, source: HeadSource, head: int) -> int:
        """The KV head that a query head reads."""
        return head // (self.heads // source.dim[1])

    def lengths(self, batch: int) -> tuple[int, int]:
        """Actual numbers of queries and of keys."""
        o = self.options
        return (
            self.rows if o.seq_len_q is None else int(o.seq_len_q[batch]),
            self.columns if o.seq_len_kv is None else int(o.seq_len_kv[batch]),
        )

    def part(self, tensor: torch.Tensor, block: Block) -> torch.Tensor:
        """The part (rows, Skv), or broadcasting to it, of a tensor over (B, Hq, Sq, Skv)."""
        whole = tensor.reshape(*([1] * (4 - tensor.dim())), *tensor.shape)
        head = whole[
            block.batch if whole.shape[0] > 1 else 0, block.head if whole.shape[1] > 1 else 0
        ]
        return head[block.start : block.end] if head.shape[0] > 1 else head

    def visible(self, block: Block) -> torch.Tensor:
        """Boolean (rows, Skv)."""
        o = self.options
        length_q, length_kv = self.lengths(block.batch)
        tiles = None
        if o.block_mask is not None:
            tiles = o.block_mask.expand(self.batch, self.heads, -1, -1)[block.batch, block.head]
        visible = visible_block(
            torch.arange(block.start, block.end, device=self.device),
            torch.arange(self.columns, device=self.device),
            length_q=length_q,
            length_kv=length_kv,
            left_bound=o.left_bound,
            right_bound=o.right_bound,
            bottom_right=o.bottom_right,
            block_mask=tiles,
            mask=None if o.mask is None else self.part(o.mask, block),
        )
        if o.bias is None:
            return visible
        # A bias of -inf hides, whatever the key and its value hold.
        return visible & (self.part(o.bias, block) != NEGATIVE_INFINITY)

    def live_rows(self, block: Block) -> torch.Tensor:
        """Boolean (rows, 1): which rows are not padding."""
        rows = torch.arange(block.start, block.end, device=self.device)
        return (rows < self.lengths(block.batch)[0])[:, None]

    def raw_scores(self, block: Block, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """scale * Q K^T (rows, Skv), as a score program reads it."""
        return self.scale * torch.matmul(q[block.start : block.end], k.transpose(0, 1))

    def scores(self, block: Block, raw: torch.Tensor) -> torch.Tensor:
        """Scores before masking, from the scaled products."""
        o = self.options
        scores = raw if o.score_mod is None else o.score_mod(raw, block)
        if o.bias is not None:
            scores = scores + to_float64(self.part(o.bias, block))
        if self.slopes is not None:
            length_q, length_kv = self.lengths(block.batch)
            aligned = torch.arange(block.start, block.end, device=self.device)
            if o.bottom_right:
                aligned = aligned + (length_kv - length_q)
            distance = torch.arange(self.columns, device=self.device)[None, :] - aligned[:, None]
            scores = scores + self.slopes[block.head] * distance.to(torch.float64)
        return scores

    def sink(self, head: int) -> float | None:
        """The sink of a query head."""
        sink = self.options.sink
        return None if sink is None else float(to_float64(sink.reshape(-1)[head]))

    def dropout_factor(self, block: Block) -> torch.Tensor | None:
        """Z (rows, Skv), or None without dropout."""
        dropout = self.options.dropout
        if dropout is None:
            return None
        if isinstance(dropout, MaskedDropout):
            return to_float64(self.part(dropout.mask, block)) * dropout.scale
        kept = self.dropout_keep(block, dropout)
        # Not torch.where of two numbers, which would be float32.
        return kept.to(torch.float64) / (1.0 - dropout.probability)

    def weights(self, block: Block, probabilities: torch.Tensor) -> torch.Tensor:
        """What multiplies V: P with dropout, as mapped."""
        factor = self.dropout_factor(block)
        weights = probabilities if factor is None else probabilities * factor
        weights_map = self.options.weights_map
        return weights if weights_map is None else weights_map(weights)

    def dropout_keep(self, block: Block, dropout: SeededDropout) -> torch.Tensor:
        """Boolean (rows, Skv): which probabilities are kept."""
        row = torch.arange(block.start, block.end, device=self.device)
        first = ((block.batch * self.heads + block.head) * self.rows + row) * self.columns
        flat = first[:, None] + torch.arange(self.columns, device=self.device)[None, :]
        return dropout_keep(
            flat, probability=dropout.probability, seed=dropout.seed, offset=dropout.offset
        )


def alibi_slopes(heads: int) -> list[float]:
    """The ALiBi slope of each head.

    2 ** (-8 (h + 1) / H) for a power of two H; else those of the largest power of two below H,
    then every other one of twice that power.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    finer = [2.0 ** (-8.0 * (h + 1) / (2 * power)) for h in range(0, 2 * power, 2)]
    return slopes + finer[: heads - power]


def masked_product(
    weights: torch.Tensor, visible: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """`weights @ values` in which hidden terms do not exist, so that 0 * NaN cannot appear.

    Args:
        weights: (R, C), 0 where hidden.
        visible: Boolean (R, C).
        values: (C, D).
    """
    finite = torch.isfinite(values).all(dim=1)
    product = torch.matmul(weights, torch.where(finite[:, None], values, 0.0))
    for column in torch.nonzero(~finite).reshape(-1).tolist():
        term = weights[:, column, None] * values[column][None, :]
        product = product + torch.where(visible[:, column, None], term, 0.0)
    return product


class Softmax(NamedTuple):
    """A block's softmax: P (rows, Skv), and (rows, 1) each of the others."""

    probabilities: torch.Tensor
    stats: torch.Tensor
    row_max: torch.Tensor
    sum_exp: torch.Tensor


def softmax(problem: Problem, block: Block, raw: torch.Tensor, visible: torch.Tensor) -> Softmax:
    """Softmax over the visible keys of a block, with its sink."""
    scores = torch.where(visible, problem.scores(block, raw), NEGATIVE_INFINITY)
    live, sink = problem.live_rows(block), problem.sink(block.head)
    if problem.columns:
        row_max = scores.amax(dim=1, keepdim=True)
    else:
        row_max = scores.new_full((scores.shape[0], 1), NEGATIVE_INFINITY)
    if sink is not None:
        row_max = torch.where(live & (row_max < sink), sink, row_max)
    # exp(-inf - -inf) would be NaN; against 0 it is 0.
    shift = torch.where(row_max == NEGATIVE_INFINITY, 0.0, row_max)
    exponentials = torch.exp(scores - shift)
    sum_exp = exponentials.sum(dim=1, keepdim=True)
    if sink is not None:
        sum_exp = sum_exp + torch.where(live, torch.exp(sink - shift), 0.0)
    empty = sum_exp == 0
    probabilities = torch.where(empty, 0.0, exponentials / sum_exp)
    stats = torch.where(empty, NEGATIVE_INFINITY, shift + torch.log(sum_exp))
    return Softmax(probabilities, stats, row_max, sum_exp)
