"""The ATen engine's block-scaled formats: exact codes, ties, tiles and special values."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import tilewright
from tilewright import tensor_reordering
from tilewright.engines.aten.block_scale import pack_scales_128x4, unpack_scales_128x4
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

ELEMENTS = ["FP8_E4M3", "FP8_E5M2", "FP4_E2M1"]
SCALES = ["FP8_E8M0", "FP8_E4M3", "FLOAT"]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _draw(dim, seed=0):
    """Numbers over many binades, so that blocks differ in scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(dim, generator=generator)
    return x * torch.exp(3 * torch.randn(dim, generator=generator))


def _quantize(x, element, scale, block, reordering=tensor_reordering.NONE, **attributes):
    graph = tilewright.Graph(io_data_type=x.dtype)
    source = graph.tensor_like(x)
    y, scales = graph.block_scale_quantize(source, block, **attributes)
    y.set_output(True).set_data_type(element)
    scales.set_output(True).set_data_type(scale).set_reordering_type(reordering)
    return graph, {source: x}, y, scales


def _check_exactly(check_graph, graph, feeds):
    """Codes are exact or wrong: no arithmetic error is allowed for, half a spacing would do."""
    results = check_graph(graph, feeds, factor=0)
    from tilewright.oracle.block_scale import quantize

    operation = graph.operations[0]
    x = next(iter(feeds.values()))
    y, scale = operation.outputs["Y"], operation.outputs["scale"]
    axis = -1 if operation.axis is None else operation.axis
    expected = quantize(x, y.data_type, scale.data_type, block_size=operation.block_size, axis=axis)
    elements, scales = expected.elements, expected.scales
    if operation.transpose:
        elements, scales = elements.transpose(-1, -2), scales.transpose(-1, -2)
    assert torch.equal(results[y].double(), elements)
    held = results[scale].double()[tuple(slice(0, extent) for extent in scales.shape)]
    assert torch.equal(held, scales)
    return results


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_codes_equal_the_oracles_along_every_axis(check_graph, element, scale):
    x = _draw((2, 33, 50))
    x[0, 0], x[1, 1] = 0.0, 1e-37
    for dtype in (torch.float32, torch.bfloat16):
        for attributes in (
            {},
            {"axis": 1},
            {"axis": -2, "transpose": True},
            {"axis": 2, "transpose": True},
            {"axis": 0},
        ):
            graph, feeds, _, _ = _quantize(x.to(dtype), element, scale, 16, **attributes)
            _check_exactly(check_graph, graph, feeds)


@pytest.mark.parametrize("scale", ["FP8_E8M0", "FP8_E4M3"])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("transpose", [False, True])
def test_tiled_scales_go_where_the_oracle_reads_them(check_graph, element, scale, transpose):
    x = _draw((2, 130, 96))
    tiles = tensor_reordering.F8_128x4
    graph, feeds, y, scales = _quantize(x, element, scale, 16, tiles, transpose=transpose)
    results = _check_exactly(check_graph, graph, feeds)
    assert scales.get_dim() == ([2, 8, 256] if transpose else [2, 256, 8])
    # Padding of whole tiles is the scale of a block of zeros.
    padding = results[scales].double().transpose(1, 2) if transpose else results[scales].double()
    assert (padding[:, 130:] <= 2.0**-127).all() and (padding[:, :, 6:] <= 2.0**-127).all()
    _round_trip(graph, feeds, y, scales, 16, transpose)


