"""Block-scaled quantization: scales and elements by hand for MX, NVFP4 and float32 scales."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.graph.enums import tensor_reordering
from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, block_scale, evaluate, formats, layout

pytestmark = pytest.mark.L0


def _tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_mx_scales_by_hand() -> None:
    """2^(floor(log2 amax) - emax): emax 8 for E4M3, 15 for E5M2, 2 for E2M1."""
    amax = _tensor(1.0, 1.99, 2.0, 448.0, 6.0)
    found = block_scale.block_scales(amax, "FP8_E4M3", "FP8_E8M0")
    assert found.tolist() == [2.0**-8, 2.0**-8, 2.0**-7, 1.0, 2.0**-6]
    found = block_scale.block_scales(amax, "FP8_E5M2", "FP8_E8M0")
    assert found.tolist() == [2.0**-15, 2.0**-15, 2.0**-14, 2.0**-7, 2.0**-13]
    found = block_scale.block_scales(amax, "FP4_E2M1", "FP8_E8M0")
    assert found.tolist() == [2.0**-2, 2.0**-2, 2.0**-1, 2.0**6, 1.0]


def test_mx_scales_are_held_to_their_codes() -> None:
    amax = _tensor(0.0, 1e-40, 2.0**-130, 3.0e38, math.inf, math.nan)
    found = block_scale.block_scales(amax, "FP8_E4M3", "FP8_E8M0")
    assert found.tolist()[:5] == [2.0**-127, 2.0**-127, 2.0**-127, 2.0**119, 2.0**127]
    assert torch.isnan(found[5])
    codes = formats.encode(found, "FP8_E8M0").tolist()
    assert codes == [0, 0, 0, 246, 254, 255]


def test_nvfp4_scales_by_hand() -> None:
    amax = _tensor(6.0, 6.75, 12.0, 0.0, 1e6)
    found = block_scale.block_scales(amax, "FP4_E2M1", "FP8_E4M3")
    # 6.75 / 6 = 1.125 is a number of E4M3; 1e6 / 6 saturates.
    assert found.tolist() == [1.0, 1.125, 2.0, 0.0, 448.0]


def test_float_scales_by_hand() -> None:
    found = block_scale.block_scales(_tensor(896.0, 0.0, 1e-37), "FP8_E4M3", "FLOAT")
    assert found.tolist()[:2] == [2.0, 0.0]
    assert found[2].item() == pytest.approx(1e-37 / 448.0, rel=1e-6)


def test_mx_elements_saturate_above_the_largest() -> None:
    """amax 1.99 has the scale of 1: 1.99 * 256 = 509 is beyond 448."""
    x = torch.zeros(32, dtype=torch.float64)
    x[0], x[1], x[2] = 1.99, -1.0, 1.0 / 256
    found = block_scale.quantize(x, "FP8_E4M3", "FP8_E8M0", block_size=32)
    assert found.scales.tolist() == [2.0**-8]
    assert found.elements.tolist()[:4] == [448.0, -256.0, 1.0, 0.0]


@pytest.mark.parametrize("scale", [1.0, 1.125, 0.875])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ties_of_e2m1_go_to_even_under_any_scale(scale: float, sign: float) -> None:
    """Exact ties, also under a scale that is no power of two."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = sign * scale * _tensor(6.0, *ties, *ties, 0.0)
    found = block_scale.quantize(x, "FP4_E2M1", "FP8_E4M3", block_size=16)
    assert found.scales.tolist() == [scale]
    expected = [6.0] + [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0] * 2 + [0.0]
    assert [value * sign for value in found.elements.tolist()] == expected
    # The trap itself: a reciprocal that is off by one unit of float32, as approximate ones are.
    reciprocal = torch.tensor(1.0 / scale, dtype=torch.float32)
    for toward in (0.0, 2.0):
        near = torch.nextafter(reciprocal, torch.tensor(toward))
        wrong = formats.round_to((x.to(torch.float32) * near).double(), "FP4_E2M1")
        assert wrong.tolist() != found.elements.tolist()


def test_a_block_of_zeros_dequantizes_to_zero() -> None:
    x = torch.zeros(2, 32)
    x[1, 3] = 1e-37
    for element, scale, code in (
        ("FP8_E4M3", "FP8_E8M0", 2.0**-127),
        ("FP4_E2M1", "FP8_E4M3", 0.0),
        ("FP8_E4M3", "FLOAT", 0.0),
    ):
        found = block_scale.quantize(x, element, scale, block_size=32)
        assert found.scales[0].tolist() == [code]
        back = block_scale.dequantize(found.elements, found.scales, (1, 32))
        assert (back[0] == 0).all()
        assert torch.isfinite(back).all()
        if scale == "FLOAT":
            # 448 / amax would overflow float32; division does not.
            assert found.elements[1, 3] == 448.0
            assert back[1, 3].item() == pytest.approx(float(x[1, 3]), rel=1e-6)


def test_a_short_last_block_and_another_axis() -> None:
    x = torch.ones(5, 3, dtype=torch.float64)
    x[4] = 256.0
    found = block_scale.quantize(x, "FP8_E4M3", "FP8_E8M0", block_size=4, axis=0)
    assert found.scales.tolist() == [[2.0**-8] * 3, [1.0] * 3]
    assert torch.equal(block_scale.dequantize(found.elements, found.scales, (4, 1)), x)


