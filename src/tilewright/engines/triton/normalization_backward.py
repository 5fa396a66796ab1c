"""RMSNorm, LayerNorm and AdaLN backward in Triton: scale varies along a row.

With xhat the normalized input, g the incoming gradient and gw = g * scale:

    rmsnorm:    dx = inverse * (gw - xhat * mean(gw * xhat))
    the others: dx = inverse * (gw - mean(gw) - xhat * mean(gw * xhat))
    dscale = sum over rows of g * xhat,   dbias = sum over rows of g

Rows come in groups that share a row of scale: all of them, or for adalayernorm those of a sample.
Each program of the first kernel walks rows of one group in strides, keeps its share of dscale and
dbias in float32 registers, and writes it to the workspace once; the last kernel adds the shares
in a fixed order, so results repeat bit for bit. Rows too wide for the accumulators take a kernel
for dx and one for the shares (``normalization_backward_shares``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import triton
import triton.language as tl

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel, slot_numbers
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.norm_problem import NormProblem, backward_problem
from tilewright.engines.triton.norm_tiles import place
from tilewright.engines.triton.normalization_backward_shares import shares_kernel, sum_kernel
from tilewright.engines.triton.rows import only_operation
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.graph.graph import DeclaredGraph
from tilewright.launch.prepared import Scratch
from tilewright.launch.workspace import plan_workspace

# A row longer than this does not fit a program's registers.
MAX_WIDTH = 65536
# Wider rows would spill the two accumulators.
_MAX_FUSED_WIDTH = 8192
# Elements that a tile of short rows has about.
_TILE_ELEMENTS = 2048
# Row parts, of which each makes a share where rows are wide.
_SPLITS = 32


@triton.jit
def norm_backward(
    grad,
    x,
    scale,
    mean,
    inverse,
    dx,
    dscale_shares,
    dbias_shares,
    inner_rows,
    group_rows,
    trips,
    scale_group,
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
    scale_jump,
    scale_step,
    mean_outer,
    mean_inner,
    inverse_outer,
    inverse_inner,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    INNER_COLUMNS: tl.constexpr,
    ROW_AXES: tl.constexpr,
    COLUMN_AXES: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    PREFETCHES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    group = program // PROGRAMS
    column = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    g_column = place(column, INNER_COLUMNS, grad_jump, grad_step, COLUMN_AXES)[None, :]
    x_column = place(column, INNER_COLUMNS, x_jump, x_step, COLUMN_AXES)[None, :]
    dx_column = place(column, INNER_COLUMNS, dx_jump, dx_step, COLUMN_AXES)[None, :]
    scale_at = scale + group * scale_group
    scale_at += place(column, INNER_COLUMNS, scale_jump, scale_step, COLUMN_AXES)
    factor = tl.load(scale_at, mask=in_width, other=0.0).to(COMPUTE)[None, :]
    dscale = tl.zeros((ROWS, BLOCK), dtype=COMPUTE)
    dbias = tl.zeros((ROWS, BLOCK), dtype=COMPUTE)
    in_group = program % PROGRAMS * ROWS + tl.arange(0, ROWS)
    inside = (in_group < group_rows)[:, None] & in_width[None, :]
    row = group * group_rows + in_group
    if PREFETCHES:
        at = place(row, inner_rows, grad_outer, grad_inner, ROW_AXES)[:, None] + g_column
        raw_g = tl.load(grad + at, mask=inside, other=0.0)
        at = place(row, inner_rows, x_outer, x_inner, ROW_AXES)[:, None] + x_column
        raw_x = tl.load(x + at, mask=inside, other=0.0)
    for _ in range(trips):
        following = in_group + PROGRAMS * ROWS
        following_row = row + PROGRAMS * ROWS
        following_inside = (following < group_rows)[:, None] & in_width[None, :]
        if PREFETCHES:
            # The next rows are on their way while these are reduced and written.
            g, values = raw_g.to(COMPUTE), raw_x.to(COMPUTE)
            at = place(following_row, inner_rows, grad_outer, grad_inner, ROW_AXES)
            raw_g = tl.load(grad + at[:, None] + g_column, mask=following_inside, other=0.0)
            at = place(following_row, inner_rows, x_outer, x_inner, ROW_AXES)
            raw_x = tl.load(x + at[:, None] + x_column, mask=following_inside, other=0.0)
        else:
            at = place(row, inner_rows, grad_outer, grad_inner, ROW_AXES)[:, None] + g_column
            g = tl.load(grad + at, mask=inside, other=0.0).to(COMPUTE)
            at = place(row, inner_rows, x_outer, x_inner, ROW_AXES)[:, None] + x_column
            values = tl.load(x + at, mask=inside, other=0.0).to(COMPUTE)
        in_rows = in_group < group_rows
        at = place(row, inner_rows, inverse_outer, inverse_inner, ROW_AXES)
        inverse_of_row = tl.load(inverse + at, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
        if IS_CENTRED:
            at = place(row, inner_rows, mean_outer, mean_inner, ROW_AXES)
            values = values - tl.load(mean + at, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
        values = tl.where(inside, values * inverse_of_row, 0.0)
        weighted = g * factor
        along = tl.sum(weighted * values, axis=1) / WIDTH
        result = weighted - values * along[:, None]
        if IS_CENTRED:
            average = tl.sum(weighted, axis=1) / WIDTH
            result -= average[:, None]
        at = place(row, inner_rows, dx_outer, dx_inner, ROW_AXES)[:, None] + dx_column
        tl.store(dx + at, (result * inverse_of_row).to(dx.dtype.element_ty), mask=inside)
        if HAS_SHARES:
            dscale += g * values
            if HAS_DBIAS:
                dbias += g
        in_group = following
        row = following_row
        inside = following_inside
    if HAS_SHARES:
        share = program * WIDTH + column
        tl.store(dscale_shares + share, tl.sum(dscale, axis=0), mask=in_width)
        if HAS_DBIAS:
            tl.store(dbias_shares + share, tl.sum(dbias, axis=0), mask=in_width)


@dataclass(frozen=True)
class BackwardConfig:
    """``rows`` rows a tile, ``warps`` warps, ``programs`` a multiprocessor that walk the rows."""

    rows: int
    warps: int
    programs: int
    prefetches: bool = False


def choose_config(width: int) -> BackwardConfig:
    """Sixteen elements a thread; short rows share a tile. As measured on an H200.

    Programs read ahead where they walk rows.
    """
    block = triton.next_power_of_2(width)
    rows = max(1, min(8, _TILE_ELEMENTS // block))
    tile = rows * block
    return BackwardConfig(rows, max(1, min(16, tile // 512)), max(1, min(4, 8192 // tile)), True)


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal, with the warps as a knob; declines what the kernels cannot address."""
    facts = _Facts(backward_problem(only_operation(graph, "norms")), sm_count)
    knobs = ((knob_type.WARPS, facts.config.warps),)
    return [Proposal(knobs, 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """Two kernels, or three for wide rows; wide loads where pointers are aligned."""
    problem = backward_problem(only_operation(graph, "norms"))
    facts = _Facts(problem, sm_count)
    slots = slot_numbers(graph)
    warps = dict(knobs).get(knob_type.WARPS, facts.config.warps)
    general = _plan(facts, Assembly(slots), warps)
    aligned = _plan(facts, Assembly(slots, is_aligned=True), warps)
    return problem.with_fallback(aligned, general, slots)


class _Facts:
    """What the kernels of one plan have in common."""

    def __init__(self, problem: NormProblem, sm_count: int) -> None:
        self.problem = problem
        grounds = self.grounds = problem.plane
        for name in ("dx", "dscale"):
            if name not in problem.tensors:
                raise NotSupportedError(
                    f"{problem.operation.title()}: DX and DScale are made together"
                )
        self.width = grounds.columns
        x = problem.tensors["x"]
        if not 1 <= self.width <= MAX_WIDTH:
            raise NotSupportedError(
                f"tensor {x.label()} (input) has {self.width} elements a row; the kernel takes "
                f"1 to {MAX_WIDTH}"
            )
        scale = grounds.steps["scale"]
        if not scale.varies_by_row:
            self.group_rows = grounds.rows
        else:
            # Checked to be the outer axis, or the only one: rows are in declared order.
            self.group_rows = grounds.inner_rows if grounds.row_axes == 2 else 1
            if not grounds.rows:
                raise NotSupportedError(
                    f"tensor {x.label()} (input) has dim {x.dim}; the kernels have no sums of no "
                    "element"
                )
        self.groups = grounds.rows // self.group_rows if self.group_rows else 1
        self.config = choose_config(self.width)
        self.is_fused = self.width <= _MAX_FUSED_WIDTH
        tiles = max(1, triton.cdiv(self.group_rows, self.config.rows))
        wanted = triton.cdiv(self.config.programs * sm_count, max(1, self.groups))
        # Without accumulators nothing is kept from row to row: a program a tile balances best.
        self.programs = max(1, min(tiles, wanted)) if self.is_fused else tiles
        self.trips = triton.cdiv(tiles, self.programs)
        self.shares = self.programs if self.is_fused else _SPLITS
        size = 8 if problem.is_double else 4
        share_bytes = self.groups * self.shares * self.width * size
        sizes = [("dscale shares", share_bytes)]
        if "dbias" in problem.tensors:
            sizes.append(("dbias shares", share_bytes))
        self.scratch = tuple(sizes)
        self.offsets = [piece.offset_bytes for piece in plan_workspace(sizes).pieces]

    def group_step(self, name: str) -> int:
        """Elements from a group's row of scale, or of a gradient of it, to the next group's."""
        steps = self.grounds.steps.get(name)
        if steps is None:
            return 0
        return steps.row_outer if self.grounds.row_axes == 2 else steps.row_inner

    def assembly(self, assembly: Assembly, names: Iterable[str]) -> Assembly:
        """Operands, shares and integers of every kernel."""
        self.problem.operands(assembly, names)
        kind = f"*{self.problem.compute_name}"
        for name, offset in (("dscale", self.offsets[0]), ("dbias", self.offsets[-1])):
            assembly.pointer(f"{name}_shares", kind, Scratch(offset))
        for name, value in (
            ("inner_rows", self.grounds.inner_rows),
            ("group_rows", self.group_rows),
            ("trips", self.trips),
        ):
            assembly.integer(name, value)
        for name in ("scale", "dscale", "dbias"):
            tensor = self.problem.tensors.get(name)
            size = 1 if tensor is None else max(1, tensor.data_type.bits // 8)
            assembly.integer(f"{name}_group", self.group_step(name), size)
        return assembly

    def constants(self) -> Mapping[str, object]:
        """Compile-time arguments of every kernel."""
        return {
            "WIDTH": self.width,
            "INNER_COLUMNS": self.grounds.inner_columns,
            "ROW_AXES": self.grounds.row_axes,
            "COLUMN_AXES": self.grounds.column_axes,
            "IS_CENTRED": self.problem.is_centred,
            "HAS_DBIAS": "dbias" in self.problem.tensors,
            "COMPUTE": self.problem.compute,
        }


def _plan(facts: _Facts, assembly: Assembly, warps: int) -> KernelPlan:
    names = ("grad", "x", "scale", "mean", "inverse", "dx", "dscale", "dbias")
    facts.assembly(assembly, names)
    kernels = [] if facts.grounds.rows == 0 else [_rows_kernel(facts, assembly, warps)]
    if not facts.is_fused:
        kernels.append(
            shares_kernel(assembly, facts.width, facts.groups, facts.shares, facts.constants())
        )
    # No program ran over no row, and then there is no share.
    shares = facts.shares if facts.grounds.rows else 0
    kernels.append(sum_kernel(assembly, facts.width, facts.groups, shares, facts.constants()))
    return KernelPlan(tuple(kernels), facts.scratch)


def _rows_kernel(facts: _Facts, assembly: Assembly, warps: int) -> PlannedKernel:
    constants = {
        **facts.constants(),
        "BLOCK": triton.next_power_of_2(facts.width),
        "ROWS": facts.config.rows,
        "PROGRAMS": facts.programs,
        "HAS_SHARES": facts.is_fused,
        "PREFETCHES": facts.config.prefetches and facts.trips > 1,
    }
    grid = (facts.groups * facts.programs, 1, 1)
    return assembly.kernel(norm_backward, grid, warps, **constants)
