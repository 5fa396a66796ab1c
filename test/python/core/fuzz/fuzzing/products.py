"""Products: matmul, convolutions, grouped products; and block-scaled formats."""

from __future__ import annotations

from fuzzing.drawing import (
    BFLOAT16,
    FLOAT,
    FLOATS,
    FP8,
    HALF,
    WIDE,
    Drawing,
    Value,
    result_types,
)
from tilewright.dtypes import DataType
from tilewright.graph.enums import moe_grouped_matmul_mode, tensor_reordering

_INDEX = (DataType.INT32, DataType.INT64)
_MAX_SIDE = 40


def matmul(d: Drawing, source: Value | None) -> None:
    if source is None or len(source.dim) < 2 or source.data_type not in FLOATS:
        source = d.operand(d.dim(d.pick((2, 3, 4, 5))), (*FLOATS, DataType.INT8))
    columns = d.extent(20)
    batch = tuple(1 if d.chance(25) else extent for extent in source.dim[:-2])
    integral = source.data_type is DataType.INT8
    same = source.data_type
    types = (same,) if integral or d.chance(60) else FLOATS
    if d.chance(20) and not integral:
        # The left operand new, the right one given.
        rows = d.extent(20)
        left = d.operand((*batch, rows, source.dim[-2]), types)
        a, b, dim = left, source, (*source.dim[:-2], rows, source.dim[-1])
    else:
        right = d.operand((*batch, source.dim[-1], columns), types)
        a, b, dim = source, right, (*source.dim[:-1], columns)
    results = (FLOAT, DataType.INT32, DataType.INT32) if integral else result_types(same)
    d.result(d.graph.matmul(a.tensor, b.tensor), dim, results, exact=integral)


# -- convolution ------------------------------------------------------------------------------


