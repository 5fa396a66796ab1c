"""L2, L3, L8 and L9 on a GPU: twins that wait, allocate, and leave their stream."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome, replay

pytestmark = pytest.mark.L0
Given = dict[str, torch.Tensor]
Out = torch.Tensor | None


def adds(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    return torch.add(a, b, out=torch.empty_like(a) if out is None else out)


def waits(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    float(a.sum())
    return adds(a, b, out)


def on_another_stream(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.cuda.stream(torch.cuda.Stream()):
        return a + b


def test_right_code_holds(cuda_operands: Given) -> None:
    for name in ("no_allocation", "no_synchronization", "stream_order", "replay_freshness"):
        verdict = getattr(detectors, name)(adds, cuda_operands)
        assert verdict.outcome is Outcome.HELD, verdict


def test_a_wait_is_seen(cuda_operands: Given) -> None:
    assert detectors.no_synchronization(waits, cuda_operands).outcome is Outcome.BROKEN


def test_an_allocation_is_seen(cuda_operands: Given) -> None:
    def makes_a_temporary(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
        return adds(a * 1.0, b, out)

    assert detectors.no_allocation(makes_a_temporary, cuda_operands).outcome is Outcome.BROKEN


def test_another_stream_is_seen(cuda_operands: Given) -> None:
    assert detectors.stream_order(on_another_stream, cuda_operands).outcome is Outcome.BROKEN


def test_a_scale_read_at_capture_is_seen(cuda_operands: Given) -> None:
    values: dict[int, float] = {}

    def reads_once(a: torch.Tensor, scale: torch.Tensor, out: Out = None) -> torch.Tensor:
        if scale.data_ptr() not in values:
            values[scale.data_ptr()] = float(scale)
        out = torch.empty_like(a) if out is None else out
        return torch.mul(a, values[scale.data_ptr()], out=out)

    given = {"a": cuda_operands["a"], "scale": torch.tensor([0.5], device="cuda")}
    verdict = detectors.replay_freshness(reads_once, given, lambda g: {"out": g["a"] * g["scale"]})
    assert verdict.outcome is Outcome.BROKEN, verdict


def test_a_captured_run_comes_after_what_made_its_operands(cuda_operands: Given) -> None:
    a, seen = cuda_operands["a"], torch.empty_like(cuda_operands["a"])
    a.zero_()
    torch.cuda.synchronize()
    # Some milliseconds, before the operand is what it is.
    torch.cuda._sleep(50_000_000)
    a.fill_(2.0)
    found: list[torch.Tensor] = []

    def run() -> None:
        seen.copy_(a)
        if not torch.cuda.is_current_stream_capturing():
            found.append(seen.clone())

    with contextlib.ExitStack() as owned:
        replay._captured(run, owned)
    assert len(found) == 1 and bool((found[0] == 2.0).all())


def test_a_captured_run_lives_as_long_as_its_replays(cuda_operands: Given) -> None:
    class Run:
        def __call__(self) -> None:
            torch.add(cuda_operands["a"], 1.0, out=cuda_operands["b"])

    run = Run()
    alive = weakref.ref(run)
    with contextlib.ExitStack() as owned:
        replay._captured(run, owned)()
        del run
        assert alive() is not None
    assert alive() is None
