"""ops.sdpa and its relatives: values and gradients against a dense float64 computation."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from dense_attention import TOLERANCE, check_call, close, draw, reference, visible

import tilewright as tw
from tilewright import ops
from tilewright.ops.plan_cache import plan_count

pytestmark = pytest.mark.L0


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "keys", "depth", "depth_v"),
    [(2, 2, 5, 7, 16, 16), (4, 2, 7, 5, 24, 8), (3, 1, 1, 9, 8, 16), (2, 2, 6, 6, 13, 13)],
)
def test_masks_and_gradients(
    dtype: torch.dtype, heads: int, kv_heads: int, rows: int, keys: int, depth: int, depth_v: int
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + keys)
    tensors = {
        "q": draw(generator, 2, heads, rows, depth, dtype=dtype),
        "k": draw(generator, 2, kv_heads, keys, depth, dtype=dtype),
        "v": draw(generator, 2, kv_heads, keys, depth_v, dtype=dtype),
    }
    cases: list[dict[str, Any]] = [
        {},
        {"causal": True},
        {"causal": True, "align": "bottom_right"},
        {"window": (2, 1)},
        {"window": (1, None), "causal": True, "align": "bottom_right"},
    ]
    for case in cases:
        may = visible(rows, keys, **case)
        # A row that sees nothing has no gradient in the dense reference (NaN); leave it out.
        check_call(
            tensors,
            lambda q, k, v, case=case: ops.sdpa(q, k, v, return_stats=True, **case),
            lambda q, k, v, may=may: reference(q, k, v, may=may),
            generator,
        )


def test_bias_sink_soft_cap_alibi_and_scale_have_gradients() -> None:
    generator = torch.Generator().manual_seed(3)
    heads, rows, keys = 4, 6, 9
    tensors = {
        "q": draw(generator, 2, heads, rows, 16),
        "k": draw(generator, 2, 2, keys, 16),
        "v": draw(generator, 2, 2, keys, 16),
    }
    bias = {"bias": draw(generator, 1, heads, 1, keys)}
    sink = {"sink": draw(generator, heads)}
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]).double()
    may = visible(rows, keys, causal=True, align="bottom_right")
    check_call(
        tensors | bias,
        lambda q, k, v, bias: ops.sdpa(q, k, v, bias=bias, return_stats=True),
        lambda q, k, v, bias: reference(q, k, v, bias=bias),
        generator,
    )
    check_call(
        tensors | sink,
        lambda q, k, v, sink: ops.sdpa(
            q, k, v, sink=sink, causal=True, align="bottom_right", return_stats=True
        ),
        lambda q, k, v, sink: reference(q, k, v, sink=sink, may=may),
        generator,
    )
    check_call(
        tensors,
        lambda q, k, v: ops.sdpa(q, k, v, soft_cap=2.0, scale=0.7, return_stats=True),
        lambda q, k, v: reference(q, k, v, soft_cap=2.0, scale=0.7),
        generator,
    )
    check_call(
        tensors,
        lambda q, k, v: ops.sdpa(q, k, v, alibi=True, return_stats=True),
        lambda q, k, v: reference(q, k, v, slopes=slopes),
        generator,
    )


def test_boolean_mask_joins_the_bias() -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = {name: draw(generator, 2, 2, 6, 8) for name in ("q", "k", "v")}
    bias = {"bias": draw(generator, 2, 1, 6, 6)}
    mask = torch.rand(2, 1, 6, 6, generator=generator) < 0.6
    mask[..., 0] = True
    check_call(
        tensors | bias,
        lambda q, k, v, bias: ops.sdpa(q, k, v, bias=bias, mask=mask, return_stats=True),
        lambda q, k, v, bias: reference(q, k, v, bias=bias, may=mask),
        generator,
    )


def test_rows_that_see_nothing_are_zero_with_zero_gradient() -> None:
    # Field report 1.
    generator = torch.Generator().manual_seed(5)
    q, k, v = (draw(generator, 1, 1, 8, 8).requires_grad_() for _ in range(3))
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:4, :4] = True
    o, stats = ops.sdpa(q, k, v, mask=mask, return_stats=True)
    o.sum().backward()
    assert torch.equal(o[:, :, 4:], torch.zeros(1, 1, 4, 8))
    assert torch.isneginf(stats[:, :, 4:]).all() and torch.isfinite(stats[:, :, :4]).all()
    for grad in (q.grad, k.grad, v.grad):
        assert grad is not None and torch.isfinite(grad).all()
    assert torch.count_nonzero(q.grad[:, :, 4:]) == 0


@pytest.mark.parametrize("length", [64, 192, 640, 704, 768])
def test_large_negative_scores_under_a_mask_have_finite_gradients(length: int) -> None:
    # Field report 4.
    generator = torch.Generator().manual_seed(length)
    q = draw(generator, 1, 1, length, 64) * 0.1
    k = draw(generator, 1, 1, length, 64) * 0.1
    v = draw(generator, 1, 1, length, 64, dtype=torch.bfloat16)
    q[..., 0], k[..., 0] = 1.0, -120 * 64**0.5
    q, k = (t.bfloat16().requires_grad_() for t in (q, k))
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    ops.sdpa(q, k, v, mask=mask).sum().backward()
    assert torch.isfinite(q.grad).all() and torch.isfinite(k.grad).all()


def test_padding_by_lengths_ignores_what_lies_beyond() -> None:
    # Field report 7: lengths, one query each, NaN beyond the used part.
    generator = torch.Generator().manual_seed(7)
    q = draw(generator, 4, 4, 1, 16)
    k, v = draw(generator, 4, 2, 128, 16), draw(generator, 4, 2, 128, 16)
    lengths = torch.tensor([32, 64, 96, 48])
    clean = ops.sdpa(q, k, v, seqlens_kv=lengths)
    for b, used in enumerate(lengths.tolist()):
        k[b, :, used:], v[b, :, used:] = math.nan, math.inf
    dirty = ops.sdpa(q, k, v, seqlens_kv=lengths)
    assert torch.isfinite(dirty).all() and torch.equal(clean, dirty)
    may = torch.arange(128)[None, :] < lengths[:, None]
    zeroed = [torch.where(may[:, None, :, None], t, 0.0).double() for t in (k, v)]
    expected, _ = reference(q.double(), *zeroed, may=may[:, None, None, :])
    close(dirty, expected, 1e-5)


def test_lengths_and_sinks_may_be_views() -> None:
    # B12: strided lengths of either integer type, a sliced sink.
    generator = torch.Generator().manual_seed(8)
    q, k, v = (draw(generator, 2, 2, 5, 8) for _ in range(3))
    sinks = draw(generator, 4)
    expected = ops.sdpa(q, k, v, seqlens_kv=torch.tensor([3, 4]), sink=sinks[::2].clone())
    for dtype in (torch.int32, torch.int64):
        lengths = torch.tensor([3, 99, 4, 99], dtype=dtype)[::2]
        assert torch.equal(ops.sdpa(q, k, v, seqlens_kv=lengths, sink=sinks[::2]), expected)


def test_dropout_replays_by_seed_and_offset() -> None:
    # Field report 16.
    generator = torch.Generator().manual_seed(12)
    q, k, v = (draw(generator, 1, 2, 32, 16) for _ in range(3))
    first, second = ops.sdpa(q, k, v, dropout_p=0.3), ops.sdpa(q, k, v, dropout_p=0.3)
    assert not torch.equal(first, second)
    again = [ops.sdpa(q, k, v, dropout_p=0.3, seed=5, offset=9) for _ in range(2)]
    assert torch.equal(again[0], again[1])
    as_tensor = torch.tensor([5], dtype=torch.int64)
    assert torch.equal(ops.sdpa(q, k, v, dropout_p=0.3, seed=as_tensor, offset=9), again[0])
    for seed, offset in ((6, 9), (5, 10)):
        other = ops.sdpa(q, k, v, dropout_p=0.3, seed=seed, offset=offset)
        assert not torch.equal(other, again[0])
    # The mean over many seeds is the undropped result.
    mean = sum(ops.sdpa(q, k, v, dropout_p=0.3, seed=s) for s in range(400)) / 400
    close(mean, ops.sdpa(q, k, v).double(), 0.2)


def test_the_backward_drops_what_the_forward_dropped() -> None:
    generator = torch.Generator().manual_seed(13)
    q, k, v = (draw(generator, 1, 1, 4, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    for return_stats in (False, True):
        options = {"dropout_p": 0.4, "seed": 1, "causal": True, "return_stats": return_stats}
        assert torch.autograd.gradcheck(functools.partial(ops.sdpa, **options), (q, k, v))


def test_compiled_stats_that_no_loss_reads_are_no_hindrance_to_dropout() -> None:
    # There zeros come for a gradient that nobody makes, and not None.
    generator = torch.Generator().manual_seed(14)
    given = [draw(generator, 1, 2, 5, 16) for _ in range(3)]

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.sdpa(q, k, v, dropout_p=0.4, seed=3, return_stats=True)[0]

    found = []
    for function in (call, torch.compile(call, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in given]
        found.append(torch.autograd.grad(function(*leaves).sum(), leaves))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_a_loss_on_stats_that_an_engine_declines_says_why(interpreted_functions: None) -> None:
    q, k, v = (torch.randn(1, 1, 4, 256, requires_grad=True) for _ in range(3))
    _, stats = ops.sdpa(q, k, v, return_stats=True, engine="triton")
    with pytest.raises(tw.NotSupportedError, match="and with 8 more columns of v, which has 256"):
        stats.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("weight", "size"), [(3e5, 0.01), (1.0, 1.0), (2e-8, 30.0)])
def test_a_loss_on_stats_keeps_its_range_in_16_bits(
    dtype: torch.dtype, weight: float, size: float
) -> None:
    # A z-loss under a gradient scaler: its weight is beyond, or below, what float16 holds, and
    # the gradients of q and k are not.
    generator = torch.Generator().manual_seed(19)
    q, k, v = ((size * draw(generator, 1, 2, 4, 8)).to(dtype).requires_grad_() for _ in range(3))
    _, stats = ops.sdpa(q, k, v, scale=1.0, return_stats=True)
    (weight * stats).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    (weight * reference(*wide, scale=1.0)[1]).sum().backward()
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for given, expected in zip((q, k), wide, strict=False):
        bound = 2e-2 * expected.grad.abs().max() + step
        assert expected.grad.abs().max() > 2 * step
        assert (given.grad.double() - expected.grad).abs().max() <= bound


def test_gate_describes_the_output_and_not_the_statistics() -> None:
    # O7.
    generator = torch.Generator().manual_seed(14)
    q, k, v, gate = (draw(generator, 1, 2, 4, 8).requires_grad_() for _ in range(4))
    plain, stats = ops.sdpa(q, k, v, return_stats=True)
    gated, gated_stats = ops.sdpa(q, k, v, gate=gate, return_stats=True)
    assert torch.equal(stats, gated_stats)
    torch.testing.assert_close(gated, plain * torch.sigmoid(gate))
    gated.sum().backward()
    assert all(t.grad is not None and torch.count_nonzero(t.grad) for t in (q, k, v, gate))


def test_the_cache_tells_layouts_apart() -> None:
    # B10: compact, padded, permuted, then compact again, each right.
    ops.clear_plan_cache()
    generator = torch.Generator().manual_seed(15)
    base = [draw(generator, 2, 3, 4, 8) for _ in range(3)]
    expected, _ = reference(*(t.double() for t in base))

    def padded(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((2, 3, 4, 11), math.nan)
        wide[..., :8] = t
        return wide[..., :8]

    def permuted(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    layouts = (lambda t: t, padded, permuted, lambda t: t, padded)
    for layout in layouts:
        close(ops.sdpa(*(layout(t) for t in base)), expected, 1e-5)
    assert plan_count() == 3
    close(ops.sdpa(base[0], padded(base[1]), base[2]), expected, 1e-5)
    assert plan_count() == 4
    close(ops.sdpa(*base, scale=8**-0.5), expected, 1e-5)
    assert plan_count() == 4
    ops.sdpa(*base, scale=0.5)
    ops.sdpa(*(t.double() for t in base))
    assert plan_count() == 6


def test_padding_a_head_keeps_the_scale() -> None:
    # B11: widths that are no multiple of eight.
    generator = torch.Generator().manual_seed(16)
    for depth in (1, 3, 7, 12, 33):
        tensors = {name: draw(generator, 1, 2, 5, depth) for name in ("q", "k", "v")}
        check_call(
            tensors,
            lambda q, k, v: ops.sdpa(q, k, v, return_stats=True),
            lambda q, k, v: reference(q, k, v),
            generator,
        )


def test_out_engine_and_layout_of_the_result() -> None:
    generator = torch.Generator().manual_seed(18)
    q, k, v = (draw(generator, 2, 4, 3, 8).transpose(1, 2) for _ in range(3))
    o = ops.sdpa(q, k, v)
    assert o.stride() == q.stride()
    out = torch.empty(2, 3, 4, 8)
    assert ops.sdpa(q, k, v, out=out) is out
    torch.testing.assert_close(out, o)
    assert torch.equal(ops.sdpa(q, k, v, engine="aten"), o)
    with pytest.raises(tw.NotSupportedError, match="engine='hopper' has no plan"):
        ops.sdpa(q, k, v, engine="hopper")
    with pytest.raises(tw.BindingError, match="out: given while an operand requires grad"):
        ops.sdpa(q.clone().requires_grad_(), k, v, out=out)


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 2, 0, 8)])
def test_empty_extents(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, requires_grad=True)
    k = torch.zeros((shape[0], 2, 5, 8), requires_grad=True)
    o, stats = ops.sdpa(q, k, k, return_stats=True)
    assert o.shape == shape and stats.shape == shape[:3]
    o.sum().backward()
    assert torch.count_nonzero(k.grad) == 0
    keyless, stats = (
        ops.sdpa(torch.ones(1, 1, 2, 8), k[:1, :1, :0], k[:1, :1, :0], return_stats=True)
        if shape[0]
        else (torch.zeros(1), torch.full((1,), -math.inf))
    )
    assert torch.count_nonzero(keyless) == 0 and torch.isneginf(stats).all()


def test_the_gate_may_be_the_buffer_of_out() -> None:
    q, k, v, gate = (draw(torch.Generator().manual_seed(33 + i), 1, 2, 4, 8) for i in range(4))
    expected = ops.sdpa(q, k, v, gate=gate)
    assert ops.sdpa(q, k, v, gate=gate, out=gate) is gate
    assert torch.equal(gate, expected)


def test_a_soft_cap_of_float64_scores_is_float64() -> None:
    generator = torch.Generator().manual_seed(35)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    # 0.1 and its reciprocal by float32 would leave errors of 1e-8.
    scores = 0.1 * torch.tanh(q @ k.transpose(-1, -2) / 0.1)
    expected = scores.softmax(-1) @ v
    assert (ops.sdpa(q, k, v, scale=1.0, soft_cap=0.1) - expected).abs().max() <= 1e-14


def test_a_buffer_that_requires_grad_is_written_without_autograd() -> None:
    q = torch.rand(1, 2, 5, 8, generator=torch.Generator().manual_seed(36))
    out = torch.empty(1, 2, 5, 8, requires_grad=True)
    with torch.no_grad():
        ops.sdpa(q, q, q, out=out)
    assert torch.equal(out, ops.sdpa(q, q, q))