def _convolution(d: Drawing, source: Value | None, direction: str) -> None:
    rank = d.pick((3, 4, 4, 5))
    groups, own, per_group = d.pick((1, 1, 2, 3)), d.pick((1, 2, 3, 5)), d.pick((1, 2, 3))
    filters = groups * per_group
    image = (d.pick((1, 2, 3)), groups * own, *(d.pick((1, 2, 3, 5, 7)) for _ in range(rank - 2)))
    fits = source is not None and 3 <= len(source.dim) <= 5 and source.data_type in FLOATS
    if source is not None and fits and direction == "conv_fprop" and 0 not in source.dim:
        image, rank = source.dim, len(source.dim)
        groups = d.pick([g for g in (1, 2, 3, image[1]) if image[1] % g == 0])
        own, filters = image[1] // groups, groups * d.pick((1, 2))
    options: dict[str, list[int]] = {"pre_padding": [], "post_padding": [], "stride": []}
    options["dilation"] = []
    window, spatial = [], []
    for extent in image[2:]:
        pre, post = d.pick((0, 0, 1, 2)), d.pick((0, 0, 1, 2))
        dilation, stride = d.pick((1, 1, 2)), d.pick((1, 1, 2, 3))
        room = extent + pre + post - 1
        reach = d.pick([r for r in (1, 2, 3, 4) if dilation * (r - 1) <= room])
        window.append(reach)
        spatial.append((room - dilation * (reach - 1)) // stride + 1)
        for name, value in zip(options, (pre, post, stride, dilation), strict=True):
            options[name].append(value)
    weight, loss = (filters, own, *window), (image[0], filters, *spatial)
    image_type = d.pick(FLOATS)
    other = image_type if d.chance(70) else d.pick(FLOATS)
    method = getattr(d.graph, direction)
    if direction == "conv_fprop":
        first = d.operand(image, (image_type,)) if source is None or source.dim != image else source
        second = d.operand(weight, (other,))
        out = method(first.tensor, second.tensor, **options)
        d.result(out, loss, result_types(image_type))
        return
    if direction == "conv_dgrad":
        first, second, dim = d.operand(loss, (image_type,)), d.operand(weight, (other,)), image
    else:
        first, second, dim = d.operand(image, (image_type,)), d.operand(loss, (other,)), weight
    out = method(first.tensor, second.tensor, **options)
    d.result(out, dim, result_types(image_type), set_dim=True)


def conv_fprop(d: Drawing, source: Value | None) -> None:
    _convolution(d, source, "conv_fprop")


def conv_dgrad(d: Drawing, source: Value | None) -> None:
    _convolution(d, source, "conv_dgrad")


def conv_wgrad(d: Drawing, source: Value | None) -> None:
    _convolution(d, source, "conv_wgrad")


# -- grouped products -------------------------------------------------------------------------


def _offsets(d: Drawing, experts: int, rows: int, with_end: bool) -> Value:
    offsets = d.input(
        (experts + with_end, 1, 1), d.pick(_INDEX), d.strides((experts + with_end, 1, 1))
    )
    if d.chance(30):
        # Anything at all: what lies outside is clipped, a group that ends early is empty.
        numbers = [d.pick(range(-2, rows + 3)) for _ in range(experts + with_end)]
        d.case.given.append((offsets.tensor, tuple(numbers)))
    return offsets


def moe_grouped_matmul(d: Drawing, source: Value | None) -> None:
    rows, inner, columns = d.extent(20), d.extent(12), d.extent(12)
    experts = d.pick((1, 2, 3, 5))
    data_type = d.pick(FLOATS)
    token = d.operand((1, rows, inner), (data_type,))
    weight = d.operand((experts, inner, columns), (data_type,))
    modes = (
        *("NONE", "NONE", "GATHER", "GATHER", "SCATTER", "SCATTER"),
        *(("COMBINE",) if d.chance(20) else ()),
    )
    mode = moe_grouped_matmul_mode[d.pick(modes)]
    index, count, out_rows = None, rows, rows
    if mode.name == "GATHER":
        count = out_rows = d.extent(20) if rows else 0
    if mode.name != "NONE":
        index = d.input((1, count, 1), d.pick(_INDEX)).tensor
    if mode.name == "SCATTER":
        out_rows += d.pick((0, 0, 1, 3))
    offsets = _offsets(d, experts, count, d.chance(50))
    out = d.graph.moe_grouped_matmul(
        token.tensor, weight.tensor, offsets.tensor, token_index=index, mode=mode
    )
    d.result(out, (1, out_rows, columns), result_types(data_type), set_dim=mode.name == "SCATTER")


def moe_grouped_matmul_bwd(d: Drawing, source: Value | None) -> None:
    rows, inner, columns = d.extent(20), d.extent(12), d.extent(12)
    experts, with_end = d.pick((1, 2, 3, 5)), d.chance(50)
    data_type = d.pick(FLOATS)
    gradient = d.operand((1, rows, columns), (data_type,))
    token = d.operand((1, rows, inner), (data_type,))
    offsets = _offsets(d, experts, rows, with_end)
    out = d.graph.moe_grouped_matmul_bwd(gradient.tensor, token.tensor, offsets.tensor)
    d.result(out, (experts, inner, columns), result_types(data_type), set_dim=with_end)


# -- block scales -----------------------------------------------------------------------------

_BLOCKS = (1, 3, 16, 32)
_ELEMENTS = (*FP8, DataType.FP4_E2M1)
_SCALES = (DataType.FP8_E8M0, DataType.FP8_E4M3, FLOAT)


def block_scale_quantize(d: Drawing, source: Value | None) -> None:
    if source is None or source.data_type not in WIDE or not source.exact:
        source = d.operand(d.dim(d.pick((1, 2, 3, 4))), WIDE, exact=True)
    rank = len(source.dim)
    transposed = rank >= 2 and d.chance(25)
    axis, block = d.pick(range(rank)), d.pick(_BLOCKS)
    named = d.pick((axis, axis - rank))
    if axis == rank - 1 and d.chance(50):
        named = None
    elements, scale = d.graph.block_scale_quantize(source.tensor, block, named, transposed)
    counts = list(source.dim)
    counts[axis] = -(-counts[axis] // block)
    dim = list(source.dim)
    if transposed:
        for extents in (dim, counts):
            extents[-1], extents[-2] = extents[-2], extents[-1]
    scale_type = d.pick(_SCALES)
    made = d.result(elements, dim, _ELEMENTS, exact=scale_type is DataType.FP8_E8M0)
    scale.set_data_type(scale_type)
    if rank >= 2 and axis >= rank - 2 and d.chance(25):
        scale.set_reordering_type(tensor_reordering.F8_128x4).set_output(True)
        return
    scales = d.result(scale, counts, (scale_type,), exact=scale_type is DataType.FP8_E8M0)
    if d.chance(50) and not transposed and block > 1:
        out = d.graph.block_scale_dequantize(
            made.tensor, scales.tensor, _block_sizes(axis, block, rank)
        )
        d.result(out, dim, (FLOAT, HALF, BFLOAT16))


def _block_sizes(axis: int, block: int, rank: int) -> list[int]:
    return [block if other == axis else 1 for other in range(rank)]


def block_scale_dequantize(d: Drawing, source: Value | None) -> None:
    dim = d.dim(d.pick((1, 2, 3, 4)))
    axis, block = d.pick(range(len(dim))), d.pick(_BLOCKS)
    counts = list(dim)
    counts[axis] = -(-counts[axis] // block)
    elements = d.input(dim, d.pick((*_ELEMENTS, *_ELEMENTS, DataType.INT8, DataType.INT4)))
    more = {}
    if len(dim) >= 2 and axis >= len(dim) - 2 and d.chance(20):
        more["reordering_type"] = tensor_reordering.F8_128x4
        strides = _tile_strides(counts, axis)
        scales = d.input(counts, d.pick(_SCALES[:2]), strides, **more)
    else:
        scales = d.input(counts, d.pick(_SCALES))
    out = d.graph.block_scale_dequantize(
        elements.tensor,
        scales.tensor,
        _block_sizes(axis, block, len(dim)),
        is_negative_scale=d.chance(20),
    )
    d.result(out, dim, (FLOAT, HALF, BFLOAT16, DataType.DOUBLE))


def _tile_strides(counts: list[int], columns: int) -> list[int]:
    """Packed whole tiles with the block columns fastest."""
    rank = len(counts)
    rows = 2 * rank - 3 - columns
    strides = [1] * rank
    strides[rows] = -(-counts[columns] // 4) * 4
    step = strides[rows] * (-(-counts[rows] // 128) * 128)
    for axis in reversed(range(rank - 2)):
        strides[axis] = max(step, 1)
        step *= max(counts[axis], 1)
    return strides
