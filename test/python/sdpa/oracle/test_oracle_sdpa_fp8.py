"""sdpa_fp8 and sdpa_mxfp8 references: scales, rounding of P and dS, maxima, both directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.graph.enums import tensor_reordering
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, attention, block_scale, evaluate, formats, layout

pytestmark = pytest.mark.L0

_TOL = 1e-12
_B, _HQ, _HKV, _SQ, _SKV, _D = 2, 4, 2, 6, 7, 4
_SCALES = {
    "descale_q": 0.5,
    "descale_k": 0.25,
    "descale_v": 1.75,
    "descale_s": 1.0 / 256.0,
    "scale_s": 256.0,
    "scale_o": 3.0,
}
_BACKWARD_SCALES = {
    **{name: _SCALES[name] for name in ("descale_q", "descale_k", "descale_v")},
    "descale_o": 0.125,
    "descale_dO": 0.5,
    "descale_s": 1.0 / 128.0,
    "descale_dP": 1.0 / 32.0,
    "scale_s": 128.0,
    "scale_dQ": 2.0,
    "scale_dK": 3.0,
    "scale_dV": 5.0,
    "scale_dP": 32.0,
}


def _codes(*shape: int, seed: int, kind: str = "FP8_E4M3", spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = spread * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return formats.encode(values, kind).to(torch.uint8)


def _value(codes: torch.Tensor, kind: str = "FP8_E4M3") -> torch.Tensor:
    return formats.decode(codes, kind)


def _scalars(scales: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.full((1, 1, 1, 1), value) for name, value in scales.items()}


def _round(values: torch.Tensor, kind: str) -> torch.Tensor:
    return formats.round_to(values, kind)


def _declare(
    graph: DeclaredGraph, buffers: dict[str, torch.Tensor], kinds: dict[str, str]
) -> dict[str, Any]:
    records = {}
    for name, buffer in buffers.items():
        kind = kinds.get(name) or ("FP8_E4M3" if buffer.dtype == torch.uint8 else None)
        records[name] = graph.tensor(buffer.shape, buffer.stride(), kind or buffer.dtype)
    return records


def _pack(records: dict[str, Any], buffers: dict[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {records[name].uid: buffer for name, buffer in buffers.items()}


def _whole(values: torch.Tensor, heads: int) -> torch.Tensor:
    return values.repeat_interleave(heads // values.shape[1], 1)


@pytest.mark.parametrize("kind", ["FP8_E4M3", "FP8_E5M2"])
def test_forward_formula(kind: str) -> None:
    buffers = {
        "q": _codes(_B, _HQ, _SQ, _D, seed=1, kind=kind),
        "k": _codes(_B, _HKV, _SKV, _D, seed=2, kind=kind),
        "v": _codes(_B, _HKV, _SKV, _D, seed=3, kind=kind),
        **_scalars(_SCALES),
    }
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
    records = _declare(graph, buffers, {name: kind for name in "qkv"})
    outputs = graph.sdpa_fp8(
        **records, attn_scale=0.7, use_causal_mask_bottom_right=True, generate_stats=True
    )
    for tensor in outputs:
        tensor.set_output(True)
    graph.validate()
    found = evaluate(graph, _pack(records, buffers))
    q, k, v = (_value(buffers[name], kind) for name in "qkv")
    scores = torch.einsum("bhid,bhjd->bhij", q, _whole(k, _HQ)) * 0.5 * 0.25 * 0.7
    hidden = torch.ones(_SQ, _SKV, dtype=torch.bool).triu(_SKV - _SQ + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1)
    output = torch.einsum("bhij,bhjd->bhid", _round(p * 256.0, kind) / 256.0, _whole(v, _HQ) * 1.75)
    assert_close(found[outputs[0].uid], output * 3.0, tol=_TOL)
    assert_close(found[outputs[1].uid], scores.logsumexp(-1, keepdim=True), tol=_TOL)
    assert found[outputs[2].uid].item() == pytest.approx(p.max().item(), rel=1e-12)
    assert found[outputs[3].uid].item() == pytest.approx(output.abs().max().item(), rel=1e-12)
    # P was really rounded: the unrounded product is elsewhere.
    plain = torch.einsum("bhij,bhjd->bhid", p, _whole(v, _HQ) * 1.75) * 3.0
    assert (found[outputs[0].uid] - plain).abs().max() > 1e-4


def test_a_stored_result_saturates() -> None:
    buffers = {
        "q": _codes(1, 1, 2, 16, seed=1),
        "k": _codes(1, 1, 3, 16, seed=2),
        "v": _codes(1, 1, 3, 16, seed=3),
        **_scalars({**_SCALES, "scale_o": 1e4}),
    }
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
    records = _declare(graph, buffers, {})
    outputs = graph.sdpa_fp8(**records, is_inference=True)
    outputs[0].set_output(True).set_data_type("FP8_E4M3")
    for tensor in outputs[2:]:
        tensor.set_output(True)
    graph.validate()
    found = evaluate(graph, _pack(records, buffers))
    assert found[outputs[0].uid].abs().max().item() == 448.0
    # The maximum is of what was before the scale.
    assert found[outputs[3].uid].item() < 10.0


@pytest.mark.parametrize(("kind", "gradient_kind"), [("FP8_E4M3", "FP8_E5M2"), ("FP8_E5M2",) * 2])
def test_backward_formula(kind: str, gradient_kind: str) -> None:
    buffers = {
        "q": _codes(_B, _HQ, _SQ, _D, seed=1, kind=kind),
        "k": _codes(_B, _HKV, _SKV, _D, seed=2, kind=kind),
        "v": _codes(_B, _HKV, _SKV, _D, seed=3, kind=kind),
        "o": _codes(_B, _HQ, _SQ, _D, seed=4, kind=kind),
        "dO": _codes(_B, _HQ, _SQ, _D, seed=5, kind=gradient_kind),
    }
    q, k, v, o = (_value(buffers[name], kind) for name in ("q", "k", "v", "o"))
    q, k, v, o = q * 0.5, _whole(k, _HQ) * 0.25, _whole(v, _HQ) * 1.75, o * 0.125
    d_o = _value(buffers["dO"], gradient_kind) * 0.5
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * 0.7
    stats = scores.logsumexp(-1, keepdim=True)
    p = torch.exp(scores - stats)
    p8 = _round(p * 128.0, kind) / 128.0
    d_p = torch.einsum("bhid,bhjd->bhij", d_o, v)
    d_s = 0.7 * p * (d_p - (d_o * o).sum(-1, keepdim=True))
    d_s8 = _round(d_s * 32.0, gradient_kind) / 32.0
    group = (_B, _HKV, _HQ // _HKV, _SKV, _D)
    expected = {
        "dQ": torch.einsum("bhij,bhjd->bhid", d_s8, k),
        "dK": torch.einsum("bhij,bhid->bhjd", d_s8, q).reshape(group).sum(2),
        "dV": torch.einsum("bhij,bhid->bhjd", p8, d_o).reshape(group).sum(2),
    }
    buffers = {**buffers, "stats": stats, **_scalars(_BACKWARD_SCALES)}
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
    kinds = {**dict.fromkeys(("q", "k", "v", "o"), kind), "dO": gradient_kind}
    records = _declare(graph, buffers, kinds)
    outputs = graph.sdpa_fp8_backward(**records, attn_scale=0.7)
    for tensor in outputs:
        tensor.set_output(True)
    for tensor in outputs[:3]:
        tensor.set_data_type("FLOAT")
    graph.validate()
    found = evaluate(graph, _pack(records, buffers))
    for index, (name, gradient) in enumerate(expected.items()):
        scale = _BACKWARD_SCALES[f"scale_{name}"]
        assert_close(found[outputs[index].uid], gradient * scale, tol=_TOL, name=name)
        amax = found[outputs[3 + index].uid].item()
        assert amax == pytest.approx(gradient.abs().max().item(), rel=1e-12)
    assert found[outputs[6].uid].item() == pytest.approx(d_s.abs().max().item(), rel=1e-12)


def _mx(values: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of elements, codes of scales, and the values that both stand for."""
    elements, scales = block_scale.quantize(
        values, "FP8_E4M3", "FP8_E8M0", block_size=32, axis=axis
    )
    extents = [1, 1, 1, 1]
    extents[axis] = 32
    return (
        formats.encode(elements, "FP8_E4M3").to(torch.uint8).contiguous(),
        formats.encode(scales, "FP8_E8M0").to(torch.uint8).contiguous(),
        block_scale.dequantize(elements, scales, extents),
    )


