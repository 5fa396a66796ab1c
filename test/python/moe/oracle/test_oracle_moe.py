"""Grouped products of experts: every mode, empty groups, rows of no group, the weight gradient."""

from __future__ import annotations

import pytest
import torch

from tilewright.errors import NotSupportedError
from tilewright.graph.enums import moe_grouped_matmul_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, evaluate, moe

pytestmark = pytest.mark.L0

_TOL = 1e-13


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _offsets(*entries: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32).reshape(-1, 1, 1)


def _run(mode: str, buffers: dict[str, torch.Tensor], rows: int | None = None) -> torch.Tensor:
    graph = DeclaredGraph(io_data_type="DOUBLE")
    records = {name: graph.tensor_like(t) for name, t in buffers.items()}
    out = graph.moe_grouped_matmul(**records, mode=moe_grouped_matmul_mode[mode])
    out.set_output(True)
    if rows is not None:
        out.set_dim((1, rows, buffers["weight"].shape[2]))
    graph.validate()
    return evaluate(graph, {records[name].uid: t for name, t in buffers.items()})[out.uid]


def test_none_with_an_empty_group_and_the_end_implied_or_given() -> None:
    token, weight = _randn(1, 6, 3), _randn(3, 3, 2, seed=1)
    expected = torch.cat((token[0, :2] @ weight[0], token[0, 2:] @ weight[2]))
    buffers = {"token": token, "weight": weight, "first_token_offset": _offsets(0, 2, 2)}
    assert_close(_run("NONE", buffers)[0], expected, tol=_TOL)
    buffers["first_token_offset"] = _offsets(0, 2, 2, 5)
    # Row 5 belongs to no group.
    expected[5] = 0.0
    assert_close(_run("NONE", buffers)[0], expected, tol=_TOL)
    buffers["first_token_offset"] = _offsets(1, 2, 2)
    assert (_run("NONE", buffers)[0, 0] == 0).all()


def test_gather_reads_by_index() -> None:
    token, weight = _randn(1, 4, 3), _randn(2, 3, 2, seed=1)
    index = [3, 3, 0, 1, 2]
    buffers = {
        "token": token,
        "weight": weight,
        "first_token_offset": _offsets(0, 2),
        "token_index": torch.tensor(index, dtype=torch.int32).reshape(1, 5, 1),
    }
    expected = torch.stack([token[0, t] @ weight[0 if i < 2 else 1] for i, t in enumerate(index)])
    assert_close(_run("GATHER", buffers)[0], expected, tol=_TOL)


def test_scatter_writes_by_index() -> None:
    token, weight = _randn(1, 4, 3), _randn(2, 3, 2, seed=1)
    index = [5, 0, 2, 1]
    buffers = {
        "token": token,
        "weight": weight,
        "first_token_offset": _offsets(0, 3),
        "token_index": torch.tensor(index, dtype=torch.int32).reshape(1, 4, 1),
    }
    expected = torch.zeros(6, 2, dtype=torch.float64)
    for row, target in enumerate(index):
        expected[target] = token[0, row] @ weight[0 if row < 3 else 1]
    assert_close(_run("SCATTER", buffers, rows=6)[0], expected, tol=_TOL)
    with pytest.raises(NotSupportedError, match="COMBINE"):
        _run("COMBINE", buffers)


def test_the_weight_gradient_is_the_adjoint() -> None:
    token, weight, dy = _randn(1, 6, 3), _randn(3, 3, 2, seed=1), _randn(1, 6, 2, seed=2)
    offsets = _offsets(0, 0, 4)
    graph = DeclaredGraph(io_data_type="DOUBLE")
    records = [graph.tensor_like(t) for t in (dy, token, offsets)]
    out = graph.moe_grouped_matmul_bwd(*records).set_output(True)
    graph.validate()
    buffers = (dy, token, offsets)
    found = evaluate(graph, {r.uid: b for r, b in zip(records, buffers, strict=True)})[out.uid]
    leaf = weight.clone().requires_grad_(True)
    (expected,) = torch.autograd.grad(moe.forward(token, leaf, offsets), leaf, dy)
    assert_close(found, expected, tol=_TOL)
    assert (found[0] == 0).all()


def test_bounds_stay_within_the_rows() -> None:
    assert moe.group_bounds(_offsets(0, 9, 4), 3, 6) == [(0, 6), (6, 6), (4, 6)]
