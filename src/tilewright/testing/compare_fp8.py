"""Compare results of fp8 attention: one 8-bit rounding the other way is accepted with a proof."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import OracleError
from tilewright.oracle.compare import require_same_specials
from tilewright.oracle.formats import to_float64
from tilewright.testing.compare import Comparison, assert_close
from tilewright.testing.fp8_flip import Intermediates, explain_row
from tilewright.testing.report import bounded
from tilewright.testing.tolerances import bound_by_tolerance, root_mean_square

__all__ = ["Flip", "Fp8Comparison", "assert_close_fp8"]

_SHOWN = 5


@dataclass(frozen=True)
class Flip:
    """A row (batch index, head, row) that one flip at a position of its reduction explains."""

    row: tuple[int, int, int]
    position: int


@dataclass(frozen=True)
class Fp8Comparison:
    """What held: the comparison of the rows that need no flip, and the proved flips."""

    comparison: Comparison
    flips: tuple[Flip, ...]


def assert_close_fp8(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    operand: torch.Tensor,
    flip_unit: float,
    intermediates: Intermediates,
    fp8_dtype: Any,
    tol: float | None = None,
    data_type: Any = None,
    name: str = "result",
    picture: str | os.PathLike[str] | None = None,
) -> Fp8Comparison:
    """Require that a product with an 8-bit intermediate equals its float64 reference.

    Elements must lie within `tol * max(|expected|.max(), 1)`, as `assert_close` has it. A row
    that does not passes only if one flip of its intermediate is proved to explain it
    (`tilewright.testing.fp8_flip`). Packed outputs (not 4 axes) and operands with another number
    of heads than the output get no such proof: they keep the plain bound.

    Args:
        actual: (B, H, rows, D), or packed.
        expected: Of that shape, float64.
        operand: (B, H, positions, D), what the rounded intermediate multiplies: v for O, k for
            dQ, q for dK, dO for dV; as stored, before its descale.
        flip_unit: Output per unit of code times operand, as descale_s * descale_v * scale_o.
        intermediates: Of the reference, rows as the output's.
        fp8_dtype: The type that the intermediate is rounded to.
        tol: By default that of the output's data type.
        data_type: Of the output, if `actual` holds its values in a wider one.
        name, picture: As in `assert_close`.

    Raises:
        OracleError: Some row is neither within the tolerance nor explained by one flip.
        ValueError: A shape does not fit, or the reference is not float64.
    """
    chosen = actual.dtype if data_type is None else data_type
    if expected.dtype != torch.float64:
        raise ValueError(f"{name}: the reference is {expected.dtype}; a proof needs float64")
    provable = actual.dim() == 4 and operand.dim() == 4 and operand.shape[1] == actual.shape[1]
    if not provable or actual.shape != expected.shape or actual.numel() == 0:
        found = assert_close(
            actual, expected, tol=tol, data_type=chosen, name=name, picture=picture
        )
        return Fp8Comparison(found, ())
    rows, positions = tuple(actual.shape[:3]), operand.shape[2]
    for what, shape, wanted in (
        ("operand", tuple(operand.shape), (*actual.shape[:2], positions, actual.shape[3])),
        ("intermediates", tuple(intermediates.values.shape), (*rows, positions)),
        ("intermediates' visible", tuple(intermediates.visible.shape), (*rows, positions)),
    ):
        if shape != wanted:
            raise ValueError(f"{name}: {what} has shape {shape}; expected {wanted}")
    bound = bound_by_tolerance(expected, chosen, tol, name)
    got = to_float64(actual.detach())
    want = expected.detach().to(got.device)
    require_same_specials(got, want, name)
    difference = torch.where(torch.isfinite(want), got - want, 0.0)
    suspects = (difference.abs() > bound.limit).any(dim=-1).nonzero().tolist()
    multiplied = to_float64(operand.detach()).to(got.device)
    flips, unproved = [], []
    for batch, head, row in suspects:
        here = (batch, head, row)
        explained = explain_row(
            difference[here],
            want[here],
            intermediates.values[here].to(got.device),
            intermediates.visible[here].to(got.device),
            multiplied[batch, head],
            flip_unit=flip_unit,
            fp8_dtype=fp8_dtype,
            output_type=chosen,
            limit=bound.limit,
        )
        if explained.position is None:
            unproved.append(f"  row {here}: {explained.reason}")
        else:
            flips.append(Flip(here, explained.position))
            difference[here] = 0.0
            got[here] = want[here]
    if unproved:
        lines = [
            f"{name}: {len(unproved)} rows differ and no single proved fp8 flip explains them "
            f"({len(flips)} rows are explained)",
            *unproved[:_SHOWN],
        ]
        try:
            assert_close(got, want, tol=tol, data_type=chosen, name=name, picture=picture)
        except OracleError as failure:
            lines.append(str(failure))
        raise OracleError(bounded("\n".join(lines)))
    worst = float(difference.abs().max())
    return Fp8Comparison(Comparison(worst, root_mean_square(difference), bound), tuple(flips))