def _randn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("tiled", [False, True])
def test_mxfp8_forward(tiled: bool) -> None:
    q = _mx(_randn(1, 2, 40, 64, seed=1), 3)
    k = _mx(_randn(1, 1, 70, 64, seed=2), 3)
    v = _mx(_randn(1, 1, 70, 64, seed=3), 2)
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
    records, pack = {}, {}
    for name, (elements, _, __) in (("q", q), ("k", k), ("v", v)):
        records[name] = graph.tensor(elements.shape, data_type="FP8_E4M3")
    for name, (_, codes, __) in (("q", q), ("k", k), ("v", v)):
        dim, stride, storage = tuple(codes.shape), None, codes
        if tiled:
            rows, blocks = (2, 3) if name != "v" else (3, 2)
            padded = list(dim)
            padded[rows], padded[blocks] = 128, 4
            stride = [0] * 4
            stride[blocks], stride[rows] = 1, 4
            stride[1], stride[0] = 512, 512 * dim[1]
            full = torch.full(padded, 255, dtype=torch.uint8)
            full[tuple(slice(0, extent) for extent in dim)] = codes
            offsets = layout.scale_tile_offsets(tuple(padded), tuple(stride))
            storage = torch.empty(512 * dim[1], dtype=torch.uint8)
            storage[offsets.reshape(-1)] = full.reshape(-1)
            dim = tuple(padded)
        records[f"descale_{name}"] = graph.tensor(
            dim,
            stride or (),
            "FP8_E8M0",
            reordering_type=tensor_reordering.F8_128x4 if tiled else tensor_reordering.NONE,
        )
        pack[f"descale_{name}"] = storage
    outputs = graph.sdpa_mxfp8(
        **records, attn_scale=0.125, use_causal_mask=True, generate_stats=True
    )
    for tensor in outputs:
        tensor.set_output(True)
    outputs[0].set_data_type("BFLOAT16")
    graph.validate()
    buffers = {"q": q[0], "k": k[0], "v": v[0], **pack}
    found = evaluate(graph, _pack(records, buffers))
    expected = attention.forward(q[2], k[2], v[2], scale=0.125, right_bound=0)
    assert_close(found[outputs[0].uid], expected.output, tol=_TOL)
    assert_close(found[outputs[1].uid], expected.stats, tol=_TOL)
    assert found[outputs[2].uid].item() == expected.output.abs().max().item()


