"""A driver and devices that are not there: what would have been launched, where, with what."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.artifact.code import KernelCode
from tilewright.engines.compiled import executable
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.executable import CudaExecutable
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel
from tilewright.launch import driver_launch, kernel_frames
from tilewright.launch.direct import DirectCalls
from tilewright.planning import built
from tilewright.planning.plans import Plan

# Makes `launch_samples/` importable.
sys.path.insert(0, str(Path(__file__).parent))


@dataclass(frozen=True)
class Launched:
    """One launch: the kernel's handle, its grid, stream, parameters, and the device then."""

    function: int
    grid: tuple[int, int, int]
    stream: int
    parameters: bytes
    device: int


@dataclass
class FakeDriver:
    """Records launches. ``device`` is current; ``statuses`` are what the next launches return."""

    launches: list[Launched] = field(default_factory=list)
    device: int = 0
    statuses: list[int] = field(default_factory=list)
    contexts_made: list[int] = field(default_factory=list)

    def launch(self, config: Any, function: Any, parameters: None, extra: Any) -> int:
        status = self.statuses.pop(0) if self.statuses else 0
        if status == 0:
            where, size = extra._obj[1], ctypes.c_size_t.from_address(extra._obj[3]).value
            self.launches.append(
                Launched(
                    ctypes.addressof(function._obj),
                    tuple(config._obj.grid),
                    config._obj.stream or 0,
                    ctypes.string_at(where, size),
                    self.device,
                )
            )
        return status

    def take(self) -> list[Launched]:
        """The launches since the last time."""
        taken, self.launches = self.launches, []
        return taken


def current_stream(device_index: int) -> int:
    """The stream that is current on a fake device."""
    return 1000 + device_index


@pytest.fixture
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()

    class Current:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, fake.device = fake.device, self.index

        def __exit__(self, *_: object) -> None:
            fake.device = self.before

    monkeypatch.setattr(driver_launch, "launch_function", lambda: fake.launch)
    monkeypatch.setattr(driver_launch, "make_context_current", fake.contexts_made.append)
    monkeypatch.setattr(driver_launch, "check", refuse)
    monkeypatch.setattr(kernel_frames, "current_device", lambda: fake.device)
    monkeypatch.setattr(kernel_frames, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "device", Current)
    code = KernelCode("k", b"code", 128, 0, (9, 0))
    monkeypatch.setattr(executable, "kernel_code", lambda spec, target: (spec.name, code))
    # A handle is a number to us.
    module = lambda name, *_: types.SimpleNamespace(function=0x1000 * int(name))  # noqa: E731
    monkeypatch.setattr(executable, "load_module", module)
    return fake


def refuse(status: int, what: str) -> None:
    if status:
        raise tw.LaunchError(f"{what}: CUDA error {status}")


def kernel(
    number: int,
    arguments: Sequence[tuple[str, Any]],
    grid: tuple[int, int, int] = (5, 1, 1),
) -> PlannedKernel:
    """A kernel whose handle is 0x1000 * number, with arguments (Triton's type, argument)."""
    types_ = tuple((f"a{i}", kind) for i, (kind, _) in enumerate(arguments))
    function = types.SimpleNamespace(__name__=str(number))
    return PlannedKernel(KernelSpec(function, types_), grid, tuple(a for _, a in arguments))


@pytest.fixture
def make_kernel() -> Callable[..., PlannedKernel]:
    """Return a function that makes a kernel; see ``kernel``."""
    return kernel


@pytest.fixture
def build(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function (graph, plan, device) that builds a plan of made-up kernels.

    Its calls go the short way from the first one on.
    """
    monkeypatch.setattr(DirectCalls, "_is_first", lambda *_: False)

    def make(graph: Any, plan: KernelPlan, device: Any = "cpu") -> built.BuiltPlan:
        graph.validate()
        resolved, codes = executable.resolve(plan, (9, 0))
        engine = types.SimpleNamespace(
            build=lambda graph, where, knobs: CudaExecutable(resolved, where, codes)
        )
        monkeypatch.setattr(built, "load_engine", lambda module: engine)
        named = Plan(1, "triton", (), 1.0, frozenset(), frozenset())
        return built.BuiltPlan(graph, named, torch.device(device))

    return make


@pytest.fixture
def norm(build: Any, make_kernel: Any) -> Callable[..., Any]:
    """Return a function (*device) that builds the plan of ``norm_plan``."""

    from launch_samples.norm import norm_graph, norm_plan

    def built(*device: str) -> Any:
        graph = norm_graph()
        return build(graph, norm_plan(make_kernel, graph), *device)

    return built
