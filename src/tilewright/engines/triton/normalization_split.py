"""Normalization of long rows in Triton, forward: a row is cut, so that all of a device works on it.

Three kernels. The first takes a part of some rows, and writes its mean and its sum of squared
deviations to the workspace; the second joins the parts of a row in a fixed order (Chan, Golub and
LeVeque 1979), writes the statistics and steps the running ones; the third normalizes. Batch
normalization with given statistics is the third alone.

A part is walked in tiles of ROWS x COLUMNS (``norm_cut``). Deviations are first taken from the mean
K of the part's first tile, s1 = sum(x - K) and s2 = sum((x - K)^2): the tile is one of the part's
n_t tiles, so (mean - K)^2 is at most n_t times the variance, and s2 - s1^2 / n loses no more than
n_t roundings.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.device_math import narrow
from tilewright.engines.triton.norm_codegen import TILES, fused_kernel
from tilewright.engines.triton.norm_cut import cut_integers, cut_rows
from tilewright.engines.triton.norm_problem import RUNNING, NormProblem, Scratches
from tilewright.engines.triton.norm_tiles import place, step_running, stored, tile_columns
from tilewright.launch.prepared import Scratch
from tilewright.launch.workspace import plan_workspace

# Longer rows are cut where neighbours in memory are of different rows: too few would fit a tile.
MAX_SCATTERED_COLUMNS = 1024
# By what measured best on an H200 (benchmark/norm_layouts_gpu.py), where lanes go along columns and
# where along rows: programs a multiprocessor, and warps each.
_ALONG_COLUMNS = (8, 8)
_ALONG_ROWS = (12, 4)
_MAX_SPLITS = 256
_JOIN_WARPS = 4
# Rows that one program of the second kernel joins.
_JOINED_ROWS = 8


@triton.jit
def elements_before(tile, tiles_a_run, INNER_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr):
    """Elements of a row in the tiles before ``tile``; a run of the outer axis ends a tile early."""
    in_run = tl.minimum((tile % tiles_a_run) * COLUMNS, INNER_COLUMNS)
    return tile // tiles_a_run * INNER_COLUMNS + in_run


@triton.jit
def norm_parts(
    x,
    part_means,
    part_squares,
    rows,
    inner_rows,
    row_blocks,
    tiles_a_row,
    tiles_a_run,
    tiles_a_part,
    x_outer,
    x_inner,
    x_jump,
    x_step,
    INNER_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    part = program // row_blocks
    row = program % row_blocks * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    x_row = x + place(row, inner_rows, x_outer, x_inner, ROW_AXES)
    lane = tl.arange(0, COLUMNS)
    tile = part * tiles_a_part
    end = tl.minimum(tile + tiles_a_part, tiles_a_row)
    count = elements_before(end, tiles_a_run, INNER_COLUMNS, COLUMNS)
    count = (count - elements_before(tile, tiles_a_run, INNER_COLUMNS, COLUMNS)).to(COMPUTE)
    run, column, in_columns = tile_columns(tile, tiles_a_run, lane, INNER_COLUMNS, COLUMNS)
    inside = in_rows[:, None] & in_columns[None, :]
    cell = (run * x_jump + column * x_step)[None, :]
    raw = tl.load(x_row[:, None] + cell, mask=inside, other=0.0)
    values = raw.to(COMPUTE)
    # fused: input
    if IS_CENTRED:
        in_tile = tl.minimum(INNER_COLUMNS - tile % tiles_a_run * COLUMNS, COLUMNS).to(COMPUTE)
        origin = tl.sum(values, axis=1) / in_tile
        values = tl.where(inside, values - origin[:, None], 0.0)
        sums = values
    squares = values * values
    for following in range(tile + 1, end):
        run, column, in_columns = tile_columns(following, tiles_a_run, lane, INNER_COLUMNS, COLUMNS)
        inside = in_rows[:, None] & in_columns[None, :]
        cell = (run * x_jump + column * x_step)[None, :]
        raw = tl.load(x_row[:, None] + cell, mask=inside, other=0.0)
        values = raw.to(COMPUTE)
        # fused: input
        if IS_CENTRED:
            values = tl.where(inside, values - origin[:, None], 0.0)
            sums += values
        squares += values * values
    total = tl.sum(squares, axis=1)
    if IS_CENTRED:
        moved = tl.sum(sums, axis=1) / count
        total = tl.maximum(total - moved * moved * count, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(part_means + part * rows + row, origin + moved, mask=in_rows)
    tl.store(part_squares + part * rows + row, total, mask=in_rows)


@triton.jit
def norm_join(
    part_means,
    part_squares,
    means,
    inverses,
    mean_out,
    inverse_out,
    in_mean,
    in_var,
    next_mean,
    next_var,
    epsilon,
    momentum,
    rows,
    inner_rows,
    columns,
    tiles_a_row,
    tiles_a_run,
    tiles_a_part,
    mean_outer,
    mean_inner,
    inverse_outer,
    inverse_inner,
    in_mean_inner,
    in_var_inner,
    next_mean_inner,
    next_var_inner,
    INNER_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    HAS_NEXT_MEAN: tl.constexpr,
    HAS_NEXT_VAR: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    part = tl.arange(0, PARTS_BLOCK).to(tl.int64)
    inside = (part < PARTS)[:, None] & in_rows[None, :]
    at = part[:, None] * rows + row[None, :]
    part_square = tl.load(part_squares + at, mask=inside, other=0.0)
    squares = tl.sum(part_square, axis=0)
    total = columns.to(COMPUTE)
    if IS_CENTRED:
        start = tl.minimum(part * tiles_a_part, tiles_a_row)
        end = tl.minimum(start + tiles_a_part, tiles_a_row)
        count = elements_before(end, tiles_a_run, INNER_COLUMNS, COLUMNS)
        count = (count - elements_before(start, tiles_a_run, INNER_COLUMNS, COLUMNS)).to(COMPUTE)
        part_mean = tl.load(part_means + at, mask=inside, other=0.0)
        mean = tl.sum(part_mean * count[:, None], axis=0) / total
        away = tl.where(inside, part_mean - mean[None, :], 0.0)
        squares += tl.sum(away * away * count[:, None], axis=0)
        tl.store(means + row, mean, mask=in_rows)
    inverse = 1.0 / tl.sqrt(squares / total + epsilon)
    tl.store(inverses + row, inverse, mask=in_rows)
    if HAS_INVERSE:
        at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
        tl.store(inverse_out + at, narrow(inverse, inverse_out.dtype.element_ty), mask=in_rows)
    if HAS_MEAN:
        at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
        tl.store(mean_out + at, narrow(mean, mean_out.dtype.element_ty), mask=in_rows)
    if HAS_NEXT_MEAN:
        old, new = in_mean + row * in_mean_inner, next_mean + row * next_mean_inner
        step_running(old, new, mean, momentum, in_rows, COMPUTE)
    if HAS_NEXT_VAR:
        old, new = in_var + row * in_var_inner, next_var + row * next_var_inner
        unbiased = squares / tl.maximum(total - 1.0, 1.0)
        step_running(old, new, unbiased, momentum, in_rows, COMPUTE)


@triton.jit
def norm_apply(
    x,
    scale,
    bias,
    y,
    mean,
    inverse,
    rows,
    inner_rows,
    row_blocks,
    tiles_a_row,
    tiles_a_run,
    tiles_a_part,
    programs,
    x_outer,
    x_inner,
    x_jump,
    x_step,
    y_outer,
    y_inner,
    y_jump,
    y_step,
    scale_outer,
    scale_inner,
    scale_jump,
    scale_step,
    bias_outer,
    bias_inner,
    bias_jump,
    bias_step,
    mean_outer,
    mean_inner,
    inverse_outer,
    inverse_inner,
    INNER_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_Y: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    # Backwards: what the first kernel read last may still be in the cache.
    program = programs - 1 - tl.program_id(0).to(tl.int64)
    row = program % row_blocks * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    x_row = x + place(row, inner_rows, x_outer, x_inner, ROW_AXES)
    y_row = y + place(row, inner_rows, y_outer, y_inner, ROW_AXES)
    scale_row = scale + place(row, inner_rows, scale_outer, scale_inner, ROW_AXES)
    at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
    inverse_of_row = tl.load(inverse + at, mask=in_rows, other=0.0).to(COMPUTE)
    if IS_CENTRED:
        at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
        mean_of_row = tl.load(mean + at, mask=in_rows, other=0.0).to(COMPUTE)
    if HAS_BIAS:
        bias_row = bias + place(row, inner_rows, bias_outer, bias_inner, ROW_AXES)
    lane = tl.arange(0, COLUMNS)
    if not BY_COLUMN:
        factor = tl.load(scale_row, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
        if HAS_BIAS:
            shift = tl.load(bias_row, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
    start = program // row_blocks * tiles_a_part
    # fused: start
    for tile in range(start, tl.minimum(start + tiles_a_part, tiles_a_row)):
        run, column, in_columns = tile_columns(tile, tiles_a_run, lane, INNER_COLUMNS, COLUMNS)
        inside = in_rows[:, None] & in_columns[None, :]
        cell = (run * x_jump + column * x_step)[None, :]
        raw = tl.load(x_row[:, None] + cell, mask=inside, other=0.0)
        values = raw.to(COMPUTE)
        # fused: input and stores
        if BY_COLUMN:
            cell = (run * scale_jump + column * scale_step)[None, :]
            factor = tl.load(scale_row[:, None] + cell, mask=inside, other=0.0).to(COMPUTE)
            if HAS_BIAS:
                cell = (run * bias_jump + column * bias_step)[None, :]
                shift = tl.load(bias_row[:, None] + cell, mask=inside, other=0.0).to(COMPUTE)
        if IS_CENTRED:
            values = values - mean_of_row[:, None]
        result = values * inverse_of_row[:, None] * factor
        if HAS_BIAS:
            result += shift
        # fused: result
        if HAS_Y:
            cell = (run * y_jump + column * y_step)[None, :]
            tl.store(y_row[:, None] + cell, stored(result, y.dtype.element_ty), mask=inside)
    # fused: end


def plan(problem: NormProblem, slots: Mapping[int, int], sm_count: int) -> KernelPlan:
    """The three kernels, with the general ones behind those that want aligned pointers."""
    if 0 in (problem.plane.rows, problem.plane.columns):
        return problem.empty_plan()
    general = _plan(problem, slots, sm_count, is_aligned=False)
    aligned = _plan(problem, slots, sm_count, is_aligned=True)
    return problem.with_fallback(aligned, general, slots)


def apply_plan(problem: NormProblem, slots: Mapping[int, int], sm_count: int) -> KernelPlan:
    """The third kernel alone, over statistics that are given."""
    if 0 in (problem.plane.rows, problem.plane.columns):
        return problem.empty_plan()
    plans = []
    for is_aligned in (True, False):
        assembly = Assembly(slots, is_aligned=is_aligned)
        problem.operands(assembly, ("x", "scale", "bias", "y", "mean", "inverse"))
        plans.append(KernelPlan(*_apply_kernels(problem, assembly, sm_count, ())))
    return problem.with_fallback(*plans, slots)


def _plan(
    problem: NormProblem, slots: Mapping[int, int], sm_count: int, *, is_aligned: bool
) -> KernelPlan:
    grounds = problem.plane
    programs, warps = _ALONG_ROWS if grounds.is_row_contiguous("x") else _ALONG_COLUMNS
    cut = cut_rows(grounds, "x", programs * sm_count, _MAX_SPLITS)
    size = 8 if problem.is_double else 4
    pointer = f"*{problem.compute_name}"
    scratch = (
        ("part means", cut.parts * grounds.rows * size),
        ("part squares", cut.parts * grounds.rows * size),
        ("means", grounds.rows * size),
        ("inverses", grounds.rows * size),
    )
    pieces = plan_workspace(list(scratch)).pieces
    assembly = Assembly(slots, is_aligned=is_aligned)
    problem.operands(assembly, ("x", "scale", "bias", "y", "mean", "inverse", *RUNNING))
    for name, piece in zip(
        ("part_means", "part_squares", "means", "inverses"), pieces, strict=True
    ):
        assembly.pointer(name, pointer, Scratch(piece.offset_bytes))
    cut_integers(assembly, grounds, cut, problem.tensors["x"])
    parts = assembly.kernel(
        fused_kernel(norm_parts, problem.fusion, TILES, problem.fused_names),
        (cut.row_blocks * cut.parts, 1, 1),
        warps,
        INNER_COLUMNS=grounds.inner_columns,
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        ROW_AXES=grounds.row_axes,
        IS_CENTRED=problem.is_centred,
        COMPUTE=problem.compute,
    )
    flags = problem.flags()
    for name in ("HAS_BIAS", "HAS_Y"):
        del flags[name]
    join = assembly.kernel(
        norm_join,
        (triton.cdiv(grounds.rows, _JOINED_ROWS), 1, 1),
        _JOIN_WARPS,
        INNER_COLUMNS=grounds.inner_columns,
        COLUMNS=cut.columns,
        PARTS=cut.parts,
        PARTS_BLOCK=triton.next_power_of_2(cut.parts),
        ROWS=_JOINED_ROWS,
        ROW_AXES=grounds.row_axes,
        **flags,
    )
    own = Assembly(slots, is_aligned=is_aligned)
    problem.operands(own, ("x", "scale", "bias", "y"))
    # The statistics of row r are at r: one axis of rows, or two that join.
    for name, piece in (("mean", pieces[2]), ("inverse", pieces[3])):
        own.pointer(name, pointer, Scratch(piece.offset_bytes))
        own.integer(f"{name}_outer", grounds.inner_rows, size)
        own.integer(f"{name}_inner", 1)
    kernels, scratch = _apply_kernels(problem, own, sm_count, scratch)
    return KernelPlan((parts, join, *kernels), scratch)


def _apply_kernels(
    problem: NormProblem, assembly: Assembly, sm_count: int, scratch: Scratches
) -> tuple[tuple[PlannedKernel, ...], Scratches]:
    """The third kernel and what joins maxima, and the workspace with theirs after ``scratch``."""
    grounds = problem.plane
    programs, warps = _ALONG_ROWS if grounds.is_row_contiguous("x") else _ALONG_COLUMNS
    cut = cut_rows(grounds, "x", 4 * programs * sm_count, grounds.columns)
    cut_integers(assembly, grounds, cut, problem.tensors["x"])
    count = cut.row_blocks * cut.parts
    scratch = problem.maxima(assembly, count, scratch)
    affine = [grounds.steps[name] for name in ("scale", "bias") if name in problem.tensors]
    kernel = assembly.kernel(
        fused_kernel(norm_apply, problem.fusion, TILES, problem.fused_names),
        (count, 1, 1),
        warps,
        INNER_COLUMNS=grounds.inner_columns,
        ROWS=cut.rows,
        COLUMNS=cut.columns,
        ROW_AXES=grounds.row_axes,
        BY_COLUMN=any(steps.varies_by_column for steps in affine),
        IS_CENTRED=problem.is_centred,
        HAS_BIAS="bias" in problem.tensors,
        HAS_Y="y" in problem.tensors,
        COMPUTE=problem.compute,
    )
    return (kernel, *problem.maximum_kernels(assembly, count)), scratch
