"""Views that PyTorch negates when it reads them: kernels read storage, which has other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
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


# What a call has that is no operand is refused by name on the way of operators, too.
Q, ROWS = torch.randn(2, 4, 5, 8), torch.randn(5, 4, 8)
REFUSED: dict[str, Callable[..., Any]] = {
    "sdpa": lambda x, **wrong: ops.sdpa(x(Q), Q, Q, **wrong),
    "sdpa_varlen": lambda x, **wrong: ops.sdpa_varlen(
        x(ROWS), ROWS, ROWS, SUMS, SUMS, 3, 3, **wrong
    ),
    "sdpa_decode": lambda x, **wrong: ops.sdpa_decode(x(Q), Q, Q, torch.tensor([5, 2]), **wrong),
    "merge_states": lambda x, **wrong: ops.merge_states(x(Q), Q[..., 0], Q, Q[..., 0], **wrong),
    "rms_norm": lambda x, **wrong: ops.rms_norm(x(Q), torch.ones(8), **wrong),
    "layer_norm": lambda x, **wrong: ops.layer_norm(x(Q), **wrong),
    "group_norm": lambda x, **wrong: ops.group_norm(x(Q), 2, **wrong),
    "rope": lambda x, **wrong: ops.rope(x(Q), torch.ones(5, 4), torch.ones(5, 4), **wrong),
    "linear": lambda x, **wrong: ops.linear(x(Q), torch.ones(3, 8), **wrong),
    "conv1d_causal": lambda x, **wrong: ops.conv1d_causal(x(Q[0]), torch.ones(8, 3), **wrong),
}


@pytest.mark.parametrize("view", [torch.clone, lambda x: torch._neg_view(-x)], ids=["own", "view"])
@pytest.mark.parametrize("name", REFUSED)
def test_no_name_of_an_engine_is_refused(name: str, view: Callable[..., Any]) -> None:
    for wrong in (0, ["aten"]):
        with pytest.raises(tw.BindingError, match=r"engine: got .*; expected an engine's name"):
            REFUSED[name](view, engine=wrong)


@pytest.mark.parametrize("view", [torch.clone, lambda x: torch._neg_view(-x)], ids=["own", "view"])
def test_a_length_that_no_integer_of_64_bits_holds_is_refused(view: Callable[..., Any]) -> None:
    for lengths in ((2**63, 3), (3, 2**70), (-1, 3)):
        with pytest.raises(tw.BindingError, match=r"max_seqlen_.*: got .*; expected an int from 0"):
            ops.sdpa_varlen(view(ROWS), ROWS, ROWS, SUMS, SUMS, *lengths)
