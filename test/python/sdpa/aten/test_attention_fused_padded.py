"""Which calls with lengths go to ATen's fused attention, and what may lie beyond the lengths."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.engines.aten import attention_fused_padded

pytestmark = pytest.mark.L0

LEN_Q, LEN_KV = [7, 0, 12, 3], [9, 4, 0, 13]
MASKS = {
    "none": ({}, {}),
    "causal": ({"use_causal_mask": True}, {"right": 0}),
    "bottom_right": (
        {"use_causal_mask_bottom_right": True},
        {"right": 0, "bottom_right": True},
    ),
    "window": (
        {"use_causal_mask_bottom_right": True, "sliding_window_length": 3},
        {"right": 0, "left": 3, "bottom_right": True},
    ),
    "band": (
        {"diagonal_band_left_bound": 2, "diagonal_band_right_bound": 1},
        {"right": 1, "left": 2},
    ),
}


def draw(seed: int, *shapes: tuple[int, ...]) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def lengths(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).view(-1, 1, 1, 1)


def sums(values: list[int]) -> torch.Tensor:
    return torch.tensor([0, *values]).cumsum(0).view(-1, 1, 1, 1)


def problem(seed: int, bad: float | None = None):
    """q, k, v, dO with ``bad`` (or ordinary numbers) beyond the lengths."""
    q, k, v, d_o = draw(seed, (4, 4, 12, 8), (4, 2, 13, 8), (4, 2, 13, 8), (4, 4, 12, 8))
    if bad is not None:
        for b in range(4):
            q[b, :, LEN_Q[b] :], d_o[b, :, LEN_Q[b] :] = bad, bad
            k[b, :, LEN_KV[b] :], v[b, :, LEN_KV[b] :] = bad, bad
    return q, k, v, d_o


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ["lengths", "sums"])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
@pytest.mark.parametrize("biased", [False, True])
def test_padded_forward_is_fused(bench, calls, mask, form, bad, biased):
    options, rule = MASKS[mask]
    q, k, v, _ = problem(1, bad)
    given = {"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)}
    if form == "sums":
        given = {"cu_seq_len_q": sums(LEN_Q), "cu_seq_len_kv": sums(LEN_KV)}
    (bias,) = draw(2, (1, 4, 1, 13))
    if biased:
        given["bias"] = bias
    found = bench.run(
        "sdpa",
        {"q": q, "k": k, "v": v, **given},
        generate_stats=True,
        use_padding_mask=True,
        attn_scale=0.4,
        **options,
    )
    # Once more with zeros beyond the lengths if the result was not finite.
    assert calls["forward"] == (1 if bad is None else 2)
    q, k, v, _ = problem(1)
    chosen = bench.Rule(
        scale=0.4, len_q=LEN_Q, len_kv=LEN_KV, bias=bias if biased else None, **rule
    )
    expected = bench.reference(q, k, v, chosen)
    for port, value in found.items():
        bench.close(port, value, expected[port], 5e-6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bad", [None, math.nan])
def test_padded_backward_is_fused(bench, calls, mask, bad):
    options, rule = MASKS[mask]
    q, k, v, d_o = problem(3)
    chosen = bench.Rule(scale=0.4, len_q=LEN_Q, len_kv=LEN_KV, **rule)
    forward = bench.reference(q, k, v, chosen)
    expected = bench.gradients(q, k, v, d_o, chosen)
    stats, o = forward["Stats"].float(), forward["O"].float()
    q, k, v, d_o = problem(3, bad)
    if bad is not None:
        for b in range(4):
            stats[b, :, LEN_Q[b] :], o[b, :, LEN_Q[b] :] = bad, bad
    found = bench.run(
        "sdpa_backward",
        {
            **{"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats},
            **{"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)},
        },
        use_padding_mask=True,
        attn_scale=0.4,
        **options,
    )
    assert calls["backward"] == (1 if bad is None else 2)
    for port, value in found.items():
        bench.close(port, value, expected[port], 5e-6)
        for b in range(4):
            used = LEN_Q[b] if port == "dQ" else LEN_KV[b]
            assert (value[b, :, used:] == 0).all()


def test_what_lies_beyond_the_lengths_changes_no_bit(bench, calls):
    operands = {"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)}
    found = [
        bench.run(
            "sdpa",
            {**operands, **dict(zip("qkv", problem(11, bad)[:3], strict=True))},
            generate_stats=True,
            use_padding_mask=True,
        )
        for bad in (0.0, 3.0, math.nan, -math.inf)
    ]
    for other in found[1:]:
        for port, value in found[0].items():
            assert torch.equal(value, other[port])


def test_logarithms_to_base_2(bench, calls):
    q, k, v, _ = problem(4)
    rule = bench.Rule(scale=0.4, len_q=LEN_Q, len_kv=LEN_KV)
    given = {"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)}
    options = {"use_padding_mask": True, "attn_scale": 0.4, "stats_use_log2": True}
    found = bench.run("sdpa", {"q": q, "k": k, "v": v, **given}, generate_stats=True, **options)
    expected = bench.reference(q, k, v, rule)
    bench.close("Stats", found["Stats"], expected["Stats"] / math.log(2.0), 5e-6)
    assert calls["forward"] == 1


def test_visible_nan_stays(bench, calls):
    q, k, v, _ = problem(5)
    v[0, 0, 8, 0] = math.nan
    found = bench.run(
        "sdpa",
        {
            **{"q": q, "k": k, "v": v},
            **{"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)},
        },
        use_padding_mask=True,
        use_causal_mask_bottom_right=True,
    )
    # Row 6 alone sees the last key, for both heads that read it.
    assert torch.isnan(found["O"]).nonzero().tolist() == [[0, 0, 6, 0], [0, 1, 6, 0]]


def test_a_row_that_the_bias_hides(bench, calls):
    q, k, v, _ = problem(6)
    bias = torch.zeros(1, 1, 12, 13)
    bias[..., 2, :] = -math.inf
    found = bench.run(
        "sdpa",
        {
            **{"q": q, "k": k, "v": v, "bias": bias},
            **{"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)},
        },
        generate_stats=True,
        use_padding_mask=True,
    )
    assert (found["O"][:, :, 2] == 0).all()
    assert (found["Stats"][:, :, 2] == -math.inf).all()


def test_much_padding_is_left_to_the_composition(bench, calls, monkeypatch):
    q, k, v, _ = problem(7)
    operands = {"q": q, "k": k, "v": v, "seq_len_q": lengths([12] * 4)}
    hidden = 12 * (13 - 5) * 4 * 8
    for allowed, fused in ((hidden, 1), (hidden - 1, 0)):
        monkeypatch.setattr(attention_fused_padded, "WASTE_A_SEQUENCE", allowed)
        calls["forward"] = 0
        found = bench.run(
            "sdpa", {**operands, "seq_len_kv": lengths([5] * 4)}, use_padding_mask=True
        )
        assert calls["forward"] == fused
        expected = bench.reference(q, k, v, bench.Rule(len_kv=[5] * 4))
        bench.close("O", found["O"], expected["O"], 5e-6)


def test_a_large_mask_is_left_to_the_composition(bench, calls, monkeypatch):
    q, k, v, _ = problem(8)
    operands = {"q": q, "k": k, "v": v, "seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)}
    monkeypatch.setattr(attention_fused_padded, "MASK_ELEMENTS", 4 * 12 * 13 - 1)
    bench.run("sdpa", operands, use_padding_mask=True)
    assert calls["forward"] == 1
    bench.run("sdpa", operands, use_padding_mask=True, use_causal_mask_bottom_right=True)
    assert calls["forward"] == 1


def test_a_sink_is_composed(bench, calls):
    q, k, v, _ = problem(9)
    operands = {"q": q, "k": k, "v": v, "seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)}
    (sink,) = draw(10, (1, 4, 1, 1))
    bench.run("sdpa", {**operands, "sink_token": sink}, use_padding_mask=True)
    assert calls["forward"] == 0
