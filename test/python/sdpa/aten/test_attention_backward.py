"""Attention backward against float64 autograd through the dense reference."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.L0

FLOAT32 = 5e-6


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def problem(seed, heads_q, heads_kv, rows, keys, depth=16, depth_v=None, dtype=torch.float32):
    depth_v = depth_v or depth
    return draw(
        seed,
        (2, heads_q, rows, depth),
        (2, heads_kv, keys, depth),
        (2, heads_kv, keys, depth_v),
        (2, heads_q, rows, depth_v),
        dtype=dtype,
    )


def saved(bench, q, k, v, rule):
    """O in q's type and Stats, as a forward would have left them."""
    forward = bench.reference(q, k, v, rule)
    return forward["O"].to(q.dtype), forward["Stats"].to(torch.float32)


def check(bench, q, k, v, d_o, rule, tolerance=FLOAT32, extra=None, given=(), **options):
    o, stats = saved(bench, q, k, v, rule)
    operands = {"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats, **(extra or {})}
    options.setdefault("attn_scale", rule.scale)
    found = bench.run("sdpa_backward", operands, given=given, **options)
    expected = bench.gradients(q, k, v, d_o, rule)
    for port, value in found.items():
        bench.close(port, value, expected[port].view(value.shape), tolerance)
    return found


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize(("rows", "keys"), [(33, 40), (1, 7), (40, 33)])
def test_heads_and_extents(ways, heads_q, heads_kv, rows, keys):
    q, k, v, d_o = problem(1, heads_q, heads_kv, rows, keys)
    check(ways, q, k, v, d_o, ways.Rule(scale=0.25))


@pytest.mark.parametrize(("depth", "depth_v"), [(16, 24), (192, 128), (10, 6)])
def test_value_width_may_differ(ways, depth, depth_v):
    q, k, v, d_o = problem(2, 2, 1, 9, 11, depth, depth_v)
    check(ways, q, k, v, d_o, ways.Rule(scale=depth**-0.5))


MASKS = {
    "causal": ({"use_causal_mask": True}, {"right": 0}),
    "causal_bottom_right": (
        {"use_causal_mask_bottom_right": True},
        {"right": 0, "bottom_right": True},
    ),
    "window": ({"use_causal_mask": True, "sliding_window_length": 4}, {"left": 4, "right": 0}),
    "band": (
        {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 2},
        {"left": 3, "right": 2},
    ),
    "alibi": ({"use_causal_mask": True, "use_alibi_mask": True}, {"right": 0, "alibi": True}),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("rows", "keys"), [(12, 12), (2, 5), (5, 2), (300, 310)])
def test_masks(ways, mask, rows, keys):
    options, rule = MASKS[mask]
    q, k, v, d_o = problem(3, 4, 2, rows, keys)
    check(ways, q, k, v, d_o, ways.Rule(scale=0.25, **rule), **options)


def test_rows_that_see_nothing_give_zero(ways):
    q, k, v, d_o = draw(4, *[(1, 1, 8, 8)] * 4)
    bias = torch.full((1, 1, 8, 8), -math.inf)
    bias[..., :4, :4] = 0.0
    found = check(ways, q, k, v, d_o, ways.Rule(scale=0.5, bias=bias), extra={"bias": bias})
    assert (found["dQ"][0, 0, 4:] == 0).all()
    assert (found["dK"][0, 0, 4:] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_see_nothing_may_have_any_gradient(ways, bad):
    q, k, v, d_o = problem(5, 4, 2, 9, 6)
    rule = ways.Rule(scale=0.25, right=0, bottom_right=True)
    clean = check(ways, q, k, v, d_o, rule, use_causal_mask_bottom_right=True)
    o, stats = saved(ways, q, k, v, rule)
    q, d_o = q.clone(), d_o.clone()
    q[:, :, :3], d_o[:, :, :3] = bad, bad
    found = ways.run(
        "sdpa_backward",
        {"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats},
        attn_scale=0.25,
        use_causal_mask_bottom_right=True,
    )
    for port, value in found.items():
        ways.close(port, value, clean[port], FLOAT32)


@pytest.mark.parametrize(
    "dim", [(2, 4, 9, 11), (1, 4, 9, 11), (2, 1, 9, 11), (1, 1, 1, 11), (1, 4, 9, 1), (1, 1, 1, 1)]
)
def test_bias_gradient_is_summed_over_broadcast_axes(ways, dim):
    # Softmax does not see a bias that all keys have alike: without a sink its gradient is 0.
    q, k, v, d_o = problem(6, 4, 2, 9, 11)
    bias, sink = draw(7, dim, (1, 4, 1, 1))
    check(
        ways,
        q,
        k,
        v,
        d_o,
        ways.Rule(scale=0.25, bias=bias, sink=sink.flatten(), right=0),
        extra={"bias": bias, "sink_token": sink},
        given=("dBias", "dSink_token"),
        use_causal_mask=True,
    )


def test_bias_without_its_gradient(ways):
    q, k, v, d_o = problem(8, 4, 2, 9, 11)
    (bias,) = draw(9, (1, 4, 9, 11))
    check(ways, q, k, v, d_o, ways.Rule(scale=0.25, bias=bias), extra={"bias": bias})


@pytest.mark.parametrize("mask", ["causal_bottom_right", "window"])
def test_sink_gradient(ways, mask):
    options, rule = MASKS[mask]
    q, k, v, d_o = problem(10, 4, 2, 7, 5)
    (sink,) = draw(11, (1, 4, 1, 1))
    check(
        ways,
        q,
        k,
        v,
        d_o,
        ways.Rule(scale=0.25, sink=sink.flatten(), **rule),
        extra={"sink_token": sink},
        given=("dSink_token",),
        **options,
    )


def test_float64_is_computed_in_float64(ways):
    q, k, v, d_o = problem(12, 2, 2, 20, 20, dtype=torch.float64)
    rule = ways.Rule(scale=0.25, right=0)
    forward = ways.reference(q, k, v, rule)
    found = ways.run(
        "sdpa_backward",
        {"q": q, "k": k, "v": v, "o": forward["O"], "dO": d_o, "stats": forward["Stats"]},
        attn_scale=0.25,
        use_causal_mask=True,
        outputs=dict.fromkeys(("dQ", "dK", "dV"), torch.float64),
    )
    expected = ways.gradients(q, k, v, d_o, rule)
    for port, value in found.items():
        ways.close(port, value, expected[port], 1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 4), (8, 1)])
def test_half_gradients(ways, dtype, heads_q, heads_kv):
    """Group sums in float32: the error is that of one rounding of O and one of the result."""
    q, k, v, d_o = problem(13, heads_q, heads_kv, 65, 65, 32, dtype=dtype)
    check(
        ways,
        q,
        k,
        v,
        d_o,
        ways.Rule(scale=0.2, right=0),
        tolerance=torch.finfo(dtype).eps,
        use_causal_mask=True,
        outputs=dict.fromkeys(("dQ", "dK", "dV"), dtype),
    )


@pytest.mark.parametrize("length", [64, 192, 640, 704, 768])
def test_large_negative_scores_give_finite_gradients(ways, length):
    """Scores near -120 with a causal mask as a boolean one, in bfloat16."""
    q, k, v, d_o = draw(14, *[(1, 1, length, 64)] * 4)
    q, k = q * 0.1, k * 0.1
    q[..., 0], k[..., 0] = 1.0, -120.0 * math.sqrt(64)
    q, k, v, d_o = (x.to(torch.bfloat16) for x in (q, k, v, d_o))
    bias = torch.zeros(1, 1, length, length)
    bias.masked_fill_(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    rule = ways.Rule(scale=64**-0.5, bias=bias)
    o, stats = saved(ways, q, k, v, rule)
    found = ways.run(
        "sdpa_backward",
        {"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats, "bias": bias},
        attn_scale=rule.scale,
        outputs=dict.fromkeys(("dQ", "dK", "dV"), torch.bfloat16),
    )
    # With O as it was stored: K's first column is so large that O's rounding shows in dQ.
    p = ways.reference(q, k, v, rule)["P"]
    delta = (o.double() * d_o.double()).sum(-1, keepdim=True)
    incoming = d_o.double() @ v.double().transpose(2, 3) - delta
    d_s = rule.scale * p * incoming
    expected = d_s @ k.double()
    assert torch.isfinite(found["dQ"]).all()
    ways.close("dQ", found["dQ"][..., 1:], expected[..., 1:], 2**-8)
    # A float32 score near -120 has steps of 2**-17, which dS carries into the first column.
    step = 2**-16 * rule.scale * incoming.abs().max() * k[..., 0].double().abs().max()
    error = (found["dQ"][..., 0].double() - expected[..., 0]).abs().max()
    assert error <= 2**-8 * expected[..., 0].abs().max() + step
    ways.close("dK", found["dK"], d_s.transpose(2, 3) @ q.double(), 2**-8)
    ways.close("dV", found["dV"], p.transpose(2, 3) @ d_o.double(), 2**-8)


def test_broadcast_and_strided_gradients_of_the_output(ways):
    """dO as it comes from a sum (all strides 0) and from every second column."""
    q, k, v, wide = problem(15, 4, 2, 9, 9, 16, 32)
    v = v[..., :16].contiguous()
    for d_o in (torch.ones(1).expand(2, 4, 9, 16), wide[..., ::2]):
        check(ways, q, k, v, d_o, ways.Rule(scale=0.25, right=0), use_causal_mask=True)


@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_extents(ways, batch, rows, keys):
    q = torch.ones(batch, 4, rows, 8)
    k = torch.ones(batch, 2, keys, 8)
    stats = torch.full((batch, 4, rows, 1), -math.inf)
    found = ways.run("sdpa_backward", {"q": q, "k": k, "v": k, "o": q * 0, "dO": q, "stats": stats})
    assert all((value == 0).all() for value in found.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mask", ["causal", "band"])
def test_hidden_keys_may_hold_anything(ways, bad, mask):
    """Keys that no row of the first ten sees; rows behind have no gradient coming in."""
    options, rule = MASKS[mask]
    q, k, v, d_o = problem(16, 4, 2, 8, 12)
    clean = check(ways, q, k, v, d_o, ways.Rule(scale=0.25, **rule), **options)
    o, stats = saved(ways, q, k, v, ways.Rule(scale=0.25, **rule))
    k, v = k.clone(), v.clone()
    k[:, :, 10:], v[:, :, 10:] = bad, bad
    found = ways.run(
        "sdpa_backward",
        {"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats},
        attn_scale=0.25,
        **options,
    )
    for port, value in found.items():
        ways.close(port, value, clean[port], FLOAT32)


def test_same_bits_twice(ways):
    q, k, v, d_o = problem(17, 8, 2, 65, 65)
    rule = ways.Rule(scale=0.25, right=0)
    first = check(ways, q, k, v, d_o, rule, use_causal_mask=True)
    again = check(ways, q, k, v, d_o, rule, use_causal_mask=True)
    assert all(torch.equal(first[port], again[port]) for port in first)
