"""L11 and L5: twins that leave rows out, write outside, and read outside."""

from __future__ import annotations

import pytest
import torch

from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome

pytestmark = pytest.mark.L0
Given = dict[str, torch.Tensor]


def right(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    torch.add(a, b, out=out)
    return out


def right_writing(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.empty_like(a) if out is None else out
    return out.copy_(a + b)


def leaves_a_row(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    out[:, :-1] = (a + b)[:, :-1]
    return out


def leaves_a_row_and_converts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return leaves_a_row(a, b).to(torch.bfloat16)


def leaves_one_element(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.zeros_like(a) if out is None else out
    kept = out[0, 2, 3].clone()
    out.copy_(a + b)
    out[0, 2, 3] = kept
    return out


def writes_the_gaps(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.empty_like(a) if out is None else out
    out.copy_(a + b)
    batch, rows, columns = out.shape
    if out.stride(1) > columns:
        out.as_strided((batch, rows, columns + 1), out.stride()).select(-1, columns).zero_()
    return out


def writes_past_the_end(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    room = out.untyped_storage().nbytes() // 4 - out.storage_offset()
    longer = out.as_strided((min(out.numel() + 1, room),), (1,))
    longer.fill_(0.0)
    out.copy_(a + b)
    return out


def writes_an_operand(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a += b
    return a.clone()


def reads_past_the_end(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    room = a.untyped_storage().nbytes() // 4 - a.storage_offset()
    longer = a.as_strided((min(a.numel() + 1, room),), (1,))
    return a + b + longer[-1] * 0.0


@pytest.mark.parametrize("function", [right, right_writing])
def test_right_code_holds(function: object, operands: Given) -> None:
    for detector in (
        detectors.every_element_written,
        detectors.guards_unchanged,
        detectors.nothing_outside_read,
    ):
        assert detector(function, operands).outcome is Outcome.HELD


@pytest.mark.parametrize(
    ("function", "rows"),
    [(leaves_a_row, "2 of 12 rows"), (leaves_a_row_and_converts, "2 of 12 rows")],
)
def test_rows_left_out_are_seen(function: object, rows: str, operands: Given) -> None:
    verdict = detectors.every_element_written(function, operands)
    assert verdict.outcome is Outcome.BROKEN
    assert verdict.rule == "L11"
    assert "16 of 96 elements, first at (0, 5, 0)" in verdict.text
    assert rows in verdict.text


def test_noise_is_no_unwritten_element(operands: Given) -> None:
    generator = torch.Generator().manual_seed(8)

    def noisy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b + torch.rand(a.shape, generator=generator)

    assert detectors.every_element_written(noisy, operands).outcome is Outcome.HELD
    assert detectors.nothing_outside_read(noisy, operands).outcome is Outcome.HELD


def test_one_element_left_out_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match=r"1 of 96 elements, first at \(0, 2, 3\)"):
        detectors.assert_every_element_written(leaves_one_element, operands)


@pytest.mark.parametrize("pattern_bits", [0xFF, 0x47])
def test_a_result_that_equals_a_pattern_is_no_unwritten_one(
    pattern_bits: int, operands: Given
) -> None:
    value = torch.full((4,), pattern_bits, dtype=torch.uint8).view(torch.float32)

    def constant(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a).copy_(value.expand_as(a))

    assert detectors.every_element_written(constant, operands).outcome is Outcome.HELD


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (writes_the_gaps, "out: byte 32"),
        (writes_past_the_end, "allocation 0: byte 384"),
        (writes_an_operand, "operand a"),
    ],
)
def test_writes_outside_are_seen(function: object, named: str, operands: Given) -> None:
    with pytest.raises(AssertionError, match=named):
        detectors.assert_guards_unchanged(function, operands)


def test_reads_outside_are_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match=r"L5 .*outside the operands"):
        detectors.assert_nothing_outside_read(reads_past_the_end, operands)
