"""Rotary embedding references: by hand, table shapes, large angles, and the adjoint."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, evaluate, rope

pytestmark = pytest.mark.L0


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).reshape(1, 1, 1, 5)
    angles = torch.tensor([0.0, math.pi / 2]).reshape(1, 1, 1, 2)
    found = rope.forward(x, angles, output_scale=2.0, rope_dim=4)
    # Pair (1, 3) stays; pair (2, 4) turns to (-4, 2); the fifth passes; all twice.
    expected = torch.tensor([2.0, -8.0, 6.0, 4.0, 10.0], dtype=torch.float64)
    assert_close(found.reshape(-1), expected, tol=1e-6)


def test_rotates_complex_numbers() -> None:
    x, angles = _randn(2, 3, 4, 6), _randn(2, 1, 4, 3, seed=1).to(torch.float32)
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * angles.double())
    expected = torch.cat((turned.real, turned.imag), -1)
    assert_close(rope.forward(x, angles), expected, tol=1e-14)
    both = torch.cat((angles, angles), -1)
    assert_close(rope.forward(x, both), expected, tol=1e-14)
    assert_close(rope.forward(x, angles[:1]), rope.forward(x, angles[:1].expand(2, 1, 4, 3)), tol=0)


def test_angles_are_rounded_to_float32_and_use_the_full_range() -> None:
    """A table of wider type is rounded first; a large angle is not reduced in float32."""
    x = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    angle = 123456.789
    found = rope.forward(x, torch.tensor([[[[angle]]]], dtype=torch.float64))
    stored = torch.tensor(angle, dtype=torch.float32).item()
    assert stored != angle
    assert found.reshape(-1).tolist() == [math.cos(stored), math.sin(stored)]


def test_non_finite_values_and_signed_zero() -> None:
    x = torch.tensor([math.inf, 1.0, -0.0, math.nan]).reshape(1, 1, 2, 2)
    found = rope.forward(x, torch.zeros(1, 1, 2, 1))
    # inf * cos 0 - 1 * sin 0 = inf; 1 * cos 0 + inf * sin 0 is NaN.
    assert found[0, 0, 0, 0] == math.inf and torch.isnan(found[0, 0, 0, 1])
    assert torch.isnan(found[0, 0, 1]).all()
    zero = rope.forward(torch.tensor([-0.0, 0.0]).reshape(1, 1, 1, 2), torch.zeros(1, 1, 1, 1))
    assert torch.signbit(zero).reshape(-1).tolist() == [True, False]


@pytest.mark.parametrize(("rope_dim", "width"), [(0, 3), (4, 2), (4, 4), (0, 6)])
def test_the_backward_is_the_adjoint_in_graphs(rope_dim: int, width: int) -> None:
    x, dy, angles = _randn(2, 3, 4, 6), _randn(2, 3, 4, 6, seed=1), _randn(1, 1, 4, width, seed=2)
    angles = angles.to(torch.float32)
    graph = DeclaredGraph(io_data_type="DOUBLE")
    records = [graph.tensor_like(t) for t in (x, dy, angles)]
    y = graph.rope(records[0], records[2], output_scale=0.7, rope_dim=rope_dim)
    dx = graph.rope_backward(records[1], records[2], output_scale=0.7, rope_dim=rope_dim)
    y.set_output(True)
    dx.set_output(True)
    graph.validate()
    buffers = (x, dy, angles)
    found = evaluate(graph, {r.uid: b for r, b in zip(records, buffers, strict=True)})
    leaf = x.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(
        rope.forward(leaf, angles, output_scale=0.7, rope_dim=rope_dim), leaf, dy
    )
    assert_close(found[dx.uid], expected, tol=1e-14)
    assert_close((found[y.uid] * dy).sum(), (found[dx.uid] * x).sum(), tol=1e-13)


def test_too_few_angles_are_refused() -> None:
    with pytest.raises(ValueError, match="freqs"):
        rope.forward(_randn(1, 1, 2, 8), torch.zeros(1, 1, 2, 3))
