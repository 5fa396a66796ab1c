"""Normalization in Triton, forward, of rows that a program holds in registers.

    rmsnorm:   y = x * rsqrt(mean(x^2) + eps) * scale + bias
    the rest:  y = (x - mean(x)) * rsqrt(var(x) + eps) * scale + bias

A program takes ROWS whole rows at a time: each is read once, reduced and written once, in float32
(float64 for float64). Rows are whatever a statistic is over: the last axes of a token (layernorm,
adalayernorm, rmsnorm), an image's channel (instancenorm), a channel of all images (batchnorm).
Longer rows are cut; see ``normalization_split``. Sources: Ba, Kiros and Hinton 2016; Ulyanov,
Vedaldi and Lempitsky 2016; Zhang and Sennrich 2019; Ioffe and Szegedy 2015.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import KernelPlan, slot_numbers
from tilewright.engines.triton import normalization_split
from tilewright.engines.triton.assembling import Assembly, row_integers
from tilewright.engines.triton.device_math import narrow
from tilewright.engines.triton.norm_codegen import WHOLE_ROWS, fused_kernel
from tilewright.engines.triton.norm_fusion import fusion_of
from tilewright.engines.triton.norm_problem import RUNNING, NormProblem, forward_problem
from tilewright.engines.triton.norm_tiles import load_affine, place, step_running, stored
from tilewright.engines.triton.rows import Plane
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.graph.graph import DeclaredGraph

# A row longer than this does not fit a program's registers. Even a few such rows are faster whole:
# cut, they would take three launches.
MAX_WIDTH = 32768
# Elements that one warp holds comfortably, which sets warps a row and rows a program.
_ELEMENTS_A_WARP = 1024
_SHORT_ROW = 512
# Of rows longer than that: (up to so many elements, rows a program, warps).
_LONG_ROWS = (
    *((1024, 2, 4), (1280, 1, 2), (1536, 2, 8), (2048, 1, 4)),
    *((3584, 1, 8), (4096, 2, 16), (16384, 1, 8)),
)


@triton.jit
def norm_forward(
    x,
    scale,
    bias,
    y,
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
    in_mean_inner,
    in_var_inner,
    next_mean_inner,
    next_var_inner,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INNER_COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    COLUMN_AXES: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    HAS_NEXT_MEAN: tl.constexpr,
    HAS_NEXT_VAR: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    # Scale and bias that do not vary along an axis are loaded for one place on it.
    affine_column = column if BY_COLUMN else tl.arange(0, 1)
    in_affine = in_width if BY_COLUMN else tl.arange(0, 1) < 1
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & in_width[None, :]
    x_column = place(column, INNER_COLUMNS, x_jump, x_step, COLUMN_AXES)
    x_row = place(row, inner_rows, x_outer, x_inner, ROW_AXES)
    raw = tl.load(x + x_row[:, None] + x_column[None, :], mask=inside, other=0.0)
    # fused: start
    values = raw.to(COMPUTE)
    # fused: input and stores
    if IS_CENTRED:
        mean = tl.sum(values, axis=1) / WIDTH
        values = tl.where(inside, values - mean[:, None], 0.0)
    squares = tl.sum(values * values, axis=1)
    inverse = 1.0 / tl.sqrt(squares / WIDTH + epsilon)
    # One row of scale for each of the tile's rows, or one for all of them.
    affine_row = row if BY_ROW else first + tl.arange(0, 1)
    in_tile = (affine_row < rows)[:, None] & in_affine[None, :]
    factor = load_affine(
        scale,
        affine_row,
        affine_column,
        in_tile,
        inner_rows,
        scale_outer,
        scale_inner,
        scale_jump,
        scale_step,
        INNER_COLUMNS,
        ROW_AXES,
        COLUMN_AXES,
    )
    result = values * inverse[:, None] * factor.to(COMPUTE)
    if HAS_BIAS:
        shift = load_affine(
            bias,
            affine_row,
            affine_column,
            in_tile,
            inner_rows,
            bias_outer,
            bias_inner,
            bias_jump,
            bias_step,
            INNER_COLUMNS,
            ROW_AXES,
            COLUMN_AXES,
        )
        result += shift.to(COMPUTE)
    # fused: result
    if HAS_Y:
        y_row = place(row, inner_rows, y_outer, y_inner, ROW_AXES)
        y_column = place(column, INNER_COLUMNS, y_jump, y_step, COLUMN_AXES)
        y_at = y + y_row[:, None] + y_column[None, :]
        tl.store(y_at, stored(result, y.dtype.element_ty), mask=inside)
    if HAS_INVERSE:
        at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
        tl.store(inverse_out + at, narrow(inverse, inverse_out.dtype.element_ty), mask=row < rows)
    if HAS_MEAN:
        at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
        tl.store(mean_out + at, narrow(mean, mean_out.dtype.element_ty), mask=row < rows)
    if HAS_NEXT_MEAN:
        old, new = in_mean + row * in_mean_inner, next_mean + row * next_mean_inner
        step_running(old, new, mean, momentum, row < rows, COMPUTE)
    if HAS_NEXT_VAR:
        old, new = in_var + row * in_var_inner, next_var + row * next_var_inner
        unbiased = squares / (WIDTH - 1 if WIDTH > 1 else 1)
        step_running(old, new, unbiased, momentum, row < rows, COMPUTE)
    # fused: end


@dataclass(frozen=True)
class NormConfig:
    """``rows`` rows a program, ``warps`` warps."""

    rows: int
    warps: int


def choose_config(width: int, *, is_row_contiguous: bool = False) -> NormConfig:
    """Short rows share a program; of long rows one or two do, on 2 to 16 warps, the longest 32.

    As measured on an H200 (benchmark/norms_gpu.py), where 16 elements a thread, two vectors, were
    nearest to the rate of a copy. Programs that walk rows and read ahead through registers or
    shared memory, and hints to the caches, were slower there.
    """
    block = triton.next_power_of_2(width)
    if is_row_contiguous:
        # Neighbours in memory are of different rows: a tile takes 32 of them where they fit.
        rows = max(1, min(32, 16 * _ELEMENTS_A_WARP // block))
        return NormConfig(rows, max(1, min(16, rows * block // _ELEMENTS_A_WARP)))
    if width > _SHORT_ROW:
        # The row's own length decides: threads that lie beyond its end only wait.
        fitting = (NormConfig(r, w) for limit, r, w in _LONG_ROWS if width <= limit)
        return next(fitting, NormConfig(1, 32))
    rows = min(8, 4 * _ELEMENTS_A_WARP // block)
    return NormConfig(rows, max(1, min(4, rows * block // _ELEMENTS_A_WARP)))


def config_of(problem: NormProblem) -> NormConfig:
    """The config of a problem whose rows fit a program."""
    is_row_contiguous = problem.plane.is_row_contiguous("x")
    return choose_config(problem.plane.columns, is_row_contiguous=is_row_contiguous)


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal, with the warps as a knob; declines what the kernels cannot address."""
    problem = forward_problem(fusion_of(graph))
    if 0 in (problem.plane.rows, problem.plane.columns):
        problem.empty_plan()
    # What cannot be written into a kernel is said here, not when the plan is built.
    fused_kernel(norm_forward, problem.fusion, WHOLE_ROWS, problem.fused_names)
    notes = frozenset({behavior_note.RUNTIME_COMPILATION})
    if is_split(problem):
        return [Proposal((), 1.0, notes)]
    return [Proposal(((knob_type.WARPS, config_of(problem).warps),), 1.0, notes)]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """One kernel where rows fit a program, else three; wide loads where pointers are aligned."""
    problem = forward_problem(fusion_of(graph))
    slots = slot_numbers(graph)
    if _has_given_statistics(problem):
        return normalization_split.apply_plan(problem, slots, sm_count)
    if is_split(problem):
        return normalization_split.plan(problem, slots, sm_count)
    config = config_of(problem)
    warps = dict(knobs).get(knob_type.WARPS, config.warps)
    chosen = replace(config, warps=warps)
    general = row_plan(problem, Assembly(slots), chosen)
    aligned = row_plan(problem, Assembly(slots, is_aligned=True), chosen)
    return problem.with_fallback(aligned, general, slots)


