"""Compare a result with a reference; the helper raises, and says where and by how much."""

from __future__ import annotations

import math

import torch

from tilewright.errors import OracleError
from tilewright.oracle.formats import to_float64
from tilewright.oracle.tolerances import TIGHT

__all__ = ["assert_close", "require_float64", "require_same_specials", "worst_elements"]

_SHOWN = 5


def worst_elements(
    actual: torch.Tensor, expected: torch.Tensor, error: torch.Tensor, *, shown: int = _SHOWN
) -> str:
    """One line for each of the elements with the largest error: coordinates and both values."""
    flat = error.reshape(-1)
    flat = torch.where(torch.isnan(flat), float("inf"), flat)
    order = torch.topk(flat, min(shown, flat.numel())).indices.tolist()
    lines = []
    for position in order:
        coordinates = []
        rest = position
        for extent in reversed(error.shape):
            coordinates.append(rest % extent)
            rest //= extent
        where = tuple(reversed(coordinates))
        lines.append(
            f"  at {where}: actual {float(actual.reshape(-1)[position]):.9g}, "
            f"expected {float(expected.reshape(-1)[position]):.9g}"
        )
    return "\n".join(lines)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, tol: float, name: str = "result"
) -> None:
    """Require that `actual` equals the reference `expected` within a tolerance.

    Shapes must be equal. NaNs and infinities must stand in the same places, infinities with the
    same sign; then `|actual - expected| <= tol * max(|expected|.max(), 1)` over finite elements,
    in float64 (integers and booleans too, exactly with tol 0).

    Args:
        actual: Any dtype.
        expected: The reference. Floating references are float64 unless `tol` is at least 1e-3.
        tol: Not negative, finite.
        name: How messages call the result.

    Raises:
        OracleError: They differ; the message has the number and the coordinates of the worst
            elements. It is an AssertionError.
        ValueError: `tol` is not usable, or tighter than 1e-3 with a reference that is no float64
            tensor (such a bound can be below the reference's own error).
    """
    if not (math.isfinite(tol) and tol >= 0):
        raise ValueError(f"{name}: tol is {tol}; expected a finite number of at least 0")
    require_float64(expected, tol, name)
    if actual.shape != expected.shape:
        raise OracleError(
            f"{name}: shape {tuple(actual.shape)}; the reference has {tuple(expected.shape)}"
        )
    if actual.numel() == 0:
        return
    got = to_float64(actual.detach())
    want = to_float64(expected.detach()).to(got.device)
    require_same_specials(got, want, name)
    finite = torch.isfinite(want)
    zero = torch.zeros_like(want)
    error = torch.where(finite, (got - want).abs(), zero)
    largest = float(torch.where(finite, want.abs(), zero).max())
    bound = tol * max(largest, 1.0)
    bad = error > bound
    if bool(bad.any()):
        raise OracleError(
            f"{name}: {int(bad.sum())} of {bad.numel()} elements differ by more than "
            f"{bound:.4g} (tol {tol:g} * max(|reference|.max() = {largest:.4g}, 1)); largest "
            f"error {float(error.max()):.4g}\n{worst_elements(got, want, error)}"
        )


def require_float64(expected: torch.Tensor, tol: float, name: str) -> None:
    """Raise ValueError if `tol` is tighter than 1e-3 and a floating reference is not float64."""
    if tol < TIGHT and expected.is_floating_point() and expected.dtype != torch.float64:
        raise ValueError(
            f"{name}: tol {tol:g} is under {TIGHT:g} and the reference is {expected.dtype}; "
            "a tolerance this tight needs a float64 reference"
        )


def require_same_specials(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Raise OracleError unless NaNs, +inf and -inf stand in the same places (float64 tensors)."""
    _require_same(torch.isnan(got), torch.isnan(want), "NaN", name, got, want)
    for value, label in ((math.inf, "+inf"), (-math.inf, "-inf")):
        _require_same(got == value, want == value, label, name, got, want)


def _require_same(
    got_here: torch.Tensor,
    want_here: torch.Tensor,
    label: str,
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
) -> None:
    differ = got_here != want_here
    if bool(differ.any()):
        raise OracleError(
            f"{name}: {label} differs in {int(differ.sum())} of {differ.numel()} elements "
            f"({int(got_here.sum())} in the result, {int(want_here.sum())} in the reference)\n"
            f"{worst_elements(got, want, differ.to(torch.float64))}"
        )
