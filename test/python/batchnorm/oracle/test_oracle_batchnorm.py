"""Batch normalization references in graphs: statistics, running updates, gradients."""

from __future__ import annotations

import pytest
import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, evaluate, normalization

pytestmark = pytest.mark.L0

_TOL = 1e-12


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_forward_equals_torch_with_its_running_update() -> None:
    x = _randn(4, 3, 2, 5, seed=1)
    scale, bias, mean, var = (_randn(1, 3, 1, 1, seed=seed) for seed in range(2, 6))
    var = var.abs()
    graph = DeclaredGraph(io_data_type="DOUBLE")
    records = [graph.tensor_like(t) for t in (x, scale, bias, mean, var)]
    outputs = graph.batchnorm(
        input=records[0],
        scale=records[1],
        bias=records[2],
        in_running_mean=records[3],
        in_running_var=records[4],
        epsilon=graph.tensor_scalar(1e-3, "DOUBLE"),
        momentum=graph.tensor_scalar(0.2, "DOUBLE"),
    )
    for tensor in outputs:
        assert tensor is not None
        tensor.set_output(True)
    graph.validate()
    buffers = (x, scale, bias, mean, var)
    found = evaluate(graph, {r.uid: b for r, b in zip(records, buffers, strict=True)})
    next_mean, next_var = mean.reshape(-1).clone(), var.reshape(-1).clone()
    y = torch.nn.functional.batch_norm(
        x, next_mean, next_var, scale.reshape(-1), bias.reshape(-1), True, 0.2, 1e-3
    )
    got = [found[tensor.uid] for tensor in outputs if tensor is not None]
    assert_close(got[0], y, tol=_TOL)
    assert_close(got[1], x.mean((0, 2, 3), keepdim=True), tol=_TOL)
    inverse = 1.0 / torch.sqrt(x.var((0, 2, 3), correction=0, keepdim=True) + 1e-3)
    assert_close(got[2], inverse, tol=_TOL)
    assert_close(got[3].reshape(-1), next_mean, tol=_TOL)
    assert_close(got[4].reshape(-1), next_var, tol=_TOL)


def test_running_variance_by_hand() -> None:
    old, statistic = torch.tensor([4.0]).double(), torch.tensor([8.0]).double()
    found = normalization.running_update(old, old, statistic, statistic, count=2, momentum=0.25)
    # Mean: 3 + 2. Variance: 3 + 0.25 * 8 * 2 / 1.
    assert [t.item() for t in found] == [5.0, 7.0]
    found = normalization.running_update(old, old, statistic, statistic, count=1, momentum=0.25)
    assert [t.item() for t in found] == [5.0, 5.0]


def test_inference_and_backward() -> None:
    x, dy = _randn(3, 2, 4, seed=1), _randn(3, 2, 4, seed=2)
    scale, bias = _randn(1, 2, 1, seed=3), _randn(1, 2, 1, seed=4)
    leaves = [t.clone().requires_grad_(True) for t in (x, scale, bias)]
    y = torch.nn.functional.batch_norm(
        leaves[0], None, None, leaves[1].reshape(-1), leaves[2].reshape(-1), True, 0.0, 1e-3
    )
    gradients = torch.autograd.grad(y, leaves, dy)
    mean = x.mean((0, 2), keepdim=True)
    inverse = 1.0 / torch.sqrt(x.var((0, 2), correction=0, keepdim=True) + 1e-3)
    graph = DeclaredGraph(io_data_type="DOUBLE")
    buffers = {"x": x, "dy": dy, "scale": scale, "bias": bias, "mean": mean, "inverse": inverse}
    records = {name: graph.tensor_like(t) for name, t in buffers.items()}
    inference = graph.batchnorm_inference(
        records["x"], records["mean"], records["inverse"], records["scale"], records["bias"]
    )
    backward = graph.batchnorm_backward(
        records["dy"], records["x"], records["scale"], records["mean"], records["inverse"]
    )
    for tensor in (inference, *backward):
        tensor.set_output(True)
    graph.validate()
    found = evaluate(graph, {records[name].uid: t for name, t in buffers.items()})
    assert_close(found[inference.uid], y.detach(), tol=_TOL)
    for tensor, expected in zip(backward, gradients, strict=True):
        assert_close(found[tensor.uid], expected, tol=_TOL)
