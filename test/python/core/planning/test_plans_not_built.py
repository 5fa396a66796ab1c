"""Plans that cannot be built: the next best runs, or every reason is told."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from plan_samples import StubEngine, product

import tilewright as tw
from tilewright.engines.base import Proposal

pytestmark = pytest.mark.L0


def first_cannot_be_built(monkeypatch: pytest.MonkeyPatch, stub: StubEngine, error: Any) -> None:
    build = stub.build

    def declining(graph: Any, device: Any, knobs: Any) -> Any:
        if dict(knobs) == {tw.knob_type.TILE_M: 128}:
            raise error
        return build(graph, device, knobs)

    monkeypatch.setattr(stub, "build", declining)


@pytest.mark.parametrize("way", ["build", "all", "execute", "autotune", "workspace"])
def test_the_next_best_runs_where_the_first_cannot_be_built(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    # What a compiler or a driver declines is not known before; the plan that runs can be named.
    error = tw.NotSupportedError("kernel 'k': this driver does not tell")
    first_cannot_be_built(monkeypatch, stub, error)
    graph, pack = product()
    space = torch.empty(1024, dtype=torch.uint8)
    if way == "build":
        graph.build()
    elif way == "all":
        graph.create_execution_plans()
        graph.build_plans(tw.build_plan_policy.ALL)
    elif way == "autotune":
        names = [each["name"] for each in graph.autotune(pack, space)["plans"]]
        assert sorted(names) == ["aten", "triton:TILE_M=64"]
        return
    elif way == "workspace":
        assert graph.get_autotune_workspace_size() == 1024
    graph.execute(pack, space)
    assert stub.launched == [((tw.knob_type.TILE_M, 64),)]
    assert graph.explain().selected.name == "triton:TILE_M=64"
    assert ("triton:TILE_M=128", f"cannot be built: {error}") in graph.explain().barred
    assert f"barred triton:TILE_M=128: cannot be built: {error}" in str(graph.explain())


def test_a_selected_plan_that_cannot_be_built_is_not_replaced(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # L13.
    first_cannot_be_built(monkeypatch, stub, tw.NotSupportedError("no such target"))
    graph, pack = product()
    graph.select_plan("triton:TILE_M=128")
    every = functools.partial(graph.build_plans, tw.build_plan_policy.ALL)
    for build in (graph.build, every, functools.partial(graph.execute, pack)):
        with pytest.raises(tw.NotSupportedError, match="no such target"):
            build()
    graph, _ = product()
    graph.create_execution_plan(1, {tw.knob_type.TILE_M: 128})
    with pytest.raises(tw.NotSupportedError, match="no such target"):
        graph.build()
    assert stub.launched == []


def test_what_is_no_decline_of_a_plan_is_raised_at_build(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_cannot_be_built(monkeypatch, stub, tw.LaunchError("the compiler is forbidden"))
    with pytest.raises(tw.LaunchError, match="forbidden"):
        product()[0].build()


def test_where_no_plan_can_be_built_every_reason_is_told(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declining(graph: Any, device: Any, knobs: Any) -> Any:
        raise tw.NotSupportedError(f"not {dict(knobs)[tw.knob_type.TILE_M]}")

    monkeypatch.setattr(stub, "build", declining)
    graph, _ = product()
    graph.deselect_engines(["aten"])
    with pytest.raises(tw.NotSupportedError, match=r"(?s)no plan.*not 128.*not 64.*runs: nothing"):
        graph.build()


def test_only_a_decline_is_caught(stub: StubEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, device: Any) -> list[Proposal]:
        raise ZeroDivisionError("a bug in an engine")

    monkeypatch.setattr(stub, "propose", broken)
    with pytest.raises(ZeroDivisionError):
        product()[0].build()
