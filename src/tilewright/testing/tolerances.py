"""How far a result may lie from its float64 reference, told by what plain arithmetic achieves.

With a baseline, the result of a plain computation in the same data type, a result may lie

    2 * max |baseline - reference| + spacing(max |reference|)

from the reference: at most twice the plain error, plus one spacing of the output's type at the
largest magnitude (half of it is the rounding of the result itself, half a sum that fell to the
other side of a midpoint). The root mean square of all errors is held likewise, to twice the
baseline's, plus half a spacing everywhere, plus one whole spacing at one element: an error that
spreads over a tensor shows there while each element still hides below the worst of the baseline.

Without a baseline the bound is `tol * max(max |reference|, 1)`, `tol` being the default of the
data type (`tilewright.oracle.default_tolerance`). Both grow with the tensor: sums over more terms
have larger results and larger roundings, which no fixed number can follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.oracle.compare import require_float64
from tilewright.oracle.formats import format_of, to_float64
from tilewright.oracle.tolerances import default_tolerance

__all__ = ["BASELINE_FACTOR", "Bound", "bound_by_baseline", "bound_by_tolerance", "rounding_floor"]

BASELINE_FACTOR = 2.0
"""How many times the error of a plain same-type computation a result may have."""

# A baseline that is further off than this, relative to max(|reference|.max(), 1), is no measure.
_USABLE_BASELINE = 0.25


@dataclass(frozen=True)
class Bound:
    """The largest absolute error and, if not None, the largest root mean square of all errors."""

    limit: float
    reason: str
    rms_limit: float | None = None


def rounding_floor(data_type: Any, magnitude: float) -> float:
    """The spacing of a data type's numbers at a magnitude; 0 for integers.

    Args:
        data_type: A data type record, its name, or a torch dtype.
        magnitude: Not negative; infinities and what is beyond the type count as its largest number.
    """
    target = format_of(data_type)
    if target is None:
        return 0.0
    held = min(magnitude, target.max_finite)
    # frexp gives m * 2**e with m in [0.5, 1).
    exponent = math.frexp(held)[1] - 1 if held > 0 else target.min_exponent
    return math.ldexp(1.0, max(exponent, target.min_exponent) - target.mantissa_bits)


def largest_magnitude(values: torch.Tensor) -> float:
    """max |x| over finite elements; 0 if there are none."""
    if values.numel() == 0:
        return 0.0
    return float(torch.where(torch.isfinite(values), values.abs(), 0.0).max())


def root_mean_square(values: torch.Tensor) -> float:
    """Root of the mean of x * x over finite elements, without overflow; 0 if there are none."""
    finite = values[torch.isfinite(values)]
    top = largest_magnitude(finite)
    if top == 0.0:
        return 0.0
    return top * math.sqrt(float((finite / top).square().mean()))


def bound_by_baseline(
    expected: torch.Tensor, baseline: torch.Tensor, data_type: Any, name: str = "result"
) -> Bound:
    """The bound from the error of a plain same-type computation.

    Args:
        expected: The reference, float64.
        baseline: The plain computation's result, of the same shape. Where it is not finite and
            the reference is (a naive softmax of a row that sees nothing), it measures nothing.
        data_type: Of the output; its spacing is the floor.

    Raises:
        ValueError: The reference is not float64, shapes differ, or the baseline is so far off
            that it would accept anything.
    """
    if expected.dtype != torch.float64:
        raise ValueError(
            f"{name}: the reference is {expected.dtype}; a baseline's error is measured against a "
            "float64 reference"
        )
    if baseline.shape != expected.shape:
        raise ValueError(
            f"{name}: the baseline's shape is {tuple(baseline.shape)}; the reference has "
            f"{tuple(expected.shape)}"
        )
    plain = to_float64(baseline.detach()).to(expected.device)
    measured = torch.isfinite(plain) & torch.isfinite(expected)
    if bool(torch.isfinite(expected).any()) and not bool(measured.any()):
        raise ValueError(f"{name}: the baseline is nowhere finite where the reference is")
    error = torch.where(measured, plain - expected, 0.0)[measured]
    worst, spread = largest_magnitude(error), root_mean_square(error)
    largest = largest_magnitude(expected)
    target = format_of(data_type)
    usable = max(_USABLE_BASELINE, 0.0 if target is None else 2.0 * target.epsilon)
    if worst > usable * max(largest, 1.0):
        raise ValueError(
            f"{name}: the baseline is off by {worst:.4g} where the reference reaches "
            f"{largest:.4g}; such a baseline would accept anything"
        )
    floor = rounding_floor(data_type, largest)
    half = 0.0 if target is None else 0.5 * target.epsilon * root_mean_square(expected)
    return Bound(
        BASELINE_FACTOR * worst + floor,
        f"{BASELINE_FACTOR:g} * plain error {worst:.4g} + rounding {floor:.4g}",
        BASELINE_FACTOR * spread + half + floor / math.sqrt(max(expected.numel(), 1)),
    )


def bound_by_tolerance(
    expected: torch.Tensor, data_type: Any, tol: float | None = None, name: str = "result"
) -> Bound:
    """`tol * max(max |reference|, 1)`; the data type's default tolerance if `tol` is None.

    Raises:
        ValueError: `tol` is not a finite number of at least 0, or under 1e-3 with a reference
            that is not float64: TF32 products alone put one off by about this much.
    """
    chosen = default_tolerance(data_type) if tol is None else tol
    if not (isinstance(chosen, int | float) and math.isfinite(chosen) and chosen >= 0):
        raise ValueError(f"{name}: tol is {tol!r}; expected a finite number of at least 0")
    require_float64(expected, chosen, name)
    largest = largest_magnitude(to_float64(expected.detach()))
    return Bound(
        chosen * max(largest, 1.0), f"tol {chosen:g} * max(|reference|.max() = {largest:.4g}, 1)"
    )
