"""B13 with devices that are not there: each is asked for its own architecture and its own size."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.artifact.code import KernelCode
from tilewright.engines.compiled import executable
from tilewright.engines.triton import normalization
from tilewright.engines.triton.engine import ENGINE
from tilewright.planning.devices import device_properties

pytestmark = pytest.mark.L0

# By index: compute capability and number of multiprocessors.
DEVICES = [((9, 0), 132), ((8, 0), 108), ((7, 5), 72)]


def image_for(target: tuple[int, int]) -> bytes:
    return f"code for {target}".encode()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, fake_driver: Any) -> list[tuple[str, Any]]:
    """What the compiler and the family were asked for, in order."""
    seen: list[tuple[str, Any]] = []

    def properties(device: Any) -> Any:
        (major, minor), count = DEVICES[torch.device(device).index]
        found = {"major": major, "minor": minor, "multi_processor_count": count, "name": "made up"}
        return types.SimpleNamespace(**found)

    def code(spec: Any, target: tuple[int, int]) -> tuple[str, KernelCode]:
        seen.append(("compiled for", target))
        return spec.name, KernelCode("k", image_for(target), 128, 0, target)

    def load(digest: str, image: bytes, name: str, shared_bytes: int, device_index: int) -> Any:
        seen.append(("loaded on", (device_index, image)))
        return types.SimpleNamespace(function=0x1000)

    plan = normalization.plan

    def planned(graph: Any, knobs: Any, sm_count: int) -> Any:
        seen.append(("planned for", sm_count))
        return plan(graph, knobs, sm_count)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    capability = lambda device: DEVICES[torch.device(device).index][0]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(executable, "kernel_code", code)
    monkeypatch.setattr(executable, "load_module", load)
    monkeypatch.setattr(normalization, "plan", planned)
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    return seen


def norm(index: int) -> Any:
    handle = tw.create_handle(torch.device("cuda", index))
    graph = tw.Graph("norm", "bfloat16", "float32", handle=handle)
    x, scale = graph.tensor((8, 64), name="x"), graph.tensor((1, 64), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    graph.rmsnorm(phase, x, scale, None, graph.tensor_scalar(1e-5))[0].set_output(True)
    graph.validate()
    return graph


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_a_plan_is_made_for_the_device_that_it_runs_on(
    asked: list[tuple[str, Any]], fake_driver: Any, index: int, current: int
) -> None:
    # Whichever device is current.
    fake_driver.device = current
    capability, count = DEVICES[index]
    ENGINE.build(norm(index), torch.device("cuda", index), ())
    assert ("planned for", count) in asked
    assert {each for what, each in asked if what == "compiled for"} == {capability}
    assert {each for what, each in asked if what == "loaded on"} == {(index, image_for(capability))}
    assert fake_driver.device == current


@pytest.mark.parametrize("index", [0, 1, 2])
def test_admission_asks_the_handle_s_device(asked: list[tuple[str, Any]], index: int) -> None:
    capability, count = DEVICES[index]
    found = device_properties(torch.device("cuda", index))
    assert (found.compute_capability, found.sm_count) == (capability, count)
    verdicts = {v.engine_name: v for v in norm(index).explain().verdicts}
    is_known = capability in {(8, 0), (9, 0)}
    assert verdicts["triton"].is_taken is is_known
    if not is_known:
        assert "sm_75" in verdicts["triton"].reason
