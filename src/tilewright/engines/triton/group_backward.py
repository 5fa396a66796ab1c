"""BatchNorm and InstanceNorm backward in Triton: scale is one value a row.

With xhat the normalized input, g the incoming gradient, and sums over a row of n elements:

    dx = inverse * scale * (g - sum(g) / n - xhat * sum(g * xhat) / n)
    dscale = sum(g * xhat),   dbias = sum(g)       (of instancenorm summed over the samples)

Where rows fit a program, one kernel reads grad and x once. Longer rows are cut as in the forward:
the first kernel sums parts, the second joins them, the third makes dx (``group_backward_split``).
Sums are in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel, slot_numbers
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.group_backward_split import split_kernels
from tilewright.engines.triton.group_backward_sums import gradients_kernel, has_samples
from tilewright.engines.triton.norm_cut import cut_integers, cut_rows
from tilewright.engines.triton.norm_problem import NormProblem, backward_problem
from tilewright.engines.triton.norm_tiles import place
from tilewright.engines.triton.normalization_split import MAX_SCATTERED_COLUMNS
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
    programs = _PROGRAMS_A_MULTIPROCESSOR * sm_count
    cut = cut_rows(grounds, "x", programs, _MAX_SPLITS)
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
    if is_whole:
        cut_integers(assembly, grounds, cut, problem.tensors["x"])
        kernels = [_whole_kernel(problem, assembly, shared)]
    else:
        for name, offset in zip(("part_g", "part_gx"), parts, strict=True):
            assembly.pointer(name, f"*{problem.compute_name}", Scratch(offset))
        kernels = split_kernels(problem, assembly, cut, programs, shared)
    if is_whole or has_samples(problem):
        kernels.append(gradients_kernel(problem, assembly.slots, sums, assembly.is_aligned))
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
