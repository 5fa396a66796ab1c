"""Attention forward against the dense reference: masks, heads, layouts, statistics."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.L0

FLOAT32 = 3e-6


def draw(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def qkv(seed: int, heads_q: int, heads_kv: int, rows: int, keys: int, depth: int = 16) -> list:
    return draw(seed, (2, heads_q, rows, depth), *[(2, heads_kv, keys, depth)] * 2)


def check(bench, operands, rule, tolerance=FLOAT32, **options):
    found = bench.run("sdpa", operands, generate_stats=True, attn_scale=rule.scale, **options)
    expected = bench.reference(operands["q"], operands["k"], operands["v"], rule)
    for port, value in found.items():
        bench.close(port, value, expected[port], tolerance)
    return found


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(("rows", "keys"), [(33, 40), (1, 7), (40, 33)])
def test_heads_and_extents(ways, heads_q, heads_kv, rows, keys):
    q, k, v = qkv(1, heads_q, heads_kv, rows, keys)
    check(ways, {"q": q, "k": k, "v": v}, ways.Rule(scale=0.25))


@pytest.mark.parametrize(("depth", "depth_v"), [(16, 24), (96, 64), (192, 128), (10, 6)])
def test_value_width_may_differ(ways, depth, depth_v):
    q, k, v = draw(2, (1, 2, 9, depth), (1, 2, 11, depth), (1, 2, 11, depth_v))
    check(ways, {"q": q, "k": k, "v": v}, ways.Rule(scale=depth**-0.5))


MASKS = {
    "causal": ({"use_causal_mask": True}, {"right": 0}),
    "causal_bottom_right": (
        {"use_causal_mask_bottom_right": True},
        {"right": 0, "bottom_right": True},
    ),
    "window": (
        {"use_causal_mask": True, "sliding_window_length": 4},
        {"left": 4, "right": 0},
    ),
    "band": (
        {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 2},
        {"left": 3, "right": 2},
    ),
    "band_bottom_right": (
        {
            "diagonal_band_left_bound": 5,
            "diagonal_band_right_bound": 1,
            "diagonal_alignment": "BOTTOM_RIGHT",
        },
        {"left": 5, "right": 1, "bottom_right": True},
    ),
    "left": ({"diagonal_band_left_bound": 2}, {"left": 2}),
    "alibi": ({"use_causal_mask": True, "use_alibi_mask": True}, {"right": 0, "alibi": True}),
    "alibi_bottom_right": (
        {"use_causal_mask_bottom_right": True, "use_alibi_mask": True},
        {"right": 0, "alibi": True, "bottom_right": True},
    ),
}


def masks(name: str):
    import tilewright

    options, rule = MASKS[name]
    options = dict(options)
    if "diagonal_alignment" in options:
        options["diagonal_alignment"] = tilewright.diagonal_alignment.BOTTOM_RIGHT
    return options, rule


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("rows", "keys"), [(12, 12), (2, 5), (5, 2), (300, 310)])
def test_masks(ways, mask, rows, keys):
    options, rule = masks(mask)
    q, k, v = qkv(3, 4, 2, rows, keys)
    check(ways, {"q": q, "k": k, "v": v}, ways.Rule(scale=0.25, **rule), **options)


def test_causal_alignment_shows_the_reported_keys(bench):
    """(Sq, Skv) = (2, 5) and (5, 2): how many keys each row sees, by values that count them."""
    for rows, keys, bottom_right, seen in [
        (2, 5, False, [1, 2]),
        (2, 5, True, [4, 5]),
        (5, 2, True, [0, 0, 0, 1, 2]),
    ]:
        q, k = torch.zeros(1, 1, rows, 8), torch.zeros(1, 1, keys, 8)
        v = torch.ones(1, 1, keys, 8)
        mask = "use_causal_mask_bottom_right" if bottom_right else "use_causal_mask"
        found = bench.run("sdpa", {"q": q, "k": k, "v": v}, generate_stats=True, **{mask: True})
        expected = torch.tensor([math.log(n) if n else -math.inf for n in seen])
        bench.close("Stats", found["Stats"].flatten(), expected, FLOAT32)
        assert found["O"][0, 0, :, 0].tolist() == [float(n > 0) for n in seen]


def test_sliding_window_counts_the_query_itself(bench):
    q = torch.zeros(1, 1, 12, 8)
    k, v = torch.zeros(1, 1, 12, 8), torch.ones(1, 1, 12, 8)
    found = bench.run(
        "sdpa",
        {"q": q, "k": k, "v": v},
        generate_stats=True,
        use_causal_mask=True,
        sliding_window_length=4,
    )
    expected = torch.tensor([1.0, 2.0, 3.0] + [4.0] * 9).log()
    bench.close("Stats", found["Stats"].flatten(), expected, FLOAT32)


def test_rows_that_see_nothing_give_zero(ways):
    """An 8x8 mask, true only in [:4, :4], as a bias."""
    q, k, v = draw(4, *[(1, 1, 8, 8)] * 3)
    bias = torch.full((1, 1, 8, 8), -math.inf)
    bias[..., :4, :4] = 0.0
    found = check(ways, {"q": q, "k": k, "v": v, "bias": bias}, ways.Rule(scale=0.5, bias=bias))
    assert (found["O"][0, 0, 4:] == 0).all()
    assert (found["Stats"][0, 0, 4:] == -math.inf).all()


@pytest.mark.parametrize(
    "dim", [(2, 4, 9, 11), (1, 4, 9, 11), (2, 1, 9, 11), (1, 1, 1, 11), (1, 4, 9, 1), (1, 1, 1, 1)]
)
def test_bias_broadcasts(ways, dim):
    q, k, v = qkv(5, 4, 2, 9, 11)
    (bias,) = draw(6, dim)
    check(ways, {"q": q, "k": k, "v": v, "bias": bias}, ways.Rule(scale=0.25, bias=bias))


def test_block_mask_hides_tiles(ways):
    q, k, v = draw(7, (1, 2, 200, 8), (1, 1, 1200, 8), (1, 1, 1200, 8))
    tiles = torch.rand(1, 2, 2, 10, generator=torch.Generator().manual_seed(8)) > 0.5
    tiles[0, 1, 1] = False
    weights = 2 ** torch.arange(8)
    bits = torch.zeros(1, 2, 2, 16, dtype=torch.int64)
    bits[..., :10] = tiles
    packed = (bits.view(1, 2, 2, 2, 8) * weights).sum(-1).to(torch.uint8)
    hidden = ~tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :200, :1200]
    check(
        ways,
        {"q": q, "k": k, "v": v, "block_mask": packed},
        ways.Rule(scale=0.3, hidden=hidden),
    )


@pytest.mark.parametrize("mask", ["causal_bottom_right", "window"])
def test_sink_joins_the_denominator(ways, mask):
    options, rule = masks(mask)
    q, k, v = qkv(9, 4, 2, 7, 5)
    (sink,) = draw(10, (1, 4, 1, 1))
    sink[0, 0] = 30.0
    check(
        ways,
        {"q": q, "k": k, "v": v, "sink_token": sink},
        ways.Rule(scale=0.25, sink=sink.flatten(), **rule),
        **options,
    )


@pytest.mark.parametrize("has_sink", [False, True])
def test_score_maximum_and_sum(ways, has_sink):
    """Stats = score_max + ln(score_sum_exp); a sink joins both."""
    q, k, v = qkv(11, 4, 2, 9, 6)
    (sink,) = draw(11, (1, 4, 1, 1))
    operands = {"q": q, "k": k, "v": v, **({"sink_token": sink} if has_sink else {})}
    check(
        ways,
        operands,
        ways.Rule(
            scale=0.25, right=0, bottom_right=True, sink=sink.flatten() if has_sink else None
        ),
        use_causal_mask_bottom_right=True,
        given=("score_max", "score_sum_exp"),
    )


@pytest.mark.parametrize("mask", ["causal", "band"])
def test_statistics_in_base_two(ways, mask):
    options, rule = masks(mask)
    q, k, v = qkv(12, 2, 2, 9, 9)
    found = ways.run(
        "sdpa",
        {"q": q, "k": k, "v": v},
        generate_stats=True,
        stats_use_log2=True,
        attn_scale=0.25,
        **options,
    )
    expected = ways.reference(q, k, v, ways.Rule(scale=0.25, **rule))
    ways.close("Stats", found["Stats"], expected["Stats"] / math.log(2.0), FLOAT32)


def test_scale_tensor(ways):
    q, k, v = qkv(13, 2, 2, 9, 9)
    operands = {"q": q, "k": k, "v": v, "attn_scale": torch.full((1, 1, 1, 1), 0.3)}
    found = ways.run("sdpa", operands, generate_stats=True)
    expected = ways.reference(q, k, v, ways.Rule(scale=0.3))
    ways.close("O", found["O"], expected["O"], FLOAT32)


def test_scale_defaults_to_one(ways):
    q, k, v = qkv(14, 2, 2, 9, 9)
    found = ways.run("sdpa", {"q": q, "k": k, "v": v}, generate_stats=False)
    ways.close("O", found["O"], ways.reference(q, k, v, ways.Rule())["O"], FLOAT32)


def test_float64_is_computed_in_float64(ways):
    q, k, v = draw(15, *[(1, 2, 50, 8)] * 3, dtype=torch.float64)
    found = ways.run(
        "sdpa",
        {"q": q, "k": k, "v": v},
        generate_stats=True,
        attn_scale=0.3,
        use_causal_mask=True,
        outputs={"O": torch.float64, "Stats": torch.float64},
    )
    expected = ways.reference(q, k, v, ways.Rule(scale=0.3, right=0))
    ways.close("O", found["O"], expected["O"], 1e-14)
    ways.close("Stats", found["Stats"], expected["Stats"], 1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_is_no_worse_than_a_rounded_result(ways, dtype, causal):
    """Computed in float32 and rounded once: within the rounding of the output type."""
    q, k, v = draw(16, (2, 4, 65, 32), *[(2, 2, 65, 32)] * 2, dtype=dtype)
    found = ways.run(
        "sdpa",
        {"q": q, "k": k, "v": v},
        generate_stats=True,
        attn_scale=0.2,
        use_causal_mask=causal,
        outputs={"O": dtype},
    )
    expected = ways.reference(q, k, v, ways.Rule(scale=0.2, right=0 if causal else None))
    half_ulp = torch.finfo(dtype).eps / 2
    error = (found["O"].double() - expected["O"]).abs()
    assert (error <= half_ulp * expected["O"].abs() * (1 + 1e-3) + 1e-6).all()
    ways.close("Stats", found["Stats"], expected["Stats"], 1e-5)


LAYOUTS = {
    "bshd": lambda b, h, s, d: (s * h * d, d, h * d, 1),
    "sbhd": lambda b, h, s, d: (h * d, d, b * h * d, 1),
    "gaps": lambda b, h, s, d: (h * s * (d + 3) + 5, s * (d + 3), d + 3, 1),
    "column": lambda b, h, s, d: (h * s * d, s * d, 1, s),
    "step": lambda b, h, s, d: (2 * h * s * d, 2 * s * d, 2 * d, 2),
}


def strided(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    stride = LAYOUTS[layout](*tensor.shape)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True))
    view = torch.full((span,), math.nan).as_strided(tensor.shape, stride)
    return view.copy_(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(ways, layout, causal):
    q, k, v = (strided(x, layout) for x in qkv(17, 4, 2, 9, 9, 8))
    check(
        ways,
        {"q": q, "k": k, "v": v},
        ways.Rule(scale=0.25, right=0 if causal else None),
        use_causal_mask=causal,
        outputs={"O": LAYOUTS[layout](2, 4, 9, 8)},
    )


@pytest.mark.parametrize(("batch", "rows", "keys"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_extents(ways, batch, rows, keys):
    q = torch.ones(batch, 4, rows, 8)
    k, v = torch.ones(batch, 2, keys, 8), torch.ones(batch, 2, keys, 8)
    found = ways.run("sdpa", {"q": q, "k": k, "v": v}, generate_stats=True)
    assert (found["O"] == 0).all()
    assert (found["Stats"] == -math.inf).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", ["causal", "band"])
def test_hidden_keys_may_hold_anything(ways, bad, mask):
    """Rows that do not see the last two keys are those of a run with zeros there."""
    options, rule = masks(mask)
    q, k, v = qkv(18, 4, 2, 12, 12)
    clean = check(ways, {"q": q, "k": k, "v": v}, ways.Rule(scale=0.25, **rule), **options)
    k, v = k.clone(), v.clone()
    k[:, :, 10:], v[:, :, 10:] = bad, bad
    rows = 10 - rule["right"]
    dirty = ways.run(
        "sdpa", {"q": q, "k": k, "v": v}, generate_stats=True, attn_scale=0.25, **options
    )
    for port in ("O", "Stats"):
        ways.close(port, dirty[port][:, :, :rows], clean[port][:, :, :rows], FLOAT32)
    assert not torch.isfinite(dirty["O"][:, :, rows + 2 :]).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bias_hides_what_is_not_finite(ways, bad):
    q, k, v = qkv(19, 4, 2, 6, 6)
    bias = torch.zeros(1, 1, 1, 6)
    bias[..., 3] = -math.inf
    clean = check(ways, {"q": q, "k": k, "v": v, "bias": bias}, ways.Rule(scale=0.25, bias=bias))
    k, v = k.clone(), v.clone()
    k[:, :, 3], v[:, :, 3] = bad, bad
    dirty = ways.run(
        "sdpa", {"q": q, "k": k, "v": v, "bias": bias}, generate_stats=True, attn_scale=0.25
    )
    ways.close("O", dirty["O"], clean["O"], FLOAT32)
    ways.close("Stats", dirty["Stats"], clean["Stats"], FLOAT32)


def test_a_seen_infinity_arrives(ways):
    q, k, v = qkv(20, 2, 2, 6, 6)
    v[0, 0, 2, 1] = math.inf
    v[0, 0, 3, 1] = -math.inf
    v[0, 1, 2, 1] = math.nan
    found = ways.run("sdpa", {"q": q, "k": k, "v": v}, use_causal_mask=True)
    column = found["O"][0, 0, :, 1]
    assert torch.isfinite(column[:2]).all()
    assert column[2] == math.inf
    assert torch.isnan(column[3:]).all()
    assert torch.isnan(found["O"][0, 1, 2:, 1]).all()
    assert torch.isfinite(found["O"][0, :, :, 0]).all()
