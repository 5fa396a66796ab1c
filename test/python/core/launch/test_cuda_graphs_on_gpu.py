"""Plans as nodes of a caller's CUDA graph: populate, launch, rebind, and what is refused."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.launch.cuda_driver import check, driver

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

ROWS, WIDTH = 64, 1024


class DriverGraph:
    """A CUDA graph of the driver's, and its instance once there is one."""

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")
        self.graph, self.instance = ctypes.c_void_p(), ctypes.c_void_p()
        check(driver().cuGraphCreate(ctypes.byref(self.graph), 0), "create")

    @property
    def handle(self) -> int:
        return self.graph.value or 0

    def launch(self) -> None:
        if not self.instance:
            status = driver().cuGraphInstantiateWithFlags(
                ctypes.byref(self.instance), self.graph, ctypes.c_ulonglong(0)
            )
            check(status, "instantiate")
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(driver().cuGraphLaunch(self.instance, stream), "launch")
        torch.cuda.synchronize()

    def renew(self) -> None:
        """Forget the instance: the next launch makes one of the graph as it is."""
        if self.instance:
            check(driver().cuGraphExecDestroy(self.instance), "destroy")
            self.instance = ctypes.c_void_p()

    def close(self) -> None:
        self.renew()
        check(driver().cuGraphDestroy(self.graph), "destroy")


@pytest.fixture
def new_graph() -> Iterator[Callable[[], DriverGraph]]:
    made: list[DriverGraph] = []

    def make() -> DriverGraph:
        made.append(DriverGraph())
        return made[-1]

    yield make
    for graph in made:
        graph.close()


def forward() -> tuple[Any, Callable[[], dict[str, torch.Tensor]], Callable[..., Any]]:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    x, scale = graph.tensor((ROWS, WIDTH), name="x"), graph.tensor((1, WIDTH), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(phase, x, scale, None, graph.tensor_scalar(1e-6))
    y.set_output(True).set_name("y")
    graph.build()
    assert graph.selected_engine == "triton"

    def operands() -> dict[str, torch.Tensor]:
        x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
        scale = torch.randn(1, WIDTH, device="cuda").bfloat16()
        return {"x": x, "scale": scale, "y": torch.full_like(x, torch.nan)}

    return graph, operands, lambda pack: pack["y"]


def backward() -> tuple[Any, Callable[[], dict[str, torch.Tensor]], Callable[..., Any]]:
    """Several kernels and a workspace."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    grad, x = (graph.tensor((ROWS, WIDTH), name=name) for name in ("grad", "x"))
    scale = graph.tensor((1, WIDTH), name="scale")
    inverse = graph.tensor((ROWS, 1), data_type="float32", name="inverse")
    dx, dscale, _ = graph.rmsnorm_backward(grad, x, scale, inverse, False)
    dx.set_output(True).set_name("dx")
    dscale.set_output(True).set_name("dscale").set_data_type("float32")
    graph.build()
    assert graph.selected_engine == "triton" and graph.get_workspace_size() > 0

    def operands() -> dict[str, torch.Tensor]:
        made = {name: torch.randn(ROWS, WIDTH, device="cuda").bfloat16() for name in ("grad", "x")}
        made["scale"] = torch.randn(1, WIDTH, device="cuda").bfloat16()
        made["inverse"] = torch.rand(ROWS, 1, device="cuda")
        made["dx"] = torch.full_like(made["x"], torch.nan)
        made["dscale"] = torch.full((1, WIDTH), torch.nan, device="cuda")
        return made

    return graph, operands, lambda pack: torch.cat([pack["dx"].float(), pack["dscale"]])


BOTH = pytest.mark.parametrize("make", [forward, backward], ids=["one kernel", "several"])


def workspace_of(graph: Any) -> torch.Tensor:
    return torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")


def executed(graph: Any, pack: dict[str, torch.Tensor], result: Callable[..., Any]) -> Any:
    """What execute gives on the same inputs, in outputs of its own."""
    own = {name: t.clone() for name, t in pack.items()}
    graph.execute(own, workspace_of(graph))
    torch.cuda.synchronize()
    return result(own)


@BOTH
def test_populate_then_update_the_graph_and_an_instance(make: Any, new_graph: Any) -> None:
    graph, operands, result = make()
    native, first, second, third = new_graph(), operands(), operands(), operands()
    spaces = [workspace_of(graph) for _ in range(3)]
    graph.populate_cuda_graph(None, first, spaces[0], native.handle)
    torch.cuda.synchronize()
    assert torch.isnan(result(first)).any(), "nothing runs when a graph is populated"
    native.launch()
    assert torch.equal(result(first), executed(graph, first, result))
    # The instance that was launched is rebound.
    graph.update_cuda_graph(None, second, spaces[1], native.handle, native.instance.value)
    native.launch()
    assert torch.equal(result(second), executed(graph, second, result))
    # The graph alone is rebound: a new instance has it, and reads operands as they are then.
    graph.update_cuda_graph(None, third, spaces[2], native.handle)
    native.renew()
    third[next(iter(third))].mul_(-0.5)
    native.launch()
    assert torch.equal(result(third), executed(graph, third, result))


@BOTH
def test_a_populated_graph_is_a_child_of_another(make: Any, new_graph: Any) -> None:
    graph, operands, result = make()
    native, outer, pack = new_graph(), new_graph(), operands()
    space = workspace_of(graph)
    graph.populate_cuda_graph(None, pack, space, native.handle)
    node = ctypes.c_void_p()
    status = driver().cuGraphAddChildGraphNode(
        ctypes.byref(node), outer.graph, None, ctypes.c_size_t(0), native.graph
    )
    check(status, "child")
    outer.launch()
    assert torch.equal(result(pack), executed(graph, pack, result))


def test_a_refused_call_adds_and_changes_nothing(new_graph: Any) -> None:
    graph, operands, result = forward()
    native, empty, pack = new_graph(), new_graph(), operands()
    with pytest.raises(tw.BindingError, match=r"'x'.*owns"):
        graph.populate_cuda_graph(None, {**pack, "x": pack["x"][:5]}, None, native.handle)
    graph.populate_cuda_graph(None, pack, None, native.handle)
    with pytest.raises(tw.BindingError, match="has 1 nodes; expected an empty graph"):
        graph.populate_cuda_graph(None, pack, None, native.handle)
    with pytest.raises(tw.BindingError, match="overlap"):
        graph.update_cuda_graph(None, {**pack, "y": pack["x"]}, None, native.handle)
    with pytest.raises(tw.BindingError, match="no chain of 1 kernels"):
        graph.update_cuda_graph(None, pack, None, empty.handle)
    for wrong in (None, 0, "graph", True, 1.5):
        with pytest.raises(tw.BindingError, match="cuda_graph: got"):
            graph.populate_cuda_graph(None, pack, None, wrong)
    several, more, _ = backward()
    with pytest.raises(tw.BindingError, match="no chain of"):
        several.update_cuda_graph(None, more(), workspace_of(several), native.handle)
    native.launch()
    assert torch.equal(result(pack), executed(graph, pack, result))


def test_a_graph_that_torch_captured_is_rebound(new_graph: Any) -> None:
    graph, operands, result = forward()
    first, second = operands(), operands()
    graph.execute(first)
    captured = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(captured):
            graph.execute(first)
        graph.update_cuda_graph(None, second, None, captured)
        captured.instantiate()
        captured.replay()
        torch.cuda.synchronize()
        assert torch.equal(result(second), executed(graph, second, result))
    finally:
        captured.reset()