def is_split(problem: NormProblem) -> bool:
    """True if rows are cut."""
    if _has_given_statistics(problem):
        return True
    scattered = normalization_split.MAX_SCATTERED_COLUMNS
    is_scattered = problem.plane.is_row_contiguous("x")
    return problem.plane.columns > (min(scattered, MAX_WIDTH) if is_scattered else MAX_WIDTH)


def _has_given_statistics(problem: NormProblem) -> bool:
    return problem.operation.kind == "batchnorm_inference"


def row_plan(problem: NormProblem, assembly: Assembly, config: NormConfig) -> KernelPlan:
    """The plan of one kernel."""
    grounds: Plane = problem.plane
    if 0 in (grounds.rows, grounds.columns):
        return problem.empty_plan()
    problem.operands(assembly, ("x", "scale", "bias", "y", "mean", "inverse", *RUNNING))
    programs = triton.cdiv(grounds.rows, config.rows)
    scratch = problem.maxima(assembly, programs, ())
    row_integers(assembly, grounds, problem.tensors["x"])
    affine = [grounds.steps[name] for name in ("scale", "bias") if name in problem.tensors]
    # Rows of a tile that lie within one of the outer axis share what varies along that only.
    is_shared = grounds.inner_rows % config.rows == 0 and not any(s.row_inner for s in affine)
    is_one = config.rows == 1 or is_shared or not any(s.varies_by_row for s in affine)
    kernel = assembly.kernel(
        fused_kernel(norm_forward, problem.fusion, WHOLE_ROWS, problem.fused_names),
        (programs, 1, 1),
        config.warps,
        WIDTH=grounds.columns,
        BLOCK=triton.next_power_of_2(grounds.columns),
        ROWS=config.rows,
        INNER_COLUMNS=grounds.inner_columns,
        ROW_AXES=grounds.row_axes,
        COLUMN_AXES=grounds.column_axes,
        BY_ROW=not is_one,
        BY_COLUMN=any(steps.varies_by_column for steps in affine),
        **problem.flags(),
    )
    return KernelPlan((kernel, *problem.maximum_kernels(assembly, programs)), scratch)
