"""Compare results with float64 references; the helpers raise, and say where and by how much."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.errors import OracleError
from tilewright.oracle.compare import require_same_specials
from tilewright.oracle.formats import to_float64
from tilewright.testing.report import bounded, describe_difference, error_picture, where_wrong
from tilewright.testing.tolerances import (
    Bound,
    bound_by_baseline,
    bound_by_tolerance,
    root_mean_square,
)

__all__ = ["Comparison", "assert_all_close", "assert_bitwise_equal", "assert_close"]

Baseline = torch.Tensor | Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Comparison:
    """What a comparison that held has measured, and what was allowed."""

    max_error: float
    rms_error: float
    bound: Bound


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    baseline: Baseline | None = None,
    tol: float | None = None,
    data_type: Any = None,
    name: str = "result",
    picture: str | os.PathLike[str] | None = None,
    plane: Sequence[int] | None = None,
) -> Comparison:
    """Require that a result equals its float64 reference as far as its data type allows.

    Shapes must be equal (nothing is broadcast). NaN, +inf and -inf must stand in the same places.
    Then finite elements must lie within a bound (`tilewright.testing.tolerances`): with a
    `baseline`, twice the error of that plain computation plus one spacing of the data type; else
    `tol`, by default the data type's, times max(|expected|.max(), 1).

    Args:
        actual: Any dtype.
        expected: The reference; float64 with a baseline and for bounds under 1e-3. It is never
            rounded to the output's type here: a bound has room for that.
        baseline: The result of a plain computation in the same data type, or a function that
            computes it.
        tol: Relative to max(|expected|.max(), 1); not together with a baseline.
        data_type: Of the output, if `actual` holds its values in a wider one.
        name: How messages call the result.
        picture: A PNG to write if the comparison fails: |error| over the last two axes.
        plane: Which plane the picture shows; by default the worst element's.

    Raises:
        OracleError: They differ (it is an AssertionError). The message has at most 40 lines.
        ValueError: The reference, the tolerance or the baseline cannot be used.
        TypeError: What is compared is no strided tensor of real numbers in memory.
    """
    _require_values(actual, name)
    _require_values(expected, f"{name}: the reference")
    chosen = actual.dtype if data_type is None else data_type
    if actual.shape != expected.shape:
        raise OracleError(
            f"{name}: shape {tuple(actual.shape)}; the reference has {tuple(expected.shape)}"
        )
    if baseline is not None:
        if tol is not None:
            raise ValueError(f"{name}: give a baseline or tol, not both")
        plain = baseline() if callable(baseline) else baseline
        bound = bound_by_baseline(expected, plain, chosen, name)
    else:
        bound = bound_by_tolerance(expected, chosen, tol, name)
    if actual.numel() == 0:
        return Comparison(0.0, 0.0, bound)
    got = to_float64(actual.detach())
    want = to_float64(expected.detach()).to(got.device)
    finite = torch.isfinite(want)
    try:
        require_same_specials(got, want, name)
    except OracleError as failure:
        wrong = ~((got == want) | (finite & torch.isfinite(got)) | (got.isnan() & want.isnan()))
        lines = [str(failure), *where_wrong(wrong)]
        lines += _picture(picture, wrong.to(torch.float64), None, plane, name)
        raise OracleError(bounded("\n".join(lines))) from None
    error = torch.where(finite, _distance(actual, expected, got, want), 0.0)
    found = Comparison(float(error.max()), root_mean_square(error[finite]), bound)
    bad = error > bound.limit
    spread = bound.rms_limit is not None and found.rms_error > bound.rms_limit
    if spread or bool(bad.any()):
        report = describe_difference(name, got, want, error, bad, bound)
        lines = _picture(picture, error, bound.limit, plane, name)
        raise OracleError(bounded("\n".join([*lines, report])))
    return found


def _require_values(tensor: object, what: str) -> None:
    """Refuse what would be compared in part only, or not at all.

    Raises:
        TypeError: saying what came and what to give instead.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what}: got {type(tensor).__name__}; expected a torch tensor")
    advice = None
    if tensor.is_complex():
        advice = "compare torch.view_as_real of both"
    elif tensor.is_quantized or tensor.layout is not torch.strided:
        advice = "compare what it stands for, dense"
    elif tensor.device.type == "meta":
        advice = "it has no values"
    elif tensor.dtype is getattr(torch, "float4_e2m1fn_x2", None):
        advice = "compare the unpacked numbers"
    if advice is not None:
        raise TypeError(
            f"{what}: a {tensor.dtype} tensor, {tensor.layout}, on {tensor.device}: {advice}"
        )


