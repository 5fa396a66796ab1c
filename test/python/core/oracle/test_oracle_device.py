"""References follow the device of their operands.

With the default device set to "meta", a tensor that a reference makes without saying where lands
there, and meeting an operand on the CPU it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.dtypes import DataType
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import (
    assert_close,
    attention,
    block_scale,
    causal_convolution,
    convolution,
    evaluate,
    formats,
    layout,
    linear_attention,
    matmul,
    moe,
    normalization,
    philox,
    pointwise,
    reduction,
    rope,
)

pytestmark = pytest.mark.L0


def _randn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")


def _numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cpu")


def _attention(row_block: int) -> dict[str, Any]:
    return {
        "bias": _randn(1, 4, 5, 6),
        "mask": _randn(5, 6) > -1,
        "block_mask": torch.full((1, 1, 1, 1), 1, dtype=torch.uint8, device="cpu"),
        "sink": _randn(4),
        "alibi": True,
        "bottom_right": True,
        "left_bound": 4,
        "right_bound": 1,
        "seq_len_q": [5, 3],
        "seq_len_kv": [6, 2],
        "dropout": attention.SeededDropout(0.3, 1),
        "row_block": row_block,
    }


def _attention_operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    v = _randn(2, 2, 6, 3)
    v[0, 0, 5] = float("nan")
    return _randn(2, 4, 5, 3), _randn(2, 2, 6, 3), v


def _record(dim: tuple[int, ...], stride: tuple[int, ...], kind: str) -> Any:
    return DeclaredGraph().tensor(dim, stride, DataType[kind])


def _conv() -> dict[str, Any]:
    return {"pre_padding": [1], "stride": [2], "dilation": [1]}


_CASES: dict[str, Callable[[], Any]] = {
    "attention forward": lambda: attention.forward(*_attention_operands(), **_attention(2)),
    "attention backward": lambda: attention.backward(
        *_attention_operands(), _randn(2, 4, 5, 3), **_attention(2)
    ),
    "merge": lambda: attention.merge_states(_randn(2, 3), _randn(2), _randn(2, 3), _randn(2)),
    "rounding": lambda: formats.round_to(_randn(50), "FP8_E4M3"),
    "codes": lambda: formats.decode(formats.encode(_randn(50), "FP8_E5M2"), "FP8_E5M2"),
    "scale codes": lambda: formats.encode(_randn(50).abs(), "FP8_E8M0"),
    "nibbles": lambda: formats.unpack_nibbles(formats.pack_nibbles(_numbers(1, 2, 3, 4))),
    "dropout": lambda: philox.dropout_keep(_numbers(0, 1, 2), probability=0.5, seed=1, offset=2),
    "block scale": lambda: block_scale.quantize(
        _randn(2, 40), "FP4_E2M1", "FP8_E4M3", block_size=16
    ),
    "dequantize": lambda: block_scale.dequantize(_randn(2, 40), _randn(2, 3), (1, 16)),
    "convolution": lambda: convolution.forward(
        _randn(1, 2, 5), _randn(3, 2, 2), post_padding=[0], **_conv()
    ),
    "dgrad": lambda: convolution.data_gradient(
        _randn(1, 3, 3), _randn(3, 2, 2), image_dim=(1, 2, 5), **_conv()
    ),
    "wgrad": lambda: convolution.weight_gradient(
        _randn(1, 2, 5), _randn(1, 3, 3), weight_dim=(3, 2, 2), **_conv()
    ),
    "norm": lambda: normalization.forward(
        _randn(2, 3), _randn(1, 3), _randn(1, 3), axes=[1], epsilon=0.1
    )[0],
    "norm backward": lambda: normalization.backward(
        _randn(2, 3), _randn(2, 3), _randn(1, 3), _randn(2, 1), _randn(2, 1), axes=[1]
    ),
    "matmul": lambda: matmul.forward(_randn(2, 3, 4), _randn(2, 4, 2), k_lengths=_numbers(1, 4)),
    "moe": lambda: moe.forward(_randn(1, 5, 3), _randn(2, 3, 4), _numbers(0, 2)),
    "moe gradient": lambda: moe.weight_gradient(
        _randn(1, 5, 3), _randn(1, 5, 2), _numbers(0, 2), experts=2
    ),
    "rope": lambda: rope.forward(_randn(1, 2, 3, 4), _randn(1, 1, 3, 2)),
    "rope backward": lambda: rope.backward(_randn(1, 2, 3, 4), _randn(1, 1, 3, 2)),
    "reduction": lambda: reduction.reduce(_randn(3, 0), "MAX", [1]),
    "relu": lambda: pointwise.evaluate("relu_backward", [_randn(9), _randn(9)]),
    "swish": lambda: pointwise.evaluate("swish", [_randn(9)]),
    "index": lambda: pointwise.evaluate("gen_index", [_randn(3, 3)]),
    "linear attention": lambda: linear_attention.forward(
        _randn(1, 4, 1, 2), _randn(1, 4, 1, 2), _randn(1, 4, 2, 3), beta=_randn(1, 4, 2)
    ),
    "linear attention backward": lambda: tuple(
        linear_attention.backward(
            _randn(1, 4, 1, 2), _randn(1, 4, 1, 2), _randn(1, 4, 2, 3), _randn(1, 4, 2, 3)
        ).values()
    ),
    "causal convolution": lambda: causal_convolution.forward(_randn(1, 4, 2), _randn(2, 3)),
    "ragged": lambda: layout.load(
        _record((2, 2, 3, 1), (6, 1, 2, 1), "DOUBLE"), _randn(10), _numbers(0, 4, 10)
    ),
    "tiles": lambda: layout.restore_scales_128x4(layout.reorder_scales_128x4(_randn(5, 6)), (5, 6)),
}


@pytest.mark.parametrize("name", _CASES)
def test_references_make_nothing_on_the_default_device(name: str) -> None:
    expected = _CASES[name]()
    with torch.device("meta"):
        found = _CASES[name]()
    pairs = [(found, expected)]
    if isinstance(expected, tuple):
        pairs = list(zip(found, expected, strict=True))
    for got, want in pairs:
        if want is not None:
            assert_close(got, want, tol=0.0)


def test_a_graph_makes_nothing_on_the_default_device() -> None:
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    q, k, v = (graph.tensor(dim) for dim in ((2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 3)))

    def score_mod(inner: Any, score: Any) -> Any:
        row = inner.gen_index(score, axis=2)
        return inner.add(score, inner.mul(row, inner.tensor_scalar(0.5)))

    seed = graph.tensor_scalar(3)
    dump = graph.tensor((2, 4, 5, 6), data_type="FLOAT").set_output(True)
    output, stats = graph.sdpa(
        q, k, v, score_mod=score_mod, dropout=(0.5, seed, seed), rng_dump=dump, generate_stats=True
    )
    assert output is not None and stats is not None
    output.set_output(True)
    stats.set_output(True)
    graph.validate()
    buffers = dict(zip((q.uid, k.uid, v.uid), _attention_operands(), strict=True))
    expected = evaluate(graph, buffers)
    with torch.device("meta"):
        found = evaluate(graph, buffers)
    for uid, want in expected.items():
        assert_close(found[uid], want, tol=0.0)
