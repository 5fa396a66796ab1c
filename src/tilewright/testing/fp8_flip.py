"""Prove that a row differs from its reference by one 8-bit rounding that fell the other way.

Fp8 attention rounds its probabilities (or dS) to 8 bits before the second product. Where the
reference's value lies almost on the midpoint between two codes, a right kernel may take the other
code: its float32 value fell on the other side. The whole output row then moves by

    flip = (other code - reference's code) * flip_unit * operand[that position]

which is more than any rounding of the output. Such a row is accepted only with a proof. Its own
reduction (its batch index, its head, positions that are not masked) must hold a position whose
scaled intermediate lies within 1/32 of a code spacing of the midpoint between two adjacent codes,
and that one flip must explain the row three ways: what remains is within the tolerance, each
element of what remains is within the rounding of the output, and the least-squares number of
flips, <difference, flip> / <flip, flip>, is within 1/2 of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.oracle import attention
from tilewright.oracle.attention_problem import AttentionOptions, HeadSource, Problem, softmax
from tilewright.oracle.formats import FloatFormat, floor_log2, format_of, power_of_two, round_to
from tilewright.oracle.tolerances import default_tolerance

__all__ = [
    "MIDPOINT_SHARE",
    "Explanation",
    "Intermediates",
    "backward_intermediates",
    "explain_row",
    "forward_intermediates",
]

MIDPOINT_SHARE = 1.0 / 32.0
"""How far from a midpoint, in code spacings, the reference may be for a flip to be possible."""

COUNT_TOLERANCE = 0.5
"""How far from one the least-squares number of flips may be."""


@dataclass(frozen=True, eq=False)
class Intermediates:
    """What the reference rounds to 8 bits, before it is rounded.

    Attributes:
        values: (B, H, rows, positions) float64, scaled: P * scale_s, or dS * scale_dP.
        visible: Boolean of that shape; false where a position is masked or padded.
    """

    values: torch.Tensor
    visible: torch.Tensor

    def transposed(self) -> Intermediates:
        """For dK and dV, whose rows are keys and which sum over queries."""
        return Intermediates(self.values.transpose(-1, -2), self.visible.transpose(-1, -2))


@dataclass(frozen=True)
class Explanation:
    """Whether one flip explains a row: the position if it does, else the reason."""

    position: int | None
    reason: str


def forward_intermediates(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    descale_q: float = 1.0,
    descale_k: float = 1.0,
    scale_s: float = 1.0,
    **options: Any,
) -> Intermediates:
    """P * scale_s of the reference of fp8 attention.

    Args:
        q, k, v: (B, H, S, D), fp8 or wider.
        options: Fields of `tilewright.oracle.attention.AttentionOptions`.
    """
    problem = Problem(_times(q, descale_q), _times(k, descale_k), v, AttentionOptions(**options))

    def of_block(block: Any, visible: torch.Tensor) -> torch.Tensor:
        raw = problem.raw_scores(
            block,
            problem.q.read(block.batch, block.head),
            problem.k.read(block.batch, problem.kv_head(problem.k, block.head)),
        )
        return problem.weights(block, softmax(problem, block, raw, visible).probabilities) * scale_s

    return _assemble(problem, of_block)


def backward_intermediates(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    d_o: torch.Tensor,
    *,
    scale_s: float = 1.0,
    scale_dP: float = 1.0,
    descales: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    **options: Any,
) -> tuple[Intermediates, Intermediates]:
    """P * scale_s and dS * scale_dP of the reference of fp8 attention's gradients.

    dQ reads dS as it is; dK reads dS and dV reads P, both `transposed()`.

    Args:
        q, k, v, d_o: (B, H, S, D), fp8 or wider.
        descales: Of q, k, v and dO.
        options: `output` and `stats` as `tilewright.oracle.attention.backward` takes them, and
            fields of `AttentionOptions`.
    """
    seen: list[torch.Tensor] = []

    def record(values: torch.Tensor) -> torch.Tensor:
        seen.append(values * scale_dP)
        return values

    sources = [_times(t, f) for t, f in zip((q, k, v, d_o), descales, strict=True)]
    attention.backward(*sources, d_scores_map=record, **options)
    plain = {name: value for name, value in options.items() if name not in ("output", "stats")}
    problem = Problem(sources[0], sources[1], sources[2], AttentionOptions(**plain))
    # The gradients walk the blocks in the order in which the problem lists them.
    recorded = iter(seen)
    d_s = _assemble(problem, lambda block, visible: next(recorded))
    p = forward_intermediates(
        q, k, v, descale_q=descales[0], descale_k=descales[1], scale_s=scale_s, **plain
    )
    return p, d_s


def _times(tensor: torch.Tensor, factor: float) -> HeadSource:
    heads = HeadSource.of(tensor)
    return HeadSource(heads.dim, heads.device, lambda b, h: heads.read(b, h) * factor)


def _assemble(
    problem: Problem, of_block: Callable[[Any, torch.Tensor], torch.Tensor]
) -> Intermediates:
    shape = (problem.batch, problem.heads, problem.rows, problem.columns)
    values = torch.zeros(shape, dtype=torch.float64, device=problem.device)
    visible = torch.zeros(shape, dtype=torch.bool, device=problem.device)
    for block in problem.blocks():
        seen = problem.visible(block)
        at = (block.batch, block.head, slice(block.start, block.end))
        values[at], visible[at] = of_block(block, seen), seen
    return Intermediates(values, visible)


def spacing_of(values: torch.Tensor, target: FloatFormat) -> torch.Tensor:
    """Distance between the two codes around each value, on its side of a power of two."""
    exponent = floor_log2(values).clamp(min=target.min_exponent)
    exponent = torch.where(values == 0, target.min_exponent, exponent)
    return power_of_two(exponent - target.mantissa_bits)


def flip_steps(values: torch.Tensor, fp8_dtype: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The other code minus the reference's, and the distance to the midpoint in spacings.

    The two codes are those around each value; a value at or beyond the largest number, or not
    finite, has no other code: its distance is infinite.
    """
    target = format_of(fp8_dtype)
    if target is None:
        raise ValueError(f"fp8_dtype: {fp8_dtype!r} is not a floating-point format")
    magnitude = values.abs()
    spacing = spacing_of(magnitude, target)
    low = torch.floor(magnitude / spacing) * spacing
    high = low + spacing
    distance = (magnitude - (low + high) / 2.0).abs() / spacing
    inside = torch.isfinite(values) & (high <= target.max_finite)
    distance = torch.where(inside, distance, float("inf"))
    chosen = round_to(magnitude, target)
    step = torch.where(chosen == low, spacing, -spacing)
    return torch.where(inside, torch.copysign(torch.ones_like(step), values) * step, 0.0), distance


