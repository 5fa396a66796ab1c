"""What the normalization kernels share: addresses of rows and columns, scale and bias, running."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.engines.triton.device_math import narrow
from tilewright.engines.triton.pointwise_functions import saturated


@triton.jit
def place(
    index,
    inner,
    outer_step,
    inner_step,
    AXES: tl.constexpr,
):
    """Element offsets of rows, or of columns, that lie along one or two axes."""
    if AXES == 1:
        return index.to(tl.int64) * inner_step
    return (index // inner).to(tl.int64) * outer_step + (index % inner).to(tl.int64) * inner_step


@triton.jit
def tile_columns(tile, tiles_a_run, lane, INNER_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr):
    """Where a tile's lanes are: the run, their columns in it, and which of these there are."""
    run = tile // tiles_a_run
    column = tile % tiles_a_run * COLUMNS + lane
    return run, column, column < INNER_COLUMNS


@triton.jit
def load_affine(
    pointer,
    row,
    column,
    in_tile,
    inner_rows,
    outer,
    inner,
    jump,
    step,
    INNER_COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    COLUMN_AXES: tl.constexpr,
):
    rows_at = place(row, inner_rows, outer, inner, ROW_AXES)
    columns_at = place(column, INNER_COLUMNS, jump, step, COLUMN_AXES)
    at = pointer + rows_at[:, None] + columns_at[None, :]
    return tl.load(at, mask=in_tile, other=0.0)


@triton.jit
def step_running(old_at, next_at, statistic, momentum, mask, COMPUTE: tl.constexpr):
    """next = (1 - momentum) * old + momentum * statistic; old and next may be one buffer."""
    old = tl.load(old_at, mask=mask, other=0.0).to(COMPUTE)
    stepped = (1.0 - momentum) * old + momentum * statistic
    tl.store(next_at, narrow(stepped, next_at.dtype.element_ty), mask=mask)


@triton.jit
def stored(value, TYPE: tl.constexpr):
    """As it is stored: rounded once to nearest even, 8-bit types saturating."""
    if TYPE.is_fp8e4nv():
        result = saturated(value, TYPE, 448.0)
    elif TYPE.is_fp8e5():
        result = saturated(value, TYPE, 57344.0)
    else:
        result = narrow(value, TYPE)
    return result


@triton.jit
def norm_maximum(maximum, out, count, BLOCK: tl.constexpr):
    """Joins the programs' largest magnitudes, which are whole numbers of the floats' bits."""
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=maximum.dtype.element_ty)
    for first in range(0, count, BLOCK):
        at = first + lane
        largest = tl.maximum(largest, tl.load(maximum + at, mask=at < count, other=0))
    bits = tl.max(largest, axis=0, keep_dims=True)
    if maximum.dtype.element_ty == tl.int64:
        value = bits.to(tl.float64, bitcast=True)
    else:
        value = bits.to(tl.float32, bitcast=True)
    tl.store(out + tl.arange(0, 1), stored(value, out.dtype.element_ty))
