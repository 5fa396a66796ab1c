"""Populating and updating CUDA graphs, on a driver that keeps its graphs in Python."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.compiled.planned import KernelPlan
from tilewright.launch import cuda_graphs
from tilewright.launch.prepared import Constant, Operand

pytestmark = pytest.mark.L0

KERNEL, COPY = 0, 1


@dataclass
class Node:
    function: int
    grid: tuple[int, ...]
    parameters: bytes
    after: int | None
    kind: int = KERNEL


@dataclass
class Library:
    """The driver's functions on graphs; ``statuses`` are what the next changes return."""

    graphs: dict[int, dict[int, Node]] = field(default_factory=lambda: {7: {}, 8: {}})
    instances: dict[int, dict[int, Node]] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    following: int = 100

    def cuGraphGetNodes(self, graph: Any, nodes: None, count: Any) -> int:
        count._obj.value = len(self.graphs[graph.value])
        return 0

    def cuGraphAddKernelNode_v2(
        self, node: Any, graph: Any, before: Any, count: Any, params: Any
    ) -> int:
        status = self.statuses.pop(0) if self.statuses else 0
        if status == 0:
            self.following += 1
            after = before[0] if count.value else None
            self.graphs[graph.value][self.following] = self._node(params, after)
            node._obj.value = self.following
        return status

    def cuGraphDestroyNode(self, node: Any) -> int:
        for nodes in self.graphs.values():
            nodes.pop(node.value, None)
        return 0

    def cuGraphGetRootNodes(self, graph: Any, found: Any, count: Any) -> int:
        return self._list(self.graphs[graph.value], None, found, count)

    def cuGraphNodeGetDependentNodes(self, node: Any, found: Any, count: Any) -> int:
        return self._list(self._of(node), node.value, found, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self._of(node)[node.value].kind
        return 0

    def cuGraphKernelNodeSetParams_v2(self, node: Any, params: Any) -> int:
        nodes = self._of(node)
        nodes[node.value] = self._node(params, nodes[node.value].after)
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, instance: Any, node: Any, params: Any) -> int:
        nodes = self.instances[instance.value]
        nodes[node.value] = self._node(params, nodes[node.value].after)
        return 0

    def _of(self, node: Any) -> dict[int, Node]:
        return next(nodes for nodes in self.graphs.values() if node.value in nodes)

    @staticmethod
    def _list(nodes: dict[int, Node], after: int | None, found: Any, count: Any) -> int:
        names = [name for name, node in nodes.items() if node.after == after]
        count._obj.value = len(names)
        for number, name in enumerate(names):
            found[number] = name
        return 0

    @staticmethod
    def _node(params: Any, after: int | None) -> Node:
        given = params._obj
        where = (ctypes.c_void_p * 5).from_address(given.extra)
        size = ctypes.c_size_t.from_address(where[3]).value
        parameters = ctypes.string_at(where[1], size)
        return Node(given.function, tuple(given.grid), parameters, after)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, fake_driver: Any) -> Library:
    made = Library()
    monkeypatch.setattr(cuda_graphs, "driver", lambda: made)

    @contextlib.contextmanager
    def device_context(device_index: int) -> Iterator[None]:
        fake_driver.contexts_made.append(device_index)
        yield

    monkeypatch.setattr(cuda_graphs, "device_context", device_context)

    def check(status: int, what: str) -> None:
        if status:
            raise tw.LaunchError(f"{what}: CUDA error {status}")

    monkeypatch.setattr(cuda_graphs, "check", check)
    return made


@pytest.fixture
def graph(build: Any, make_kernel: Any, library: Library) -> Any:
    """A graph y = 2 x whose plan is three kernels."""
    made = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    x = made.tensor((4, 8), name="x")
    made.add(x, x).set_output(True).set_name("y")
    operands = [("*fp32", Operand(0)), ("*fp32", Operand(1))]
    kernels = tuple(make_kernel(n, [*operands, ("i64", Constant(n))], (n, 1, 1)) for n in (1, 2, 3))
    made._active = build(made, KernelPlan(kernels))
    return made


def pack() -> dict[str, torch.Tensor]:
    return {"x": torch.rand(4, 8), "y": torch.zeros(4, 8)}


