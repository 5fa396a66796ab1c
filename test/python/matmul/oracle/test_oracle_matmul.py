"""The matrix product's reference."""

from __future__ import annotations

import pytest
import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, evaluate, matmul

pytestmark = pytest.mark.L0


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_by_hand_in_a_graph_with_a_transposed_operand() -> None:
    graph = DeclaredGraph(io_data_type="HALF")
    a, b = graph.tensor((1, 2, 2)), graph.tensor((1, 2, 2), (4, 1, 2))
    c = graph.matmul(a, b).set_output(True)
    graph.validate()
    stored = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16)
    found = evaluate(graph, {a.uid: stored.reshape(1, 2, 2), b.uid: stored})[c.uid]
    # B is read as [[1, 3], [2, 4]].
    assert found.tolist() == [[[5.0, 11.0], [11.0, 25.0]]]


@pytest.mark.parametrize("batches", [((2,), (2,)), ((2, 3), (1, 3)), ((1,), (4,)), ((), ())])
def test_batch_axes_broadcast(batches: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = _randn(*batches[0], 3, 5), _randn(*batches[1], 5, 4, seed=1)
    found = matmul.forward(a, b)
    expected = (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)
    assert_close(found, expected, tol=1e-14)


def test_an_empty_inner_axis_gives_zero() -> None:
    assert matmul.forward(torch.zeros(2, 0), torch.zeros(0, 3)).tolist() == [[0.0] * 3] * 2


def test_lengths_bound_rows_columns_and_the_sum() -> None:
    a, b = _randn(2, 3, 4), _randn(2, 4, 5, seed=1)
    lengths = {"m_lengths": [2, 0], "n_lengths": [5, 1], "k_lengths": [3, 4]}
    dirty_a, dirty_b = a.clone(), b.clone()
    dirty_a[0, :, 3], dirty_b[0, 3] = float("nan"), float("inf")
    found = matmul.forward(
        dirty_a,
        dirty_b,
        padding=-7.0,
        **{name: torch.tensor(value) for name, value in lengths.items()},
    )
    expected = torch.full((2, 3, 5), -7.0, dtype=torch.float64)
    expected[0, :2] = a[0, :2, :3] @ b[0, :3]
    assert_close(found, expected, tol=1e-14)


def test_a_gradient_by_differences() -> None:
    """The float64 product is accurate enough to difference."""
    a, b = _randn(3, 4), _randn(4, 2, seed=1)
    step = torch.zeros_like(a)
    step[1, 2] = 1e-6
    slope = (matmul.forward(a + step, b) - matmul.forward(a - step, b)) / 2e-6
    assert_close(slope[1], b[2], tol=1e-8)
    assert_close(slope[[0, 2]], torch.zeros(2, 2, dtype=torch.float64), tol=0.0)
