"""Samples of attention: each engine, direction and place of keys, and every feature of scores."""

from __future__ import annotations

from typing import Any

import torch

from launch_samples.declaring import Declaring


def attention(d: Declaring) -> None:
    dim = (2, 4, d.rows, 64)
    operands = d("q", dim), d("k", dim), d("v", dim)
    o, stats = d.graph.sdpa(*operands, generate_stats=True, use_causal_mask=True, attn_scale=0.125)
    d.out("o", o, dim)
    d.out("stats", stats, (2, 4, d.rows, 1), "float32")


def attention_without_hopper(d: Declaring) -> None:
    d.barred = ("hopper",)
    attention(d)


def attention_of_whole_tiles(d: Declaring) -> None:
    # Rows of warp groups that are full, where the compiler deals loops to them.
    several_tiles(d, 256, 128)


def attention_of_part_tiles(d: Declaring) -> None:
    several_tiles(d, 200, 128)


def attention_of_wide_heads(d: Declaring) -> None:
    several_tiles(d, 200, 256)


def several_tiles(d: Declaring, rows: int, width: int) -> None:
    d.barred = ("hopper",)
    dim = (2, 2, rows, width)
    operands = d("q", dim), d("k", dim), d("v", dim)
    o, stats = d.graph.sdpa(*operands, generate_stats=True, use_causal_mask=True, attn_scale=0.125)
    d.out("o", o, dim)
    d.out("stats", stats, (2, 2, rows, 1), "float32")


def attention_gated_behind(d: Declaring) -> None:
    # So many keys that the gate is a kernel of its own.
    d.barred = ("hopper",)
    dim, long = (1, 2, 256, 128), (1, 2, 2048, 128)
    operands = d("q", dim), d("k", long), d("v", long)
    o, _ = d.graph.sdpa(*operands, is_inference=True, attn_scale=0.125)
    d.out("o", d.graph.mul(o, d.graph.sigmoid(d("gate", dim))), dim)


def attention_with_its_draws(d: Declaring) -> None:
    d.barred = ("hopper",)
    dim, draws = (2, 4, d.rows, 64), d.graph.tensor(name="draws")
    words = [d.given(name, torch.full((1, 1, 1, 1), 7)) for name in ("seed", "offset")]
    operands = d("q", dim), d("k", dim), d("v", dim)
    options = {"dropout": (0.25, *words), "rng_dump": draws}
    o, _ = d.graph.sdpa(*operands, is_inference=True, attn_scale=0.125, **options)
    d.out("o", o, dim)
    d.out("draws", draws, (2, 4, d.rows, d.rows), "float32")


def attention_gated(d: Declaring) -> None:
    d.barred = ("hopper",)
    dim = (2, 4, d.rows, 64)
    operands = d("q", dim), d("k", dim), d("v", dim)
    o, _ = d.graph.sdpa(*operands, is_inference=True, use_causal_mask=True, attn_scale=0.125)
    d.out("o", d.graph.mul(o, d.graph.sigmoid(d("gate", dim))), dim)


