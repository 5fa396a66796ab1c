"""References that move elements: reshape, slice, transpose, concatenate, on strided buffers."""

from __future__ import annotations

import pytest
import torch

from tilewright.graph.enums import reshape_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import evaluate

pytestmark = pytest.mark.L0


def _counted(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("mode", list(reshape_mode))
def test_reshape_keeps_row_major_order(mode: reshape_mode) -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((2, 6))
    out = graph.reshape(x, reshape_mode=mode).set_dim((3, 4)).set_output(True)
    graph.validate()
    found = evaluate(graph, {x.uid: _counted(2, 6)})[out.uid]
    assert found.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_logical_reshape_of_a_column_major_buffer() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((2, 3), (1, 2))
    out = graph.reshape(x, reshape_mode=reshape_mode.LOGICAL).set_dim((6,)).set_output(True)
    graph.validate()
    # Stored 0..5 with strides (1, 2): rows (0, 2, 4) and (1, 3, 5).
    assert evaluate(graph, {x.uid: _counted(6)})[out.uid].tolist() == [0, 2, 4, 1, 3, 5]


def test_slice_with_steps_and_negative_ends() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((4, 5))
    out = graph.slice(x, slices=[slice(1, None, 2), slice(0, -2)]).set_output(True)
    graph.validate()
    found = evaluate(graph, {x.uid: _counted(4, 5)})[out.uid]
    assert found.tolist() == [[5, 6, 7], [15, 16, 17]]


def test_transpose_then_concatenate() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
    x, y = graph.tensor((2, 3)), graph.tensor((3, 1))
    turned = graph.transpose(x, permutation=[1, 0])
    out = graph.concatenate([turned, y], axis=-1).set_output(True)
    graph.validate()
    found = evaluate(graph, {x.uid: _counted(2, 3), y.uid: 10 + _counted(3, 1)})[out.uid]
    assert found.tolist() == [[0, 3, 10], [1, 4, 11], [2, 5, 12]]


def test_integers_stay_integers() -> None:
    graph = DeclaredGraph(io_data_type="INT64")
    parts = [graph.tensor((1,)) for _ in range(11)]
    out = graph.concatenate(parts, axis=0).set_output(True)
    graph.validate()
    large = 2**62
    given = {part.uid: torch.tensor([large + index]) for index, part in enumerate(parts)}
    found = evaluate(graph, given)[out.uid]
    assert found.dtype == torch.int64
    assert found.tolist() == [large + index for index in range(11)]


def test_eight_bit_floats_are_moved_exactly() -> None:
    graph = DeclaredGraph(io_data_type="FP8_E4M3")
    x = graph.tensor((2, 2))
    out = graph.transpose(x, permutation=(1, 0)).set_output(True)
    graph.validate()
    values = torch.tensor([[0.5, -448.0], [1.125, 2.0**-9]]).to(torch.float8_e4m3fn)
    found = evaluate(graph, {x.uid: values})[out.uid]
    assert found.tolist() == [[0.5, 1.125], [-448.0, 2.0**-9]]