def test_error_of_a_round_trip_is_within_half_a_step() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(8, 96, generator=generator, dtype=torch.float64)
    for element, scale, size in (
        ("FP8_E4M3", "FP8_E8M0", 32),
        ("FP8_E5M2", "FP8_E8M0", 32),
        ("FP4_E2M1", "FP8_E8M0", 32),
        ("FP4_E2M1", "FP8_E4M3", 16),
        ("FP8_E4M3", "FLOAT", 128),
    ):
        found = block_scale.quantize(x, element, scale, block_size=size)
        back = block_scale.dequantize(found.elements, found.scales, (1, size))
        top = formats.FORMATS[element].max_finite
        spread = block_scale.spread_scales(found.scales, (1, size), (8, 96))
        kept = x.abs() <= top * spread
        half_step = 0.5 * formats.FORMATS[element].epsilon
        smallest = 2.0 ** (formats.FORMATS[element].min_exponent)
        bound = half_step * torch.maximum(x.abs(), spread * smallest)
        assert ((back - x).abs()[kept] <= bound[kept] * (1 + 1e-12)).all()
        assert kept.double().mean() > 0.9


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_graph_quantizes_and_dequantizes(transpose: bool, tiled: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 40, 64, generator=generator, dtype=torch.float64)
    graph = DeclaredGraph(io_data_type="DOUBLE", intermediate_data_type="DOUBLE")
    source = graph.tensor_like(x)
    y, scale = graph.block_scale_quantize(source, block_size=32, axis=2, transpose=transpose)
    y.set_data_type("FP8_E4M3").set_output(True)
    scale.set_data_type("FP8_E8M0").set_output(True)
    if tiled:
        scale.set_reordering_type(tensor_reordering.F8_128x4)
    graph.validate()
    found = evaluate(graph, {source.uid: x})
    expected = block_scale.quantize(x, "FP8_E4M3", "FP8_E8M0", block_size=32)
    elements, scales = expected
    if transpose:
        elements, scales = elements.transpose(1, 2), scales.transpose(1, 2)
    assert_close(found[y.uid], elements, tol=0.0)
    inner = found[scale.uid][tuple(slice(0, extent) for extent in scales.shape)]
    assert_close(inner, scales, tol=0.0)
    # Store both as an engine would and read them back through a second graph.
    codes = formats.encode(found[scale.uid], "FP8_E8M0").to(torch.uint8)
    storage = codes.contiguous()
    if tiled:
        offsets = layout.scale_tile_offsets(scale.dim, scale.stride)
        storage = torch.zeros(int(offsets.max()) + 1, dtype=torch.uint8)
        storage[offsets.reshape(-1)] = codes.reshape(-1)
    elif not transpose:
        storage = torch.empty_strided(scale.dim, scale.stride, dtype=torch.uint8).copy_(codes)
    second = DeclaredGraph(io_data_type="DOUBLE")
    eight_bit = second.tensor(y.dim, data_type="FP8_E4M3")
    descale = second.tensor(
        scale.dim, scale.stride, "FP8_E8M0", reordering_type=scale.reordering_type
    )
    out = second.block_scale_dequantize(eight_bit, descale, 32 if not transpose else [32, 1])
    out.set_output(True)
    second.validate()
    stored = formats.encode(found[y.uid], "FP8_E4M3").to(torch.uint8).contiguous()
    if transpose and not tiled:
        storage = torch.empty_strided(scale.dim, scale.stride, dtype=torch.uint8).copy_(codes)
    back = evaluate(second, {eight_bit.uid: stored, descale.uid: storage})[out.uid]
    want = block_scale.dequantize(expected.elements, expected.scales, (1, 1, 32))
    assert_close(back, want.transpose(1, 2) if transpose else want, tol=0.0)


def test_packed_fp4_elements_are_read_low_nibble_first() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT")
    x = graph.tensor((1, 16), data_type="FP4_E2M1")
    descale = graph.tensor((1, 1), data_type="FP8_E4M3")
    out = graph.block_scale_dequantize(x, descale, 16).set_output(True)
    graph.validate()
    packed = torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F]], dtype=torch.uint8)
    found = evaluate(graph, {x.uid: packed, descale.uid: torch.tensor([[0x40]], dtype=torch.uint8)})
    half = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [*half, -0.0, *(-value for value in half), 0.0]
    assert found[out.uid].reshape(-1).tolist() == [2.0 * value for value in expected]


def test_block_extents() -> None:
    assert block_scale.block_extents([1, 32], (4, 8, 64), (4, 8, 2)) == [1, 1, 32]
    assert block_scale.block_extents([128, 128], (256, 256), (2, 2)) == [128, 128]
    assert block_scale.block_extents(32, (4, 8, 64), (4, 128, 4)) == [1, 1, 32]
    assert block_scale.block_extents((32,), (4, 64, 8), (4, 2, 8)) == [1, 32, 1]
    assert block_scale.block_extents(32, (4, 1, 1), (4, 1, 1)) == [1, 1, 32]
