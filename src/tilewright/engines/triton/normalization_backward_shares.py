"""Gradients of LayerNorm's and RMSNorm's scale and bias: shares of wide rows, and what adds shares.

A share is the sum of g * xhat, and of g, over some rows of a group. Where rows fit the accumulators
of the kernel that makes dx, it makes them (``normalization_backward``). Where they do not, a kernel
here reads grad and x again, a block of columns a program. Shares are added in a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import PlannedKernel
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.norm_tiles import place

# Tile that one program reads at a time, and its warps: of the kernel that adds shares, and of the
# one that makes them.
_SUM_ROWS = 64
_SUM_COLUMNS = 32
_SUM_WARPS = 8
_SHARE_ROWS = 16
_SHARE_COLUMNS = 128
_SHARE_WARPS = 4


@triton.jit
def norm_backward_shares(
    grad,
    x,
    mean,
    inverse,
    dscale_shares,
    dbias_shares,
    inner_rows,
    group_rows,
    grad_outer,
    grad_inner,
    grad_jump,
    grad_step,
    x_outer,
    x_inner,
    x_jump,
    x_step,
    mean_outer,
    mean_inner,
    inverse_outer,
    inverse_inner,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER_COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    COLUMN_AXES: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    # Neighbouring programs read neighbouring columns.
    share = (tl.program_id(0) // COLUMN_BLOCKS).to(tl.int64)
    group = share // SHARES
    column = tl.program_id(0) % COLUMN_BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    g_column = place(column, INNER_COLUMNS, grad_jump, grad_step, COLUMN_AXES)[None, :]
    x_column = place(column, INNER_COLUMNS, x_jump, x_step, COLUMN_AXES)[None, :]
    dscale = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    dbias = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    first = share % SHARES * ROWS
    while first < group_rows:
        in_group = first + tl.arange(0, ROWS)
        in_rows = in_group < group_rows
        row = group * group_rows + in_group
        inside = in_rows[:, None] & in_width[None, :]
        at = place(row, inner_rows, grad_outer, grad_inner, ROW_AXES)[:, None] + g_column
        g = tl.load(grad + at, mask=inside, other=0.0).to(COMPUTE)
        at = place(row, inner_rows, x_outer, x_inner, ROW_AXES)[:, None] + x_column
        values = tl.load(x + at, mask=inside, other=0.0).to(COMPUTE)
        if IS_CENTRED:
            at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
            values = values - tl.load(mean + at, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
        at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
        values = values * tl.load(inverse + at, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
        dscale += tl.where(inside, g * values, 0.0)
        if HAS_DBIAS:
            dbias += g
        first += ROWS * SHARES
    at = share * WIDTH + column
    tl.store(dscale_shares + at, tl.sum(dscale, axis=0), mask=in_width)
    if HAS_DBIAS:
        tl.store(dbias_shares + at, tl.sum(dbias, axis=0), mask=in_width)


@triton.jit
def sum_shares(
    dscale_shares,
    dbias_shares,
    dscale,
    dbias,
    dscale_group,
    dbias_group,
    dscale_jump,
    dscale_step,
    dbias_jump,
    dbias_step,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER_COLUMNS: tl.constexpr,
    COLUMN_AXES: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    total = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    total_bias = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    for first in range(0, PROGRAMS, ROWS):
        share = first + tl.arange(0, ROWS)
        at = (group * PROGRAMS + share)[:, None] * WIDTH + column[None, :]
        live = (share < PROGRAMS)[:, None] & in_width[None, :]
        total += tl.load(dscale_shares + at, mask=live, other=0.0)
        if HAS_DBIAS:
            total_bias += tl.load(dbias_shares + at, mask=live, other=0.0)
    sums = tl.sum(total, axis=0).to(dscale.dtype.element_ty)
    at = group * dscale_group + place(column, INNER_COLUMNS, dscale_jump, dscale_step, COLUMN_AXES)
    tl.store(dscale + at, sums, mask=in_width)
    if HAS_DBIAS:
        bias_sums = tl.sum(total_bias, axis=0).to(dbias.dtype.element_ty)
        at = group * dbias_group + place(column, INNER_COLUMNS, dbias_jump, dbias_step, COLUMN_AXES)
        tl.store(dbias + at, bias_sums, mask=in_width)


def shares_kernel(
    assembly: Assembly, width: int, groups: int, shares: int, constants: Mapping[str, object]
) -> PlannedKernel:
    """``shares`` shares of each group's rows, which are ``width`` wide."""
    blocks = triton.cdiv(width, _SHARE_COLUMNS)
    return assembly.kernel(
        norm_backward_shares,
        (blocks * groups * shares, 1, 1),
        _SHARE_WARPS,
        **constants,
        SHARES=shares,
        ROWS=_SHARE_ROWS,
        COLUMNS=_SHARE_COLUMNS,
        COLUMN_BLOCKS=blocks,
    )


def sum_kernel(
    assembly: Assembly, width: int, groups: int, shares: int, constants: Mapping[str, object]
) -> PlannedKernel:
    """dscale and dbias of each group from its ``shares`` shares."""
    return assembly.kernel(
        sum_shares,
        (groups, triton.cdiv(width, _SUM_COLUMNS), 1),
        _SUM_WARPS,
        **constants,
        PROGRAMS=shares,
        ROWS=_SUM_ROWS,
        COLUMNS=_SUM_COLUMNS,
    )
