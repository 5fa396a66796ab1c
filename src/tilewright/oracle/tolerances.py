"""Default tolerances by the type of what is compared, derived from rounding.

A tolerance is relative to the largest magnitude of the reference, or to 1 if that is smaller:
`|actual - expected| <= tol * max(|expected|.max(), 1)`. With `epsilon` the distance from 1 to the
next number of a type, rounding a result once costs at most `epsilon / 2` of it. The factors:

- FLOAT: sums of a few thousand float32 products that cancel partly; 64 epsilon = 7.6e-6. TF32
  products are not covered: give them HALF's tolerance, whose mantissa they share.
- HALF, BFLOAT16: one rounding of the result, and one of an operand that is rounded on the way (P
  of attention, an epilogue's input) whose errors partly average out; 2 epsilon.
- FP8: a value near the boundary of two numbers may fall either way after a slightly different
  sum: one epsilon instead of its half, with one more for scales applied before rounding.
- FP4: the same, one step of E2M1 relative to its largest number.
- FP8_E8M0 and integers: exact.
"""

from __future__ import annotations

from typing import Any

from tilewright.oracle.formats import format_of

__all__ = ["TIGHT", "default_tolerance"]

TIGHT = 1e-3
"""A tolerance below this needs a float64 reference: TF32 alone differs by about this much."""

_EPSILONS: dict[str, float] = {
    # Two float64 evaluations in another order.
    "DOUBLE": 4096.0,
    "FLOAT": 64.0,
    "HALF": 2.0,
    "BFLOAT16": 2.0,
    "FP8_E4M3": 2.0,
    "FP8_E5M2": 2.0,
    "FP4_E2M1": 1.0,
    "FP8_E8M0": 0.0,
}


def default_tolerance(data_type: Any, *, factor: float = 1.0) -> float:
    """The tolerance for results of a data type (a record, its name, or a torch dtype).

    Args:
        factor: For what costs more roundings than one operation, with the reason beside its use.

    Integers and booleans give 0.
    """
    target = format_of(data_type)
    if target is None:
        return 0.0
    return _EPSILONS[target.name] * target.epsilon * factor
