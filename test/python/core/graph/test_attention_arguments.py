"""Each argument of each attention method reaches the record's port, output or attribute."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tilewright.dtypes import DataType
from tilewright.graph.enums import attention_implementation, diagonal_alignment
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation, operation_kinds

pytestmark = pytest.mark.L0

METHODS = [
    *("sdpa", "sdpa_backward", "sdpa_fp8", "sdpa_fp8_backward"),
    *("sdpa_mxfp8", "sdpa_mxfp8_backward"),
]
# Where an argument's name is not the attribute's.
RENAMED = {
    "left_bound": "diagonal_band_left_bound",
    "right_bound": "diagonal_band_right_bound",
    "sliding_window": "sliding_window_length",
}
VALUES: dict[str, Any] = {
    "diagonal_alignment": diagonal_alignment.BOTTOM_RIGHT,
    "implementation": attention_implementation.UNIFIED,
    "compute_data_type": DataType.DOUBLE,
    "name": "attention",
    "attn_scale": 0.125,
}
CALLBACKS = ("score_mod", "score_mod_bprop", "fn")


def parameters(method: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(DeclaredGraph, method)).parameters)


def options(method: str) -> list[str]:
    optional = [name for name, p in parameters(method).items() if p.default is not p.empty]
    names = [name for name in optional if name != "dropout"]
    assert len(names) > 10
    return names


def declared(method: str, **changes: Any) -> Operation:
    graph = DeclaredGraph()
    given = {
        name: graph.tensor((1, 1, 1, 1))
        for name, p in parameters(method).items()
        if name != "self" and p.default is p.empty
    }
    value = {
        name: graph.tensor((1, 1, 1, 1)) if change == "tensor" else change
        for name, change in changes.items()
    }
    getattr(graph, method)(**given, **value)
    operation = graph.operations[0]
    assert operation.kind == method
    for name, tensor in given.items():
        assert operation.inputs[name] is tensor
    for name, change in changes.items():
        if change == "tensor":
            assert value[name] in (operation.inputs.get(name), operation.outputs.get(name)), name
    return operation


@pytest.mark.parametrize(("method", "name"), [(m, name) for m in METHODS for name in options(m)])
def test_every_option_reaches_the_record(method: str, name: str) -> None:
    parameter = parameters(method)[name]
    if name in CALLBACKS:
        extra = {"score_mod": lambda graph, score: score} if name == "score_mod_bprop" else {}
        operation = declared(method, **{name: lambda graph, *scores: scores[0]}, **extra)
        attribute = "score_mod" if name == "fn" else name
        assert operation.attributes()[attribute] is not None
    elif name in VALUES:
        operation = declared(method, **{name: VALUES[name]})
        found = {
            "name": operation.name,
            "compute_data_type": operation.compute_data_type,
            **operation.attributes(),
        }
        assert found[name] == VALUES[name]
    elif "bool" in str(parameter.annotation):
        assert declared(method, **{name: True}).attributes()[name] is True
    elif "int" in str(parameter.annotation):
        attribute = RENAMED.get(name, name)
        assert declared(method, **{name: 17}).attributes()[attribute] == 17
    else:
        assert "Tensor" in str(parameter.annotation), name
        operation = declared(method, **{name: "tensor"})
        assert name in {*operation.inputs, *operation.outputs}


@pytest.mark.parametrize("method", [m for m in METHODS if "dropout" in parameters(m)])
def test_dropout_reaches_the_record(method: str) -> None:
    graph = DeclaredGraph()
    given = {
        name: graph.tensor((1, 1, 1, 1))
        for name, p in parameters(method).items()
        if name != "self" and p.default is p.empty
    }
    seed, offset = graph.tensor((1,)), graph.tensor((1,))
    getattr(graph, method)(**given, dropout=(0.5, seed, offset))
    operation = graph.operations[0]
    assert operation.attributes()["dropout_probability"] == 0.5
    assert operation.inputs["dropout_seed"] is seed
    assert operation.inputs["dropout_offset"] is offset


@pytest.mark.parametrize("method", METHODS)
def test_every_port_has_an_argument(method: str) -> None:
    record = operation_kinds()[method]
    by_dropout = {name for name in record.optional if name.startswith("dropout_")}
    ports = {*record.required, *record.optional, *record.accepts_outputs} - by_dropout
    assert ports <= set(parameters(method))
