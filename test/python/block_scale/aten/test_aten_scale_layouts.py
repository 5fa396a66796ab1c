"""Which axes blocks run along, and where a tiled scale tensor holds each scale."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright import tensor_reordering
from tilewright.engines.aten import block_scale
from tilewright.errors import GraphError, NotSupportedError
from tilewright.graph.operations.block_scale import tile_axes

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")
TILED = tensor_reordering.F8_128x4


def record(dim, stride=None, data_type="FP8_E8M0", reordering=tensor_reordering.NONE):
    stride = stride or torch.empty(dim, device="meta").stride()
    tensor = tilewright.Graph().tensor(dim, stride, tilewright.data_type[data_type])
    return tensor.set_reordering_type(reordering)


def blocks_of(block_size, source, descale, stride=None, reordering=tensor_reordering.NONE):
    graph = tilewright.Graph()
    elements = graph.tensor(source, data_type=tilewright.data_type.FP8_E4M3)
    stride = stride or torch.empty(descale, device="meta").stride()
    scales = graph.tensor(descale, stride, tilewright.data_type.FP8_E8M0)
    scales.set_reordering_type(reordering)
    graph.block_scale_dequantize(elements, scales, block_size)
    return graph.operations[0].blocks()


def test_blocks_run_along_the_last_axis_that_fits():
    assert blocks_of(4, (3, 8, 10), (3, 8, 3)) == (1, 1, 4)
    assert blocks_of(4, (3, 8, 10), (3, 2, 10)) == (1, 4, 1)
    assert blocks_of(4, (9, 8, 10), (3, 8, 10)) == (4, 1, 1)
    assert blocks_of(8, (8, 8), (8, 1)) == (1, 8) and blocks_of(8, (8, 8), (1, 8)) == (8, 1)
    assert blocks_of(1, (2, 3), (2, 3)) == (1, 1)
    assert blocks_of((4,), (3, 8, 10), (3, 8, 3)) == (1, 1, 4)
    assert blocks_of((2, 5), (3, 8, 10), (3, 4, 2)) == (1, 2, 5)
    assert blocks_of((3, 2, 4), (3, 8, 10), (1, 4, 3)) == (3, 2, 4)
    for block_size, source, descale in (
        (4, (3, 8, 10), (3, 8, 4)),
        (4, (3, 8, 10), (3, 8)),
        (4, (3, 8, 10), (3, 2, 3)),
        (0, (3, 8, 10), (3, 8, 10)),
        ((), (3, 8), (3, 8)),
        ((2, 0), (3, 8), (2, 8)),
        ((1, 1, 1), (3, 8), (3, 8)),
        ((2, 4), (3, 8), (2, 3)),
    ):
        with pytest.raises(GraphError):
            blocks_of(block_size, source, descale)


def test_a_tiled_scale_may_be_rounded_up_to_whole_tiles():
    source = (2, 130, 160)
    for descale in ((2, 130, 5), (2, 256, 8)):
        assert blocks_of(32, source, descale, reordering=TILED) == (1, 1, 32)
    for descale in ((2, 130, 8), (2, 256, 5), (2, 384, 8), (2, 256, 12), (2, 128, 8)):
        with pytest.raises(GraphError):
            blocks_of(32, source, descale, reordering=TILED)
    with pytest.raises(GraphError):
        blocks_of(32, source, (2, 256, 8))
    # The column axis is the one of stride 1.
    turned = {"stride": (2048, 1, 8), "reordering": TILED}
    assert blocks_of(32, (2, 160, 130), (2, 8, 256), **turned) == (1, 32, 1)


def test_rows_and_columns_of_tiles():
    def axes(dim, stride):
        return tile_axes(record(dim, stride, reordering=TILED))

    assert axes((128, 4), (4, 1)) == (0, 1)
    assert axes((4, 128), (1, 4)) == (1, 0)
    assert axes((2, 128, 4), (512, 4, 1)) == (1, 2)
    assert axes((2, 4, 128), (512, 1, 4)) == (2, 1)
    assert axes((2, 128, 1), (128, 1, 1)) == (1, 2)
    assert axes((1, 2, 3, 4), (1, 12, 4, 1)) == (2, 3)


def test_tiles_that_are_declined():
    def check(dim, stride, data_type="FP8_E8M0"):
        return block_scale._check_tiled(record(dim, stride, data_type, TILED))

    assert check((128, 4), (4, 1)) == (0, 1)
    assert check((8, 256), (1, 8)) == (1, 0)
    assert check((3, 256, 8), (9999, 8, 1)) == (1, 2)
    for dim, stride, data_type in (
        ((64, 4), (4, 1), "FP8_E8M0"),
        ((128, 6), (6, 1), "FP8_E8M0"),
        ((128, 4), (5, 1), "FP8_E8M0"),
        ((128, 4), (8, 2), "FP8_E8M0"),
        ((128, 4), (4, 1), "FLOAT"),
        ((128, 4), (4, 1), "HALF"),
        ((128,), (1,), "FP8_E8M0"),
    ):
        with pytest.raises(NotSupportedError, match="takes 8-bit scales"):
            check(dim, stride, data_type)
    for load in (block_scale._scale_loader, block_scale._scale_storer):
        other = record((128, 4), (4, 1), reordering=tensor_reordering.INT8x32)
        rest = (torch.float32, CPU) if load is block_scale._scale_loader else ((128, 4),)
        with pytest.raises(NotSupportedError, match="take NONE or F8_128x4"):
            load(other, *rest)


def place(row, column, columns):
    """Where F8_128x4 holds the scale of a row and a block column of a plane."""
    tile = (row // 128) * (columns // 4) + column // 4
    inner = row % 128
    return tile * 512 + (inner % 32) * 16 + (inner // 32) * 4 + column % 4


@pytest.mark.parametrize("turned", [False, True])
def test_tiled_scales_are_stored_and_loaded_by_the_formula(turned):
    rows, columns, batches = 256, 8, 2
    used_rows, used_columns = 200, 6
    codes = torch.randint(
        100, 150, (batches, used_rows, used_columns), generator=torch.Generator().manual_seed(1)
    )
    dim = (batches, columns, rows) if turned else (batches, rows, columns)
    stride = (rows * columns, 1, columns) if turned else (rows * columns, columns, 1)
    needed = (batches, used_columns, used_rows) if turned else tuple(codes.shape)
    scale = record(dim, stride, reordering=TILED)
    values = torch.ldexp(torch.ones(codes.shape), codes - 127)
    raw = torch.full((batches * rows * columns,), 77, dtype=torch.uint8)
    view = raw.view(torch.float8_e8m0fnu).as_strided(dim, stride)
    store = block_scale._scale_storer(scale, needed)
    store(view, values.transpose(1, 2) if turned else values)
    expected = torch.zeros(batches, rows * columns, dtype=torch.uint8)
    for b, r, c in itertools.product(range(batches), range(used_rows), range(used_columns)):
        expected[b, place(r, c, columns)] = int(codes[b, r, c])
    assert torch.equal(raw.view(batches, -1), expected)
    loaded = block_scale._scale_loader(scale, torch.float32, CPU)(view)
    loaded = loaded.transpose(1, 2) if turned else loaded
    assert torch.equal(loaded[:, :used_rows, :used_columns], values)
    for wrong in ((batches, 300, 6), (batches, 200, 9), (1, 200, 6), (batches, 128, 6)):
        wrong = (wrong[0], wrong[2], wrong[1]) if turned else wrong
        with pytest.raises(NotSupportedError, match="rounded up"):
            block_scale._scale_storer(scale, wrong)


def test_spread_scales():
    scale = torch.arange(6.0).view(2, 3)
    assert torch.equal(block_scale._spread(scale, 1, 4, 10), scale.repeat_interleave(4, 1)[:, :10])
    assert torch.equal(block_scale._spread(scale, 0, 3, 5), scale.repeat_interleave(3, 0)[:5])
    assert block_scale._spread(scale, 1, 1, 3) is scale
    # Tiles are rounded up, also where a block is one element.
    assert torch.equal(block_scale._spread(scale, 1, 1, 2), scale[:, :2])
    one = torch.ones(2, 1)
    for block, extent in ((4, 4), (9, 4)):
        assert block_scale._spread(one, 1, block, extent) is one
    assert block_scale._spread(torch.ones(2, 3), 1, 8, 7).shape == (2, 7)


@pytest.mark.parametrize("data_type", ["FP8_E4M3", "FP8_E5M2", "FP4_E2M1"])
def test_scales_of_a_largest_magnitude(data_type):
    element = tilewright.data_type[data_type]
    emax, largest = {"FP8_E4M3": (8, 448.0), "FP8_E5M2": (15, 57344.0), "FP4_E2M1": (2, 6.0)}[
        data_type
    ]
    power = block_scale._scale_maker(tilewright.data_type.FP8_E8M0, element)
    amax = torch.tensor([1.0, 1.99, 2.0, 3.0, 0.75, 2.0**100, 2.0**-120, 0.0, math.inf, 2.0**127])
    floors = [0, 0, 1, 1, -1, 100, -120, None, None, 127]
    expected = [
        2.0 ** max(floor - emax, -127) if floor is not None else 2.0 ** (-127 if not top else 127)
        for floor, top in zip(floors, amax.isinf().tolist(), strict=True)
    ]
    assert power(amax).tolist() == expected
    assert math.isnan(power(torch.tensor([math.nan])).item())
    wide = torch.tensor([2.0**-200, 2.0**300], dtype=torch.float64)
    assert power(wide).tolist() == [2.0**-127, 2.0**127]
    plain = block_scale._scale_maker(tilewright.data_type.FLOAT, element)
    values = torch.tensor([largest, 1.0, 0.0])
    assert plain(values).tolist() == [1.0, torch.tensor(1 / largest).item(), 0.0]
    eight = block_scale._scale_maker(tilewright.data_type.FP8_E4M3, element)
    # 1 + 1/16 lies between two neighbours; 1e9 saturates.
    values = torch.tensor([1.0, 1.0625, 1.0626, 1.1875, 0.0], dtype=torch.float64) * largest
    assert eight(values).tolist() == [1.0, 1.0, 1.125, 1.25, 0.0]
    assert eight(torch.tensor([1e9])).item() == 448.0


def test_axes_that_are_quantized_and_dims_that_are_swapped():
    def axis(given, rank=3, block=4):
        return block_scale._quantized_axis(SimpleNamespace(axis=given, block_size=block), rank)

    assert [axis(a) for a in (None, 0, 1, 2, -1, -2, -3)] == [2, 0, 1, 2, 2, 1, 0]
    for given, block in ((3, 4), (-4, 4), (0, 0), (0, -1)):
        with pytest.raises(NotSupportedError):
            axis(given, block=block)
    assert axis(None, block=1) == 2
    assert block_scale._swapped((2, 3, 4, 5)) == (2, 3, 5, 4)
    assert block_scale._swapped([7, 8]) == (8, 7)


def test_the_largest_magnitude_of_groups():
    groups = torch.tensor([[[1.0, -3.0], [0.5, 0.25]]])
    assert block_scale._amax(groups).tolist() == [[3.0, 0.5]]
    assert block_scale._amax(torch.tensor([[[-2.0]]])).tolist() == [[2.0]]
    assert block_scale._amax(torch.zeros(2, 0, 4)).shape == (2, 0)
    assert block_scale._amax(torch.zeros(2, 3, 0)).tolist() == [[0.0] * 3] * 2
    assert block_scale._amax(torch.zeros(0, 3, 4)).shape == (0, 3)


@pytest.mark.parametrize("extent", [0, 1, 7, 8, 9])
def test_extents_around_a_block(check_graph, extent):
    x = torch.randn((3, extent), generator=torch.Generator().manual_seed(extent))
    graph = tilewright.Graph(io_data_type=torch.float32)
    source = graph.tensor_like(x)
    y, scales = graph.block_scale_quantize(source, 8)
    y.set_output(True).set_data_type("FP8_E4M3")
    scales.set_output(True).set_data_type("FP8_E8M0")
    check_graph(graph, {source: x}, factor=0)
