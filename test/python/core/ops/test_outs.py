"""Results that a call writes into the caller's tensor."""

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
CALLS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "sdpa": (
        lambda q, k, gate, out: ops.sdpa(q, k, k, gate=gate, out=out),
        (2, 4, 5, 8),
        ((2, 4, 5, 8), (2, 2, 7, 8), (2, 4, 5, 8)),
    ),
    "sdpa_varlen": (
        lambda q, k, out: ops.sdpa_varlen(q, k, k, SUMS, SUMS, 3, 3, out=out),
        (5, 4, 8),
        ((5, 4, 8), (5, 2, 8)),
    ),
    "sdpa_paged": (
        lambda q, pages, out: ops.sdpa_paged(q, pages, pages, PAGES, LENGTHS, out=out),
        (2, 4, 5, 8),
        ((2, 4, 5, 8), (6, 4, 2, 8)),
    ),
    "sdpa_decode": (
        lambda q, k, out: ops.sdpa_decode(q, k, k, LENGTHS, out=out),
        (2, 4, 1, 8),
        ((2, 4, 1, 8), (2, 2, 9, 8)),
    ),
    "rms_norm": (lambda x, out: ops.rms_norm(x, out=out), (6, 16), ((6, 16),)),
    "layer_norm": (lambda x, out: ops.layer_norm(x, out=out), (6, 16), ((6, 16),)),
    "group_norm": (lambda x, out: ops.group_norm(x, 2, out=out), (6, 16), ((6, 16),)),
    "linear": (lambda x, w, out: ops.linear(x, w, out=out), (6, 8), ((6, 16), (8, 16))),
}


@pytest.mark.parametrize("name", CALLS)
def test_autograd_finds_what_it_saved_overwritten(
    name: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A plan of compiled kernels writes through an address: PyTorch sees nothing of it.
    monkeypatch.setattr(plan_cache, "_run_built", lambda *_: None)
    call, shape, shapes = CALLS[name]
    operands = [torch.randn(each, generator=generator) for each in shapes]
    out = torch.zeros(shape)
    factor = torch.ones(shape, requires_grad=True)
    product = factor * out
    call(*operands, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_a_type_that_no_result_has_is_named(name: str, generator: torch.Generator) -> None:
    call, shape, shapes = CALLS[name]
    operands = [torch.randn(each, generator=generator) for each in shapes]
    for dtype in (torch.int8, torch.bool, torch.complex64):
        out = torch.ones(shape, dtype=dtype)
        with pytest.raises(tw.BindingError, match=f"out: data type {dtype}; expected one of"):
            call(*operands, out)
        assert torch.equal(out, torch.ones(shape, dtype=dtype))
