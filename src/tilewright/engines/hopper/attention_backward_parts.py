"""Row statistics in parts, which a product on the tensor cores adds to a tile.

Where scores are made transposed, every thread needs the statistics of half of a tile's rows, and
loading them costs shared memory, which binds there, and registers. So a statistic is split into
numbers of 16 bits that together have a float32's bits, the rows' parts are an operand of 16
columns, and a first product of them with the units that they count begins the tile:

    units parts^T = -Stats / c,  or -Delta,      then  + K Q^T,  or + V dO^T.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

# Columns of the operand: what a product takes at least. The rest are zeros.
PARTS = gl.constexpr(16)
MOST_PARTS = gl.constexpr(4)


@gluon.constexpr_function
def unit_of(part, dtype):
    """What part number ``part`` counts; 0 if there is none.

    Three bfloat16 have 24 bits. float16 has 11, and a narrow range: its parts count steps of 2^11.
    """
    if dtype == gl.bfloat16:
        return 1.0 if part < 3 else 0.0
    return 2.0 ** (11 - 11 * part)


@gluon.jit
def store_parts(parts, values, first):
    """Store the parts of a block of float32 numbers as rows ``first`` and on; infinity is one."""
    ROWS: gl.constexpr = values.shape[0]
    dtype: gl.constexpr = parts.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    rest = gl.convert_layout(values, gl.SliceLayout(1, layout))
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, PARTS, gl.SliceLayout(0, layout))[None, :]
    tile = gl.zeros([ROWS, PARTS], gl.float32, layout)
    for i in gl.static_range(MOST_PARTS):
        if unit_of(i, dtype) > 0.0:
            part = (rest * (1.0 / unit_of(i, dtype))).to(dtype).to(gl.float32)
            rest = gl.where(gl.abs(part) < float("inf"), rest - part * unit_of(i, dtype), 0.0)
            tile = gl.where(column == i, part[:, None], tile)
    gl.store(parts + row.to(gl.int64)[:, None] * PARTS + column, tile.to(dtype))


@gluon.jit
def units_of(keys: gl.constexpr, score_layout: gl.constexpr, dtype: gl.constexpr):
    """What the parts count, once for every key: the operand of the products that add them up."""
    layout: gl.constexpr = gl.DotOperandLayout(0, score_layout, 2)
    column = gl.arange(0, PARTS, gl.SliceLayout(0, layout))[None, :]
    units = gl.zeros([keys, PARTS], gl.float32, layout)
    for i in gl.static_range(MOST_PARTS):
        units = gl.where(column == i, unit_of(i, dtype), units)
    return units.to(dtype)


@gluon.jit
def start_with_parts(keys, rows, parts, units, zero):
    """Start keys rows^T plus the rows' statistics: two products under way."""
    token = warpgroup_mma(units, parts.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(keys, rows.permute((1, 0)), token, is_async=True)
