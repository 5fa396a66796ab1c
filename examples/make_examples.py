"""Write the example graphs beside this file: one JSON document for each family of operations.

    python examples/make_examples.py

Each function below declares one graph with the same calls that a program makes. Run one with
`tilewright run examples/attention_ragged.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tilewright as tw
from tilewright.graph.json_form import to_dict

FOLDER = Path(__file__).resolve().parent
FLOAT, HALF, INT32 = tw.data_type.FLOAT, tw.data_type.HALF, tw.data_type.INT32


def packed_strides(dim: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a buffer without gaps, the last axis innermost."""
    strides = [1]
    for extent in reversed(dim[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def channels_last(dim: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The strides of N, C, H, W in memory order N, H, W, C."""
    _, channels, height, width = dim
    return (channels * height * width, 1, width * channels, channels)


def declare(graph: tw.Graph, name: str, *dim: int, **more: Any) -> tw.Tensor:
    """An input named ``name``, without gaps unless told otherwise."""
    more.setdefault("stride", packed_strides(dim))
    return graph.tensor(dim=dim, name=name, **more)


def attention_ragged() -> tw.Graph:
    """Causal attention over four sequences of up to 256 tokens, packed without padding."""
    graph = tw.Graph(name="attention_ragged", io_data_type=HALF, compute_data_type=FLOAT)
    batch, heads, kv_heads, length, width = 4, 8, 2, 256, 64
    lengths = {
        name: declare(graph, name, batch, 1, 1, 1, data_type=INT32)
        for name in ("seq_len_q", "seq_len_kv")
    }
    offsets = {
        name: declare(graph, f"{name}_offset", batch + 1, 1, 1, 1, data_type=INT32)
        for name in ("q", "k", "v", "o")
    }

    def packed(name: str, count: int) -> tw.Tensor:
        # Token-major, as a projection writes them: token, head, element.
        return declare(
            graph,
            name,
            batch,
            count,
            length,
            width,
            stride=(length * count * width, width, count * width, 1),
            ragged_offset=offsets[name],
        )

    q, k, v = packed("q", heads), packed("k", kv_heads), packed("v", kv_heads)
    output, _ = graph.sdpa(
        q,
        k,
        v,
        generate_stats=False,
        attn_scale=width**-0.5,
        use_causal_mask=True,
        use_padding_mask=True,
        **lengths,
        name="attention",
    )
    output.set_output(True).set_name("o").set_dim(q.dim).set_stride(q.stride)
    output.set_ragged_offset(offsets["o"])
    return graph


def convolution_bias_relu() -> tw.Graph:
    """A 3x3 convolution, a bias a channel, and a ReLU, all channels-last."""
    graph = tw.Graph(
        name="convolution_bias_relu",
        io_data_type=HALF,
        intermediate_data_type=FLOAT,
        compute_data_type=FLOAT,
    )
    image_dim, weight_dim, bias_dim = (2, 32, 28, 28), (64, 32, 3, 3), (1, 64, 1, 1)
    image = declare(graph, "image", *image_dim, stride=channels_last(image_dim))
    weight = declare(graph, "weight", *weight_dim, stride=channels_last(weight_dim))
    bias = declare(graph, "bias", *bias_dim, stride=channels_last(bias_dim))
    product = graph.conv_fprop(
        image, weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="convolution"
    )
    shifted = graph.bias(product, bias, name="bias")
    graph.relu(shifted, name="relu").set_output(True).set_name("out")
    return graph


def layer_norm_forward() -> tw.Graph:
    """LayerNorm of 512 rows of 768, with the statistics that its backward reads."""
    graph = tw.Graph(name="layer_norm_forward", io_data_type=FLOAT, compute_data_type=FLOAT)
    rows, width = 512, 768
    x = declare(graph, "x", rows, width, 1, 1)
    scale, bias = (declare(graph, name, 1, width, 1, 1) for name in ("scale", "bias"))
    outputs = graph.layernorm(
        tw.norm_forward_phase.TRAINING,
        x,
        scale,
        bias,
        graph.tensor_scalar(1e-5),
        name="layer_norm",
    )
    for name, output in zip(("y", "mean", "inv_variance"), outputs, strict=True):
        output.set_output(True).set_name(name)
    return graph


def layer_norm_backward() -> tw.Graph:
    """The gradients of that LayerNorm for its input, scale and bias."""
    graph = tw.Graph(name="layer_norm_backward", io_data_type=FLOAT, compute_data_type=FLOAT)
    rows, width = 512, 768
    grad, x = (declare(graph, name, rows, width, 1, 1) for name in ("grad", "x"))
    scale = declare(graph, "scale", 1, width, 1, 1)
    mean, inv_variance = (declare(graph, name, rows, 1, 1, 1) for name in ("mean", "inv_variance"))
    outputs = graph.layernorm_backward(
        grad, x, scale, mean, inv_variance, name="layer_norm_backward"
    )
    for name, output in zip(("dx", "dscale", "dbias"), outputs, strict=True):
        output.set_output(True).set_name(name)
    return graph


def matmul_gelu() -> tw.Graph:
    """The first half of a feed-forward block: a matrix product and an exact GELU."""
    graph = tw.Graph(
        name="matmul_gelu",
        io_data_type=HALF,
        intermediate_data_type=FLOAT,
        compute_data_type=FLOAT,
    )
    a = declare(graph, "a", 1, 256, 384)
    b = declare(graph, "b", 1, 384, 1024)
    product = graph.matmul(a, b, name="matmul")
    graph.gelu(product, name="gelu").set_output(True).set_name("out")
    return graph


def rope() -> tw.Graph:
    """Rotary position embedding of 256 positions; the last quarter of a head is passed through."""
    graph = tw.Graph(name="rope", io_data_type=HALF, compute_data_type=FLOAT)
    x = declare(graph, "x", 2, 8, 256, 64)
    freqs = declare(graph, "freqs", 1, 1, 256, 48, data_type=FLOAT)
    graph.rope(x, freqs, rope_dim=48, name="rope").set_output(True).set_name("out")
    return graph


EXAMPLES: tuple[Callable[[], tw.Graph], ...] = (
    attention_ragged,
    convolution_bias_relu,
    layer_norm_forward,
    layer_norm_backward,
    matmul_gelu,
    rope,
)


def document(graph: tw.Graph) -> str:
    """The graph's JSON form, with one tensor and one operation a line."""
    graph.validate()
    form = to_dict(graph)
    lines = ["{"]
    for key, value in form.items():
        last = key == list(form)[-1]
        if isinstance(value, list):
            entries = ",\n".join(f"    {json.dumps(entry)}" for entry in value)
            text = f"[\n{entries}\n  ]"
        else:
            text = json.dumps(value)
        lines.append(f"  {json.dumps(key)}: {text}{'' if last else ','}")
    return "\n".join([*lines, "}"]) + "\n"


def main() -> None:
    """Write every example."""
    for example in EXAMPLES:
        path = FOLDER / f"{example.__name__}.json"
        path.write_text(document(example()), encoding="utf-8")
        print(path.name)


if __name__ == "__main__":
    main()
