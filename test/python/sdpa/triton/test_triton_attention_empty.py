"""Attention of no sequence, no query or no key on Triton's kernels; interpreted without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tilewright import ops
from tilewright.errors import NotSupportedError

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted_functions")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.mark.parametrize("operand", ["k", "v"])
def test_rows_beyond_a_sequence_take_nothing_of_a_key_that_is_not_finite(operand: str) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, 40, 16, generator=generator) for h in (2, 1, 1))
    {"k": k, "v": v}[operand][:, :, 0, 0] = torch.nan
    given = [t.to(DEVICE).requires_grad_() for t in (q, k, v)]
    lengths = torch.tensor([1, 23], device=DEVICE)
    o = ops.sdpa(*given, seqlens_q=lengths, engine="triton")
    o.sum().backward()
    d_q = given[0].grad
    assert d_q is not None
    for sequence, length in enumerate(lengths.tolist()):
        for made in (o, d_q):
            beyond = made[sequence, :, length:]
            assert torch.equal(beyond, torch.zeros_like(beyond))


@pytest.mark.parametrize(
    ("batch", "rows", "keys"),
    # Few queries are another kernel's, which deals the keys out.
    [(0, 20, 5), (2, 0, 5), (2, 20, 0), (2, 0, 0), (2, 1, 0), (0, 1, 37)],
    ids=str,
)
def test_what_is_empty_gives_zeros(batch: int, rows: int, keys: int) -> None:
    q = torch.ones(batch, 4, rows, 16, device=DEVICE, requires_grad=True)
    k = torch.ones(batch, 2, keys, 16, device=DEVICE, requires_grad=True)
    v = torch.ones(batch, 2, keys, 8, device=DEVICE, requires_grad=True)
    o, stats = ops.sdpa(q, k, v, causal=True, return_stats=True, engine="triton")
    assert torch.equal(o, torch.zeros(batch, 4, rows, 8, device=DEVICE))
    assert torch.equal(stats, torch.full((batch, 4, rows), -torch.inf, device=DEVICE))
    if not batch:
        with pytest.raises(NotSupportedError, match="no sequence; the kernels take at least one"):
            o.sum().backward()
        return
    o.sum().backward()
    for operand in (q, k, v):
        assert operand.grad is not None
        assert torch.equal(operand.grad, torch.zeros_like(operand))
