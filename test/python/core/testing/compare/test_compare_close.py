"""assert_close: what it accepts, what it refuses, and what its report says."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.errors import OracleError
from tilewright.oracle.formats import FORMATS, round_to
from tilewright.testing.compare import assert_all_close, assert_bitwise_equal, assert_close
from tilewright.testing.report import MAX_LINES, bounded, error_picture, where_wrong
from tilewright.testing.tolerances import (
    bound_by_baseline,
    bound_by_tolerance,
    root_mean_square,
    rounding_floor,
)

pytestmark = pytest.mark.L0


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _product_case() -> tuple[torch.Tensor, torch.Tensor]:
    """A float64 product of bfloat16 matrices, and what plain bfloat16 arithmetic makes of it."""
    a, b = _randn(32, 64).bfloat16(), _randn(64, 48, seed=1).bfloat16()
    return a.double() @ b.double(), a @ b


def test_the_plain_result_passes_and_twice_its_error_is_the_limit() -> None:
    expected, plain = _product_case()
    error = (plain.double() - expected).abs().max().item()
    found = assert_close(plain, expected, baseline=plain)
    assert found.max_error == error
    # Numbers of 16 to 32 are 1/8 apart in bfloat16.
    assert 16 < expected.abs().max().item() < 32
    floor = 2.0**-3
    assert found.bound.limit == pytest.approx(2 * error + floor)
    actual = expected.clone()
    actual[3, 5] += 0.99 * found.bound.limit
    assert_close(actual, expected, baseline=plain, data_type=torch.bfloat16)
    actual[3, 5] = expected[3, 5] + 1.01 * found.bound.limit
    with pytest.raises(OracleError, match=r"1 of 1536 elements \(0.0651 %\)"):
        assert_close(actual, expected, baseline=plain, data_type=torch.bfloat16)


def test_a_baseline_may_be_a_function_called_once() -> None:
    expected, plain = _product_case()
    calls = []

    def compute() -> torch.Tensor:
        calls.append(1)
        return plain

    assert_close(plain, expected, baseline=compute)
    assert len(calls) == 1


def test_an_error_everywhere_shows_in_the_root_mean_square() -> None:
    """Each element hides below the worst error of the baseline; all together do not."""
    expected = _randn(100, 100)
    plain = expected.clone()
    plain[0, 0] += 0.1
    shifted = expected + 0.15
    limit = bound_by_baseline(expected, plain, torch.float32).limit
    assert limit > 0.15
    with pytest.raises(OracleError, match=r"0 of 10000 elements.*\n.*\n.*\(allowed"):
        assert_close(shifted, expected, baseline=plain, data_type=torch.float32)


@pytest.mark.parametrize("name", ["FLOAT", "HALF", "BFLOAT16", "FP8_E4M3", "FP8_E5M2", "FP4_E2M1"])
def test_the_floor_takes_one_step_of_the_type(name: str) -> None:
    """A right result that fell to the other side of a midpoint passes an exact baseline."""
    target = FORMATS[name]
    expected = torch.tensor([target.max_finite, 1.0], dtype=torch.float64)
    low = target.max_finite - 2.0 ** (target.max_exponent - target.mantissa_bits)
    actual = torch.tensor([low, 1.0], dtype=torch.float64)
    rounded = round_to(expected, target)
    assert_close(actual, expected, baseline=rounded, data_type=name)
    with pytest.raises(OracleError):
        two = torch.tensor([2 * low - target.max_finite, 1.0], dtype=torch.float64)
        assert_close(two, expected, baseline=rounded, data_type=name)


def test_the_floor_of_small_results_is_small() -> None:
    """Averages over many keys are near 0.01: a floor of a step at 1 would hide half of it."""
    expected = 0.01 * _randn(64, 64).clamp(-1, 1)
    plain = expected.bfloat16()
    assert_close(plain, expected, baseline=plain)
    with pytest.raises(OracleError):
        assert_close(plain * 1.05, expected, baseline=plain)
    # The default tolerance, relative to at least 1, cannot see it.
    assert_close(plain * 1.05, expected)


def test_without_a_baseline_the_default_tolerance_scales() -> None:
    expected = 100.0 * _randn(8, 8)
    top = expected.abs().max().item()
    actual = expected.clone()
    actual[0, 0] += 2 * 2.0**-7 * top * 0.99
    assert_close(actual, expected, data_type=torch.bfloat16)
    actual[0, 0] = expected[0, 0] + 2 * 2.0**-7 * top * 1.01
    with pytest.raises(OracleError):
        assert_close(actual, expected, data_type=torch.bfloat16)
    assert bound_by_tolerance(expected / 1e4, torch.bfloat16).limit == 2 * 2.0**-7


def test_integers_and_booleans_are_exact() -> None:
    assert_close(torch.tensor([1, 2]), torch.tensor([1, 2]))
    with pytest.raises(OracleError, match="1 of 2"):
        assert_close(torch.tensor([1, 3]), torch.tensor([1, 2]))
    assert_close(torch.tensor([True]), torch.tensor([True]))
    assert rounding_floor("INT32", 5.0) == 0.0


def test_specials_are_compared_first_and_located() -> None:
    expected = _randn(4, 6)
    expected[1, 2], expected[2, 3], expected[3, 4] = math.nan, math.inf, -math.inf
    assert_close(expected.clone(), expected)
    for place, value, label in (
        ((1, 2), 0.0, "NaN"),
        ((2, 3), 3e38, r"\+inf"),
        ((3, 4), math.inf, "inf"),
        ((0, 0), math.nan, "NaN"),
        ((0, 0), -math.inf, "-inf"),
    ):
        actual = expected.clone()
        actual[place] = value
        with pytest.raises(OracleError, match=f"{label} differs in 1 of 24") as caught:
            # No bound, however wide, lets them pass.
            assert_close(actual, expected, tol=1e300)
        assert f"axis 0: wrong at {place[0]} (1 of 4)" in str(caught.value)
        assert f"axis 1: wrong at {place[1]} (1 of 6)" in str(caught.value)


def test_an_infinite_reference_does_not_open_the_bound() -> None:
    expected = torch.tensor([math.inf, 1.0], dtype=torch.float64)
    with pytest.raises(OracleError):
        assert_close(torch.tensor([math.inf, 1.5]), expected, tol=0.1)
    with pytest.raises(OracleError):
        assert_close(torch.tensor([math.inf, 1.5]), expected, baseline=expected.float())


def test_shapes_are_not_broadcast_and_empty_is_equal() -> None:
    with pytest.raises(OracleError, match="shape"):
        assert_close(torch.zeros(3, 1), torch.zeros(3, dtype=torch.float64))
    empty = torch.zeros(0, 4)
    assert assert_close(empty, empty.double(), baseline=empty).max_error == 0.0


def test_a_baseline_that_measures_nothing_is_refused() -> None:
    expected = _randn(8)
    with pytest.raises(ValueError, match="accept anything"):
        assert_close(expected, expected, baseline=-expected)
    with pytest.raises(ValueError, match="nowhere finite"):
        assert_close(expected, expected, baseline=expected * math.nan)
    with pytest.raises(ValueError, match="float64"):
        assert_close(expected.float(), expected.float(), baseline=expected.float())
    with pytest.raises(ValueError, match="shape"):
        assert_close(expected, expected, baseline=expected[:4])
    with pytest.raises(ValueError, match="not both"):
        assert_close(expected, expected, baseline=expected, tol=0.1)
    for tol in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tol"):
            assert_close(expected, expected, tol=tol)


def test_where_the_baseline_is_nan_it_measures_nothing() -> None:
    """A naive softmax gives NaN in a row that sees nothing; the reference has zeros there."""
    expected = _randn(4, 8)
    expected[1] = 0.0
    plain = expected.bfloat16()
    plain[1] = math.nan
    assert_close(expected.bfloat16(), expected, baseline=plain)
    with pytest.raises(OracleError, match="NaN"):
        assert_close(plain, expected, baseline=plain)


def test_the_report_tells_where() -> None:
    expected = _randn(2, 4, 256, 8)
    actual = expected.clone()
    actual[1, 2, 64:128] += 3.0
    actual[1, 2, 100, 5] += 4.0
    with pytest.raises(AssertionError) as caught:
        assert_close(actual, expected, tol=1e-3, name="dK")
    message = str(caught.value)
    assert message.startswith("dK: 512 of 16384 elements (3.12 %) differ by more than")
    assert "axis 0: wrong at 1 (1 of 2)" in message
    assert "axis 1: wrong at 2 (1 of 4)" in message
    assert "axis 2: wrong at 64-127 (64 of 256)" in message
    assert "axis 3: wrong at 0-7 (8 of 8)" in message
    assert "at (1, 2, 100, 5): actual" in message
    assert "row (1, 2, 100): 8 of 8 wrong, largest error 7 at 5" in message


def test_the_report_stays_bounded() -> None:
    expected = _randn(*([2] * 10))
    with pytest.raises(OracleError) as caught:
        assert_close(-expected - 1, expected, tol=1e-9, name="n" * 5000)
    lines = str(caught.value).split("\n")
    assert len(lines) <= 40
    assert max(len(line) for line in lines) <= 200
    scattered = torch.zeros(10000, dtype=torch.bool)
    scattered[::2] = True
    assert max(len(line) for line in where_wrong(scattered)) < 120
    cut = bounded("\n".join(map(str, range(100)))).split("\n")
    assert len(cut) == MAX_LINES == 40
    assert cut[-2:] == ["38", "... 61 more lines"]
    assert bounded("a\nb\nc\nd", 3) == "a\nb\n... 2 more lines"


def _png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_a_picture_of_the_worst_plane_on_request(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    expected = _randn(2, 3, 600, 40)
    actual = expected.clone()
    actual[1, 2, 128:256, :8] += 0.5
    path = tmp_path / "error.png"
    with pytest.raises(OracleError, match=r"picture of plane \(1, 2\)"):
        assert_close(actual, expected, tol=1e-3, picture=path)
    assert min(_png_size(path)) > 200
    assert error_picture(tmp_path / "b.png", actual - expected, plane=(0, 1)) == (0, 1)
    with pytest.raises(ValueError, match="plane"):
        error_picture(tmp_path / "c.png", actual - expected, plane=(2, 0))
    # One axis, and infinities, are shown as well.
    assert error_picture(tmp_path / "d.png", torch.tensor([0.0, math.inf]), limit=1.0) == ()
    assert min(_png_size(tmp_path / "d.png")) > 200


def test_a_passing_comparison_writes_no_picture(tmp_path: Path) -> None:
    assert_close(torch.ones(3), torch.ones(3).double(), picture=tmp_path / "none.png")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_fails_does_not_hide_the_failure(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such" / "folder.png"
    with pytest.raises(OracleError, match=r"no picture(.|\n)*1 of 3 elements"):
        assert_close(
            torch.tensor([1.0, 2.0, 9.0]),
            torch.tensor([1.0, 2.0, 3.0]).double(),
            picture=missing,
        )


def test_comparing_loads_no_matplotlib() -> None:
    code = "import sys, tilewright.testing.compare; print('matplotlib' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_several_results_are_reported_together() -> None:
    expected = {name: _randn(4, 4, seed=seed) for seed, name in enumerate(("O", "Stats", "dQ"))}
    actual = {name: t.float() for name, t in expected.items()}
    assert set(assert_all_close(actual, expected)) == set(expected)
    assert_all_close(actual, expected, baselines={"O": actual["O"]})
    actual["Stats"], actual["dQ"] = actual["Stats"] + 1, actual["dQ"] + 1
    with pytest.raises(OracleError, match=r"2 of 3 results differ: Stats, dQ") as caught:
        assert_all_close(actual, expected)
    assert "Stats: 16 of 16" in str(caught.value)
    assert "dQ: 16 of 16" in str(caught.value)
    assert len(str(caught.value).split("\n")) <= MAX_LINES
    with pytest.raises(OracleError, match="references"):
        assert_all_close({"O": actual["O"]}, expected)


def test_bits_are_compared_as_bits() -> None:
    nan = torch.tensor([math.nan, 0.0])
    assert_bitwise_equal(nan, nan.clone())
    for wrong in (torch.tensor([math.nan, -0.0]), (nan.view(torch.int32) + 1).view(torch.float32)):
        with pytest.raises(OracleError, match="bits differ"):
            assert_bitwise_equal(wrong, nan)
    with pytest.raises(OracleError, match="0x80000000 instead of 0x00000000"):
        assert_bitwise_equal(torch.tensor(-0.0), torch.tensor(0.0))
    with pytest.raises(OracleError, match="dtype"):
        assert_bitwise_equal(nan, nan.double())
    eight = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    with pytest.raises(OracleError, match="axis 0: wrong at 1"):
        assert_bitwise_equal(eight, torch.tensor([1.0, 3.0]).to(torch.float8_e4m3fn))


def test_the_floor_is_the_spacing() -> None:
    for dtype, info in ((t, torch.finfo(t)) for t in (torch.float16, torch.bfloat16)):
        for number in (1.0, 1.9, 2.0, 100.0, info.max, info.smallest_normal, 0.0):
            at = torch.tensor(number, dtype=dtype)
            up = torch.nextafter(
                at, torch.tensor(0.0 if number == info.max else torch.inf).to(dtype)
            )
            assert rounding_floor(dtype, at.item()) == abs(up.double() - at.double()).item()
    assert rounding_floor(torch.float16, float("inf")) == 32.0


def test_root_mean_square_does_not_overflow() -> None:
    assert root_mean_square(torch.tensor([3e200, 4e200], dtype=torch.float64)) == pytest.approx(
        5e200 / math.sqrt(2)
    )
    assert root_mean_square(torch.zeros(0, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([2**53 + 1]), torch.tensor([2**53])),
        (torch.tensor([2**53 + 1]), torch.tensor([2.0**53], dtype=torch.float64)),
        (torch.tensor([-(2**63)]), torch.tensor([-(2**63) + 1])),
        (
            torch.tensor([2**63 + 1], dtype=torch.uint64),
            torch.tensor([2**63 + 3], dtype=torch.uint64),
        ),
    ],
)
def test_integers_that_float64_rounds_to_one_number_differ(
    actual: torch.Tensor, expected: torch.Tensor
) -> None:
    with pytest.raises(OracleError, match="1 of 1 elements"):
        assert_close(actual, expected)
    assert_close(actual, actual.clone())
    assert_close(actual + 1 if actual.dtype is torch.int64 else actual, actual, tol=1e-12)


def test_small_integers_against_floats() -> None:
    assert_close(torch.tensor([-3, 2**40]), torch.tensor([-3.0, 2.0**40], dtype=torch.float64))
    with pytest.raises(OracleError, match="1 of 2 elements"):
        assert_close(torch.tensor([-3, 7]), torch.tensor([-3.5, 7.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (torch.ones(2, dtype=torch.complex64), "view_as_real"),
        (torch.eye(2).to_sparse()[0], "dense"),
        (torch.ones(2, device="meta"), "no values"),
        ([1.0, 1.0], "got list; expected a torch tensor"),
        (None, "got NoneType"),
    ],
    ids=["complex", "sparse", "meta", "list", "none"],
)
def test_what_would_be_compared_in_part_is_refused(values: Any, advice: str) -> None:
    reference = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match=f"result: .*{advice}"):
        assert_close(values, reference)
    with pytest.raises(TypeError, match=f"result: the reference: .*{advice}"):
        assert_close(reference, values)


def test_a_tolerance_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="tol is '1e-3'"):
        assert_close(torch.ones(2), torch.ones(2, dtype=torch.float64), tol="1e-3")  # type: ignore[arg-type]
