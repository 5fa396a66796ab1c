"""Sequences of different lengths: padded, packed one after another, and in pages."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.L0

FLOAT32 = 5e-6
GRADIENTS = ("dQ", "dK", "dV")


def draw(seed: int, *shapes: tuple[int, ...]) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def lengths(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).view(-1, 1, 1, 1)


def sums(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    total = torch.tensor([0, *values]).cumsum(0)
    return total.to(dtype).view(-1, 1, 1, 1)


MASKS = {
    "none": ({}, {}),
    "causal": ({"use_causal_mask": True}, {"right": 0}),
    "causal_bottom_right": (
        {"use_causal_mask_bottom_right": True},
        {"right": 0, "bottom_right": True},
    ),
    "window_bottom_right": (
        {"use_causal_mask_bottom_right": True, "sliding_window_length": 3},
        {"right": 0, "left": 3, "bottom_right": True},
    ),
    "alibi": (
        {"use_causal_mask_bottom_right": True, "use_alibi_mask": True},
        {"right": 0, "bottom_right": True, "alibi": True},
    ),
}
LEN_Q, LEN_KV = [7, 0, 12, 3], [9, 4, 0, 13]


def padded_problem(seed: int, bad: float | None = None):
    """q, k, v, dO with ``bad`` (or ordinary numbers) beyond the lengths."""
    q, k, v, d_o = draw(seed, (4, 4, 12, 8), (4, 2, 13, 8), (4, 2, 13, 6), (4, 4, 12, 6))
    if bad is not None:
        for b in range(4):
            q[b, :, LEN_Q[b] :], d_o[b, :, LEN_Q[b] :] = bad, bad
            k[b, :, LEN_KV[b] :], v[b, :, LEN_KV[b] :] = bad, bad
    return q, k, v, d_o


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", ["lengths", "sums"])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_padded_forward(ways, mask, form, bad):
    options, rule = MASKS[mask]
    q, k, v, _ = padded_problem(1, bad)
    given = {"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)}
    if form == "sums":
        given = {"cu_seq_len_q": sums(LEN_Q), "cu_seq_len_kv": sums(LEN_KV, torch.int32)}
    (sink,) = draw(2, (1, 4, 1, 1))
    found = ways.run(
        "sdpa",
        {"q": q, "k": k, "v": v, "sink_token": sink, **given},
        generate_stats=True,
        use_padding_mask=True,
        attn_scale=0.4,
        given=("score_max", "score_sum_exp"),
        **options,
    )
    q, k, v, _ = padded_problem(1)
    expected = ways.reference(
        q,
        k,
        v,
        ways.Rule(scale=0.4, len_q=LEN_Q, len_kv=LEN_KV, sink=sink.flatten(), **rule),
    )
    rows = torch.arange(12).view(1, 1, -1, 1)
    beyond = rows >= lengths(LEN_Q)
    expected["score_max"] = expected["score_max"].masked_fill(beyond, -math.inf)
    expected["score_sum_exp"] = expected["score_sum_exp"].masked_fill(beyond, 0.0)
    for port, value in found.items():
        ways.close(port, value, expected[port], FLOAT32)


def test_padded_rows_without_any_key_have_no_sink(ways):
    (sink,) = draw(17, (1, 4, 1, 1))
    # As none.
    sink[0, 2] = -math.inf
    q, k = torch.ones(4, 4, 12, 8), torch.ones(4, 2, 0, 8)
    found = ways.run(
        "sdpa",
        {
            **{"q": q, "k": k, "v": k, "sink_token": sink},
            **{"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths([0] * 4)},
        },
        generate_stats=True,
        use_padding_mask=True,
        given=("score_max", "score_sum_exp"),
    )
    beyond = torch.arange(12).view(1, 1, -1, 1) >= lengths(LEN_Q)
    expected = sink.expand(4, 4, 12, 1).masked_fill(beyond, -math.inf)
    assert torch.equal(found["Stats"], expected)
    assert torch.equal(found["score_max"], expected)
    assert torch.equal(found["score_sum_exp"], (expected != -math.inf).float())
    assert (found["O"] == 0).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bad", [None, math.nan])
def test_padded_backward(ways, mask, bad):
    options, rule = MASKS[mask]
    q, k, v, d_o = padded_problem(3)
    (bias,) = draw(4, (1, 4, 12, 13))
    chosen = ways.Rule(scale=0.4, len_q=LEN_Q, len_kv=LEN_KV, bias=bias, **rule)
    forward = ways.reference(q, k, v, chosen)
    expected = ways.gradients(q, k, v, d_o, chosen)
    o, stats = forward["O"].float(), forward["Stats"].float()
    q, k, v, d_o = padded_problem(3, bad)
    if bad is not None:
        for b in range(4):
            o[b, :, LEN_Q[b] :], stats[b, :, LEN_Q[b] :] = bad, bad
    found = ways.run(
        "sdpa_backward",
        {
            **{"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats, "bias": bias},
            **{"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)},
        },
        use_padding_mask=True,
        attn_scale=0.4,
        given=("dBias",),
        **options,
    )
    for port, value in found.items():
        ways.close(port, value, expected[port], FLOAT32)


def pack(bench, dense: torch.Tensor, used: list[int], layout: str, gap: int = 0, multiplier=1):
    """Sequences one after another, ``gap`` rows of NaN behind each, token- or head-major."""
    _, heads, rows, width = dense.shape
    starts, total = [], 0
    for length in used:
        starts.append(total)
        total += length + gap
    capacity = total + 2
    if layout == "token_major":
        data = torch.full((capacity, heads, width), math.nan)
        for b, length in enumerate(used):
            data[starts[b] : starts[b] + length] = dense[b, :, :length].transpose(0, 1)
        stride = (rows * heads * width, width, heads * width, 1)
        step = heads * width
    else:
        data = torch.full((heads, capacity, width), math.nan)
        for b, length in enumerate(used):
            data[:, starts[b] : starts[b] + length] = dense[b, :, :length]
        stride = (rows * width, capacity * width, width, 1)
        step = width
    offsets = torch.tensor([*starts, total]) * (step // multiplier)
    return bench.Ragged(
        data, tuple(dense.shape), stride, offsets.view(-1, 1, 1, 1).to(torch.int64), multiplier
    )


def unpack(ragged, flat: torch.Tensor, used: list[int], fill: float = 0.0) -> torch.Tensor:
    dense = torch.full(ragged.dim, fill, dtype=flat.dtype)
    for b, length in enumerate(used):
        start = int(ragged.offsets[b]) * ragged.multiplier
        size = (ragged.dim[1], length, ragged.dim[3])
        if length:
            view = flat.as_strided(size, ragged.stride[1:], flat.storage_offset() + start)
            dense[b, :, :length] = view
    return dense


def check_untouched(ragged, flat: torch.Tensor, used: list[int]) -> None:
    """Only the declared elements of a packed output were written."""
    declared = torch.zeros(flat.numel(), dtype=torch.bool)
    for b, length in enumerate(used):
        start = int(ragged.offsets[b]) * ragged.multiplier
        size = (ragged.dim[1], length, ragged.dim[3])
        if length:
            declared.as_strided(size, ragged.stride[1:], start).fill_(True)
    cells = flat.contiguous().view(torch.uint8).view(flat.numel(), -1)
    untouched = (cells == 0xFF).all(1)
    assert untouched[~declared].all()
    assert not untouched[declared].any()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("layout", "stats_layout"),
    [("token_major", "token_major"), ("token_major", "head_major"), ("head_major", "token_major")],
)
@pytest.mark.parametrize("gap", [0, 2])
def test_ragged_forward(ways, mask, layout, stats_layout, gap):
    options, rule = MASKS[mask]
    q, k, v, _ = padded_problem(5)
    operands = {
        "q": pack(ways, q, LEN_Q, layout, gap),
        "k": pack(ways, k, LEN_KV, layout, gap, multiplier=2),
        "v": pack(ways, v, LEN_KV, layout),
        "seq_len_q": lengths(LEN_Q),
        "seq_len_kv": lengths(LEN_KV),
    }
    o = pack(ways, torch.zeros(4, 4, 12, 6), LEN_Q, layout, gap)
    stats = pack(ways, torch.zeros(4, 4, 12, 1), LEN_Q, stats_layout, gap)
    found = ways.run(
        "sdpa",
        operands,
        generate_stats=True,
        use_padding_mask=True,
        attn_scale=0.4,
        outputs={"O": o, "Stats": stats},
        **options,
    )
    expected = ways.reference(q, k, v, ways.Rule(scale=0.4, len_q=LEN_Q, len_kv=LEN_KV, **rule))
    ways.close("O", unpack(o, found["O"], LEN_Q), expected["O"], FLOAT32)
    ways.close("Stats", unpack(stats, found["Stats"], LEN_Q, -math.inf), expected["Stats"], FLOAT32)
    check_untouched(o, found["O"], LEN_Q)
    check_untouched(stats, found["Stats"], LEN_Q)


def test_ragged_queries_with_padded_keys_and_outputs(ways):
    q, k, v, _ = padded_problem(6, math.nan)
    found = ways.run(
        "sdpa",
        {
            "q": pack(ways, padded_problem(6)[0], LEN_Q, "token_major"),
            **{"k": k, "v": v, "seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)},
        },
        generate_stats=True,
        use_padding_mask=True,
    )
    q, k, v, _ = padded_problem(6)
    expected = ways.reference(q, k, v, ways.Rule(len_q=LEN_Q, len_kv=LEN_KV))
    ways.close("O", found["O"], expected["O"], FLOAT32)
    ways.close("Stats", found["Stats"], expected["Stats"], FLOAT32)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("gap", [0, 2])
def test_ragged_backward(ways, mask, gap):
    options, rule = MASKS[mask]
    q, k, v, d_o = padded_problem(7)
    chosen = ways.Rule(scale=0.4, len_q=LEN_Q, len_kv=LEN_KV, **rule)
    forward = ways.reference(q, k, v, chosen)
    expected = ways.gradients(q, k, v, d_o, chosen)
    used = {"dQ": LEN_Q, "dK": LEN_KV, "dV": LEN_KV}
    outputs = {
        port: pack(ways, torch.zeros(dense.shape), used[port], "token_major", gap)
        for port, dense in zip(GRADIENTS, (q, k, v), strict=True)
    }
    found = ways.run(
        "sdpa_backward",
        {
            "q": pack(ways, q, LEN_Q, "token_major"),
            "k": pack(ways, k, LEN_KV, "token_major"),
            "v": pack(ways, v, LEN_KV, "head_major"),
            "o": pack(ways, forward["O"].float(), LEN_Q, "token_major"),
            "dO": pack(ways, d_o, LEN_Q, "head_major"),
            "stats": pack(ways, forward["Stats"].float(), LEN_Q, "head_major"),
            "seq_len_q": lengths(LEN_Q),
            "seq_len_kv": lengths(LEN_KV),
        },
        use_padding_mask=True,
        attn_scale=0.4,
        outputs=outputs,
        **options,
    )
    for port, layout in outputs.items():
        ways.close(port, unpack(layout, found[port], used[port]), expected[port], FLOAT32)
        check_untouched(layout, found[port], used[port])


def varlen(bench, used_q, used_kv, heads_q, heads_kv, depth, seed, **options):
    """Forward and backward over packed q and k; returns dense results and their reference."""
    rows, keys, batch = max(used_q), max(used_kv), len(used_q)
    q, k, v, d_o = draw(
        seed,
        (batch, heads_q, rows, depth),
        *[(batch, heads_kv, keys, depth)] * 2,
        (batch, heads_q, rows, depth),
    )
    rule = bench.Rule(
        scale=depth**-0.5,
        len_q=used_q,
        len_kv=used_kv,
        right=0 if options.get("use_causal_mask") else None,
    )
    shared = {"seq_len_q": lengths(used_q), "seq_len_kv": lengths(used_kv)}
    packed = {
        "q": pack(bench, q, used_q, "token_major"),
        "k": pack(bench, k, used_kv, "token_major"),
        "v": pack(bench, v, used_kv, "token_major"),
    }
    o = pack(bench, torch.zeros(q.shape), used_q, "token_major")
    options.update(use_padding_mask=True, attn_scale=rule.scale)
    forward = bench.run(
        "sdpa", {**packed, **shared}, generate_stats=True, outputs={"O": o}, **options
    )
    expected = bench.reference(q, k, v, rule)
    bench.close("O", unpack(o, forward["O"], used_q), expected["O"], FLOAT32)
    bench.close("Stats", forward["Stats"], expected["Stats"], FLOAT32)
    outputs = {
        port: pack(bench, torch.zeros(dense.shape), used, "token_major")
        for port, dense, used in zip(GRADIENTS, (q, k, v), (used_q, used_kv, used_kv), strict=True)
    }
    saved = {
        "o": pack(bench, expected["O"].float(), used_q, "token_major"),
        "dO": pack(bench, d_o, used_q, "token_major"),
        "stats": expected["Stats"].float(),
    }
    found = bench.run("sdpa_backward", {**packed, **shared, **saved}, outputs=outputs, **options)
    return found, outputs, bench.gradients(q, k, v, d_o, rule)


def test_short_segments_of_nine_query_heads(ways):
    """cu_q = [0, 1, 1, 2], cu_k = [0, 3, 3, 8], nine query heads on three, causal."""
    used_q, used_kv = [1, 0, 1], [3, 0, 5]
    found, outputs, expected = varlen(ways, used_q, used_kv, 9, 3, 64, seed=8, use_causal_mask=True)
    used = {"dQ": used_q, "dK": used_kv, "dV": used_kv}
    for port, layout in outputs.items():
        ways.close(port, unpack(layout, found[port], used[port]), expected[port], FLOAT32)


def test_keys_of_segments_without_queries_have_no_gradient(bench):
    """cu_q = [0, 0, 1208, 2048, 2048], cu_k = [0, 2538, 4280, 5120, 8192], a sixteenth of it."""
    used_q, used_kv = [0, 75, 53, 0], [158, 109, 53, 192]
    found, outputs, expected = varlen(bench, used_q, used_kv, 4, 1, 256, seed=9)
    d_k = found["dK"].view(-1, 256)
    assert (d_k[:158] == 0).all()
    assert (d_k[158 + 109 + 53 : 512] == 0).all()
    layout = outputs["dK"]
    bench.close("dK", unpack(layout, found["dK"], used_kv), expected["dK"], FLOAT32)


def test_cache_of_128_with_nan_beyond_the_used_part(ways):
    used = [32, 64, 96, 48]
    q, k, v = draw(10, (4, 8, 1, 64), (4, 2, 128, 64), (4, 2, 128, 64))
    expected = ways.reference(q, k, v, ways.Rule(scale=0.125, len_kv=used))
    for b, length in enumerate(used):
        k[b, :, length:], v[b, :, length:] = math.nan, math.nan
    found = ways.run(
        "sdpa",
        {
            **{"q": q, "k": k, "v": v},
            **{"seq_len_q": lengths([1] * 4), "seq_len_kv": lengths(used)},
        },
        generate_stats=True,
        use_padding_mask=True,
        attn_scale=0.125,
    )
    ways.close("O", found["O"], expected["O"], FLOAT32)
    ways.close("Stats", found["Stats"], expected["Stats"], FLOAT32)


def paged(dense, used, page, seed, bad_entry):
    """A container of pages in random order, NaN where no token lies, and its table."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, keys, width = dense.shape
    entries = -(-keys // page)
    count = sum(-(-length // page) for length in used) + 3
    order = torch.randperm(count, generator=generator).tolist()
    container = torch.full((count, heads, page, width), math.nan)
    table = torch.full((batch, 1, entries, 1), bad_entry, dtype=torch.int32)
    for b, length in enumerate(used):
        for entry in range(-(-length // page)):
            table[b, 0, entry, 0] = order.pop()
            tokens = dense[b, :, entry * page : min((entry + 1) * page, length)]
            container[table[b, 0, entry, 0], :, : tokens.shape[1]] = tokens
    return container, table


def packed_table(bench, table, used, page, dtype=torch.int64, multiplier=1):
    """The used entries of a table's rows, one row after another."""
    counts = [-(-length // page) for length in used]
    rows = [row.reshape(-1)[:count] for row, count in zip(table, counts, strict=True)]
    # Each row starts at a multiple of what an offset counts.
    gaps = [row.new_full((-len(row) % multiplier,), 2**31 - 1) for row in rows]
    data = torch.cat([piece for pair in zip(rows, gaps, strict=True) for piece in pair])
    starts = sums([-(-count // multiplier) for count in counts], dtype)
    return bench.Ragged(data, tuple(table.shape), (1, 1, 1, 1), starts, multiplier)


@pytest.mark.parametrize(("page_k", "page_v"), [(4, 4), (1, 3), (16, 4), (256, 128)])
@pytest.mark.parametrize("bad_entry", [0, -1, 2**31 - 1, "packed"])
def test_paged_keys_and_values(ways, page_k, page_v, bad_entry):
    """Tables of their own, free slots of last pages, entries behind the last used one or none."""
    used = [13, 0, 5, 20]
    q, k, v = draw(11, (4, 4, 3, 8), (4, 2, 20, 8), (4, 2, 20, 6))
    is_packed = bad_entry == "packed"
    k_pages, k_table = paged(k, used, page_k, 12, 0 if is_packed else bad_entry)
    v_pages, v_table = paged(v, used, page_v, 13, 0 if is_packed else bad_entry)
    if is_packed:
        k_table = packed_table(ways, k_table, used, page_k)
        v_table = packed_table(ways, v_table, used, page_v, torch.int32, multiplier=3)
    found = ways.run(
        "sdpa",
        {
            **{"q": q, "k": k_pages, "v": v_pages},
            **{"paged_attention_k_table": k_table, "paged_attention_v_table": v_table},
            **{"seq_len_q": lengths([3] * 4), "seq_len_kv": lengths(used)},
        },
        generate_stats=True,
        use_padding_mask=True,
        use_causal_mask_bottom_right=True,
        attn_scale=0.4,
        paged_attention_max_seq_len_kv=20,
    )
    rule = ways.Rule(scale=0.4, len_kv=used, right=0, bottom_right=True)
    expected = ways.reference(q, k, v, rule)
    ways.close("O", found["O"], expected["O"], FLOAT32)
    ways.close("Stats", found["Stats"], expected["Stats"], FLOAT32)


def test_a_used_table_entry_without_a_page_is_refused(bench):
    from tilewright.errors import BindingError

    q, k = draw(14, (1, 2, 1, 8), (3, 2, 4, 8))
    table = torch.tensor([0, 3], dtype=torch.int32).view(1, 1, 2, 1)
    with pytest.raises(BindingError, match=r"k_table.*\[0, 3\].*has 3"):
        bench.run(
            "sdpa",
            {
                **{"q": q, "k": k, "v": k},
                **{"paged_attention_k_table": table, "paged_attention_v_table": table},
                **{"seq_len_q": lengths([1]), "seq_len_kv": lengths([5])},
            },
            use_padding_mask=True,
            paged_attention_max_seq_len_kv=8,
        )


def test_a_packed_row_of_page_numbers_beyond_its_buffer_is_refused(bench):
    from tilewright.errors import BindingError

    q, k = draw(14, (2, 2, 1, 8), (3, 2, 4, 8))
    rows = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32).view(2, 1, 2, 1)
    table = packed_table(bench, rows, [8, 8], 4)
    table.data = table.data[:3]
    with pytest.raises(BindingError, match=r"k_table: a sequence of 2 rows at element 2.* has 3"):
        bench.run(
            "sdpa",
            {
                **{"q": q, "k": k, "v": k},
                **{"paged_attention_k_table": table, "paged_attention_v_table": table},
                **{"seq_len_q": lengths([1, 1]), "seq_len_kv": lengths([8, 8])},
            },
            use_padding_mask=True,
            paged_attention_max_seq_len_kv=8,
        )


def test_a_sequence_beyond_its_buffer_is_refused(bench):
    from tilewright.errors import BindingError

    q, k, v, _ = padded_problem(15)
    packed = pack(bench, q, LEN_Q, "token_major")
    packed.data = packed.data[: sum(LEN_Q) - 1].contiguous()
    with pytest.raises(BindingError, match="q: a sequence of 3 rows"):
        bench.run(
            "sdpa",
            {
                **{"q": packed, "k": k, "v": v},
                **{"seq_len_q": lengths(LEN_Q), "seq_len_kv": lengths(LEN_KV)},
            },
            use_padding_mask=True,
        )