def parameters(given: dict[str, torch.Tensor], number: int) -> bytes:
    return struct.pack("<QQqQQ", given["x"].data_ptr(), given["y"].data_ptr(), number, 0, 0)


def test_a_chain_of_kernels_in_order(graph: Any, library: Library, fake_driver: Any) -> None:
    given = pack()
    graph.populate_cuda_graph(None, given, None, 7)
    names = list(library.graphs[7])
    nodes = list(library.graphs[7].values())
    assert [node.function for node in nodes] == [0x1000, 0x2000, 0x3000]
    assert [node.grid for node in nodes] == [(1, 1, 1), (2, 1, 1), (3, 1, 1)]
    assert [node.after for node in nodes] == [None, *names[:2]]
    assert [node.parameters for node in nodes] == [parameters(given, n) for n in (1, 2, 3)]
    assert fake_driver.launches == [] and fake_driver.contexts_made == [0]


def test_an_update_reaches_the_graph_and_the_instance(graph: Any, library: Library) -> None:
    first, second, third = pack(), pack(), pack()
    graph.populate_cuda_graph(None, first, None, 7)
    library.instances[9] = dict(library.graphs[7])
    graph.update_cuda_graph(None, second, None, 7)
    found = [node.parameters for node in library.graphs[7].values()]
    assert found == [parameters(second, n) for n in (1, 2, 3)]
    kept = [node.parameters for node in library.instances[9].values()]
    assert kept == [parameters(first, n) for n in (1, 2, 3)]
    graph.update_cuda_graph(None, third, None, 7, cuda_graph_exec=9)
    for nodes in (library.graphs[7], library.instances[9]):
        assert [node.parameters for node in nodes.values()] == [
            parameters(third, n) for n in (1, 2, 3)
        ]


def test_what_is_refused_leaves_graphs_as_they_were(graph: Any, library: Library) -> None:
    given = pack()
    short = {**given, "x": given["x"][:3]}
    for call in (graph.populate_cuda_graph, graph.update_cuda_graph):
        with pytest.raises(tw.BindingError, match="owns 96 bytes"):
            call(None, short, None, 7)
        for wrong in (None, 0, -1, True, "graph", 1.5):
            with pytest.raises(tw.BindingError, match="cuda_graph: got"):
                call(None, given, None, wrong)
    assert library.graphs[7] == {}
    with pytest.raises(tw.BindingError, match="no chain of 3 kernels"):
        graph.update_cuda_graph(None, given, None, 7)
    library.statuses = [0, 0, 700]
    with pytest.raises(tw.LaunchError, match="adding its node: CUDA error 700"):
        graph.populate_cuda_graph(None, given, None, 7)
    assert library.graphs[7] == {}, "the nodes that were added are gone"
    graph.populate_cuda_graph(None, given, None, 7)
    before = dict(library.graphs[7])
    with pytest.raises(tw.BindingError, match="has 3 nodes; expected an empty graph"):
        graph.populate_cuda_graph(None, pack(), None, 7)
    assert library.graphs[7] == before


@pytest.mark.parametrize("spoil", ["a copy", "a fork", "two chains", "one more", "one less"])
def test_other_graphs_are_not_updated(graph: Any, library: Library, spoil: str) -> None:
    graph.populate_cuda_graph(None, pack(), None, 7)
    nodes = library.graphs[7]
    names = list(nodes)
    if spoil == "a copy":
        nodes[names[1]].kind = COPY
    elif spoil == "a fork":
        nodes[names[2]].after = names[0]
    elif spoil == "two chains":
        nodes[names[1]].after = None
    elif spoil == "one more":
        nodes[999] = Node(0, (1, 1, 1), b"", names[2])
    else:
        del nodes[names[2]]
    before = dict(nodes)
    with pytest.raises(tw.BindingError, match="no chain of 3 kernels"):
        graph.update_cuda_graph(None, pack(), None, 7)
    assert nodes == before


def test_an_object_that_tells_its_graph(graph: Any, library: Library) -> None:
    class Recorded:
        def raw_cuda_graph(self) -> int:
            return 8

    graph.populate_cuda_graph(None, pack(), None, Recorded())
    assert len(library.graphs[8]) == 3 and library.graphs[7] == {}