def test_mxfp8_backward_reads_each_products_own_quantization() -> None:
    heads, rows, columns, depth = 2, 40, 70, 64
    q, k = _randn(1, heads, rows, depth, seed=1), _randn(1, 1, columns, depth, seed=2)
    v, d_o = _randn(1, 1, columns, depth, seed=3), _randn(1, heads, rows, depth, seed=4)
    o = _randn(1, heads, rows, depth, seed=5)
    quantized = {
        "q": _mx(q, 3),
        "q_T": _mx(q, 2),
        "k": _mx(k, 3),
        "k_T": _mx(k, 2),
        "v": _mx(v, 3),
        "dO": _mx(d_o, 3),
        "dO_T": _mx(d_o, 2),
    }
    values = {name: entry[2] for name, entry in quantized.items()}
    assert not torch.equal(values["q"], values["q_T"])
    scores = torch.einsum("bhid,bhjd->bhij", values["q"], _whole(values["k"], heads)) * 0.125
    hidden = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    stats = scores.masked_fill(hidden, -torch.inf).logsumexp(-1, keepdim=True)
    p = torch.exp(scores - stats).masked_fill(hidden, 0.0)
    d_p = torch.einsum("bhid,bhjd->bhij", values["dO"], _whole(values["v"], heads))
    d_s = 0.125 * p * (d_p - (d_o * o).sum(-1, keepdim=True))
    expected = [
        torch.einsum("bhij,bhjd->bhid", d_s, _whole(values["k_T"], heads)),
        torch.einsum("bhij,bhid->bhjd", d_s, values["q_T"]).sum(1, keepdim=True),
        torch.einsum("bhij,bhid->bhjd", p, values["dO_T"]).sum(1, keepdim=True),
    ]
    buffers = {
        **{name: entry[0] for name, entry in quantized.items()},
        **{f"descale_{name}": entry[1] for name, entry in quantized.items()},
        "o_f16": o,
        "dO_f16": d_o,
        "stats": stats,
    }
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
    records = {}
    for name, buffer in buffers.items():
        kind = "FP8_E8M0" if name.startswith("descale") else "FP8_E4M3"
        kind = kind if buffer.dtype == torch.uint8 else "DOUBLE"
        records[name] = graph.tensor(buffer.shape, buffer.stride(), kind)
    outputs = graph.sdpa_mxfp8_backward(**records, attn_scale=0.125, use_causal_mask=True)
    for tensor in outputs:
        tensor.set_output(True)
    for tensor in outputs[:3]:
        tensor.set_data_type("FLOAT")
    graph.validate()
    found = evaluate(graph, _pack(records, buffers))
    for index, gradient in enumerate(expected):
        assert_close(found[outputs[index].uid], gradient, tol=_TOL, name=f"gradient {index}")
        amax = found[outputs[3 + index].uid].item()
        assert amax == pytest.approx(gradient.abs().max().item(), rel=1e-12)
