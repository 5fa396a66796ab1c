"""Views that PyTorch negates when it reads them: kernels read storage, which has other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import ops
from tilewright.ops import plan_cache

pytestmark = pytest.mark.L0

LENGTHS, SUMS, PAGES = torch.tensor([7, 3]), torch.tensor([0, 2, 5]), torch.tensor([[0, 1], [2, 3]])
CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "sdpa": (
        lambda q, k, gate: ops.sdpa(q, k, k, causal=True, gate=gate),
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 4, 5, 8)),
    ),
    "sdpa_bias_sink": (
        lambda q, bias, sink: ops.sdpa(q, q, q, bias=bias, sink=sink),
        ((2, 4, 5, 8), (5, 5), (4,)),
    ),
    "sdpa_varlen": (
        lambda q, k: ops.sdpa_varlen(q, k, k, SUMS, SUMS, 3, 3),
        ((5, 4, 8), (5, 2, 8)),
    ),
    "sdpa_paged": (
        lambda q, pages: ops.sdpa_paged(q, pages, pages, PAGES, LENGTHS),
        ((2, 4, 5, 8), (6, 4, 2, 8)),
    ),
    "sdpa_decode": (
        lambda q, k: ops.sdpa_decode(q, k, k, LENGTHS),
        ((2, 4, 1, 8), (2, 2, 9, 8)),
    ),
    "merge_states": (
        lambda o, stats: ops.merge_states(o, stats, o + 1, stats * 2)[0],
        ((2, 4, 5, 8), (2, 4, 5)),
    ),
    "rms_norm": (ops.rms_norm, ((6, 16), (16,), (16,))),
    "layer_norm": (lambda x, r: ops.layer_norm(x, residual=r)[0], ((6, 16), (6, 16))),
    "group_norm": (lambda x: ops.group_norm(x, 2), ((2, 4, 5, 8),)),
    "rope": (ops.rope, ((2, 4, 5, 8), (5, 4), (5, 4))),
    "linear": (ops.linear, ((6, 16), (8, 16), (8,))),
    "conv1d_causal": (ops.conv1d_causal, ((2, 5, 8), (8, 3))),
}


@pytest.fixture(autouse=True)
def _no_plan_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = plan_cache._run_built

    def checked(operation: str, built: Any, pack: Any, *others: Any) -> None:
        assert not [name for name, tensor in pack.items() if tensor.is_neg()], operation
        run(operation, built, pack, *others)

    monkeypatch.setattr(plan_cache, "_run_built", checked)


def negated(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    parts = torch.randn(2, *shape, generator=generator)
    return torch.complex(parts[0], parts[1]).conj().imag


@pytest.mark.parametrize("name", CALLS)
def test_a_negated_operand_has_its_own_numbers(name: str, generator: torch.Generator) -> None:
    call, shapes = CALLS[name]
    views = [negated(shape, generator) for shape in shapes]
    assert all(view.is_neg() for view in views)
    copies = [view.resolve_neg() for view in views]
    assert torch.allclose(call(*views), call(*copies), atol=1e-5)
    for i in range(len(views)):
        mixed = [views[j] if j == i else copies[j] for j in range(len(views))]
        assert torch.allclose(call(*mixed), call(*copies), atol=1e-5), i


@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("sdpa_paged", "merge_states")])
def test_a_negated_gradient_has_its_own_numbers(name: str, generator: torch.Generator) -> None:
    call, shapes = CALLS[name]
    operands = [torch.randn(shape, generator=generator) for shape in shapes]
    operands[0].requires_grad_()
    out = call(*operands)
    gradient = negated(tuple(out.shape), generator)
    made = [
        torch.autograd.grad(call(*operands), operands[0], each)[0]
        for each in (gradient, gradient.resolve_neg())
    ]
    assert torch.allclose(*made, atol=1e-5)


def test_a_negated_out_is_written_so_that_it_reads_right(generator: torch.Generator) -> None:
    q = torch.randn(2, 4, 5, 8, generator=generator)
    out = torch.complex(torch.zeros_like(q), torch.zeros_like(q)).conj().imag
    assert ops.sdpa(q, q, q, out=out) is out
    assert torch.allclose(out, ops.sdpa(q, q, q), atol=1e-6)
