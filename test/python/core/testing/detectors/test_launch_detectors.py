"""L2, L9, L10, L13 and determinism: twins that allocate, remember, share, and misname."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome, Subject, frames, replay
from tilewright.testing.detectors.subject import Declared, Tensors

pytestmark = pytest.mark.L0
Given = dict[str, torch.Tensor]
Out = torch.Tensor | None


def adds_in_place(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    return torch.add(a, b, out=torch.empty_like(a) if out is None else out)


def makes_a_temporary(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    out = torch.empty_like(a) if out is None else out
    return out.copy_(a + b)


class Streams:
    """Stands for torch's streams: writes down who waits for whom, and when work is sent."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def wait_stream(self, other: object) -> None:
        self.log.append(f"waits for {other}")

    def synchronize(self) -> None:
        self.log.append("host waits")


def test_each_side_of_frames_waits_for_who_made_operands_and_reads_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    subject = types.SimpleNamespace(
        declare=None, call=lambda operands: side.log.append("work") or operands
    )
    operand = types.SimpleNamespace(device=torch.device("cuda", 0))
    frames._runner(subject, {"a": operand})()  # type: ignore[arg-type, dict-item]
    assert side.log == ["waits for the caller's", "work", "host waits"]


def test_the_first_run_of_a_capture_waits_for_who_made_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side, graph = Streams(), types.SimpleNamespace(reset=None, replay=None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "synchronize", side.synchronize)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    owned = types.SimpleNamespace(callback=lambda *_: None)
    replay._captured(lambda: side.log.append("work"), owned)  # type: ignore[arg-type]
    assert side.log == ["waits for the caller's", "work", "host waits", "work"]


def test_a_launch_without_allocation_holds(operands: Given) -> None:
    assert detectors.no_allocation(adds_in_place, operands).outcome is Outcome.HELD


def test_a_temporary_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match=r"L2 .*1 allocation, 384 bytes"):
        detectors.assert_no_allocation(makes_a_temporary, operands)


def test_code_that_returns_is_declined_with_what_was_seen(operands: Given) -> None:
    verdict = detectors.no_allocation(lambda a, b: torch.softmax(a + b, -1), operands)
    assert verdict.outcome is Outcome.DECLINED
    assert "2 allocations, 768 bytes" in verdict.text


class RemembersScale:
    """Reads its scale once for each tensor object."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def __call__(self, a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        key = scale.data_ptr()
        if key not in self.seen:
            self.seen[key] = float(scale)
        return a * self.seen[key]


class RemembersFirst:
    """Reads its scale in the first call only, whatever tensors come later."""

    value: float | None = None

    def __call__(self, a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.value = float(scale) if self.value is None else self.value
        return a * self.value


def bind_copies(operands: Tensors, results: Tensors) -> Callable[[], None]:
    copies = {name: tensor.clone() for name, tensor in operands.items()}

    def launch() -> None:
        results["out"].copy_(copies["a"] + copies["b"])

    return launch


def stub(bind: Any, **facts: Any) -> Subject:
    def call(operands: Tensors) -> dict[str, torch.Tensor]:
        return {"out": operands["a"] + operands["b"]}

    def execute(operands: Tensors, results: Tensors) -> None:
        results["out"].copy_(operands["a"] + operands["b"])

    declared = Declared(execute, bind or (lambda a, r: lambda: execute(a, r)), **facts)
    return Subject("stub", call, lambda operands, results: declared)


def scaled(operands: Given) -> Given:
    return {"a": operands["a"], "scale": torch.tensor([0.5])}


def test_fresh_reads_hold(operands: Given) -> None:
    verdict = detectors.replay_freshness(lambda a, scale: a * scale, scaled(operands))
    assert verdict.outcome is Outcome.HELD
    assert "a, scale" in verdict.text
    assert detectors.replay_freshness(stub(None), operands).outcome is Outcome.HELD


def test_a_scale_that_is_remembered_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match=r"scale was changed in place and .* old values"):
        detectors.assert_replay_freshness(RemembersScale(), scaled(operands))


def test_a_scale_that_is_remembered_for_all_is_seen_by_a_reference(operands: Given) -> None:
    with pytest.raises(AssertionError, match="scale was changed in place"):
        detectors.assert_replay_freshness(
            RemembersFirst(), scaled(operands), lambda given: {"out": given["a"] * given["scale"]}
        )


def test_a_binding_that_copies_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match="a was changed in place"):
        detectors.assert_replay_freshness(stub(bind_copies), operands)


def test_without_an_effect_nothing_is_shown(operands: Given) -> None:
    verdict = detectors.replay_freshness(lambda a, b: torch.zeros(3), operands)
    assert verdict.outcome is Outcome.DECLINED


def shares_scratch(a: torch.Tensor, b: torch.Tensor, scratch: dict[str, Any] = {}) -> Any:  # noqa: B006
    buffer = scratch.setdefault("buffer", torch.empty_like(a))
    buffer.copy_(a)
    buffer.add_(b)
    return buffer.clone()


def test_calls_that_share_nothing_hold(operands: Given) -> None:
    assert detectors.frame_independence(adds_in_place, operands).outcome is Outcome.HELD


def test_shared_scratch_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match=r"L10 .*thread \d"):
        detectors.assert_frame_independence(lambda a, b: shares_scratch(a, b), operands)


def test_an_error_of_one_thread_is_seen(operands: Given) -> None:
    calls: list[int] = []

    def fails_later(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("busy")
        return a + b

    with pytest.raises(AssertionError, match="RuntimeError: busy"):
        detectors.assert_frame_independence(fails_later, operands)


def test_the_plan_that_runs_has_a_name(operands: Given) -> None:
    facts: dict[str, Any] = {"selected": "fast:WARPS=4", "plan_name": lambda a, r: "fast:WARPS=4"}
    assert detectors.no_silent_fallback(stub(None, **facts), operands, "fast").outcome is (
        Outcome.HELD
    )
    with pytest.raises(AssertionError, match=r"fast:WARPS=4 was selected and slow runs"):
        detectors.assert_no_silent_fallback(
            stub(None, **{**facts, "plan_name": lambda a, r: "slow"}), operands
        )
    with pytest.raises(AssertionError, match="engine other was asked for"):
        detectors.assert_no_silent_fallback(stub(None, **facts), operands, "other")
    assert detectors.no_silent_fallback(adds_in_place, operands).outcome is Outcome.DECLINED


def test_noise_is_seen(operands: Given) -> None:
    generator = torch.Generator().manual_seed(3)

    def noisy(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b + 1e-3 * torch.rand(a.shape, generator=generator)

    assert detectors.determinism(adds_in_place, operands).outcome is Outcome.HELD
    with pytest.raises(AssertionError, match=r"out, call 2: .* differ"):
        detectors.assert_determinism(noisy, operands)


def test_a_declared_allocation_is_declined(operands: Given) -> None:
    subject = stub(None)
    assert subject.declare is not None
    noted = dataclasses.replace(
        subject.declare(operands, {}), notes=frozenset({"ALLOCATES_TEMPORARIES"})
    )
    with pytest.raises(AssertionError):
        detectors.assert_no_allocation(subject, operands)
    subject = dataclasses.replace(subject, declare=lambda operands, results: noted)
    assert detectors.no_allocation(subject, operands).outcome is Outcome.DECLINED


def test_torchs_flags_of_modes_are_as_before(operands: Given) -> None:
    """Two threads that enter and leave modes at once can leave torch's process-wide flag set."""
    for _ in range(3):
        detectors.frame_independence(adds_in_place, operands)
        assert not is_in_torch_dispatch_mode()
