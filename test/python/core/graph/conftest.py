"""One right graph of every operation kind, for the tests that go over all of them.

Beside it, graph_cases/ holds wrong ones; it is importable from here on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tilewright.graph.enums import (
    moe_grouped_matmul_mode,
    norm_forward_phase,
    reduction_mode,
    reshape_mode,
)
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor

sys.path.insert(0, str(Path(__file__).parent))

Declare = Callable[[DeclaredGraph], None]
_SAMPLES: dict[str, Declare] = {}
IMAGE = (2, 8, 6, 6)
CHANNELS = (1, 8, 1, 1)
TRAINING = norm_forward_phase.TRAINING


@pytest.fixture(scope="session")
def declared_samples() -> Mapping[str, Callable[[], DeclaredGraph]]:
    """Kind -> a function that declares a graph with an operation of it, not validated."""

    def maker(declare: Declare) -> Callable[[], DeclaredGraph]:
        def make() -> DeclaredGraph:
            graph = DeclaredGraph(io_data_type="HALF", intermediate_data_type="FLOAT")
            declare(graph)
            return graph

        return make

    return {kind: maker(declare) for kind, declare in _SAMPLES.items()}


def _sample(kind: str) -> Callable[[Declare], Declare]:
    def register(declare: Declare) -> Declare:
        _SAMPLES[kind] = declare
        return declare

    return register


def _bind(*tensors: Tensor | None, data_type: str | None = None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.set_output(True)
            if data_type is not None:
                tensor.set_data_type(data_type)


@_sample("matmul")
def _matmul(g: DeclaredGraph) -> None:
    _bind(
        g.matmul(g.tensor((2, 4, 8), name="A"), g.tensor((1, 8, 16)), padding=1.5, name="product")
    )


@_sample("conv_fprop")
def _conv_fprop(g: DeclaredGraph) -> None:
    image = g.tensor(IMAGE, (288, 1, 48, 8), name="image")
    weight = g.tensor((16, 4, 3, 3), name="weight")
    out = g.conv_fprop(image, weight, stride=2, pre_padding=[1, 0], post_padding=[0, 1])
    _bind(g.relu(out, upper_clip=6.0))


@_sample("conv_dgrad")
def _conv_dgrad(g: DeclaredGraph) -> None:
    loss, weight = g.tensor((2, 16, 6, 6)), g.tensor((16, 8, 3, 3))
    _bind(g.conv_dgrad(loss, weight, padding=1).set_dim(IMAGE))


@_sample("conv_wgrad")
def _conv_wgrad(g: DeclaredGraph) -> None:
    image, loss = g.tensor(IMAGE), g.tensor((2, 16, 6, 6))
    _bind(g.conv_wgrad(image, loss, padding=2, dilation=2).set_dim((16, 8, 3, 3)))


@_sample("genstats")
def _genstats(g: DeclaredGraph) -> None:
    _bind(*g.genstats(g.tensor(IMAGE)), data_type="FLOAT")


@_sample("reduction")
def _reduction(g: DeclaredGraph) -> None:
    _bind(g.reduction(g.tensor(IMAGE), reduction_mode.AMAX).set_dim((1, 8, 1, 1)))


@_sample("reshape")
def _reshape(g: DeclaredGraph) -> None:
    _bind(g.reshape(g.tensor(IMAGE), reshape_mode=reshape_mode.LOGICAL).set_dim((16, 36)))


@_sample("slice")
def _slice(g: DeclaredGraph) -> None:
    _bind(g.slice(g.tensor(IMAGE), [slice(None), slice(2, -1), (0, 6, 2)]))


@_sample("transpose")
def _transpose(g: DeclaredGraph) -> None:
    _bind(g.transpose(g.tensor(IMAGE), [0, 2, 3, 1]))


@_sample("concatenate")
def _concatenate(g: DeclaredGraph) -> None:
    _bind(g.concatenate([g.tensor(IMAGE), g.tensor((2, 3, 6, 6))], axis=1, in_place_index=0))


@_sample("layernorm")
def _layernorm(g: DeclaredGraph) -> None:
    scale, bias = g.tensor((1, 8, 6, 6)), g.tensor((1, 8, 6, 6))
    _bind(*g.layernorm(TRAINING, g.tensor(IMAGE), scale, bias, 1e-5))


@_sample("instancenorm")
def _instancenorm(g: DeclaredGraph) -> None:
    _bind(*g.instancenorm(TRAINING, g.tensor(IMAGE), g.tensor(CHANNELS), g.tensor(CHANNELS), 0.1))


@_sample("adalayernorm")
def _adalayernorm(g: DeclaredGraph) -> None:
    scale, bias = g.tensor((4, 1, 32)), g.tensor((4, 1, 32))
    _bind(*g.adalayernorm(TRAINING, g.tensor((4, 10, 32)), scale, bias, 1e-6))


@_sample("rmsnorm")
def _rmsnorm(g: DeclaredGraph) -> None:
    epsilon = g.tensor((1, 1, 1), data_type="FLOAT", is_pass_by_value=True)
    _bind(*g.rmsnorm(TRAINING, g.tensor((4, 10, 32)), g.tensor((1, 1, 32)), epsilon=epsilon))


def _norm_backward(g: DeclaredGraph, kind: str, scale: tuple[int, ...]) -> None:
    dim = (4, 10, 32) if len(scale) == 3 else IMAGE
    spatial = kind == "instancenorm"
    statistic = (2, 8, 1, 1) if spatial else (4, 10, 1)
    operands = [g.tensor(d) for d in (dim, dim, scale, statistic, statistic)]
    _bind(*getattr(g, f"{kind}_backward")(*operands))


@_sample("layernorm_backward")
def _layernorm_backward(g: DeclaredGraph) -> None:
    _norm_backward(g, "layernorm", (1, 1, 32))


@_sample("instancenorm_backward")
def _instancenorm_backward(g: DeclaredGraph) -> None:
    _norm_backward(g, "instancenorm", CHANNELS)


@_sample("adalayernorm_backward")
def _adalayernorm_backward(g: DeclaredGraph) -> None:
    _norm_backward(g, "adalayernorm", (4, 1, 32))


@_sample("rmsnorm_backward")
def _rmsnorm_backward(g: DeclaredGraph) -> None:
    operands = [g.tensor(d) for d in ((4, 32), (4, 32), (1, 32), (4, 1))]
    _bind(*g.rmsnorm_backward(*operands, has_dbias=True))


@_sample("batchnorm")
def _batchnorm(g: DeclaredGraph) -> None:
    scale, bias, mean, var = (g.tensor(CHANNELS, data_type="FLOAT") for _ in range(4))
    peers = [g.tensor((1, 32, 1, 1), data_type="FLOAT")]
    _bind(*g.batchnorm(g.tensor(IMAGE), scale, bias, mean, var, 1e-5, 0.1, peers))


@_sample("batchnorm_inference")
def _batchnorm_inference(g: DeclaredGraph) -> None:
    operands = [g.tensor(CHANNELS) for _ in range(4)]
    _bind(g.batchnorm_inference(g.tensor(IMAGE), *operands))


@_sample("batchnorm_backward")
def _batchnorm_backward(g: DeclaredGraph) -> None:
    operands = [g.tensor(CHANNELS) for _ in range(3)]
    _bind(*g.batchnorm_backward(g.tensor(IMAGE), g.tensor(IMAGE), *operands))


@_sample("block_scale_dequantize")
def _block_scale_dequantize(g: DeclaredGraph) -> None:
    x = g.tensor((4, 64), data_type="FP8_E4M3")
    _bind(g.block_scale_dequantize(x, g.tensor((4, 2), data_type="FP8_E8M0"), 32))


@_sample("block_scale_quantize")
def _block_scale_quantize(g: DeclaredGraph) -> None:
    y, scale = g.block_scale_quantize(g.tensor((4, 64)), 16, axis=-1, transpose=True)
    _bind(y.set_data_type("FP4_E2M1"), scale.set_data_type("FP8_E4M3"))


@_sample("moe_grouped_matmul")
def _moe_grouped_matmul(g: DeclaredGraph) -> None:
    offsets, index = (g.tensor(d, data_type="INT32") for d in ((3, 1, 1), (1, 12, 1)))
    mode = moe_grouped_matmul_mode.GATHER
    token, weight = g.tensor((1, 10, 8)), g.tensor((3, 8, 16))
    _bind(g.moe_grouped_matmul(token, weight, offsets, index, mode=mode, top_k=2))


@_sample("moe_grouped_matmul_bwd")
def _moe_grouped_matmul_bwd(g: DeclaredGraph) -> None:
    offsets = g.tensor((3, 1, 1), data_type="INT32")
    _bind(g.moe_grouped_matmul_bwd(g.tensor((1, 10, 16)), g.tensor((1, 10, 8)), offsets))


@_sample("rope")
def _rope(g: DeclaredGraph) -> None:
    freqs = g.tensor((1, 1, 10, 16), data_type="FLOAT")
    _bind(g.rope(g.tensor((2, 4, 10, 32)), freqs, output_scale=0.5, rope_dim=32))


@_sample("rope_backward")
def _rope_backward(g: DeclaredGraph) -> None:
    freqs = g.tensor((2, 1, 10, 8), data_type="FLOAT")
    _bind(g.rope_backward(g.tensor((2, 4, 10, 32)), freqs, rope_dim=8))


@_sample("pointwise")
def _pointwise(g: DeclaredGraph) -> None:
    x = g.tensor(IMAGE, name="x")
    index = g.gen_index(x, axis=-1)
    mask = g.cmp_gt(index, g.tensor_scalar(2))
    _bind(g.binary_select(g.add(x, g.tensor(CHANNELS)), g.swish(x, swish_beta=0.5), mask))


def _qkv(g: DeclaredGraph, data_type: str | None = None) -> list[Tensor]:
    heads = {"q": 4, "k": 2, "v": 2}
    return [g.tensor((2, h, 8, 32), data_type=data_type, name=n) for n, h in heads.items()]


def _scalars(g: DeclaredGraph, count: int) -> list[Tensor]:
    return [g.tensor((1, 1, 1, 1), data_type="FLOAT") for _ in range(count)]


@_sample("sdpa")
def _sdpa(g: DeclaredGraph) -> None:
    slope = g.tensor((1, 4, 1, 1), data_type="FLOAT", name="slope")

    def score_mod(graph: DeclaredGraph, score: Tensor) -> Tensor:
        return graph.tanh(graph.mul(score, slope))

    offset = g.tensor((3, 1, 1, 1), data_type="INT32", name="offset")
    q, k, v = _qkv(g)
    q.set_ragged_offset(offset)
    lengths = [g.tensor((2, 1, 1, 1), data_type="INT32") for _ in range(2)]
    seed = [g.tensor((1, 1, 1, 1), data_type="INT64") for _ in range(2)]
    results = g.sdpa(
        q,
        k,
        v,
        generate_stats=True,
        attn_scale=0.125,
        use_padding_mask=True,
        seq_len_q=lengths[0],
        seq_len_kv=lengths[1],
        diagonal_band_right_bound=0,
        dropout=(0.25, *seed),
        score_mod=score_mod,
    )
    results[0].set_ragged_offset(offset)
    _bind(*results)


@_sample("sdpa_backward")
def _sdpa_backward(g: DeclaredGraph) -> None:
    q, k, v = _qkv(g)
    o, do = (g.tensor((2, 4, 8, 32)) for _ in range(2))
    stats = g.tensor((2, 4, 8, 1), data_type="FLOAT")
    _bind(*g.sdpa_backward(q, k, v, o, do, stats, attn_scale=0.125, use_causal_mask=True))


@_sample("sdpa_fp8")
def _sdpa_fp8(g: DeclaredGraph) -> None:
    results = g.sdpa_fp8(*_qkv(g, "FP8_E4M3"), *_scalars(g, 6), generate_stats=True)
    results[0].set_data_type("FP8_E4M3")
    _bind(*results)


@_sample("sdpa_fp8_backward")
def _sdpa_fp8_backward(g: DeclaredGraph) -> None:
    o, do = (g.tensor((2, 4, 8, 32), data_type="FP8_E4M3") for _ in range(2))
    stats = g.tensor((2, 4, 8, 1), data_type="FLOAT")
    operands = (*_qkv(g, "FP8_E4M3"), o, do, stats, *_scalars(g, 12))
    results = g.sdpa_fp8_backward(*operands)
    _bind(*results[:3], data_type="FP8_E4M3")
    _bind(*results[3:])


def _scale(g: DeclaredGraph, *dim: int) -> Tensor:
    return g.tensor(dim, data_type="FP8_E8M0")


@_sample("sdpa_mxfp8")
def _sdpa_mxfp8(g: DeclaredGraph) -> None:
    scales = _scale(g, 2, 4, 8, 1), _scale(g, 2, 2, 8, 1), _scale(g, 2, 2, 1, 32)
    _bind(*g.sdpa_mxfp8(*_qkv(g, "FP8_E4M3"), *scales, generate_stats=True))


@_sample("sdpa_mxfp8_backward")
def _sdpa_mxfp8_backward(g: DeclaredGraph) -> None:
    q, k, v = _qkv(g, "FP8_E4M3")
    q_t, k_t, _ = _qkv(g, "FP8_E4M3")
    o, do_wide = (g.tensor((2, 4, 8, 32)) for _ in range(2))
    do, do_t = (g.tensor((2, 4, 8, 32), data_type="FP8_E4M3") for _ in range(2))
    stats = g.tensor((2, 4, 8, 1), data_type="FLOAT")
    rows_q, rows_kv = (2, 4, 8, 1), (2, 2, 8, 1)
    columns_q, columns_kv = (2, 4, 1, 32), (2, 2, 1, 32)
    dims = (rows_q, columns_q, rows_kv, columns_kv, rows_kv, rows_q, columns_q)
    scales = [_scale(g, *dim) for dim in dims]
    _bind(*g.sdpa_mxfp8_backward(q, q_t, k, k_t, v, o, do_wide, do, do_t, stats, *scales))
