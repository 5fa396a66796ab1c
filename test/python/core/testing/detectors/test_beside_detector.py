"""Calls beside another process: twins that are wrong only there, on a device that is played."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from tilewright.testing import detectors
from tilewright.testing.another_process import AnotherProcessError
from tilewright.testing.detectors import Outcome, beside

pytestmark = pytest.mark.L0
Given = dict[str, torch.Tensor]
Out = torch.Tensor | None


class Other:
    """Stands for the other process: calls take three milliseconds beside it, one without."""

    def __init__(self, beside_ms: float = 3.0) -> None:
        self.is_busy = False
        self.spells = 0
        self.beside_ms = beside_ms

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.is_busy = True
        self.spells += 1
        try:
            yield
        finally:
            self.is_busy = False

    def stopwatch(self, is_cuda: bool) -> Callable[[], Callable[[], float]]:
        ms = self.beside_ms if self.is_busy else 1.0
        return lambda: lambda: ms


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Other:
    made = Other()
    monkeypatch.setattr(beside, "_stopwatch", made.stopwatch)
    return made


def examined(target: object, operands: Given, other: Other, **options: float) -> detectors.Verdict:
    return detectors.beside_another_process(target, operands, other, interruptions=6, **options)


def adds(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    return torch.add(a, b, out=torch.empty_like(a) if out is None else out)


def test_right_code_holds(operands: Given, other: Other) -> None:
    verdict = examined(adds, operands, other)
    assert verdict.outcome is Outcome.HELD
    assert verdict.text == (
        "20 calls of 1 ms beside another process, 20 of them switched out: the bits of a call alone"
    )
    assert other.spells == 1 and not other.is_busy


def test_rows_that_are_nan_beside_another_process_are_seen(operands: Given, other: Other) -> None:
    made = []

    def loses_a_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a + b
        made.append(out)
        if other.is_busy and len(made) % 4 == 0:
            out[1, 2:4, 3:] = torch.nan
        return out

    verdict = examined(loses_a_row, operands, other)
    assert verdict.outcome is Outcome.BROKEN
    right = operands["a"][1, 2, 3] + operands["b"][1, 2, 3]
    assert verdict.text == (
        "out: in 5 of 20 calls of 1 ms beside another process, 5 of the 20 that were switched out: "
        f"10 of 96 elements, first at (1, 2, 3), nan instead of {right:.6g}; alone in 0 of 20 calls"
    )
    with pytest.raises(AssertionError, match=r"^beside beside another process: broken: out: in 5"):
        made.clear()
        detectors.assert_beside_another_process(loses_a_row, operands, other, interruptions=6)


def test_each_result_is_named(operands: Given, other: Other) -> None:
    def changes_two(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a + b + other.is_busy, a - b, (a > b) ^ other.is_busy

    lines = examined(changes_two, operands, other).text.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["out0", "out2"]
    assert "96 of 96 elements, first at (0, 0, 0)" in lines[1]


def test_one_bit_is_seen(operands: Given, other: Other) -> None:
    def turns_a_bit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = a * 0.0
        out[0, 0, 7] *= -1.0 if other.is_busy else 1.0
        return out

    assert "1 of 96 elements, first at (0, 0, 7)" in examined(turns_a_bit, operands, other).text


def test_what_is_not_written_does_not_hold_the_call_before(operands: Given, other: Other) -> None:
    def leaves_out(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
        out = torch.empty_like(a) if out is None else out
        rows = slice(0, 1 if other.is_busy else 2)
        out[rows] = (a + b)[rows]
        return out

    def returns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return leaves_out(a, b)

    for target in (leaves_out, returns):
        verdict = examined(target, operands, other)
        assert verdict.outcome is Outcome.BROKEN, verdict
        assert "48 of 96 elements, first at (1, 0, 0), nan instead of" in verdict.text


def test_code_that_never_repeats_its_bits_is_held_to_a_tolerance(
    operands: Given, other: Other
) -> None:
    made = []

    def rounds_otherwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made.append(a)
        return (a + b) * (1.0 + len(made) % 3 * 1e-7)

    verdict = examined(rounds_otherwise, operands, other)
    assert verdict.outcome is Outcome.HELD
    assert verdict.text.endswith("within the tolerance of a call alone")

    def is_lost_beside(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = rounds_otherwise(a, b)
        out[0, 5] *= torch.nan if other.is_busy else 1.0
        return out

    verdict = examined(is_lost_beside, operands, other)
    assert verdict.outcome is Outcome.BROKEN
    assert "8 of 96 elements, first at (0, 5, 0), nan instead of" in verdict.text
    assert examined(rounds_otherwise, operands, other, tolerance=1e-9).outcome is Outcome.BROKEN


def test_code_whose_results_are_random_is_told_so(operands: Given, other: Other) -> None:
    generator = torch.Generator().manual_seed(3)
    verdict = examined(lambda a, b: torch.rand(9, generator=generator), operands, other)
    assert verdict.outcome is Outcome.BROKEN
    assert verdict.text.startswith(
        "out: in 16 of 16 calls of 1 ms that nothing of this detector was beside, 0 of the 0 that "
        "took longer: 9 of 9 elements, first at (0,), "
    )
    assert verdict.text.endswith("; its results are random, or others have the device too")
    assert other.spells == 0


def test_on_a_device_that_others_use_the_fault_is_seen_without_one_more(
    operands: Given, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []

    def loses_a_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made.append(len(made) % 3 == 2)
        return (a + b).index_fill_(0, torch.tensor(1), torch.nan if made[-1] else 1.0)

    def stopwatch(is_cuda: bool) -> Callable[[], Callable[[], float]]:
        def stop() -> Callable[[], float]:
            ms = 3.0 if made[-1] else 1.0
            return lambda: ms

        return stop

    monkeypatch.setattr(beside, "_stopwatch", stopwatch)
    verdict = examined(loses_a_row, operands, other)
    assert verdict.outcome is Outcome.BROKEN
    assert "in 5 of 16 calls of 1 ms" in verdict.text
    assert "5 of the 5 that took longer: 48 of 96 elements" in verdict.text
    assert "nan instead of 1;" in verdict.text


def test_calls_that_nothing_interrupted_show_nothing(operands: Given, other: Other) -> None:
    other.beside_ms = 1.4
    verdict = examined(adds, operands, other, limit_s=0.05)
    assert verdict.outcome is Outcome.DECLINED
    assert "0 of them switched out: nothing was shown" in verdict.text


def test_an_exception_beside_ends_the_spell(operands: Given, other: Other) -> None:
    def fails(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if other.is_busy:
            raise ValueError("interrupted")
        return a + b

    with pytest.raises(ValueError, match="interrupted"):
        examined(fails, operands, other)
    assert other.spells == 1 and not other.is_busy


def test_a_process_that_fails_is_the_reason(operands: Given, other: Other) -> None:
    class Fails(Other):
        @contextlib.contextmanager
        def busy(self) -> Iterator[None]:
            raise AnotherProcessError("the other process: out of memory")
            yield

    verdict = detectors.beside_another_process(adds, operands, Fails())
    assert verdict.outcome is Outcome.DECLINED
    assert verdict.text == "the other process: out of memory"


@pytest.mark.parametrize(
    ("is_wrong", "outcome"), [(True, Outcome.BROKEN), (False, Outcome.DECLINED)]
)
def test_what_was_seen_is_told_where_the_process_ends_in_its_spell(
    operands: Given, other: Other, is_wrong: bool, outcome: Outcome
) -> None:
    class Ends(Other):
        @contextlib.contextmanager
        def busy(self) -> Iterator[None]:
            with other.busy():
                yield
            raise AnotherProcessError("the other process: it ended")

    verdict = examined(lambda a, b: a + b + (other.is_busy and is_wrong), operands, Ends())
    assert verdict.outcome is outcome
    assert ("96 of 96 elements" in verdict.text) == is_wrong


def test_a_cpu_is_declined(operands: Given) -> None:
    verdict = detectors.beside_another_process(adds, operands)
    assert verdict.outcome is Outcome.DECLINED
    assert verdict.text == "device cpu: needs a GPU, which two processes have in turn"
