"""What the normalization kernels share: addresses of rows and columns, scale and bias, running."""

from __future__ import annotations

import triton
import triton.language as tl


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
    tl.store(next_at, stepped.to(next_at.dtype.element_ty), mask=mask)
