"""BatchNorm and InstanceNorm backward in Triton: scale is one value a row.

With xhat the normalized input, g the incoming gradient, and sums over a row of n elements:

    dx = inverse * scale * (g - sum(g) / n - xhat * sum(g * xhat) / n)
    dscale = sum(g * xhat),   dbias = sum(g)       (of instancenorm summed over the samples)

Where rows fit a program, one kernel reads grad and x once. Longer rows are cut as in the forward:
the first kernel sums parts, the second joins them, the third makes dx. Sums are in a fixed order,
so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel, slot_numbers
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.norm_problem import NormProblem, backward_problem
from tilewright.engines.triton.norm_tiles import place
from tilewright.engines.triton.normalization_split import (
    MAX_SCATTERED_COLUMNS,
    cut_integers,
    cut_rows,
)
from tilewright.engines.triton.rows import only_operation
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.launch.prepared import Scratch
from tilewright.launch.workspace import plan_workspace

# A row longer than this, beside its gradient, does not fit a program's registers.
MAX_WIDTH = 16384
_ELEMENTS_A_WARP = 512
_MAX_SPLITS = 128
_PROGRAMS_A_MULTIPROCESSOR = 8
_WARPS = 8
_SUM_WARPS = 4
_JOINED_ROWS = 32
# Tile of the kernel that sums over samples.
_SUM_ROWS = 32
_SUM_COLUMNS = 32


@triton.jit
def group_backward(
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
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INNER_COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    COLUMN_AXES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows = row < rows
    inside = in_rows[:, None] & (column < WIDTH)[None, :]
    at = place(row, inner_rows, grad_outer, grad_inner, ROW_AXES)[:, None]
    at += place(column, INNER_COLUMNS, grad_jump, grad_step, COLUMN_AXES)[None, :]
    g = tl.load(grad + at, mask=inside, other=0.0).to(COMPUTE)
    at = place(row, inner_rows, x_outer, x_inner, ROW_AXES)[:, None]
    at += place(column, INNER_COLUMNS, x_jump, x_step, COLUMN_AXES)[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(COMPUTE)
    at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
    mean_of_row = tl.load(mean + at, mask=in_rows, other=0.0).to(COMPUTE)
    at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
    inverse_of_row = tl.load(inverse + at, mask=in_rows, other=0.0).to(COMPUTE)
    at = place(row, inner_rows, scale_outer, scale_inner, ROW_AXES)
    factor = tl.load(scale + at, mask=in_rows, other=0.0).to(COMPUTE) * inverse_of_row
    values = tl.where(inside, (values - mean_of_row[:, None]) * inverse_of_row[:, None], 0.0)
    sum_g = tl.sum(g, axis=1)
    sum_gx = tl.sum(g * values, axis=1)
    result = g - (sum_g / WIDTH)[:, None] - values * (sum_gx / WIDTH)[:, None]
    at = place(row, inner_rows, dx_outer, dx_inner, ROW_AXES)[:, None]
    at += place(column, INNER_COLUMNS, dx_jump, dx_step, COLUMN_AXES)[None, :]
    tl.store(dx + at, (result * factor[:, None]).to(dx.dtype.element_ty), mask=inside)
    tl.store(sums_g + row, sum_g, mask=in_rows)
    tl.store(sums_gx + row, sum_gx, mask=in_rows)


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
        run = tile // tiles_a_run
        column = tile % tiles_a_run * COLUMNS + lane
        inside = in_rows[:, None] & (column < INNER_COLUMNS)[None, :]
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
        run = tile // tiles_a_run
        column = tile % tiles_a_run * COLUMNS + lane
        inside = in_rows[:, None] & (column < INNER_COLUMNS)[None, :]
        cell = (run * grad_jump + column * grad_step)[None, :]
        g = tl.load(g_row + cell, mask=inside, other=0.0).to(COMPUTE)
        cell = (run * x_jump + column * x_step)[None, :]
        values = tl.load(x_row + cell, mask=inside, other=0.0).to(COMPUTE)
        result = (g - average - (values - mean_of_row) * along) * factor
        cell = (run * dx_jump + column * dx_step)[None, :]
        tl.store(dx_row + cell, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def group_sums(
    part_g,
    part_gx,
    sums_g,
    sums_gx,
    dscale,
    dbias,
    rows,
    outer_rows,
    dscale_inner,
    dbias_inner,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_GRADIENTS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Adds PARTS parts of each row, into the workspace, into dscale and dbias, or both."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    sum_g = tl.zeros((PARTS_BLOCK, ROWS), dtype=COMPUTE)
    sum_gx = tl.zeros((PARTS_BLOCK, ROWS), dtype=COMPUTE)
    for first in range(0, PARTS, PARTS_BLOCK):
        part = first + tl.arange(0, PARTS_BLOCK).to(tl.int64)
        inside = (part < PARTS)[:, None] & in_rows[None, :]
        at = part[:, None] * outer_rows + row[None, :]
        sum_g += tl.load(part_g + at, mask=inside, other=0.0)
        sum_gx += tl.load(part_gx + at, mask=inside, other=0.0)
    total_g, total_gx = tl.sum(sum_g, axis=0), tl.sum(sum_gx, axis=0)
    if HAS_SUMS:
        tl.store(sums_g + row, total_g, mask=in_rows)
        tl.store(sums_gx + row, total_gx, mask=in_rows)
    if HAS_GRADIENTS:
        at = dscale + row * dscale_inner
        tl.store(at, total_gx.to(dscale.dtype.element_ty), mask=in_rows)
        at = dbias + row * dbias_inner
        tl.store(at, total_g.to(dbias.dtype.element_ty), mask=in_rows)


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal; declines what the kernels cannot address."""
    _problem(graph)
    return [Proposal((), 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """Kernels for whole rows, or for cut ones; wide loads where pointers are aligned."""
    problem = _problem(graph)
    slots = slot_numbers(graph)
    plans = [
        _plan(problem, Assembly(slots, is_aligned=is_aligned), sm_count)
        for is_aligned in (True, False)
    ]
    return problem.with_fallback(*plans, slots)


def _problem(graph: DeclaredGraph) -> NormProblem:
    problem = backward_problem(only_operation(graph, "norms"))
    for name in ("dx", "dscale", "dbias"):
        if name not in problem.tensors:
            raise NotSupportedError(
                f"{problem.operation.title()}: DX, DScale and DBias are made together"
            )
    if 0 in (problem.plane.rows, problem.plane.columns):
        x = problem.tensors["x"]
        raise NotSupportedError(
            f"tensor {x.label()} (input) has dim {x.dim}; the kernels have no sums of no element"
        )
    return problem


def _plan(problem: NormProblem, assembly: Assembly, sm_count: int) -> KernelPlan:
    grounds = problem.plane
    names = ("grad", "x", "scale", "mean", "inverse", "dx", "dscale", "dbias")
    problem.operands(assembly, names)
    scattered = MAX_SCATTERED_COLUMNS // 2 if grounds.is_row_contiguous("x") else MAX_WIDTH
    is_whole = grounds.columns <= min(MAX_WIDTH, scattered)
    cut = cut_rows(grounds, "x", _PROGRAMS_A_MULTIPROCESSOR * sm_count, _MAX_SPLITS)
    size = 8 if problem.is_double else 4
    scratch = [("sums of g", grounds.rows * size), ("sums of g xhat", grounds.rows * size)]
    if not is_whole:
        scratch += [(f"parts of {name}", cut.parts * bytes_) for name, bytes_ in scratch]
    pieces = [piece.offset_bytes for piece in plan_workspace(scratch).pieces]
    sums, parts = pieces[:2], pieces[2:]
    for name, offset in zip(("sums_g", "sums_gx"), sums, strict=True):
        assembly.pointer(name, f"*{problem.compute_name}", Scratch(offset))
    shared = {
        "INNER_COLUMNS": grounds.inner_columns,
        "ROW_AXES": grounds.row_axes,
        "COMPUTE": problem.compute,
    }
    kernels = []
    if is_whole:
        cut_integers(assembly, grounds, cut, problem.tensors["x"])
        kernels.append(_whole_kernel(problem, assembly, shared))
    else:
        for name, offset in zip(("part_g", "part_gx"), parts, strict=True):
            assembly.pointer(name, f"*{problem.compute_name}", Scratch(offset))
        cut_integers(assembly, grounds, cut, problem.tensors["x"])
        tile = {"ROWS": cut.rows, "COLUMNS": cut.columns}
        grid = (cut.row_blocks * cut.parts, 1, 1)
        kernels.append(assembly.kernel(group_parts, grid, _WARPS, **shared, **tile))
        kernels.append(_join_kernel(problem, assembly, cut.parts))
        cut = cut_rows(grounds, "x", 4 * _PROGRAMS_A_MULTIPROCESSOR * sm_count, grounds.columns)
        for name in ("tiles_a_part", "programs"):
            assembly.types.pop(name, None)
            assembly.constants.pop(name, None)
        cut_integers(assembly, grounds, cut, problem.tensors["x"])
        grid = (cut.row_blocks * cut.parts, 1, 1)
        kernels.append(assembly.kernel(group_dx, grid, _WARPS, **shared, **tile))
    if is_whole or _has_samples(problem):
        kernels.append(_gradients_kernel(problem, assembly.slots, sums, assembly.is_aligned))
    return KernelPlan(tuple(kernels), tuple(scratch))


def _whole_kernel(
    problem: NormProblem, assembly: Assembly, shared: Mapping[str, object]
) -> PlannedKernel:
    grounds = problem.plane
    block = triton.next_power_of_2(grounds.columns)
    # Neighbours in memory may be of different rows: then a tile takes several.
    budget = (16 if grounds.is_row_contiguous("x") else 4) * _ELEMENTS_A_WARP
    rows = max(1, min(32, budget // block, triton.next_power_of_2(grounds.rows)))
    warps = max(1, min(16, rows * block // _ELEMENTS_A_WARP))
    return assembly.kernel(
        group_backward,
        (triton.cdiv(grounds.rows, rows), 1, 1),
        warps,
        WIDTH=grounds.columns,
        BLOCK=block,
        ROWS=rows,
        COLUMN_AXES=grounds.column_axes,
        **shared,
    )


def _join_kernel(problem: NormProblem, assembly: Assembly, parts: int) -> PlannedKernel:
    """Sums of rows from their parts; the gradients too, where a row is a channel."""
    rows = problem.plane.rows
    assembly.integer("outer_rows", rows)
    return assembly.kernel(
        group_sums,
        (triton.cdiv(rows, _JOINED_ROWS), 1, 1),
        _SUM_WARPS,
        PARTS=parts,
        PARTS_BLOCK=min(_SUM_ROWS, triton.next_power_of_2(parts)),
        ROWS=_JOINED_ROWS,
        HAS_SUMS=True,
        HAS_GRADIENTS=not _has_samples(problem),
        COMPUTE=problem.compute,
    )


def _gradients_kernel(
    problem: NormProblem, slots: Mapping[int, int], sums: list[int], is_aligned: bool
) -> PlannedKernel:
    """dscale and dbias from the sums of rows, over the samples of a channel."""
    grounds = problem.plane
    channels = problem.tensors["x"].dim[1]
    samples = grounds.rows // channels
    assembly = Assembly(slots, is_aligned=is_aligned)
    problem.operands(assembly, ("dscale", "dbias"))
    for name, offset in zip(("part_g", "part_gx"), sums, strict=True):
        assembly.pointer(name, f"*{problem.compute_name}", Scratch(offset))
    # Not looked at.
    for name, offset in zip(("sums_g", "sums_gx"), sums, strict=True):
        assembly.pointer(name, f"*{problem.compute_name}", Scratch(offset))
    assembly.integer("rows", channels)
    assembly.integer("outer_rows", channels)
    return assembly.kernel(
        group_sums,
        (triton.cdiv(channels, _SUM_COLUMNS), 1, 1),
        _SUM_WARPS,
        PARTS=samples,
        PARTS_BLOCK=min(_SUM_ROWS, triton.next_power_of_2(samples)),
        ROWS=_SUM_COLUMNS,
        HAS_SUMS=False,
        HAS_GRADIENTS=True,
        COMPUTE=problem.compute,
    )


def _has_samples(problem: NormProblem) -> bool:
    """True if a row is a channel of one sample, so that gradients are sums over samples."""
    return problem.operation.kind == "instancenorm_backward"
