"""The comparing helper raises, says where, and refuses a bound that its reference cannot hold."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.errors import OracleError
from tilewright.oracle import assert_close, default_tolerance

pytestmark = pytest.mark.L0


def _reference() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)


def test_equal_passes_in_any_dtype() -> None:
    expected = _reference()
    assert_close(expected.to(torch.bfloat16), expected, tol=0.0)
    assert_close(torch.tensor([1, 2]), torch.tensor([1, 2]), tol=0.0)
    assert_close(torch.tensor([True]), torch.tensor([True]), tol=0.0)
    assert_close(torch.zeros(0), torch.zeros(0, dtype=torch.float64), tol=0.0)
    eight_bit = torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn)
    assert_close(eight_bit, torch.tensor([0.5, -448.0], dtype=torch.float64), tol=0.0)


def test_the_bound_scales_with_the_largest_reference() -> None:
    expected = _reference()
    actual = expected.clone()
    actual[0, 0, 0] += 0.99 * 23 * 1e-4
    assert_close(actual, expected, tol=1e-4)
    actual[0, 0, 0] = 1.01 * 23 * 1e-4
    with pytest.raises(OracleError):
        assert_close(actual, expected, tol=1e-4)


def test_small_references_are_compared_with_one() -> None:
    expected = torch.tensor([1e-6, 0.5], dtype=torch.float64)
    assert_close(expected + 9e-4, expected, tol=1e-3)
    with pytest.raises(OracleError):
        assert_close(expected + 1.1e-3, expected, tol=1e-3)


def test_the_message_has_coordinates_and_values() -> None:
    expected = _reference()
    actual = expected.clone()
    actual[1, 2, 0] = 99.0
    with pytest.raises(AssertionError) as caught:
        assert_close(actual, expected, tol=1e-3, name="O")
    message = str(caught.value)
    assert "O: 1 of 24 elements" in message
    assert "at (1, 2, 0): actual 99, expected 20" in message


def test_non_finite_values_are_compared_first() -> None:
    expected = torch.tensor([1.0, -math.inf, math.nan, math.inf], dtype=torch.float64)
    assert_close(expected.clone(), expected, tol=0.0)
    for position, value, label in (
        (1, 0.0, "-inf"),
        (1, math.inf, "inf"),
        (2, 0.0, "NaN"),
        (0, math.nan, "NaN"),
        (3, 3.0e38, "+inf"),
    ):
        actual = expected.clone()
        actual[position] = value
        with pytest.raises(OracleError, match=r"differs in 1 of 4") as caught:
            assert_close(actual, expected, tol=10.0)
        assert label in str(caught.value)
        assert f"at ({position},)" in str(caught.value)


def test_one_infinite_reference_does_not_open_the_bound() -> None:
    expected = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    actual = torch.tensor([math.inf, 2.0], dtype=torch.float64)
    with pytest.raises(OracleError):
        assert_close(actual, expected, tol=0.1)


def test_shapes_are_not_broadcast() -> None:
    with pytest.raises(OracleError, match="shape"):
        assert_close(torch.zeros(3, 1), torch.zeros(3, dtype=torch.float64), tol=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tight_bound_needs_a_float64_reference(dtype: torch.dtype) -> None:
    same = torch.ones(3, dtype=dtype)
    with pytest.raises(ValueError, match="float64"):
        assert_close(same, same, tol=9e-4)
    assert_close(same, same, tol=1e-3)
    assert_close(same, same.double(), tol=1e-9)


def test_why_a_tight_bound_needs_float64() -> None:
    """A causal row with one visible key must give that value exactly; a TF32 reference cannot.

    TF32 keeps 10 mantissa bits of an operand. The row's right result is v itself; the reference
    that was multiplied in TF32 is off by up to 2^-11 of it, so that a right engine would fail.
    """
    value = torch.tensor([1.0 + 2.0**-11 - 2.0**-20], dtype=torch.float64)
    in_tf32 = (value * 2.0**10).floor() / 2.0**10
    with pytest.raises(OracleError):
        assert_close(value, in_tf32, tol=1e-4)


@pytest.mark.parametrize("tol", [-1.0, math.nan, math.inf])
def test_unusable_tolerances_are_refused(tol: float) -> None:
    with pytest.raises(ValueError, match="tol"):
        assert_close(torch.ones(1), torch.ones(1, dtype=torch.float64), tol=tol)


def test_default_tolerances_follow_the_spacing_of_the_type() -> None:
    assert default_tolerance("BFLOAT16") == 2 * 2.0**-7
    assert default_tolerance(torch.float16) == 2 * 2.0**-10
    assert default_tolerance("FP8_E4M3", factor=2.0) == 2 * 2 * 2.0**-3
    assert default_tolerance("INT32") == 0.0
    order = ["DOUBLE", "FLOAT", "HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2"]
    found = [default_tolerance(name) for name in order]
    assert found == sorted(found)
    # One rounding of any result must pass.
    for name in ("FLOAT", "HALF", "BFLOAT16", "FP8_E4M3"):
        generator = torch.Generator().manual_seed(3)
        values = torch.randn(500, generator=generator, dtype=torch.float64)
        from tilewright.oracle.formats import round_to

        assert_close(round_to(values, name), values, tol=default_tolerance(name))
