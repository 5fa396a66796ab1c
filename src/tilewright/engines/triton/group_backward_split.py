"""BatchNorm and InstanceNorm backward where rows are cut: sums of parts, then dx.

The kernels walk a part in tiles of ROWS x COLUMNS (``norm_cut``). What joins the parts runs between
them (``group_backward_sums``).
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import PlannedKernel
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.group_backward_sums import join_kernel
from tilewright.engines.triton.norm_cut import Cut, cut_integers, cut_rows
from tilewright.engines.triton.norm_problem import NormProblem
from tilewright.engines.triton.norm_tiles import place, tile_columns

_WARPS = 8


@triton.jit
def group_parts(
    grad,
    x,
    mean,
    inverse,
    part_g,
    part_gx,
    rows,
    inner_rows,
    row_blocks,
    tiles_a_row,
    tiles_a_run,
    tiles_a_part,
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
    INNER_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    part = program // row_blocks
    row = program % row_blocks * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    g_row = (grad + place(row, inner_rows, grad_outer, grad_inner, ROW_AXES))[:, None]
    x_row = (x + place(row, inner_rows, x_outer, x_inner, ROW_AXES))[:, None]
    at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
    mean_of_row = tl.load(mean + at, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    products = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    lane = tl.arange(0, COLUMNS)
    start = part * tiles_a_part
    for tile in range(start, tl.minimum(start + tiles_a_part, tiles_a_row)):
        run, column, in_columns = tile_columns(tile, tiles_a_run, lane, INNER_COLUMNS, COLUMNS)
        inside = in_rows[:, None] & in_columns[None, :]
        cell = (run * grad_jump + column * grad_step)[None, :]
        g = tl.load(g_row + cell, mask=inside, other=0.0).to(COMPUTE)
        cell = (run * x_jump + column * x_step)[None, :]
        values = tl.load(x_row + cell, mask=inside, other=0.0).to(COMPUTE)
        sums += g
        products += tl.where(inside, g * (values - mean_of_row), 0.0)
    at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
    inverse_of_row = tl.load(inverse + at, mask=in_rows, other=0.0).to(COMPUTE)
    tl.store(part_g + part * rows + row, tl.sum(sums, axis=1), mask=in_rows)
    tl.store(part_gx + part * rows + row, tl.sum(products, axis=1) * inverse_of_row, mask=in_rows)


@triton.jit
def group_dx(
    grad,
    x,
    scale,
    mean,
    inverse,
    dx,
    sums_g,
    sums_gx,
    rows,
    inner_rows,
    columns,
    row_blocks,
    tiles_a_row,
    tiles_a_run,
    tiles_a_part,
    programs,
    grad_outer,
    grad_inner,
    grad_jump,
    grad_step,
    x_outer,
    x_inner,
    x_jump,
    x_step,
    dx_outer,
    dx_inner,
    dx_jump,
    dx_step,
    scale_outer,
    scale_inner,
    mean_outer,
    mean_inner,
    inverse_outer,
    inverse_inner,
    INNER_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    # Backwards: what the first kernel read last may still be in the cache.
    program = programs - 1 - tl.program_id(0).to(tl.int64)
    row = program % row_blocks * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    g_row = (grad + place(row, inner_rows, grad_outer, grad_inner, ROW_AXES))[:, None]
    x_row = (x + place(row, inner_rows, x_outer, x_inner, ROW_AXES))[:, None]
    dx_row = (dx + place(row, inner_rows, dx_outer, dx_inner, ROW_AXES))[:, None]
    at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
    mean_of_row = tl.load(mean + at, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
    at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
    inverse_of_row = tl.load(inverse + at, mask=in_rows, other=0.0).to(COMPUTE)
    at = place(row, inner_rows, scale_outer, scale_inner, ROW_AXES)
    factor = (tl.load(scale + at, mask=in_rows, other=0.0).to(COMPUTE) * inverse_of_row)[:, None]
    count = columns.to(COMPUTE)
    average = (tl.load(sums_g + row, mask=in_rows, other=0.0) / count)[:, None]
    # xhat * average(g xhat), of which the row's inverse is taken here once.
    along = tl.load(sums_gx + row, mask=in_rows, other=0.0) / count
    along = (along * inverse_of_row)[:, None]
    lane = tl.arange(0, COLUMNS)
    start = program // row_blocks * tiles_a_part
    for tile in range(start, tl.minimum(start + tiles_a_part, tiles_a_row)):
        run, column, in_columns = tile_columns(tile, tiles_a_run, lane, INNER_COLUMNS, COLUMNS)
        inside = in_rows[:, None] & in_columns[None, :]
        cell = (run * grad_jump + column * grad_step)[None, :]
        g = tl.load(g_row + cell, mask=inside, other=0.0).to(COMPUTE)
        cell = (run * x_jump + column * x_step)[None, :]
        values = tl.load(x_row + cell, mask=inside, other=0.0).to(COMPUTE)
        result = (g - average - (values - mean_of_row) * along) * factor
        cell = (run * dx_jump + column * dx_step)[None, :]
        tl.store(dx_row + cell, result.to(dx.dtype.element_ty), mask=inside)


def split_kernels(
    problem: NormProblem,
    assembly: Assembly,
    cut: Cut,
    programs: int,
    shared: Mapping[str, object],
) -> list[PlannedKernel]:
    """Sums of the parts of ``cut``, what joins them, and dx by four times ``programs``."""
    grounds = problem.plane
    x = problem.tensors["x"]
    cut_integers(assembly, grounds, cut, x)
    tile = {"ROWS": cut.rows, "COLUMNS": cut.columns}
    grid = (cut.row_blocks * cut.parts, 1, 1)
    sums = assembly.kernel(group_parts, grid, _WARPS, **shared, **tile)
    join = join_kernel(problem, assembly, cut.parts)
    cut = cut_rows(grounds, "x", 4 * programs, grounds.columns)
    for name in ("tiles_a_part", "programs"):
        assembly.types.pop(name, None)
        assembly.constants.pop(name, None)
    cut_integers(assembly, grounds, cut, x)
    grid = (cut.row_blocks * cut.parts, 1, 1)
    return [sums, join, assembly.kernel(group_dx, grid, _WARPS, **shared, **tile)]
