"""Graphs whose inputs have to make sense together: each declares itself on a graph."""

from __future__ import annotations

from typing import Any

from tilewright import Graph, moe_grouped_matmul_mode, tensor_reordering

BATCH, HEADS, KV_HEADS, ROWS, KEYS, DEPTH = 3, 4, 2, 24, 40, 16


def packed(graph: Graph, name: str, heads: int, rows: int, offset: Any, depth: int = DEPTH) -> Any:
    """A tensor (B, H, S, D) whose tokens lie one after another, heads inside a token."""
    stride = (rows * heads * depth, depth, heads * depth, 1)
    return graph.tensor((BATCH, heads, rows, depth), stride, name=name, ragged_offset=offset)


def lengths(graph: Graph) -> dict[str, Any]:
    names = ("seq_len_q", "seq_len_kv")
    return {n: graph.tensor((BATCH, 1, 1, 1), data_type="int32", name=n) for n in names}


def offsets(graph: Graph, name: str) -> Any:
    return graph.tensor((BATCH + 1, 1, 1, 1), data_type="int32", name=name)


def ragged_attention(graph: Graph) -> None:
    off_q, off_kv, off_stats = (offsets(graph, n) for n in ("off_q", "off_kv", "off_stats"))
    q = packed(graph, "q", HEADS, ROWS, off_q)
    k, v = (packed(graph, n, KV_HEADS, KEYS, off_kv) for n in "kv")
    o, stats = graph.sdpa(
        *(q, k, v),
        generate_stats=True,
        attn_scale=DEPTH**-0.5,
        use_padding_mask=True,
        use_causal_mask_bottom_right=True,
        **lengths(graph),
    )
    o.set_output(True).set_name("O").set_ragged_offset(off_q)
    stats.set_output(True).set_name("Stats").set_ragged_offset(off_stats)
    stats.set_dim((BATCH, HEADS, ROWS, 1)).set_stride((HEADS * ROWS, 1, HEADS, 1))
    stats.set_data_type("float32")


def ragged_backward(graph: Graph) -> None:
    off_q, off_kv = (offsets(graph, n) for n in ("off_q", "off_kv"))
    off_stats = offsets(graph, "off_stats")
    q, o, d_o = (packed(graph, n, HEADS, ROWS, off_q) for n in ("q", "o", "dO"))
    k, v = (packed(graph, n, KV_HEADS, KEYS, off_kv) for n in "kv")
    stats = packed(graph, "stats", HEADS, ROWS, off_stats, depth=1).set_data_type("float32")
    gradients = graph.sdpa_backward(
        *(q, k, v, o, d_o, stats),
        attn_scale=DEPTH**-0.5,
        use_padding_mask=True,
        use_causal_mask=True,
        **lengths(graph),
    )
    for gradient, name, offset in zip(
        gradients, ("dQ", "dK", "dV"), (off_q, off_kv, off_kv), strict=True
    ):
        gradient.set_output(True).set_name(name).set_ragged_offset(offset)


def paged_attention(graph: Graph, ragged_tables: str = "") -> None:
    q = graph.tensor((BATCH, HEADS, 1, DEPTH), name="q")
    k, v = (graph.tensor((32, KV_HEADS, 8, DEPTH), name=n) for n in "kv")
    tables = {
        f"paged_attention_{side}_table": graph.tensor(
            (BATCH, 1, 5, 1), data_type="int32", name=f"{side}_table"
        )
        for side in "kv"
    }
    for side in ragged_tables:
        table = tables[f"paged_attention_{side}_table"]
        table.set_ragged_offset(offsets(graph, f"off_{side}_table"))
    o, _ = graph.sdpa(
        *(q, k, v),
        attn_scale=0.25,
        use_padding_mask=True,
        paged_attention_max_seq_len_kv=KEYS,
        **lengths(graph),
        **tables,
    )
    o.set_output(True).set_name("O")


def packed_tables(graph: Graph) -> None:
    paged_attention(graph, ragged_tables="kv")


def masked_attention(graph: Graph) -> None:
    q, k, v = (graph.tensor((BATCH, HEADS, 40, DEPTH), name=n) for n in "qkv")
    scalar = {n: graph.tensor((1, 1, 1, 1), data_type="int64", name=n) for n in ("seed", "offset")}
    o, stats = graph.sdpa(
        *(q, k, v),
        generate_stats=True,
        attn_scale=graph.tensor((1, 1, 1, 1), name="attn_scale"),
        bias=graph.tensor((1, HEADS, 40, 40), name="bias"),
        block_mask=graph.tensor((BATCH, HEADS, 1, 1), data_type="uint8", name="block_mask"),
        sink_token=graph.tensor((1, HEADS, 1, 1), name="sink"),
        dropout=(0.25, scalar["seed"], scalar["offset"]),
        use_alibi_mask=True,
        use_causal_mask=True,
    )
    o.set_output(True)
    stats.set_output(True)


