"""A graph can be copied and pickled, in whatever state it is: the declaration goes along."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw

pytestmark = pytest.mark.L0

COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda given: pickle.loads(pickle.dumps(given)),
    "deepcopy": copy.deepcopy,
}
STEPS: dict[str, Callable[[tw.Graph], None]] = {
    "declared": lambda graph: None,
    "validated": lambda graph: graph.validate(),
    "planned": lambda graph: graph.create_execution_plans(),
    "built": lambda graph: graph.build(),
}


def declared(x: torch.Tensor) -> tuple[tw.Graph, dict[str, Any]]:
    graph = tw.Graph("scores", io_data_type="float32", handle=tw.create_handle("cpu"))
    given = graph.tensor_like(x, name="x")
    weight = graph.tensor((1, 5, 3), name="weight")
    product = graph.matmul(given, weight)
    result = graph.relu(product, name="result").set_output(True)
    return graph, {"x": given, "weight": weight, "result": result}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("step", STEPS)
def test_a_copy_declares_and_computes_the_same(step: str, how: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 4, 5, generator=generator)
    weight = torch.randn(1, 5, 3, generator=generator)
    graph, names = declared(x)
    STEPS[step](graph)
    # Tensors that are copied along are those of the copy.
    other, others = COPIES[how]((graph, names))
    assert other is not graph and others["x"] is not names["x"]
    results = []
    for each, tensors in ((graph, names), (other, others)):
        result = torch.empty(1, 4, 3)
        pack = {tensors["x"]: x, tensors["weight"]: weight, tensors["result"]: result}
        each.build()
        each.execute(pack, torch.empty(each.get_workspace_size(), dtype=torch.uint8))
        results.append(result)
    assert torch.equal(*results)
    assert other.key() == graph.key() and other.name == "scores"
    assert other.selected_engine == graph.selected_engine


def test_a_copy_of_a_declaration_can_be_carried_on() -> None:
    graph, _ = declared(torch.ones(1, 4, 5))
    other = copy.deepcopy(graph)
    other.exp(other.tensors[-1]).set_output(True)
    assert len(graph.operations) == 2 and len(other.operations) == 3
    other.validate()
    graph.validate()


def test_arrays_streams_and_plans_are_left_behind() -> None:
    x = torch.ones(1, 1000, 1000)
    graph = tw.Graph(handle=tw.create_handle("cpu"))
    tw.set_stream(graph.handle, 7)
    graph.relu(x).set_output(True)
    assert len(pickle.dumps(graph)) < 10_000
    other = pickle.loads(pickle.dumps(graph))
    assert tw.get_stream(other.handle) is None and other.handle.device == torch.device("cpu")
    assert tw.get_stream(graph.handle) == 7


def test_overrides_and_orders_of_a_call_go_along() -> None:
    graph = tw.Graph(is_override_shape_enabled=True, handle=tw.create_handle("cpu"))
    x = graph.tensor((2, 3), data_type="float32", name="x")
    result = graph.relu(x, name="result")
    result.set_output(True).set_data_type("float32")
    graph.set_io_tuples(("x",), ("result::out",))
    graph.build()
    other = pickle.loads(pickle.dumps(graph))
    given = torch.tensor([[-1.0, 2.0, -3.0]])
    assert torch.equal(other(given.repeat(2, 1)), given.repeat(2, 1).relu())
    wide, made = torch.full((4, 3), -1.0), torch.empty(4, 3)
    other.execute(
        {x.uid: wide, result.uid: made},
        None,
        override_uids=[x.uid, result.uid],
        override_shapes=[(4, 3), (4, 3)],
        override_strides=[(3, 1), (3, 1)],
    )
    assert torch.equal(made, wide.relu())


def test_another_process_runs_a_pickled_graph(
    run_python: Callable[..., str], tmp_path: Path
) -> None:
    graph, names = declared(torch.ones(1, 4, 5))
    graph.build()
    path = tmp_path / "graph.pickle"
    path.write_bytes(pickle.dumps((graph, names)))
    code = """
import pickle, sys, torch
graph, names = pickle.loads(open(sys.argv[1], "rb").read())
result = torch.empty(1, 4, 3)
graph.build()
pack = {names["x"]: torch.ones(1, 4, 5), names["weight"]: torch.ones(1, 5, 3)}
pack[names["result"]] = result
graph.execute(pack, torch.empty(graph.get_workspace_size(), dtype=torch.uint8))
print(result.unique().tolist())
"""
    assert run_python(code, str(path)).strip() == "[5.0]"
