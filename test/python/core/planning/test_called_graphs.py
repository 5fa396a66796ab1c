"""Graphs that are declared inside ``with`` and called, as cuDNN's front end writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tilewright as tw

pytestmark = pytest.mark.L0

X = torch.arange(24.0).view(2, 3, 4)
Y = torch.full((1, 1, 4), 2.0)


def graph_of(**options: Any) -> Any:
    with tw.Graph(io_data_type="float32", intermediate_data_type="float32", **options) as graph:
        made = graph.add(a=X, b=Y, name="sum")
        graph.relu(made, name="cut").set_output(True)
    return graph


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(["sum::b", "sum::a"], ["cut::OUT_0"]), (["sum::in1", "sum::A"], ["cut::out"])],
)
def test_the_order_of_a_call_is_given_ahead(inputs: list[str], outputs: list[str]) -> None:
    handle = tw.create_handle("cpu")
    graph = graph_of(inputs=inputs, outputs=outputs, heuristics=[tw.heur_mode.A], handle=handle)
    assert graph.is_built
    assert torch.equal(graph(Y, X - 9, handle=handle), torch.relu(X - 9 + Y))


def test_a_dict_of_names_is_filled_up() -> None:
    graph = graph_of(handle=tw.create_handle("cpu"))
    pack = {"sum::a": -X, "sum::b": Y}
    assert graph(pack) is pack
    assert torch.equal(pack["cut::out"], torch.relu(Y - X))
    out = torch.empty_like(X)
    assert graph({"sum::a": X, "sum::b": Y, "cut::out": out}).keys() == pack.keys()
    assert torch.equal(out, X + Y)
    with pytest.raises(tw.GraphError, match="no tensor named 'sum::c'"):
        graph({"sum::c": X})
    with pytest.raises(tw.BindingError, match="'sum::in1'"):
        graph({"sum::a": X})


def test_a_graph_that_may_make_no_workspace_is_given_one() -> None:
    options = {"inputs": ["sum::a", "sum::b"], "outputs": ["cut::out"]}
    graph = graph_of(workspace_alloc=False, handle=tw.create_handle("cpu"), **options)
    size = graph.get_workspace_size()
    assert size > 0
    with pytest.raises(tw.BindingError, match=f"no workspace given; expected one of {size} bytes"):
        graph(X, Y)
    assert torch.equal(graph(X, Y, workspace=torch.empty(size, dtype=torch.uint8)), X + Y)


def test_a_graph_that_fails_inside_with_is_not_built() -> None:
    with pytest.raises(ZeroDivisionError), tw.Graph(inputs=["nothing"]) as graph:
        raise ZeroDivisionError
    assert not graph.is_built


def test_an_epsilon_may_be_an_array_of_the_host() -> None:
    epsilon = torch.full((1, 1, 1, 1), 0.5)
    x, scale = (
        torch.randn(2, 3, 1, 4, generator=torch.Generator().manual_seed(1)),
        torch.ones(1, 1, 1, 4),
    )
    handle = tw.create_handle("cpu")
    with tw.Graph(
        io_data_type="float32",
        inputs=["n::input", "n::scale", "n::epsilon"],
        outputs=["y"],
        handle=handle,
    ) as graph:
        y, _ = graph.rmsnorm(
            norm_forward_phase=tw.norm_forward_phase.INFERENCE,
            input=x,
            scale=scale,
            epsilon=epsilon,
            name="n",
        )
        y.set_output(True).set_name("y")
    for value in (0.5, 2.0):
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + value)
        assert torch.allclose(graph(x, scale, torch.full_like(epsilon, value)), expected, atol=1e-6)


def test_the_order_of_one_side_alone_may_be_given() -> None:
    handle = tw.create_handle("cpu")
    assert torch.equal(graph_of(outputs=["cut::out"], handle=handle)(X, Y), X + Y)
    assert torch.equal(graph_of(inputs=["sum::b", "sum::a"], handle=handle)(Y, X), X + Y)


def test_what_with_is_not_given_stays_as_set_inside() -> None:
    with tw.Graph(
        io_data_type="float32", outputs=["twice", "sum::out"], handle=tw.create_handle("cpu")
    ) as graph:
        made = graph.sub(X, Y, name="sum").set_output(True)
        graph.add(made, made, name="twice").set_output(True).set_name("twice")
        graph.set_io_tuples(["sum::b", "sum::a"], ["twice"])
    twice, once = graph(Y, X)
    assert torch.equal(once, X - Y) and torch.equal(twice, 2 * (X - Y))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["sum::a"], ["sum::out"], r"'sum::out' is none of its outputs; expected .* 'cut::out'"),
        (["sum::a"], ["sum::b"], r"'sum::b' is none of its outputs; expected .* 'cut::out'"),
        (
            ["cut::in0"],
            ["cut::out"],
            r"'cut::in0' is none of its inputs; .* 'sum::in0', 'sum::in1'",
        ),
    ],
)
def test_an_order_is_of_inputs_and_outputs(
    inputs: list[str], outputs: list[str], message: str
) -> None:
    graph = graph_of(handle=tw.create_handle("cpu"))
    with pytest.raises(tw.GraphError, match=message):
        graph.set_io_tuples(inputs, outputs)
    with pytest.raises(tw.GraphError, match=message):
        graph_of(inputs=inputs, outputs=outputs, handle=tw.create_handle("cpu"))
    assert torch.equal(graph(X, Y), X + Y)


def test_two_names_of_one_operand_have_one_buffer() -> None:
    graph = graph_of(handle=tw.create_handle("cpu"))
    with pytest.raises(tw.BindingError, match="'sum::in0' and another key mean one operand"):
        graph({"sum::a": X, "sum::b": Y, "sum::in0": -X})
    assert torch.equal(graph({"sum::a": X, "sum::b": Y, "sum::in0": X})["cut::out"], X + Y)


@pytest.mark.parametrize("name", ["", "twin"])
def test_a_dict_that_was_filled_up_can_be_given_again(name: str) -> None:
    with tw.Graph(io_data_type="float32", handle=tw.create_handle("cpu")) as graph:
        x = graph.tensor_like(X, name="x")
        # Without a name, or with one that two bear, an output's key is its uid.
        made = [graph.relu(x, name=name).set_output(True), graph.neg(x, name=name).set_output(True)]
    pack = graph({"x": X - 9})
    assert pack.keys() == {"x", *(tensor.uid for tensor in made)}
    results = [pack[tensor.uid] for tensor in made]
    pack["x"].copy_(X - 7)
    assert graph(pack) is pack
    assert all(pack[tensor.uid] is result for tensor, result in zip(made, results, strict=True))
    assert torch.equal(results[0], torch.relu(X - 7)) and torch.equal(results[1], 7 - X)


def test_names_are_sought_for_what_a_call_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(handle=tw.create_handle("cpu"))
    sought = []
    shown = graph._shown_name
    monkeypatch.setattr(graph, "_shown_name", lambda tensor: sought.append(tensor) or shown(tensor))
    pack = graph({"sum::a": X, "sum::b": Y})
    assert sought == graph.outputs()
    graph(pack)
    assert sought == graph.outputs()


def test_a_numpy_float_is_a_number() -> None:
    graph = tw.Graph(io_data_type="float32", handle=tw.create_handle("cpu"))
    x, scale = graph.tensor((2, 3, 1, 4), name="x"), graph.tensor((1, 1, 1, 4), name="scale")
    y, _ = graph.rmsnorm(tw.norm_forward_phase.INFERENCE, x, scale, epsilon=np.float64(1e-5))
    y.set_output(True)
    graph.validate()
    (epsilon,) = (tensor for tensor in graph.inputs() if tensor.is_pass_by_value)
    assert epsilon.value == 1e-5 and epsilon.dim == (1, 1, 1, 1)
    assert epsilon.data_type is tw.data_type.FLOAT