def explain_row(
    difference: torch.Tensor,
    expected: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    operand: torch.Tensor,
    *,
    flip_unit: float,
    fp8_dtype: Any,
    output_type: Any,
    limit: float,
) -> Explanation:
    """Whether one flip at one position explains one row.

    Args:
        difference: (D,) float64, actual minus expected.
        expected: (D,) float64, the reference's row.
        values, visible: (positions,) of this row alone.
        operand: (positions, D) float64, what the intermediate multiplies.
        flip_unit: Output per unit of (code * operand): the descales and the output's scale.
        fp8_dtype: Of the codes.
        output_type: Of the result, whose rounding each element may show.
        limit: The absolute tolerance of the comparison.
    """
    steps, distance = flip_steps(values, fp8_dtype)
    candidates = (visible & (distance <= MIDPOINT_SHARE)).nonzero().reshape(-1)
    if not len(candidates):
        return Explanation(None, "no position of this row lies near a midpoint")
    flips = steps[candidates, None] * flip_unit * operand[candidates]
    rest = (difference[None, :] - flips).abs()
    in_tolerance = (rest <= limit).all(dim=1)
    rounding = _rounding(expected[None, :] + flips, output_type)
    arithmetic = default_tolerance("FLOAT") * torch.maximum(
        expected.abs().max(), flips.abs().amax(dim=1, keepdim=True)
    )
    in_rounding = (rest <= rounding + arithmetic).all(dim=1)
    square = flips.square().sum(dim=1)
    counts = (flips * difference).sum(dim=1) / torch.where(square == 0, 1.0, square)
    counted = (square > 0) & ((counts - 1.0).abs() <= COUNT_TOLERANCE)
    proved = (in_tolerance & in_rounding & counted).nonzero().reshape(-1)
    if len(proved):
        return Explanation(int(candidates[proved[0]]), "one flip")
    best = int(rest.square().sum(dim=1).argmin())
    return Explanation(
        None,
        f"the likeliest flip, position {int(candidates[best])}, leaves "
        f"{float(rest[best].max()):.4g} (tolerance {limit:.4g}) and counts "
        f"{float(counts[best]):.3g} flips",
    )


def _rounding(values: torch.Tensor, output_type: Any) -> torch.Tensor:
    """Half a spacing of the output's type at each value; 0 for integers."""
    target = format_of(output_type)
    if target is None or target.name == "DOUBLE":
        return torch.zeros_like(values)
    return spacing_of(values.abs().clamp(max=target.max_finite), target) / 2.0
