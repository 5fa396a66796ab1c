"""Normalization references: by hand, and written-out gradients against float64 autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewright.graph.enums import norm_forward_phase
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, evaluate, normalization

pytestmark = pytest.mark.L0

_TOL = 1e-12
_EPSILON = 1e-3

# kind -> (input dim, scale dim, normalized axes)
_LAYOUTS = {
    "layernorm": ((3, 4, 5), (1, 1, 5), [2]),
    "layernorm of two axes": ((3, 4, 5, 1), (1, 4, 5, 1), [1, 2]),
    "rmsnorm": ((3, 4, 5), (1, 1, 5), [2]),
    "instancenorm": ((2, 3, 4, 5), (1, 3, 1, 1), [2, 3]),
    "adalayernorm": ((3, 4, 5), (3, 1, 5), [2]),
}


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _formula(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, axes: list[int], centered: bool
) -> torch.Tensor:
    if not centered:
        return x / torch.sqrt((x**2).mean(axes, keepdim=True) + _EPSILON) * scale + bias
    variance = x.var(axes, correction=0, keepdim=True)
    return (x - x.mean(axes, keepdim=True)) / torch.sqrt(variance + _EPSILON) * scale + bias


def test_by_hand() -> None:
    x = torch.tensor([[1.0, 3.0]], dtype=torch.float64)
    scale, bias = torch.tensor([[2.0, 2.0]]), torch.tensor([[0.5, 0.5]])
    found = normalization.forward(x, scale, bias, axes=[1], epsilon=0.0)
    assert found.y.tolist() == [[-1.5, 2.5]]
    assert found.mean is not None and found.mean.tolist() == [[2.0]]
    assert found.inv_variance.tolist() == [[1.0]]
    found = normalization.forward(x, scale, None, axes=[1], epsilon=4.0, centered=False)
    # Mean of squares 5, plus 4: a third.
    assert_close(found.y, torch.tensor([[2 / 3, 2.0]], dtype=torch.float64), tol=1e-15)
    assert found.mean is None


@pytest.mark.parametrize("name", sorted(_LAYOUTS))
def test_forward_and_backward_in_graphs(name: str) -> None:
    dim, scale_dim, axes = _LAYOUTS[name]
    kind = name.split(" ")[0]
    centered = kind != "rmsnorm"
    x, scale, bias, dy = (
        _randn(*shape, seed=seed)
        for seed, shape in enumerate((dim, scale_dim, scale_dim, dim), start=1)
    )
    leaves = [t.clone().requires_grad_(True) for t in (x, scale, bias)]
    y = _formula(*leaves, axes, centered)
    gradients = torch.autograd.grad(y, leaves, dy)

    graph = DeclaredGraph(io_data_type="DOUBLE")
    tensors = [graph.tensor_like(t) for t in (x, scale, bias)]
    epsilon = graph.tensor_scalar(_EPSILON, "DOUBLE")
    forward = getattr(graph, kind)(
        norm_forward_phase=norm_forward_phase.TRAINING,
        input=tensors[0],
        scale=tensors[1],
        bias=tensors[2],
        epsilon=epsilon,
    )
    for tensor in forward:
        tensor.set_output(True)
    graph.validate()
    pack = {t.uid: buffer for t, buffer in zip(tensors, (x, scale, bias), strict=True)}
    found = evaluate(graph, pack)
    assert_close(found[forward[0].uid], y.detach(), tol=_TOL)
    if centered:
        assert_close(found[forward[1].uid], x.mean(axes, keepdim=True), tol=_TOL)

    backward_graph = DeclaredGraph(io_data_type="DOUBLE")
    statistics = {
        ("mean", "inv_variance")[index + 2 - len(forward[1:])]: found[tensor.uid]
        for index, tensor in enumerate(forward[1:])
    }
    operands = {"grad": dy, "input": x, "scale": scale, **statistics}
    records = {port: backward_graph.tensor_like(t) for port, t in operands.items()}
    extra = {} if centered else {"has_dbias": True}
    results = getattr(backward_graph, f"{kind}_backward")(**records, **extra)
    for tensor in results:
        tensor.set_output(True)
    backward_graph.validate()
    given = {records[port].uid: tensor for port, tensor in operands.items()}
    found = evaluate(backward_graph, given)
    for tensor, expected in zip(results, gradients, strict=True):
        assert_close(found[tensor.uid], expected, tol=_TOL, name=tensor.name)


def test_rms_gradient_of_broadcast_gradients() -> None:
    """Gradients as `.sum()` gives them (stride 0) and as a step of 2 leaves them."""
    x, scale = _randn(2, 6, 8, seed=1), _randn(1, 1, 8, seed=2)
    inverse = 1.0 / torch.sqrt((x**2).mean(-1, keepdim=True) + _EPSILON)
    ones = torch.ones(1, dtype=torch.float64).expand(2, 6, 8)
    stepped = _randn(2, 6, 16, seed=3)[..., ::2]
    for dy in (ones, stepped):
        found = normalization.backward(dy, x, scale, None, inverse, axes=[2])
        leaves = [t.clone().requires_grad_(True) for t in (x, scale)]
        y = _formula(leaves[0], leaves[1], torch.zeros(()), [2], centered=False)
        expected = torch.autograd.grad(y, leaves, dy)
        assert_close(found.dx, expected[0], tol=_TOL)
        assert_close(found.dscale, expected[1], tol=_TOL)


def test_a_constant_row_divides_by_root_epsilon() -> None:
    x = torch.full((1, 4), 7.0, dtype=torch.float64)
    found = normalization.forward(x, None, None, axes=[1], epsilon=0.25)
    assert found.y.tolist() == [[0.0] * 4]
    assert found.inv_variance.item() == 2.0


def test_low_precision_inputs_are_read_exactly() -> None:
    x = _randn(2, 16).to(torch.bfloat16)
    arguments: dict[str, Any] = {"axes": [1], "epsilon": 1e-5}
    found = normalization.forward(x, None, None, **arguments)
    assert_close(found.y, normalization.forward(x.double(), None, None, **arguments).y, tol=0.0)
    assert math.isclose(float((found.y**2).mean()), 1.0, rel_tol=1e-4)
