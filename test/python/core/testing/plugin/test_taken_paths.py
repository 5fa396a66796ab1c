"""A retired path is counted, and its count is zero."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import tilewright as tw
from tilewright.testing import count_taken

pytestmark = pytest.mark.L0

SOURCE = """
def old(x): return x + 1
def new(x): return x + 1
class Box:
    @staticmethod
    def make(x): return old(x)
    def get(self): return new(0)
by_another_name = old
broken = False
def call(x): return (by_another_name if broken else new)(x)
"""
OLD, NEW = "paths_of_a_test:old", "paths_of_a_test:new"


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    module = ModuleType("paths_of_a_test")
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module


def test_a_path_is_counted_by_whatever_name_it_is_called(paths: ModuleType) -> None:
    # T17. While the old path was in use, its count was asserted to be above zero; then inverted.
    with count_taken(OLD, NEW, "paths_of_a_test:Box.get") as taken:
        paths.call(1)
        paths.Box().get()
    assert taken == {OLD: 0, NEW: 2, "paths_of_a_test:Box.get": 1}
    paths.broken = True
    with count_taken(OLD, NEW) as taken:
        paths.call(1)
        paths.Box.make(1)
        in_thread = threading.Thread(target=paths.call, args=(1,))
        in_thread.start()
        in_thread.join()
    assert taken == {OLD: 3, NEW: 0}
    paths.call(1)
    assert taken[OLD] == 3, "the body has ended"


def test_a_path_that_is_gone_counts_zero_until_it_is_back(paths: ModuleType) -> None:
    with count_taken(NEW, gone=["paths_of_a_test:older", "no_such_module:f"]) as taken:
        paths.call(1)
    assert taken == {NEW: 1, "paths_of_a_test:older": 0, "no_such_module:f": 0}
    with pytest.raises(LookupError, match="old is there again"), count_taken(gone=[OLD]):
        pass
    # A misspelled path would count zero for ever.
    with pytest.raises(LookupError, match="no such function"), count_taken("paths_of_a_test:odl"):
        pass
    with pytest.raises(TypeError, match="no Python function"), count_taken("math:sqrt"):
        pass


def test_a_profiler_that_was_there_goes_on(paths: ModuleType) -> None:
    seen: list[str] = []

    def profiler(frame: object, event: str, argument: object) -> None:
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        with count_taken(NEW) as taken:
            paths.call(1)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert taken[NEW] == 1 and "call" in seen


PLANS = "tilewright.planning.graph:Graph.create_execution_plans"
BIND = "tilewright.planning.built:BuiltPlan.bind"


def norm(x: torch.Tensor) -> tuple[tw.Graph, dict[str, torch.Tensor]]:
    handle = tw.create_handle(x.device)
    graph = tw.Graph(io_data_type=x.dtype, intermediate_data_type="float32", handle=handle)
    scale = graph.tensor((1, x.shape[1]), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    source = graph.tensor(x.shape, name="x")
    y, _ = graph.rmsnorm(phase, source, scale, None, graph.tensor_scalar(1e-6))
    y.set_output(True).set_name("y")
    ones = torch.ones(1, x.shape[1], dtype=x.dtype, device=x.device)
    return graph, {"x": x, "scale": ones, "y": torch.empty_like(x)}


def test_a_bound_frame_plans_and_binds_no_more() -> None:
    # Launches once went through execute, which checks and binds at each call.
    graph, pack = norm(torch.ones(3, 8))
    with count_taken(PLANS, BIND) as taken:
        graph.build()
        frame = graph.bind(pack)
    assert taken == {PLANS: 1, BIND: 1}
    with count_taken(*taken) as taken:
        frame.launch()
    assert not any(taken.values())


@pytest.mark.needs_gpus(1)
def test_prepared_norms_no_longer_go_through_tritons_own_launcher() -> None:
    # Both paths gave the same numbers, so only a count tells which was taken.
    own = "triton.runtime.jit:JITFunction.run"
    graph, pack = norm(torch.ones(3, 64, device="cuda"))
    graph.build()
    assert graph.selected_engine == "triton"
    with count_taken(own) as taken:
        graph.execute(pack)
        graph.bind(pack).launch()
        torch.cuda.synchronize()
    assert taken[own] == 0
    assert torch.all((pack["y"] - 1).abs() < 1e-5)