def _distance(
    actual: torch.Tensor, expected: torch.Tensor, got: torch.Tensor, want: torch.Tensor
) -> torch.Tensor:
    """|actual - expected|, not 0 for different integers that float64 rounds to one number."""
    if not {actual.dtype, expected.dtype} & _LONG:
        return (got - want).abs()
    (got_high, got_low), (want_high, want_low) = (
        _halves(actual.detach(), got),
        _halves(expected.detach(), want),
    )
    return ((got_high - want_high) * _HALF + (got_low - want_low.to(got.device))).abs()


# Integers of more bits than a float64 has.
_LONG = {torch.int64, torch.uint64}
_HALF = 2.0**32


def _halves(tensor: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) float64 with high * 2^32 + low equal to each number."""
    if tensor.dtype not in _LONG:
        high = torch.floor(values / _HALF)
        return high, values - high * _HALF
    bits = tensor.view(torch.int64).to(values.device)
    high = bits >> 32
    if tensor.dtype is torch.uint64:
        high = high & 0xFFFFFFFF
    return high.double(), (bits & 0xFFFFFFFF).double()


def _picture(
    path: str | os.PathLike[str] | None,
    error: torch.Tensor,
    limit: float | None,
    plane: Sequence[int] | None,
    name: str,
) -> list[str]:
    """Write the picture; a picture that cannot be made never hides the failure it belongs to."""
    if path is None:
        return []
    try:
        shown = error_picture(path, error, limit=limit, plane=plane, title=name)
    except (ImportError, OSError, ValueError) as reason:
        return [f"(no picture: {reason})"]
    return [f"(picture of plane {shown}: {os.fspath(path)})"]


def assert_all_close(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    baselines: Mapping[str, Baseline] | None = None,
    tol: float | None = None,
) -> dict[str, Comparison]:
    """`assert_close` on each of several results by name; one report tells of all that differ.

    Raises:
        OracleError: Names are missing or unexpected, or results differ.
    """
    if set(actual) != set(expected):
        raise OracleError(f"results are {sorted(actual)}; the references are {sorted(expected)}")
    found: dict[str, Comparison] = {}
    failures: list[str] = []
    for name, want in expected.items():
        baseline = (baselines or {}).get(name)
        chosen = None if baseline is not None else tol
        try:
            found[name] = assert_close(actual[name], want, baseline=baseline, tol=chosen, name=name)
        except OracleError as failure:
            failures.append(str(failure))
    if failures:
        each = max(38 // len(failures), 2)
        wrong = sorted(set(expected) - set(found))
        head = f"{len(failures)} of {len(expected)} results differ: {', '.join(wrong)}"
        raise OracleError(bounded("\n".join([head, *(bounded(text, each) for text in failures)])))
    return found


def assert_bitwise_equal(
    actual: torch.Tensor, expected: torch.Tensor, *, name: str = "result"
) -> None:
    """Require equal shape, dtype and bits: NaN payloads and the sign of zero count.

    Raises:
        OracleError: They differ.
    """
    for what, got, want in (
        ("dtype", actual.dtype, expected.dtype),
        ("shape", tuple(actual.shape), tuple(expected.shape)),
    ):
        if got != want:
            raise OracleError(f"{name}: {what} {got}; expected {want}")
    if actual.numel() == 0:
        return
    size = actual.element_size()
    codes = [
        t.detach().contiguous().reshape(-1).view(torch.uint8).reshape(-1, size)
        for t in (actual, expected.to(actual.device))
    ]
    differ = (codes[0] != codes[1]).any(dim=1).reshape(actual.shape)
    if not bool(differ.any()):
        return
    first = int(differ.reshape(-1).nonzero()[0])
    pairs = [bytes(code[first].tolist()[::-1]).hex() for code in codes]
    lines = [
        f"{name}: bits differ in {int(differ.sum())} of {differ.numel()} elements; the first in "
        f"row-major order, {first}, has 0x{pairs[0]} instead of 0x{pairs[1]}",
        *where_wrong(differ if differ.dim() else differ.reshape(1)),
    ]
    raise OracleError(bounded("\n".join(lines)))