def fp8_backward(graph: Graph) -> None:
    def tensor(name: str, heads: int = HEADS) -> Any:
        return graph.tensor((BATCH, heads, 32, DEPTH), data_type="FP8_E4M3", name=name)

    names = ("q", "k", "v", "o", "dO", "s", "dP")
    scales = [f"descale_{n}" for n in names] + [f"scale_{n}" for n in ("s", "dQ", "dK", "dV", "dP")]
    results = graph.sdpa_fp8_backward(
        *(tensor("q"), tensor("k", KV_HEADS), tensor("v", KV_HEADS), tensor("o"), tensor("dO")),
        graph.tensor((BATCH, HEADS, 32, 1), data_type="float32", name="stats"),
        **{n: graph.tensor((1, 1, 1, 1), data_type="float32", name=n) for n in scales},
        attn_scale=DEPTH**-0.5,
        use_causal_mask=True,
    )
    for result in results:
        result.set_output(True)


def conv_bias_relu(graph: Graph) -> None:
    image = graph.tensor((2, 8, 10, 10), (800, 1, 80, 8), name="image")
    weight = graph.tensor((16, 8, 3, 3), (72, 1, 24, 8), name="weight")
    bias = graph.tensor((1, 16, 1, 1), name="bias")
    y = graph.conv_fprop(image, weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    graph.relu(graph.bias(y, bias)).set_output(True).set_name("y")


def layernorm_backward(graph: Graph) -> None:
    x, grad = (graph.tensor((12, 40, 1, 1), name=n) for n in ("x", "grad"))
    scale = graph.tensor((1, 40, 1, 1), name="scale", data_type="float32")
    mean, deviation = (
        graph.tensor((12, 1, 1, 1), name=n, data_type="float32") for n in ("mean", "inv_variance")
    )
    for result in graph.layernorm_backward(grad, x, scale, mean, deviation):
        result.set_output(True)


def batchnorm(graph: Graph) -> None:
    channel = [graph.tensor((1, 8, 1, 1), name=n) for n in ("scale", "bias", "run_mean", "run_var")]
    results = graph.batchnorm(
        graph.tensor((4, 8, 5, 5), name="x"),
        *channel,
        graph.tensor_scalar(1e-5),
        graph.tensor((1, 1, 1, 1), is_pass_by_value=True, name="momentum"),
    )
    for result in results:
        result.set_output(True)


def rope(graph: Graph) -> None:
    x = graph.tensor((2, 4, 64, 32), name="x")
    freqs = graph.tensor((1, 1, 64, 32), data_type="float32", name="freqs")
    graph.rope(x, freqs).set_output(True)


def experts(graph: Graph) -> None:
    graph.moe_grouped_matmul(
        graph.tensor((1, 40, 16), name="token"),
        graph.tensor((4, 16, 8), name="weight"),
        graph.tensor((4, 1, 1), data_type="int32", name="offsets"),
        token_index=graph.tensor((1, 40, 1), data_type="int32", name="index"),
        mode=moe_grouped_matmul_mode.SCATTER,
    ).set_output(True)


def block_scaled_product(graph: Graph) -> None:
    tiled = tensor_reordering.F8_128x4
    a = graph.tensor((1, 128, 64), data_type="FP4_E2M1", name="a")
    b = graph.tensor((1, 64, 128), (8192, 1, 64), data_type="FP8_E4M3", name="b")
    a_scale = graph.tensor((1, 128, 4), data_type="FP8_E4M3", name="a_scale", reordering_type=tiled)
    b_scale = graph.tensor((1, 2, 128), (256, 1, 2), data_type="FP8_E8M0", name="b_scale")
    left = graph.block_scale_dequantize(a, a_scale, block_size=[1, 16])
    right = graph.block_scale_dequantize(b, b_scale, block_size=[32, 1])
    graph.matmul(left, right).set_output(True)


def pointwise(graph: Graph) -> None:
    def tensor(name: str, data_type: str | None = None) -> Any:
        return graph.tensor((2, 3, 40), data_type=data_type, name=name)

    selected = graph.binary_select(
        graph.div(tensor("num"), tensor("den")), graph.log(tensor("arg")), tensor("mask", "BOOLEAN")
    )
    selected.set_output(True)
    graph.cmp_eq(tensor("left"), tensor("right")).set_output(True)
    graph.pow(tensor("base"), tensor("exponent")).set_output(True)


GRAPHS = {
    build.__name__: build
    for build in (
        *(ragged_attention, ragged_backward, paged_attention, packed_tables),
        *(masked_attention, fp8_backward),
        *(conv_bias_relu, layernorm_backward, batchnorm, rope, experts, block_scaled_product),
        pointwise,
    )
}
