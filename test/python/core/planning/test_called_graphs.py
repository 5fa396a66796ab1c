"""Graphs that are declared inside ``with`` and called, as cuDNN's front end writes them."""

from __future__ import annotations

from typing import Any

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
