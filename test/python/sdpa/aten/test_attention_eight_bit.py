"""FP8 attention, with a scale a tensor."""

from __future__ import annotations

import math

import pytest
import torch
from eight_bit import E4M3, E5M2, MASKS, draw, masks, one

pytestmark = pytest.mark.L0

LARGEST = {E4M3: 448.0, E5M2: 57344.0}

# An FP8 value that lies near a midpoint may round the other way in float32 than in float64: one
# step of P is at most 1/8 (E4M3) or 1/4 (E5M2) of it, and P of one key is a small part of a row.
FLIP = {E4M3: 2e-3, E5M2: 4e-3}


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Nearest code of an FP8 type by search, ties to the even code, saturating; float64."""
    codes = torch.arange(256, dtype=torch.uint8)
    table = codes.view(dtype).double()
    keep = torch.isfinite(table) & ~torch.signbit(table)
    order = table[keep].argsort()
    numbers, codes = table[keep][order], codes[keep][order]
    magnitude = values.double().abs().clamp(max=LARGEST[dtype])
    upper = torch.searchsorted(numbers, magnitude).clamp(1, numbers.numel() - 1)
    low, high = numbers[upper - 1], numbers[upper]
    to_low, to_high = magnitude - low, high - magnitude
    even = (codes[upper - 1] % 2 == 0).expand(magnitude.shape)
    chosen = torch.where((to_low < to_high) | ((to_low == to_high) & even), low, high)
    return torch.where(values.double() < 0, -chosen, chosen)


def test_rounding_by_search_is_the_cast_of_torch():
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 20
    ties = torch.tensor([1.0625, 1.1875, 2**-10, 3 * 2**-10, -1.0625, 447.0])
    for dtype in (E4M3, E5M2):
        for source in (values, ties):
            assert torch.equal(round_to(source, dtype), source.to(dtype).double())


FORWARD_SCALES = {
    "descale_q": 0.5,
    "descale_k": 0.25,
    "descale_v": 2.0,
    "descale_s": 1 / 256,
    "scale_s": 256.0,
    "scale_o": 16.0,
}


def problem(seed: int, dtype: torch.dtype) -> list:
    shapes = ((2, 4, 33, 16), (2, 2, 40, 16), (2, 2, 40, 24), (2, 4, 33, 24))
    return [(x * 4).to(dtype) for x in draw(seed, *shapes)]


def expected_forward(bench, q, k, v, dtype, rule):
    s = FORWARD_SCALES
    forward = bench.reference(q.double() * s["descale_q"], k.double() * s["descale_k"], v, rule)
    p8 = round_to(forward["P"] * s["scale_s"], dtype)
    values = v.double().repeat_interleave(2, 1)
    o = (p8 @ values) * s["descale_s"] * s["descale_v"]
    return {**forward, "O": o, "Amax_S": forward["P"].max(), "Amax_O": o.abs().max()}


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, E4M3, E5M2])
def test_fp8_forward(ways, dtype, mask, out):
    options, rule = masks(mask)
    q, k, v, _ = problem(1, dtype)
    rule = ways.Rule(scale=0.25, **rule)
    scales = {port: one(value) for port, value in FORWARD_SCALES.items()}
    found = ways.run(
        "sdpa_fp8",
        {"q": q, "k": k, "v": v, **scales},
        generate_stats=True,
        attn_scale=0.25,
        outputs={"O": out},
        **options,
    )
    expected = expected_forward(ways, q, k, v, dtype, rule)
    ways.close("Stats", found["Stats"], expected["Stats"], 3e-6)
    ways.close("Amax_S", found["Amax_S"].squeeze(), expected["Amax_S"], 3e-6)
    ways.close("Amax_O", found["Amax_O"].squeeze(), expected["Amax_O"], FLIP[dtype])
    rounding = {torch.float32: 0.0, torch.bfloat16: 2**-8, E4M3: 2**-4, E5M2: 2**-3}[out]
    scaled = expected["O"] * 16.0
    error = (found["O"].double() - scaled).abs()
    assert (error <= rounding * scaled.abs() + FLIP[dtype] * scaled.abs().max()).all()


def test_fp8_saturates_and_keeps_nan(bench):
    q, k, v, _ = problem(2, E4M3)
    v.view(torch.uint8)[0, 0, 3, 5] = 0x7F
    scales = {port: one(value) for port, value in FORWARD_SCALES.items()}
    scales["scale_o"] = one(1e6)
    found = bench.run("sdpa_fp8", {"q": q, "k": k, "v": v, **scales}, outputs={"O": E4M3})
    o = found["O"].float()
    assert torch.isnan(o[0, :2, :, 5]).all()
    assert torch.isnan(o).sum() == 2 * 33
    assert o[~torch.isnan(o)].abs().max() == 448.0


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_probabilities_saturate(ways, dtype):
    """A scale that takes every P beyond the largest number: each key counts as that."""
    q, k, v, _ = problem(12, dtype)
    scales = {port: one(value) for port, value in FORWARD_SCALES.items()}
    scales.update(scale_s=one(1e30), descale_s=one(1.0), scale_o=one(1.0), descale_v=one(1.0))
    # Queries of 0 give every key the same probability.
    q = torch.zeros(q.shape).to(dtype)
    found = ways.run("sdpa_fp8", {"q": q, "k": k, "v": v, **scales}, outputs={"O": torch.float32})
    expected = LARGEST[dtype] * v.double().sum(2, keepdim=True).repeat_interleave(2, 1)
    ways.close("O", found["O"], expected.expand(2, 4, 33, 24), 1e-5)


BACKWARD_SCALES = {
    **{"descale_q": 0.5, "descale_k": 0.25, "descale_v": 2.0, "descale_o": 0.5},
    **{"descale_dO": 0.125, "descale_s": 1 / 256, "descale_dP": 1 / 64, "scale_s": 256.0},
    **{"scale_dQ": 2.0, "scale_dK": 4.0, "scale_dV": 8.0, "scale_dP": 64.0},
}


@pytest.mark.parametrize(("dtype", "d_o_dtype"), [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize("mask", MASKS)
def test_fp8_backward(ways, dtype, d_o_dtype, mask):
    options, rule = masks(mask)
    q, k, v, d_o = problem(3, dtype)
    d_o = d_o.float().to(d_o_dtype)
    s = BACKWARD_SCALES
    rule = ways.Rule(scale=0.25, **rule)
    forward = ways.reference(
        q.double() * s["descale_q"], k.double() * s["descale_k"], v.double() * s["descale_v"], rule
    )
    o = (forward["O"] / s["descale_o"]).float().to(dtype)
    found = ways.run(
        "sdpa_fp8_backward",
        {
            **{"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": forward["Stats"].float()},
            **{port: one(value) for port, value in s.items()},
        },
        attn_scale=0.25,
        outputs=dict.fromkeys(("dQ", "dK", "dV"), torch.float32),
        **options,
    )
    p, group = forward["P"], (2, 2, 2)
    q64, d_o64, o64 = q.double(), d_o.double(), o.double()
    k64, v64 = (x.double().repeat_interleave(2, 1) for x in (k, v))
    delta = (o64 * d_o64).sum(-1, keepdim=True) * s["descale_o"] * s["descale_dO"]
    d_p = d_o64 @ v64.transpose(2, 3) * s["descale_dO"] * s["descale_v"]
    d_s = 0.25 * p * (d_p - delta)
    p8 = round_to(p * s["scale_s"], dtype).transpose(2, 3)
    d_s8 = round_to(d_s * s["scale_dP"], d_o_dtype)
    expected = {
        "dQ": d_s8 @ k64 * s["descale_dP"] * s["descale_k"],
        "dK": (d_s8.transpose(2, 3) @ q64).unflatten(1, group[:2]).sum(2)
        * (s["descale_dP"] * s["descale_q"]),
        "dV": (p8 @ d_o64).unflatten(1, group[:2]).sum(2) * (s["descale_s"] * s["descale_dO"]),
    }
    ways.close("amax_dP", found["amax_dP"].squeeze(), d_s.abs().max(), 1e-5)
    for port, value in expected.items():
        limit = FLIP[d_o_dtype] * value.abs().max().item()
        assert (found[port].double() / s[f"scale_{port}"] - value).abs().max() <= limit
        assert abs(found[f"amax_{port}"].item() - value.abs().max().item()) <= limit


@pytest.mark.parametrize("packed", [False, True])
def test_fp8_paged(ways, packed):
    """A container of 8-bit pages, NaN in what no token uses; rows of tables one after another."""
    q, k, v, _ = problem(4, E4M3)
    used, page = [40, 13], 8
    table = torch.tensor([[0, 2, 4, 6, 1], [5, 3, 99, -1, 99]], dtype=torch.int32)
    pages = {}
    for side, dense in (("k", k), ("v", v)):
        filled = torch.full((7, 2, page, dense.shape[3]), math.nan)
        for b, length in enumerate(used):
            for entry in range(-(-length // page)):
                tokens = dense[b, :, entry * page : min((entry + 1) * page, length)].float()
                filled[table[b, entry], :, : tokens.shape[1]] = tokens
        pages[side] = filled.to(E4M3)
    lengths = torch.tensor(used, dtype=torch.int32).view(2, 1, 1, 1)
    rows = table.view(2, 1, 5, 1)
    if packed:
        starts = torch.tensor([0, 5, 7]).view(3, 1, 1, 1)
        rows = ways.Ragged(table.flatten()[:7], (2, 1, 5, 1), (1, 1, 1, 1), starts)
    tables = {f"paged_attention_{side}_table": rows for side in "kv"}
    found = ways.run(
        "sdpa_fp8",
        {
            **{"q": q, **pages, **tables, "seq_len_q": lengths * 0 + 33, "seq_len_kv": lengths},
            **{port: one(value) for port, value in FORWARD_SCALES.items()},
        },
        use_padding_mask=True,
        attn_scale=0.25,
        paged_attention_max_seq_len_kv=40,
        outputs={"O": torch.float32},
    )
    rule = ways.Rule(scale=0.25, len_kv=used)
    expected = expected_forward(ways, q, k, v, E4M3, rule)
    ways.close("O", found["O"] / 16.0, expected["O"], FLIP[E4M3])


@pytest.mark.parametrize("packed", [False, True])
def test_fp8_sequences_of_different_lengths(ways, packed):
    """8-bit results: padded rows 0, and behind a packed sequence nothing."""
    used_q, used_kv = [33, 7], [13, 40]
    q, k, v, d_o = problem(10, E4M3)
    lengths = {
        f"seq_len_{side}": torch.tensor(used, dtype=torch.int32).view(2, 1, 1, 1)
        for side, used in (("q", used_q), ("kv", used_kv))
    }

    def lay(dense, used):
        if not packed:
            return dense
        rows = [dense[b, :, :n].transpose(0, 1) for b, n in enumerate(used)]
        step = dense.shape[1] * dense.shape[3]
        offsets = torch.tensor([0, used[0] * step, sum(used) * step]).view(3, 1, 1, 1)
        stride = (dense.shape[2] * step, dense.shape[3], step, 1)
        return ways.Ragged(torch.cat(rows).contiguous(), tuple(dense.shape), stride, offsets)

    def dense_of(flat, like, used):
        if not packed:
            return flat.float()
        rows = flat.float().view(-1, like.shape[1], like.shape[3])
        found = torch.zeros(like.shape)
        found[0, :, : used[0]] = rows[: used[0]].transpose(0, 1)
        found[1, :, : used[1]] = rows[used[0] :].transpose(0, 1)
        return found

    o_like = torch.zeros(2, 4, 33, 24).to(E4M3)
    operands = {"q": lay(q, used_q), "k": lay(k, used_kv), "v": lay(v, used_kv), **lengths}
    found = ways.run(
        "sdpa_fp8",
        {**operands, **{port: one(value) for port, value in FORWARD_SCALES.items()}},
        generate_stats=True,
        use_padding_mask=True,
        attn_scale=0.25,
        outputs={"O": lay(o_like, used_q) if packed else E4M3},
    )
    rule = ways.Rule(scale=0.25, len_q=used_q, len_kv=used_kv)
    expected = expected_forward(ways, q, k, v, E4M3, rule)
    o = dense_of(found["O"], o_like, used_q) / 16.0
    ways.close("O", o, expected["O"], 2**-4)
    assert (o[1, :, 7:] == 0).all()
    ways.close("Amax_O", found["Amax_O"].squeeze(), expected["Amax_O"], FLIP[E4M3])
    o8 = (expected["O"] * 2).float().to(E4M3)
    likes = {"dQ": (q, used_q), "dK": (k, used_kv), "dV": (v, used_kv)}
    found = ways.run(
        "sdpa_fp8_backward",
        {
            **operands,
            **{"o": lay(o8, used_q), "dO": lay(d_o, used_q)},
            "stats": expected["Stats"].float(),
            **{port: one(value) for port, value in BACKWARD_SCALES.items()},
        },
        use_padding_mask=True,
        attn_scale=0.25,
        outputs={port: lay(*like) if packed else E4M3 for port, like in likes.items()},
    )
    for port, (like, used) in likes.items():
        value = dense_of(found[port], like, used)
        assert torch.isfinite(value).all()
        assert (value[1, :, used[1] :] == 0).all() and (value[0, :, used[0] :] == 0).all()
        amax = found[f"amax_{port}"].item()
        stored = min(amax * BACKWARD_SCALES[f"scale_{port}"], 448.0)
        assert abs(value.abs().max().item() - stored) <= 2**-4 * stored