def _round_trip(graph, feeds, y, scales, block, transpose):
    """Dequantizing the very buffers gives element times scale."""
    from tilewright.oracle import layout

    buffers = {}
    for tensor in (y, scales):
        count = math.prod(tensor.get_dim())
        nbytes = count * tensor.get_data_type().bits // 8
        buffers[tensor] = torch.zeros(nbytes, dtype=torch.uint8)
    graph.execute({**feeds, **buffers})
    back = tilewright.Graph(io_data_type=torch.float32)
    elements = back.tensor(y.dim, y.stride, y.data_type)
    descale = back.tensor(
        scales.dim, scales.stride, scales.data_type, reordering_type=scales.reordering_type
    )
    size = [block, 1] if transpose else [1, block]
    out = back.block_scale_dequantize(elements, descale, size).set_output(True)
    back.build()
    result = torch.zeros(out.get_dim())
    back.execute({elements: buffers[y], descale: buffers[scales], out: result})
    values = layout.load(y, buffers[y]).double()
    factors = layout.load(scales, buffers[scales]).double()
    if transpose:
        values, factors = values.transpose(1, 2), factors.transpose(1, 2)
        result = result.transpose(1, 2)
    spread = factors.repeat_interleave(block, 2)[:, : values.shape[1], : values.shape[2]]
    assert torch.equal(result, (values * spread).float())


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("block_size", [16, [1, 16], [4, 8]])
def test_dequantize_with_blocks_on_one_or_two_axes(check_graph, negative, block_size):
    blocks = [1, 16] if block_size == 16 else block_size
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (10 * 40 // 2,), generator=generator, dtype=torch.uint8)
    dim = [-(-10 // blocks[0]), -(-40 // blocks[1])]
    scale = (torch.rand(dim, generator=generator) * 100).to(torch.float8_e4m3fn)
    for out_type in (torch.float32, torch.bfloat16):
        graph = tilewright.Graph(io_data_type=out_type)
        source, descale = graph.tensor((10, 40), data_type="FP4_E2M1"), graph.tensor_like(scale)
        graph.block_scale_dequantize(source, descale, block_size, negative).set_output(True)
        check_graph(graph, {source: codes, descale: scale}, factor=1)


def test_signed_ties_of_e2m1_go_to_the_even_code(run_guarded):
    middles = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    # A largest element of 6 * 0.8125 makes the NVFP4 scale 0.8125, no power of two.
    for factor in (1.0, 0.8125):
        row = [6.0, *middles, *(-m for m in middles), -0.0]
        x = torch.tensor([row]) * factor
        graph, feeds, y, scales = _quantize(x, "FP4_E2M1", "FP8_E4M3", 16)
        results = run_guarded(graph, feeds)
        assert results[scales].double().item() == factor
        assert results[y][0].tolist() == [6.0, *even, *(-v for v in even), 0.0]
        # Zeros keep their sign: -0.25 and -0 become -0.
        assert torch.signbit(results[y][0, 8:]).all()
    # One spacing of float32 above the tie is no tie.
    above = torch.nextafter(torch.tensor([[6.0, *middles] + [0.0] * 8]), torch.tensor(9.0))
    graph, feeds, y, _ = _quantize(above, "FP4_E2M1", "FP8_E4M3", 16)
    assert run_guarded(graph, feeds)[y][0, 1:8].tolist() == E2M1[1:]


@pytest.mark.parametrize("element", ["FP8_E4M3", "FP8_E5M2"])
def test_ties_of_fp8_go_to_the_even_code(run_guarded, element):
    mantissa = 3 if element == "FP8_E4M3" else 2
    largest = 448.0 if element == "FP8_E4M3" else 57344.0
    step = 2.0**-mantissa
    ties = [1 + (k + 0.5) * step for k in range(2**mantissa)]
    even = [1 + (k + k % 2) * step for k in range(2**mantissa)]
    row = [largest, *ties, *(-t for t in ties)]
    x = torch.tensor([row + [0.0] * (32 - len(row))])
    for scale in ("FP8_E8M0", "FLOAT"):
        graph, feeds, y, scales = _quantize(x, element, scale, 32)
        results = run_guarded(graph, feeds)
        assert results[scales].double().item() == 1.0
        got = results[y][0, 1 : len(row)].double().tolist()
        assert got == [*even, *(-e for e in even)]


def test_a_quotient_is_divided_not_multiplied_by_a_reciprocal(check_graph):
    # Scales over every E4M3 mantissa, and elements at every tie of E2M1 times the scale.
    scales = torch.tensor([1 + k / 8 for k in range(8)]).repeat_interleave(2)
    ties = torch.tensor([6.0] + [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2 + [0.0])
    x = scales[:, None] * ties[None, :]
    graph, feeds, _, _ = _quantize(x, "FP4_E2M1", "FP8_E4M3", 16)
    _check_exactly(check_graph, graph, feeds)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("element", ELEMENTS)
def test_zero_tiny_infinite_and_nan_blocks(check_graph, run_guarded, element, scale):
    rows = torch.zeros(5, 32)
    rows[1, 3], rows[2, 5], rows[3, 7] = 1e-37, 1e-45, 3.4e38
    rows[4] = torch.linspace(-448, 448, 32)
    graph, feeds, _, _ = _quantize(rows, element, scale, 32)
    results = _check_exactly(check_graph, graph, feeds)
    y, scales = results.values()
    assert (y[0] == 0).all() and (y.double() * scales.double())[0].abs().max() == 0
    assert torch.isfinite(y.double()).all() and torch.isfinite(scales.double()).all()
    if scale == "FLOAT":
        return
    special = torch.ones(2, 32)
    special[0, 1], special[1, 1] = math.nan, math.inf
    graph, feeds, y, scales = _quantize(special, element, scale, 32)
    results = run_guarded(graph, feeds)
    first, second = results[scales].double().flatten().tolist()
    assert math.isnan(first) and second == (2.0**127 if scale == "FP8_E8M0" else 448.0)
    assert results[y][1, 1] == {"FP8_E4M3": 448, "FP8_E5M2": 57344, "FP4_E2M1": 6}[element]


def test_tiles_place_scales_as_the_matrix_instructions_read_them():
    logical = torch.arange(256 * 8).reshape(1, 256, 8)
    stored = pack_scales_128x4(logical)
    flat = stored.flatten()
    for row, column in ((0, 0), (1, 0), (33, 5), (96, 3), (127, 7), (200, 6), (255, 3)):
        tile = (row // 128) * 2 + column // 4
        inside = (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
        assert flat[tile * 512 + inside] == row * 8 + column
    assert torch.equal(unpack_scales_128x4(stored), logical)


def test_float32_scales_in_tiles_are_declined():
    graph, _, _, _ = _quantize(
        _draw((128, 64)), "FP8_E4M3", "FLOAT", 16, tensor_reordering.F8_128x4
    )
    with pytest.raises(NotSupportedError, match="F8_128x4 takes 8-bit scales"):
        graph.build()


def test_empty_packed_elements_inside_a_graph_need_no_workspace():
    graph = tilewright.Graph(io_data_type=torch.float16, intermediate_data_type=torch.float32)
    x = graph.tensor((0, 5, 17))
    elements, scale = graph.block_scale_quantize(x, 16, 1, True)
    elements.set_data_type(tilewright.data_type.FP4_E2M1)
    scale.set_output(True).set_data_type(tilewright.data_type.FP8_E4M3)
    graph.build()
    assert graph.get_workspace_size() == 0
    buffers = {x: torch.empty(0, 5, 17, dtype=torch.float16)}
    graph.execute({**buffers, scale: torch.empty(0, 17, 1, dtype=torch.float8_e4m3fn)})
