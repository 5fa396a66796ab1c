"""Why tolerances scale, and why tight ones need float64: gradients of grouped heads, and TF32."""

from __future__ import annotations

import pytest
import torch

from tilewright.errors import OracleError
from tilewright.oracle import attention, formats
from tilewright.testing.compare import assert_close

pytestmark = pytest.mark.L0

# What a test of a model with one query head a KV head would be given.
_FIXED = 0.04


def _randn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).bfloat16()


def _plain_key_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_o: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dK and dV of causal attention in plain bfloat16 arithmetic."""
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    p = ((q @ k.mT) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    d_v = p.mT @ d_o
    d_p = d_o @ v.mT
    d_s = p * (d_p - (p * d_p).sum(-1, keepdim=True))
    d_k = (d_s.mT @ q) * scale

    def reduced(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(t.shape[0], -1, group, *t.shape[2:]).sum(2)

    return reduced(d_k), reduced(d_v)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_gradients_of_grouped_heads_outgrow_a_fixed_bound(group: int) -> None:
    """dV of a group sums over its heads: it and its roundings grow, a fixed bound does not."""
    kv_heads, rows, depth = 2, 96, 32
    q = _randn(1, kv_heads * group, rows, depth, seed=1)
    k, v = (_randn(1, kv_heads, rows, depth, seed=seed) for seed in (2, 3))
    # A loss whose gradient is alike in all heads, as of a sum over them.
    d_o = (1.0 + 0.1 * _randn(1, kv_heads * group, rows, depth, seed=4)).bfloat16()
    exact = attention.backward(q, k, v, d_o, right_bound=0)
    d_k, d_v = _plain_key_gradients(q, k, v, d_o)
    error = (d_v.double() - exact.d_v).abs().max().item()
    assert (error > _FIXED) == (group > 1)
    for name, got, want in (("dK", d_k, exact.d_k), ("dV", d_v, exact.d_v)):
        assert_close(got, want, name=name)
        assert_close(got, want, baseline=got, name=name)
    if group == 1:
        return
    # A bound that scales still sees a kernel that leaves out one head of a group.
    lost = attention.backward(q[:, 1:2], k[:, :1], v[:, :1], d_o[:, 1:2], right_bound=0)
    broken = d_v.double()
    broken[:, :1] -= lost.d_v
    for baseline in (None, d_v):
        with pytest.raises(OracleError, match=r"dV: .*elements"):
            assert_close(broken, exact.d_v, baseline=baseline, data_type=torch.bfloat16, name="dV")


def _tf32(values: torch.Tensor) -> torch.Tensor:
    """Round float32 to the 10 mantissa bits that a TF32 product reads, to nearest even."""
    bits = values.view(torch.int32).to(torch.int64)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
    return bits.to(torch.int32).view(torch.float32)


def test_tf32_keeps_ten_bits() -> None:
    values = torch.tensor(
        [1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11 + 2.0**-20)]
    )
    expected = torch.tensor([1 + 2.0**-10, 1.0, 1 + 2.0**-9, -(1 + 2.0**-10)])
    assert torch.equal(_tf32(values), expected)
    numbers = torch.randn(500, generator=torch.Generator().manual_seed(5))
    ten_bits = formats.FloatFormat("TF32", 8, 10, 127, 3.4e38, "ieee")
    assert torch.equal(_tf32(numbers).double(), formats.round_to(numbers.double(), ten_bits))


def test_a_causal_row_with_one_key_shows_why_a_tight_bound_needs_float64() -> None:
    """Row 0 sees one key: its result is v's row, exactly. A reference with TF32 products has v
    rounded to 10 bits there, and nothing averages the error out. A right kernel then fails a
    tight bound, or the bound is loosened for all rows and hides what it was made for.
    """
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 1, 64, 16, generator=generator) for _ in range(3))
    hidden = torch.ones(64, 64, dtype=torch.bool).triu(1)

    def attend(rounded: bool) -> torch.Tensor:
        def cut(t: torch.Tensor) -> torch.Tensor:
            return _tf32(t) if rounded else t

        p = ((cut(q) @ cut(k).mT) * 0.25).masked_fill(hidden, float("-inf")).softmax(-1)
        return cut(p) @ cut(v)

    right, in_tf32 = attend(False), attend(True)
    exact = attention.forward(q, k, v, right_bound=0).output
    assert torch.equal(right[0, 0, 0], v[0, 0, 0])
    assert_close(right, exact, tol=1e-5)
    # The reference's own error at row 0 is about half a step of ten bits.
    off = (in_tf32.double() - exact).abs()[0, 0, 0] / v[0, 0, 0].abs()
    assert 1e-4 < off.max().item() <= 2.0**-11
    with pytest.raises(ValueError, match="float64 reference"):
        assert_close(right, in_tf32, tol=9e-4)
    with pytest.raises(ValueError, match="float64 reference"):
        assert_close(right, in_tf32)
    # Dressed up as float64, it fails the right result, at row 0 above all.
    with pytest.raises(OracleError, match=r"row \(0, 0, 0\)"):
        assert_close(right, in_tf32.double(), tol=1e-5)
