"""ops.sdpa and its relatives: values and gradients against a dense float64 computation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.ops.plan_cache import plan_count

pytestmark = pytest.mark.L0

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, tol: float) -> None:
    expected = expected.detach()
    assert actual.shape == expected.shape
    assert torch.equal(torch.isinf(actual), torch.isinf(expected))
    finite = torch.isfinite(expected)
    bound = tol * max(expected[finite].abs().max().item() if finite.any() else 0.0, 1.0)
    error = (actual.double() - expected)[finite].abs().max().item() if finite.any() else 0.0
    assert error <= bound, f"error {error:.3e} over {bound:.3e}"


def visible(
    rows: int,
    keys: int,
    *,
    causal: bool = False,
    align: str = "top_left",
    window: tuple[int | None, int | None] | None = None,
) -> torch.Tensor:
    """Row by row and key by key, from the words of the documentation."""
    shift = keys - rows if align == "bottom_right" else 0
    left, right = window or (None, None)
    table = torch.ones(rows, keys, dtype=torch.bool)
    for i, j in itertools.product(range(rows), range(keys)):
        row = i + shift
        hidden = (causal and j > row) or (left is not None and j < row - left)
        hidden = hidden or (right is not None and j > row + right)
        table[i, j] = not hidden
    return table


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    may: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense float64 attention and its log-sum-exp, differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    if slopes is not None:
        rows, keys = scores.shape[-2:]
        distance = torch.arange(keys)[None, :] - torch.arange(rows)[:, None]
        scores = scores + slopes.view(1, -1, 1, 1) * distance
    if may is not None:
        scores = scores.masked_fill(~may, -math.inf)
    joined = scores
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        joined = torch.cat((scores, column), -1)
    stats = torch.logsumexp(joined, -1)
    level = torch.where(torch.isneginf(stats), torch.zeros_like(stats), stats)
    weights = torch.exp(scores - level.unsqueeze(-1))
    return weights @ v, stats


def check_call(
    tensors: dict[str, torch.Tensor], call: Any, expected: Any, generator: torch.Generator
) -> None:
    """Values, Stats and all gradients (a loss on O and on Stats) of one call."""
    dtype = tensors["q"].dtype
    given = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    wide = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    o, stats = call(**given)
    o_ref, stats_ref = expected(**wide)
    tol = TOLERANCE[dtype]
    close(o, o_ref, tol)
    close(stats, stats_ref, min(tol, 1e-2))
    do = draw(generator, *o.shape, dtype=dtype)
    dstats = torch.where(torch.isfinite(stats_ref), draw(generator, *stats.shape).double(), 0.0)
    torch.autograd.backward([o, stats], [do, dstats.to(stats.dtype)])
    torch.autograd.backward([o_ref, stats_ref], [do.double(), dstats])
    for name in tensors:
        close(given[name].grad, torch.nan_to_num(wide[name].grad), 3 * tol)


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


@pytest.mark.parametrize("stats_layout", ["head_major", "token_major"])
def test_packed_sequences_equal_a_reference_each(stats_layout: str) -> None:
    # Field report 5, backward too; the gradient of Stats included.
    generator = torch.Generator().manual_seed(9)
    cu_q, cu_kv = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 3, 3, 8])
    tensors = {
        "q": draw(generator, 2, 9, 64),
        "k": draw(generator, 8, 3, 64),
        "v": draw(generator, 8, 3, 64),
    }

    def packed(q: Any, k: Any, v: Any) -> Any:
        return ops.sdpa_varlen(
            q, k, v, cu_q, cu_kv, 1, 5, causal=True, return_stats=True, stats_layout=stats_layout
        )

    def one_by_one(q: Any, k: Any, v: Any) -> Any:
        os, all_stats = [], []
        for b in range(3):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
            if cu_q[b] == cu_q[b + 1]:
                continue
            parts = [t.transpose(0, 1).unsqueeze(0) for t in (q[rows], k[keys], v[keys])]
            may = visible(parts[0].shape[2], parts[1].shape[2], causal=True)
            o, stats = reference(*parts, may=may)
            os.append(o[0].transpose(0, 1))
            all_stats.append(stats[0])
        stats = torch.cat(all_stats, -1)
        return torch.cat(os), stats.t() if stats_layout == "token_major" else stats

    check_call(tensors, packed, one_by_one, generator)


def test_keys_of_no_query_get_exactly_zero_gradient() -> None:
    # Field report 6.
    generator = torch.Generator().manual_seed(10)
    cu_q = torch.tensor([0, 0, 1208, 2048, 2048], dtype=torch.int32)
    cu_kv = torch.tensor([0, 2538, 4280, 5120, 8192], dtype=torch.int32)
    q = draw(generator, 2048, 4, 256).requires_grad_()
    k, v = (draw(generator, 8192, 1, 256).requires_grad_() for _ in range(2))
    ops.sdpa_varlen(q, k, v, cu_q, cu_kv, 1208, 3072).sum().backward()
    for grad in (k.grad, v.grad):
        assert torch.count_nonzero(grad[:2538]) == 0 and torch.count_nonzero(grad[5120:]) == 0
        assert torch.count_nonzero(grad[2538:5120]) > 0


def test_origins_and_holes_of_packed_sequences() -> None:
    # O2: prefix sums need not start at 0; rows of no sequence give 0 and -inf.
    generator = torch.Generator().manual_seed(11)
    q, k, v = (draw(generator, 10, 2, 8) for _ in range(3))
    cu_q, cu_kv = torch.tensor([2, 5, 9]), torch.tensor([1, 4, 10])
    o, stats = ops.sdpa_varlen(q, k, v, cu_q, cu_kv, 4, 6, return_stats=True)
    outside = torch.tensor([0, 1, 9])
    assert torch.count_nonzero(o[outside]) == 0 and torch.isneginf(stats[:, outside]).all()
    parts = [t[None].transpose(1, 2).double() for t in (q[2:5], k[1:4], v[1:4])]
    close(o[2:5], reference(*parts)[0][0].transpose(0, 1), 1e-5)
    with pytest.raises(tw.BindingError, match="reaches element 159"):
        ops.sdpa_varlen(q, k[:9], v[:9], cu_q, cu_kv, 4, 6)


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_paged_keys_equal_dense_ones(page: int) -> None:
    # O4 and field report 7: distinct tables, NaN in free slots, wild indices past the used pages.
    generator = torch.Generator().manual_seed(page)
    lengths = torch.tensor([13, 1, 0, 8], dtype=torch.int32)
    pages = -(-16 // page)
    q = draw(generator, 4, 4, 2, 16)
    k, v = draw(generator, 4, 2, pages * page, 16), draw(generator, 4, 2, pages * page, 16)
    count = 4 * pages
    k_pages = torch.full((count, page, 2, 16), math.nan)
    v_pages = torch.full((count, page, 2, 16), math.nan)
    tables = {}
    for name, dense, pool in (("k", k, k_pages), ("v", v, v_pages)):
        order = torch.randperm(count, generator=generator).to(torch.int32).view(4, pages)
        for b, used in enumerate(lengths.tolist()):
            for t in range(used):
                pool[order[b, t // page], t % page] = dense[b, :, t]
            order[b, -(-used // page) :] = 2**30
        tables[name] = order
    o, stats = ops.sdpa_paged(
        q, k_pages, v_pages, tables["k"], lengths, v_page_table=tables["v"], return_stats=True
    )
    expected, expected_stats = ops.sdpa(
        q, k, v, align="bottom_right", seqlens_kv=lengths, return_stats=True
    )
    close(o, expected.double(), 1e-6)
    close(stats, expected_stats.double(), 1e-6)


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
    assert torch.autograd.gradcheck(
        lambda *t: ops.sdpa(*t, dropout_p=0.4, seed=1, causal=True), (q, k, v)
    )
    o, stats = ops.sdpa(q, k, v, dropout_p=0.4, seed=1, return_stats=True)
    with pytest.raises(tw.NotSupportedError, match="loss on Stats together with dropout"):
        (o.sum() + stats.sum()).backward()


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


def test_merging_states() -> None:
    # Field report 8 and 3.1 of FlashAttention: two halves of the keys give the whole.
    generator = torch.Generator().manual_seed(17)
    q, k, v = (draw(generator, 1, 2, 4, 8).requires_grad_() for _ in range(3))
    parts = [
        ops.sdpa(q, k[:, :, s], v[:, :, s], return_stats=True) for s in (slice(0, 1), slice(1, 4))
    ]
    o, stats = ops.merge_states(*parts[0], *parts[1])
    whole, whole_stats = ops.sdpa(q, k, v, return_stats=True)
    torch.testing.assert_close(o, whole)
    torch.testing.assert_close(stats, whole_stats)
    grads = torch.autograd.grad(o.square().sum() + stats.sum(), (q, k, v))
    whole_grads = torch.autograd.grad(whole.square().sum() + whole_stats.sum(), (q, k, v))
    for grad, expected in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(grad, expected)
    empty = torch.full((1, 2, 4, 8), math.nan), torch.full((1, 2, 4), -math.inf)
    o, stats = ops.merge_states(*empty, *empty)
    assert torch.count_nonzero(o) == 0 and torch.isneginf(stats).all()
    o, stats = ops.merge_states(*empty, *(t.detach() for t in parts[1]))
    assert torch.equal(o, parts[1][0]) and torch.equal(stats, parts[1][1])


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


def test_merging_two_empty_states_has_zero_gradients() -> None:
    empty = [torch.full((2,), -torch.inf, requires_grad=True) for _ in range(2)]
    parts = [torch.ones(2, 3, requires_grad=True) for _ in range(2)]
    o, stats = ops.merge_states(parts[0], empty[0], parts[1], empty[1])
    assert torch.equal(o, torch.zeros(2, 3)) and torch.equal(stats, torch.full((2,), -torch.inf))
    (o.sum() + stats.exp().sum()).backward()
    for tensor in (*empty, *parts):
        assert tensor.grad is not None and torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_the_gradients_of_an_empty_state_that_holds_nan_are_zero() -> None:
    nothing = torch.full((1, 3), torch.nan, requires_grad=True)
    empty = torch.full((1,), -torch.inf, requires_grad=True)
    o, stats = torch.ones(1, 3, requires_grad=True), torch.zeros(1, requires_grad=True)
    joined, total = ops.merge_states(nothing, empty, o, stats)
    assert torch.equal(joined, o) and torch.equal(total, stats)
    (joined.sum() + total.sum()).backward()
    for tensor, expected in ((nothing, 0.0), (empty, 0.0), (o, 1.0), (stats, 1.0)):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.full_like(tensor, expected))


def test_a_soft_cap_of_float64_scores_is_float64() -> None:
    generator = torch.Generator().manual_seed(35)
    q, k, v = (torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    # 0.1 and its reciprocal by float32 would leave errors of 1e-8.
    scores = 0.1 * torch.tanh(q @ k.transpose(-1, -2) / 0.1)
    expected = scores.softmax(-1) @ v
    assert (ops.sdpa(q, k, v, scale=1.0, soft_cap=0.1) - expected).abs().max() <= 1e-14


def test_no_sequence_of_pages() -> None:
    pages = torch.ones(3, 4, 2, 8)
    table, lengths = torch.zeros(0, 5, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    o, stats = ops.sdpa_paged(
        torch.ones(0, 4, 1, 8), pages, pages, table, lengths, return_stats=True
    )
    assert o.shape == (0, 4, 1, 8) and stats.shape == (0, 4, 1)


def test_a_buffer_that_requires_grad_is_written_without_autograd() -> None:
    q = torch.rand(1, 2, 5, 8, generator=torch.Generator().manual_seed(36))
    out = torch.empty(1, 2, 5, 8, requires_grad=True)
    with torch.no_grad():
        ops.sdpa(q, q, q, out=out)
    assert torch.equal(out, ops.sdpa(q, q, q))
