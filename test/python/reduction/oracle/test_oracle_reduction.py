"""Reduction and statistics references by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.graph.enums import reduction_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import evaluate, reduction

pytestmark = pytest.mark.L0

_ROWS = [[3.0, -4.0, 0.0], [2.0, 0.5, -1.0]]
_BY_MODE = {
    "ADD": [-1.0, 1.5],
    "MUL": [-0.0, -1.0],
    "MIN": [-4.0, -1.0],
    "MAX": [3.0, 2.0],
    "AMAX": [4.0, 2.0],
    "AVG": [-1.0 / 3.0, 0.5],
    "NORM1": [7.0, 3.5],
    "NORM2": [5.0, math.sqrt(5.25)],
    "MUL_NO_ZEROS": [-12.0, -1.0],
}


@pytest.mark.parametrize("mode", sorted(_BY_MODE))
def test_one_axis_in_a_graph(mode: str) -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((2, 3))
    out = graph.reduction(x, mode=reduction_mode[mode]).set_dim((2, 1)).set_output(True)
    graph.validate()
    found = evaluate(graph, {x.uid: torch.tensor(_ROWS)})[out.uid]
    assert found.shape == (2, 1)
    assert found.reshape(-1).tolist() == pytest.approx(_BY_MODE[mode], abs=1e-15)


def test_every_mode_is_covered() -> None:
    assert set(_BY_MODE) == set(reduction_mode.__members__) - {"NOT_SET"}
    with pytest.raises(ValueError, match="mode"):
        reduction.reduce(torch.ones(2), "NOT_SET", [0])


def test_several_axes() -> None:
    x = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    assert reduction.reduce(x, "ADD", [0, 2]).tolist() == [[[60.0], [92.0], [124.0]]]
    assert reduction.reduce(x, "MAX", [0, 1, 2]).item() == 23.0
    assert reduction.reduce(-x, "AMAX", [1]).reshape(-1).tolist() == [8, 9, 10, 11, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("ADD", 0.0),
        ("MUL", 1.0),
        ("MUL_NO_ZEROS", 1.0),
        ("MAX", -math.inf),
        ("MIN", math.inf),
        ("AMAX", 0.0),
        ("NORM1", 0.0),
        ("NORM2", 0.0),
    ],
)
def test_over_nothing(mode: str, value: float) -> None:
    assert reduction.reduce(torch.zeros(2, 0), mode, [1]).tolist() == [[value], [value]]


def test_the_average_of_nothing_is_nan() -> None:
    assert torch.isnan(reduction.reduce(torch.zeros(2, 0), "AVG", [1])).all()


@pytest.mark.parametrize("mode", ["ADD", "MAX", "MIN", "AMAX", "NORM2", "MUL"])
def test_nan_propagates(mode: str) -> None:
    assert torch.isnan(reduction.reduce(torch.tensor([[1.0, math.nan]]), mode, [1])).all()


def test_generated_statistics() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((2, 2, 1, 2))
    total, squares = (t.set_output(True) for t in graph.genstats(x))
    graph.validate()
    values = torch.tensor([[[[1.0, 2.0]], [[3.0, 4.0]]], [[[5.0, 6.0]], [[-7.0, 8.0]]]])
    found = evaluate(graph, {x.uid: values})
    assert found[total.uid].reshape(-1).tolist() == [14.0, 8.0]
    assert found[squares.uid].reshape(-1).tolist() == [66.0, 138.0]
    assert found[total.uid].shape == (1, 2, 1, 1)