def attention_padded(d: Declaring) -> None:
    d.barred = ("hopper",)
    dim, lengths = (2, 4, d.rows, 64), torch.tensor([d.rows, d.rows // 3], dtype=torch.int32)
    o, _ = d.graph.sdpa(
        *(d("q", dim), d("k", dim), d("v", dim)),
        is_inference=True,
        attn_scale=0.125,
        use_padding_mask=True,
        seq_len_q=d.given("seq_len_q", lengths.view(2, 1, 1, 1)),
        seq_len_kv=d.given("seq_len_kv", lengths.flip(0).view(2, 1, 1, 1)),
    )
    d.out("o", o, dim)


def attention_backward(d: Declaring) -> None:
    dim = (2, 4, d.rows, 64)
    operands = [d(name, dim) for name in ("q", "k", "v", "o", "grad")]
    stats = d("stats", (2, 4, d.rows, 1), "float32")
    made = d.graph.sdpa_backward(*operands, stats, attn_scale=0.125, use_causal_mask=True)
    for name, tensor in zip(("dq", "dk", "dv"), made, strict=True):
        d.out(name, tensor, dim)


def attention_backward_without_hopper(d: Declaring) -> None:
    d.barred = ("hopper",)
    attention_backward(d)


def score_features(d: Declaring) -> dict[str, Any]:
    """Everything that changes scores or hides them, with operands of its own."""

    def soft_cap(graph: Any, score: Any) -> Any:
        cap = d("cap", (1, 1, 1, 1), "float32")
        return graph.mul(graph.tanh(graph.div(score, cap)), cap)

    lengths = torch.tensor([d.rows, d.rows // 3], dtype=torch.int32)
    bits = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0], dtype=torch.uint8)
    words = [d.given(name, torch.full((1, 1, 1, 1), 7)) for name in ("seed", "offset")]
    return {
        "use_alibi_mask": True,
        "use_padding_mask": True,
        "use_causal_mask_bottom_right": True,
        "seq_len_q": d.given("seq_len_q", lengths.view(2, 1, 1, 1)),
        "seq_len_kv": d.given("seq_len_kv", lengths.view(2, 1, 1, 1)),
        "attn_scale": d("attn_scale", (1, 1, 1, 1), "float32"),
        "bias": d("bias", (2, 4, d.rows, d.rows)),
        "block_mask": d.given("block_mask", bits.view(2, 4, 1, 1)),
        "sink_token": d("sink", (1, 4, 1, 1), "float32"),
        "dropout": (0.25, *words),
        "score_mod": soft_cap,
    }


def attention_of_every_feature(d: Declaring) -> None:
    d.barred = ("hopper",)
    operands = d("q", (2, 4, d.rows, 64)), d("k", (2, 2, d.rows, 64)), d("v", (2, 2, d.rows, 64))
    beside = {name: d.graph.tensor(name=name) for name in ("score_max", "score_sum_exp")}
    options = score_features(d) | beside
    o, stats = d.graph.sdpa(*operands, generate_stats=True, **options)
    d.out("o", o, (2, 4, d.rows, 64))
    for name, tensor in {"stats": stats, **beside}.items():
        d.out(name, tensor, (2, 4, d.rows, 1), "float32")


def attention_backward_of_every_feature(d: Declaring) -> None:
    d.barred = ("hopper",)
    many, few, scores = (2, 4, d.rows, 64), (2, 2, d.rows, 64), (2, 4, d.rows, d.rows)
    dims = {"q": many, "k": few, "v": few, "o": many, "grad": many}
    operands = [d(name, dim) for name, dim in dims.items()]
    stats = d("stats", (2, 4, d.rows, 1), "float32")
    beside = {name: d.graph.tensor(name=name) for name in ("dBias", "dSink_token")}
    made = d.graph.sdpa_backward(*operands, stats, **score_features(d), **beside)
    for name, tensor in zip(("dq", "dk", "dv"), made, strict=True):
        d.out(name, tensor, dims[name[1:]])
    d.out("dbias", beside["dBias"], scores, "float32")
    d.out("dsink", beside["dSink_token"], (1, 4, 1, 1), "float32")


def attention_with_a_sink_on_hopper(d: Declaring) -> None:
    d.barred = ("triton",)
    dim = (2, 4, d.rows, 64)
    options = {"sink_token": d("sink", (1, 4, 1, 1), "float32")}
    options |= {"attn_scale": d("attn_scale", (1, 1, 1, 1), "float32")}
    operands = d("q", dim), d("k", dim), d("v", dim)
    masks = {"use_causal_mask": True, "sliding_window_length": 40}
    o, stats = d.graph.sdpa(*operands, generate_stats=True, **options, **masks)
    d.out("o", o, dim)
    d.out("stats", stats, (2, 4, d.rows, 1), "float32")


def attention_backward_with_a_sink_on_hopper(d: Declaring) -> None:
    d.barred = ("triton",)
    dim = (2, 4, d.rows, 64)
    operands = [d(name, dim) for name in ("q", "k", "v", "o", "grad")]
    stats = d("stats", (2, 4, d.rows, 1), "float32")
    d_sink = d.graph.tensor(name="dSink_token")
    options = {"sink_token": d("sink", (1, 4, 1, 1), "float32"), "dSink_token": d_sink}
    options |= {"use_deterministic_algorithm": True, "attn_scale": 0.125}
    masks = {"use_causal_mask": True, "sliding_window_length": 40}
    made = d.graph.sdpa_backward(*operands, stats, **options, **masks)
    for name, tensor in zip(("dq", "dk", "dv"), made, strict=True):
        d.out(name, tensor, dim)
    d.out("dsink", d_sink, (1, 4, 1, 1), "float32")


def attention_fp8_on_hopper(d: Declaring) -> None:
    attention_fp8(d, d.rows, use_causal_mask=True)


def attention_fp8_long_on_hopper(d: Declaring) -> None:
    attention_fp8(d, 2176)


def attention_fp8_long_and_cut_on_hopper(d: Declaring) -> None:
    attention_fp8(d, 2176, use_causal_mask_bottom_right=True)


def attention_fp8(d: Declaring, keys: int, **masks: bool) -> None:
    d.barred = ("triton",)
    dim, one = (2, 4, d.rows, 128), (1, 1, 1, 1)
    operands = [d("q", dim, "fp8_e4m3")]
    operands += [d(name, (2, 4, keys, 128), "fp8_e4m3") for name in "kv"]
    names = (*(f"descale_{x}" for x in "qkvs"), "scale_s", "scale_o")
    scales = {name: d(name, one, "float32") for name in names}
    options = {"attn_scale": 0.125, "generate_stats": True, **masks}
    o, stats, *largest = d.graph.sdpa_fp8(*operands, **scales, **options)
    d.out("o", o, dim, "bfloat16")
    d.out("stats", stats, (2, 4, d.rows, 1), "float32")
    for name, tensor in zip(("amax_s", "amax_o"), largest, strict=True):
        d.out(name, tensor, one, "float32")


# Tokens of two packed sequences: their starts, lengths, the most of one, and all that there are.
STARTS, LENGTHS, MOST, ALL = (0, 21, 42), (20, 11), 32, 63


def ragged(
    d: Declaring, name: str, heads: int, width: int, data_type: Any = None, times: int = 1
) -> Any:
    """An operand of two sequences of at most 32 rows, with rows of neither between them."""
    rows, unit = MOST * times, heads * width
    layout = {"ragged_offset": sequence_starts(d, times), "ragged_offset_multiplier": unit}
    stride = (rows * unit, width, unit, 1)
    return d.graph.tensor((2, heads, rows, width), stride, data_type, name=name, **layout)


def sequence_starts(d: Declaring, times: int = 1) -> Any:
    # Turned round, as a test may do, they are still apart and within what the buffers own.
    if "starts" not in d.values:
        starts = torch.tensor(STARTS, dtype=torch.int64) * times
        d.shared["starts"] = d.given("starts", starts.view(3, 1, 1, 1))
    return d.shared["starts"]


def sequence_lengths(d: Declaring, times: int = 1) -> dict[str, Any]:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32).view(2, 1, 1, 1) * times
    names = ("seq_len_q", "seq_len_kv")
    return {"use_padding_mask": True, **{name: d.given(name, lengths) for name in names}}


def ragged_out(
    d: Declaring, name: str, tensor: Any, heads: int, width: int, kind: Any, times: int = 1
) -> None:
    rows, unit = MOST * times, heads * width
    d.out(name, tensor, (2, heads, rows, width), kind)
    tensor.set_stride((rows * unit, width, unit, 1))
    tensor.set_ragged_offset(sequence_starts(d, times)).set_ragged_offset_multiplier(unit)


def attention_ragged(d: Declaring, width: int = 64, times: int = 1) -> None:
    d.barred = d.barred or ("hopper",)
    heads = (("q", 4), ("k", 2), ("v", 2))
    operands = [ragged(d, name, count, width, times=times) for name, count in heads]
    options = {"use_causal_mask": True, "max_total_seq_len_q": ALL * times}
    options |= {"attn_scale": 0.125, **sequence_lengths(d, times)}
    o, stats = d.graph.sdpa(*operands, generate_stats=True, **options)
    ragged_out(d, "o", o, 4, width, None, times)
    ragged_out(d, "stats", stats, 4, 1, "float32", times)


def attention_ragged_of_several_tiles(d: Declaring) -> None:
    # So many that warp groups pay.
    attention_ragged(d, width=128, times=64)


def attention_backward_ragged(d: Declaring) -> None:
    d.barred = ("hopper",)
    heads = {"q": 4, "k": 2, "v": 2, "o": 4, "grad": 4}
    operands = [ragged(d, name, count, 64) for name, count in heads.items()]
    stats = ragged(d, "stats", 4, 1, "float32")
    options = {"use_causal_mask": True, "max_total_seq_len_q": 63, **sequence_lengths(d)}
    made = d.graph.sdpa_backward(*operands, stats, attn_scale=0.125, **options)
    for name, tensor in zip(("dq", "dk", "dv"), made, strict=True):
        ragged_out(d, name, tensor, heads[name[1:]], 64, None)


def attention_decode(d: Declaring) -> None:
    # One query, whose keys are split and combined.
    d.barred = ("hopper",)
    operands = d("q", (2, 8, 1, 64)), d("k", (2, 2, 4096, 64)), d("v", (2, 2, 4096, 64))
    lengths = torch.tensor([4096, 2500], dtype=torch.int32).view(2, 1, 1, 1)
    ones = torch.ones(2, 1, 1, 1, dtype=torch.int32)
    o, stats = d.graph.sdpa(
        *operands,
        generate_stats=True,
        attn_scale=0.125,
        use_padding_mask=True,
        seq_len_q=d.given("seq_len_q", ones),
        seq_len_kv=d.given("seq_len_kv", lengths),
    )
    d.out("o", o, (2, 8, 1, 64))
    d.out("stats", stats, (2, 8, 1, 1), "float32")


def attention_decode_of_several_tiles(d: Declaring) -> None:
    # 128 queries of a key head.
    d.barred = ("hopper",)
    operands = d("q", (2, 16, 16, 128)), d("k", (2, 2, 4096, 128)), d("v", (2, 2, 4096, 128))
    masks = {"use_causal_mask_bottom_right": True}
    o, stats = d.graph.sdpa(*operands, generate_stats=True, attn_scale=0.125, **masks)
    d.out("o", o, (2, 16, 16, 128))
    d.out("stats", stats, (2, 16, 16, 1), "float32")


def attention_decode_in_registers(d: Declaring) -> None:
    # So much to read that a cluster's programs load into registers and join their sums.
    d.barred = ("hopper",)
    operands = [d(name, (8, 8, 2048, 128)) for name in ("k", "v")]
    lengths = torch.tensor([2048, 0, 1, 300, 15, 16, 17, 2047], dtype=torch.int32)
    ones = torch.ones(8, 1, 1, 1, dtype=torch.int32)
    o, stats = d.graph.sdpa(
        d("q", (8, 16, 1, 128)),
        *operands,
        generate_stats=True,
        attn_scale=0.125,
        use_padding_mask=True,
        seq_len_q=d.given("seq_len_q", ones),
        seq_len_kv=d.given("seq_len_kv", lengths.view(8, 1, 1, 1)),
    )
    d.out("o", o, (8, 16, 1, 128))
    d.out("stats", stats, (8, 16, 1, 1), "float32")


def attention_decode_of_pairs_in_registers(d: Declaring) -> None:
    # Clusters of two sequences each.
    d.barred = ("hopper",)
    operands = [d(name, (16, 8, 1024, 128)) for name in ("k", "v")]
    lengths = [1024, 0, 1, 300, 15, 16, 17, 1023, 1024, 63, 64, 65, 0, 512, 1024, 0]
    given = torch.tensor(lengths, dtype=torch.int32).view(16, 1, 1, 1)
    o, stats = d.graph.sdpa(
        d("q", (16, 16, 1, 128)),
        *operands,
        generate_stats=True,
        attn_scale=0.125,
        use_padding_mask=True,
        seq_len_q=d.given("seq_len_q", torch.ones(16, 1, 1, 1, dtype=torch.int32)),
        seq_len_kv=d.given("seq_len_kv", given),
    )
    d.out("o", o, (16, 16, 1, 128))
    d.out("stats", stats, (16, 16, 1, 1), "float32")


def attention_decode_of_pages_in_registers(d: Declaring) -> None:
    # No clusters of 10 sequences, and more runs than there is room for at once: programs take
    # several that follow one another.
    d.barred = ("hopper",)
    pages = [d(name, (320, 8, 128, 128)) for name in ("k", "v")]
    tables = {
        f"paged_attention_{side}_table": d.given(f"table_{side}", table.int().view(10, 1, 32, 1))
        for side, table in (("k", torch.arange(320)), ("v", torch.arange(320) * 3 % 320))
    }
    lengths = torch.tensor([4096, 0, 4095, 300, 4000, 1, 4096, 3000, 4096, 17], dtype=torch.int32)
    o, stats = d.graph.sdpa(
        d("q", (10, 16, 1, 128)),
        *pages,
        generate_stats=True,
        attn_scale=0.125,
        use_padding_mask=True,
        seq_len_q=d.given("seq_len_q", torch.ones(10, 1, 1, 1, dtype=torch.int32)),
        seq_len_kv=d.given("seq_len_kv", lengths.view(10, 1, 1, 1)),
        paged_attention_max_seq_len_kv=4096,
        **tables,
    )
    d.out("o", o, (10, 16, 1, 128))
    d.out("stats", stats, (10, 16, 1, 1), "float32")


def attention_ragged_on_hopper(d: Declaring) -> None:
    d.barred = ("triton",)
    attention_ragged(d)


def attention_paged(d: Declaring) -> None:
    d.barred = d.barred or ("hopper",)
    pages = [d(name, (10, 2, 16, 64)) for name in ("k", "v")]
    tables = {
        f"paged_attention_{side}_table": d.given(f"table_{side}", table.int().view(2, 1, 5, 1))
        for side, table in (("k", torch.arange(10)), ("v", torch.arange(10) * 3 % 10))
    }
    lengths = torch.tensor([77, 40], dtype=torch.int32).view(2, 1, 1, 1)
    rows = torch.tensor([32, 32], dtype=torch.int32).view(2, 1, 1, 1)
    o, _ = d.graph.sdpa(
        d("q", (2, 4, 32, 64)),
        *pages,
        is_inference=True,
        attn_scale=0.125,
        use_padding_mask=True,
        seq_len_q=d.given("seq_len_q", rows),
        seq_len_kv=d.given("seq_len_kv", lengths),
        paged_attention_max_seq_len_kv=80,
        **tables,
    )
    d.out("o", o, (2, 4, 32, 64))


def attention_paged_on_hopper(d: Declaring) -> None:
    d.barred = ("triton",)
    attention_paged(d)
