"""MXFP8 attention, with a scale a block."""

from __future__ import annotations

import math

import pytest
import torch
from eight_bit import E4M3, E5M2, MASKS, draw, masks

import tilewright

pytestmark = pytest.mark.L0


def block_scales(seed: int, dim: tuple[int, ...], axis: int) -> torch.Tensor:
    """Random E8M0 scales near 1 of (B, H, S, D) in blocks of 32 along ``axis``."""
    shape = list(dim)
    shape[axis] = -(-dim[axis] // 32)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(125, 129, shape, generator=generator, dtype=torch.uint8)
    return codes.view(torch.float8_e8m0fnu)


def spread(values: torch.Tensor, scales: torch.Tensor, axis: int) -> torch.Tensor:
    wide = scales.double().repeat_interleave(32, axis).narrow(axis, 0, values.shape[axis])
    return values.double() * wide


def tiled(scales: torch.Tensor, axis: int) -> torch.Tensor:
    """The same scales stored in tiles of 128 rows and 4 block columns, by the formula."""
    matrix = scales.view(torch.uint8)
    matrix = matrix.transpose(2, 3) if axis == 2 else matrix
    batch, heads, rows, columns = matrix.shape
    whole_rows, whole_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    stored = torch.full((batch, heads, whole_rows * whole_columns), 255, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (whole_columns // 4) + c // 4
            at = tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            stored[:, :, at] = matrix[:, :, r, c]
    stored = stored.view(batch, heads, whole_rows, whole_columns)
    stored = stored.transpose(2, 3) if axis == 2 else stored
    return stored.view(torch.float8_e8m0fnu)


def mx_problem(seed: int, dtype: torch.dtype, axes: dict[str, int]):
    dims = {"q": (2, 4, 33, 64), "k": (2, 2, 70, 64), "v": (2, 2, 70, 96), "dO": (2, 4, 33, 96)}
    operands, scales = {}, {}
    for index, (port, axis) in enumerate(axes.items()):
        dim = dims[port.removesuffix("_T")]
        operands[port] = draw(seed + index, dim)[0].to(dtype)
        scales[f"descale_{port}"] = block_scales(seed + 50 + index, dim, axis)
    return operands, scales


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("storage", ["plain", "tiles"])
def test_mxfp8_forward(ways, dtype, mask, storage):
    options, rule = masks(mask)
    options = {
        f"diagonal_band_{name}" if name.endswith("_bound") else name: value
        for name, value in options.items()
    }
    axes = {"q": 3, "k": 3, "v": 2}
    operands, scales = mx_problem(5, dtype, axes)
    values = {port: spread(operands[port], scales[f"descale_{port}"], axes[port]) for port in axes}
    if storage == "tiles":
        scales = {f"descale_{p}": tiled(scales[f"descale_{p}"], axis) for p, axis in axes.items()}
    found = ways.run(
        "sdpa_mxfp8",
        {**operands, **scales},
        generate_stats=True,
        attn_scale=0.125,
        outputs={"O": torch.float32},
        tiled=tuple(scales) if storage == "tiles" else (),
        **options,
    )
    expected = ways.reference(values["q"], values["k"], values["v"], ways.Rule(scale=0.125, **rule))
    ways.close("O", found["O"], expected["O"], 5e-6)
    ways.close("Stats", found["Stats"], expected["Stats"], 5e-6)
    ways.close("Amax_O", found["Amax_O"].squeeze(), expected["O"].abs().max(), 5e-6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("storage", ["plain", "tiles"])
def test_mxfp8_backward(ways, mask, storage):
    """Each product reads its own quantization: those of one tensor differ here on purpose."""
    options, rule = masks(mask)
    axes = {"q": 3, "q_T": 2, "k": 3, "k_T": 2, "v": 3, "dO": 3, "dO_T": 2}
    operands, scales = mx_problem(6, E4M3, axes)
    x = {port: spread(operands[port], scales[f"descale_{port}"], axes[port]) for port in axes}
    o, d_o = (t.to(torch.bfloat16) for t in draw(7, (2, 4, 33, 96), (2, 4, 33, 96)))
    forward = ways.reference(x["q"], x["k"], x["v"], ways.Rule(scale=0.125, **rule))
    if storage == "tiles":
        scales = {f"descale_{p}": tiled(scales[f"descale_{p}"], axis) for p, axis in axes.items()}
    found = ways.run(
        "sdpa_mxfp8_backward",
        {**operands, **scales, "o_f16": o, "dO_f16": d_o, "stats": forward["Stats"].float()},
        attn_scale=0.125,
        outputs=dict.fromkeys(("dQ", "dK", "dV"), torch.float32),
        tiled=tuple(scales) if storage == "tiles" else (),
        **options,
    )
    p = forward["P"]
    wide = {port: x[port].repeat_interleave(2, 1) for port in ("k_T", "v")}
    delta = (o.double() * d_o.double()).sum(-1, keepdim=True)
    d_s = 0.125 * p * (x["dO"] @ wide["v"].transpose(2, 3) - delta)
    expected = {
        "dQ": d_s @ wide["k_T"],
        "dK": (d_s.transpose(2, 3) @ x["q_T"]).unflatten(1, (2, 2)).sum(2),
        "dV": (p.transpose(2, 3) @ x["dO_T"]).unflatten(1, (2, 2)).sum(2),
    }
    for port, value in expected.items():
        ways.close(port, found[port], value, 5e-6)
        ways.close(f"amax_{port}", found[f"amax_{port}"].squeeze(), value.abs().max(), 5e-6)


def test_mxfp8_scales_beyond_a_length_may_be_nan(ways):
    axes = {"q": 3, "k": 3, "v": 2}
    operands, scales = mx_problem(8, E4M3, axes)
    values = {port: spread(operands[port], scales[f"descale_{port}"], axes[port]) for port in axes}
    used = [32, 64]
    scales["descale_k"].view(torch.uint8)[0, :, 32:] = 255
    scales["descale_v"].view(torch.uint8)[0, :, 1:] = 255
    lengths = torch.tensor(used, dtype=torch.int32).view(2, 1, 1, 1)
    found = ways.run(
        "sdpa_mxfp8",
        {**operands, **scales, "seq_len_q": lengths * 0 + 33, "seq_len_kv": lengths},
        use_padding_mask=True,
        attn_scale=0.125,
        outputs={"O": torch.float32},
    )
    rule = ways.Rule(scale=0.125, len_kv=used)
    expected = ways.reference(values["q"], values["k"], values["v"], rule)
    ways.close("O", found["O"], expected["O"], 5e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_mxfp8_paged(ways, packed):
    """Pages of 32 tokens and the pages of their scales; rows of tables one after another."""
    axes = {"q": 3, "k": 3, "v": 2}
    operands, scales = mx_problem(11, E4M3, axes)
    values = {port: spread(operands[port], scales[f"descale_{port}"], axes[port]) for port in axes}
    order = torch.tensor([[4, 0, 2], [3, 5, 9]], dtype=torch.int32)
    for port in ("k", "v"):
        pages = torch.full((6, 2, 32, operands[port].shape[3]), math.nan)
        for b in range(2):
            for entry in range(3 - b):
                tokens = operands[port][b, :, entry * 32 : (entry + 1) * 32].float()
                pages[order[b, entry], :, : tokens.shape[1]] = tokens
        step = 32 if port == "k" else 1
        stored = scales[f"descale_{port}"].view(torch.uint8)
        page_scales = torch.full((6, 2, step, stored.shape[3]), 255, dtype=torch.uint8)
        for b in range(2):
            for entry in range(3 - b):
                rows = stored[b, :, entry * step : (entry + 1) * step]
                page_scales[order[b, entry], :, : rows.shape[1]] = rows
        operands[port] = pages.to(E4M3)
        scales[f"descale_{port}"] = page_scales.view(torch.float8_e8m0fnu)
    used = [70, 50]
    lengths = torch.tensor(used, dtype=torch.int32).view(2, 1, 1, 1)
    rows = order.view(2, 1, 3, 1)
    if packed:
        starts = torch.tensor([0, 3, 5]).view(3, 1, 1, 1)
        rows = ways.Ragged(order.flatten()[:5], (2, 1, 3, 1), (1, 1, 1, 1), starts)
    tables = {f"paged_attention_{side}_table": rows for side in "kv"}
    found = ways.run(
        "sdpa_mxfp8",
        {**operands, **scales, **tables, "seq_len_q": lengths * 0 + 33, "seq_len_kv": lengths},
        use_padding_mask=True,
        attn_scale=0.125,
        paged_attention_max_seq_len_kv=70,
        outputs={"O": torch.float32},
    )
    rule = ways.Rule(scale=0.125, len_kv=used)
    expected = ways.reference(values["q"], values["k"], values["v"], rule)
    ways.close("O", found["O"], expected["O"], 5e-6)


def test_mxfp8_declines_packed_operands(bench):
    axes = {"q": 3, "k": 3, "v": 2}
    operands, scales = mx_problem(9, E4M3, axes)
    q = operands["q"]
    operands["q"] = bench.Ragged(
        q, tuple(q.shape), q.stride(), torch.zeros(3, 1, 1, 1, dtype=torch.int64)
    )
    lengths = torch.tensor([33, 33], dtype=torch.int32).view(2, 1, 1, 1)
    with pytest.raises(tilewright.NotSupportedError, match=r"q is ragged.*dense sequences"):
        bench.run(
            "sdpa_mxfp8",
            {**operands, **scales, "seq_len_q": lengths, "seq_len_kv": lengths},
            use_padding_mask=True,
        )
