"""Detectors on operands of odd shapes, types and strides: no false alarm, and no crash."""

from __future__ import annotations

import pytest
import torch

from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome

pytestmark = pytest.mark.L0

NAMES = (
    "alias_refusal",
    "determinism",
    "every_element_written",
    "frame_independence",
    "guards_unchanged",
    "no_allocation",
    "nothing_outside_read",
    "replay_freshness",
    "wide_strides",
)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


OPERANDS = {
    "no element": draw(0, 4),
    "rows of none": draw(3, 0),
    "a number": draw(),
    "one element": draw(1),
    "integers": torch.arange(12).view(3, 4),
    "booleans": torch.ones(3, 4, dtype=torch.bool),
    "bfloat16": draw(3, 4).bfloat16(),
    "8 bits": draw(3, 4).to(torch.float8_e4m3fn),
    "one row for all": draw(1, 4).expand(3, 4),
    "transposed": draw(4, 3).t(),
    "a leaf with a gradient": draw(3, 4).requires_grad_(),
    "NaN": torch.full((3, 4), torch.nan),
}


def adds(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is not None and any(
        out.numel()
        and t.numel()
        and out.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        and not (
            out.data_ptr() >= t.data_ptr() + t.untyped_storage().nbytes()
            or _ends(out) <= t.data_ptr()
            or _ends(t) <= out.data_ptr()
        )
        for t in (a, b)
    ):
        raise ValueError("out overlaps an operand")
    if a.dtype is torch.float8_e4m3fn:
        total = (a.float() + b.float()).to(a.dtype)
        return total if out is None else out.copy_(total)
    return torch.add(a, b, out=torch.empty_like(a) if out is None else out)


def _ends(tensor: torch.Tensor) -> int:
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr() + span * tensor.element_size()


@pytest.mark.parametrize("operand", list(OPERANDS))
def test_right_code_is_not_accused(operand: str) -> None:
    a = OPERANDS[operand]
    b = a.detach().clone()
    for name in NAMES:
        verdict = getattr(detectors, name)(adds, [a, b])
        if name == "no_allocation" and operand == "8 bits":
            continue
        assert verdict.outcome is not Outcome.BROKEN, f"{operand}: {verdict}"


def test_broken_code_is_still_seen_there() -> None:
    def forgets(a: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(a)

    def remembers(a: torch.Tensor) -> torch.Tensor:
        return a + kept.setdefault(a.data_ptr(), a.clone())

    kept: dict[int, torch.Tensor] = {}
    for operand in ("a number", "8 bits", "one row for all", "a leaf with a gradient"):
        a = OPERANDS[operand]
        verdict = detectors.every_element_written(forgets, [a])
        assert verdict.outcome is Outcome.BROKEN, f"{operand}: {verdict}"
        if operand != "8 bits":
            verdict = detectors.replay_freshness(remembers, [a])
            assert verdict.outcome is Outcome.BROKEN, f"{operand}: {verdict}"
