"""RMSNorm and LayerNorm backward in Triton, over the last axis.

With xhat the normalized input, g the incoming gradient and gw = g * scale:

    rmsnorm:    dx = inverse * (gw - xhat * mean(gw * xhat))
    layernorm:  dx = inverse * (gw - mean(gw) - xhat * mean(gw * xhat))
    dscale = sum over rows of g * xhat,   dbias = sum over rows of g

Each program of the first kernel walks rows in strides of the grid, keeps its share of dscale and
dbias in float32 registers, and writes it to the workspace once; the last kernel adds the shares
in a fixed order, so results repeat bit for bit. Rows too wide for the accumulators take a kernel
for dx and one for the shares, which reads grad and x again, a block of columns a program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import (
    KernelPlan,
    PlannedKernel,
    operand,
    pointer_type,
    slot_numbers,
    strides_aligned,
)
from tilewright.engines.triton.rows import (
    is_packed,
    only_operation,
    require_vector,
    row_steps,
)
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant, Scratch
from tilewright.launch.workspace import plan_workspace

# A row longer than this does not fit a program's registers.
MAX_WIDTH = 65536
# Wider rows would spill the two accumulators.
_MAX_FUSED_WIDTH = 8192
_PROGRAMS_A_MULTIPROCESSOR = 2
# Columns that one program of the second kernel sums.
_SUM_COLUMNS = 64
_SUM_ROWS = 32
# Of the kernel that makes shares of wide rows: row parts, and the tile that a program reads.
_SPLITS = 32
_SHARE_ROWS = 16
_SHARE_COLUMNS = 128
_SHARE_WARPS = 4


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
    rows,
    inner_rows,
    grad_outer,
    grad_inner,
    x_outer,
    x_inner,
    dx_outer,
    dx_inner,
    grad_step,
    x_step,
    dx_step,
    scale_step,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK).to(tl.int64)
    inside = column < WIDTH
    factor = tl.load(scale + column * scale_step, mask=inside, other=0.0).to(COMPUTE)
    dscale = tl.zeros((BLOCK,), dtype=COMPUTE)
    dbias = tl.zeros((BLOCK,), dtype=COMPUTE)
    row = program.to(tl.int64)
    while row < rows:
        outer, inner = row // inner_rows, row % inner_rows
        g_at = grad + outer * grad_outer + inner * grad_inner + column * grad_step
        x_at = x + outer * x_outer + inner * x_inner + column * x_step
        g = tl.load(g_at, mask=inside, other=0.0).to(COMPUTE)
        values = tl.load(x_at, mask=inside, other=0.0).to(COMPUTE)
        scale_of_row = tl.load(inverse + row).to(COMPUTE)
        if IS_LAYER:
            values = values - tl.load(mean + row).to(COMPUTE)
        values = tl.where(inside, values * scale_of_row, 0.0)
        weighted = g * factor
        along = tl.sum(weighted * values, axis=0) / WIDTH
        result = weighted - values * along
        if IS_LAYER:
            result -= tl.sum(weighted, axis=0) / WIDTH
        d_at = dx + outer * dx_outer + inner * dx_inner + column * dx_step
        tl.store(d_at, (result * scale_of_row).to(dx.dtype.element_ty), mask=inside)
        if HAS_SHARES:
            dscale += g * values
            if HAS_DBIAS:
                dbias += g
        row += PROGRAMS
    if HAS_SHARES:
        share = program.to(tl.int64) * WIDTH + column
        tl.store(dscale_shares + share, dscale, mask=inside)
        if HAS_DBIAS:
            tl.store(dbias_shares + share, dbias, mask=inside)


@triton.jit
def norm_backward_shares(
    grad,
    x,
    mean,
    inverse,
    dscale_shares,
    dbias_shares,
    rows,
    inner_rows,
    grad_outer,
    grad_inner,
    x_outer,
    x_inner,
    grad_step,
    x_step,
    WIDTH: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    in_width = (column < WIDTH)[None, :]
    dscale = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    dbias = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    first = part * ROWS
    while first < rows:
        row = first + tl.arange(0, ROWS).to(tl.int64)
        in_rows = row < rows
        inside = in_rows[:, None] & in_width
        outer, inner = row // inner_rows, row % inner_rows
        g_row = outer * grad_outer + inner * grad_inner
        x_row = outer * x_outer + inner * x_inner
        g_at = grad + g_row[:, None] + column[None, :] * grad_step
        x_at = x + x_row[:, None] + column[None, :] * x_step
        g = tl.load(g_at, mask=inside, other=0.0).to(COMPUTE)
        values = tl.load(x_at, mask=inside, other=0.0).to(COMPUTE)
        if IS_LAYER:
            values = values - tl.load(mean + row, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
        values = values * tl.load(inverse + row, mask=in_rows, other=0.0).to(COMPUTE)[:, None]
        dscale += tl.where(inside, g * values, 0.0)
        if HAS_DBIAS:
            dbias += g
        first += ROWS * SHARES
    share = part * WIDTH + column
    tl.store(dscale_shares + share, tl.sum(dscale, axis=0), mask=column < WIDTH)
    if HAS_DBIAS:
        tl.store(dbias_shares + share, tl.sum(dbias, axis=0), mask=column < WIDTH)


@triton.jit
def sum_shares(
    dscale_shares,
    dbias_shares,
    dscale,
    dbias,
    dscale_step,
    dbias_step,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    inside = (column < WIDTH)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    total_bias = tl.zeros((ROWS, COLUMNS), dtype=COMPUTE)
    for first in range(0, PROGRAMS, ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        at = row[:, None] * WIDTH + column[None, :]
        live = (row < PROGRAMS)[:, None] & inside
        total += tl.load(dscale_shares + at, mask=live, other=0.0)
        if HAS_DBIAS:
            total_bias += tl.load(dbias_shares + at, mask=live, other=0.0)
    sums = tl.sum(total, axis=0).to(dscale.dtype.element_ty)
    tl.store(dscale + column * dscale_step, sums, mask=column < WIDTH)
    if HAS_DBIAS:
        bias_sums = tl.sum(total_bias, axis=0).to(dbias.dtype.element_ty)
        tl.store(dbias + column * dbias_step, bias_sums, mask=column < WIDTH)


def choose_warps(width: int) -> int:
    """Sixteen elements of a row a thread, from 1 to 16 warps."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal, with the warps as a knob; declines what the kernels cannot address."""
    operation = only_operation(graph, "norms")
    _check(operation)
    knobs = ((knob_type.WARPS, choose_warps(operation.inputs["input"].dim[-1])),)
    return [Proposal(knobs, 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """Two kernels; aligned rows get wide loads, with a general plan behind them."""
    operation = only_operation(graph, "norms")
    slots = slot_numbers(graph)
    warps = dict(knobs).get(knob_type.WARPS)
    general = _plan(operation, slots, warps, sm_count, is_aligned=False)
    rowed = [operation.inputs["grad"], operation.inputs["input"], operation.outputs["DX"]]
    if not all(strides_aligned(t, tuple(range(t.rank - 1))) for t in rowed):
        return general
    aligned = _plan(operation, slots, warps, sm_count, is_aligned=True)
    checked = (*rowed, operation.inputs["scale"])
    return KernelPlan(
        aligned.kernels,
        aligned.scratch,
        tuple(slots[tensor.uid] for tensor in checked),
        general,
    )


def _check(operation: Operation) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    x, scale = operation.inputs["input"], operation.inputs["scale"]
    grad, dx = operation.inputs["grad"], operation.outputs["DX"]
    require_vector(scale, x, "scale", MAX_WIDTH)
    for name in ("DScale", "DBias"):
        tensor = operation.outputs.get(name)
        if tensor is not None:
            require_vector(tensor, x, name, MAX_WIDTH)
            if tensor.is_virtual:
                raise NotSupportedError(
                    f"tensor {tensor.label()} ({name}) is virtual; the kernels store it"
                )
    for name in ("mean", "inv_variance"):
        tensor = operation.inputs.get(name)
        if tensor is not None and not is_packed(tensor):
            raise NotSupportedError(
                f"tensor {tensor.label()} ({name}) has stride {tensor.stride}; the kernels read "
                "statistics packed"
            )
    return row_steps((grad, x, dx))


def _plan(
    operation: Operation,
    slots: Mapping[int, int],
    warps: int | None,
    sm_count: int,
    *,
    is_aligned: bool,
) -> KernelPlan:
    facts = _Facts(operation, slots, sm_count, is_aligned)
    kernels = [_rows_kernel(facts, choose_warps(facts.width) if warps is None else warps)]
    if not facts.is_fused:
        kernels.append(_shares_kernel(facts))
    kernels.append(_sum_kernel(facts))
    return KernelPlan(tuple(kernels), facts.scratch)


class _Facts:
    """What the kernels of one plan have in common."""

    def __init__(
        self, operation: Operation, slots: Mapping[int, int], sm_count: int, is_aligned: bool
    ) -> None:
        self.slots = slots
        self.is_aligned = is_aligned
        self.rows, self.inner, self.steps = _check(operation)
        self.grad, self.x, self.scale, self.inverse = (
            operation.inputs[name] for name in ("grad", "input", "scale", "inv_variance")
        )
        self.mean = operation.inputs.get("mean", self.inverse)
        dx, dscale = operation.outputs.get("DX"), operation.outputs.get("DScale")
        if dx is None or dscale is None:
            raise NotSupportedError(f"{operation.title()}: DX and DScale are made together")
        self.dx, self.dscale = dx, dscale
        self.dbias = operation.outputs.get("DBias")
        self.is_layer = operation.kind.startswith("layernorm")
        self.width = self.x.dim[-1]
        self.is_fused = self.width <= _MAX_FUSED_WIDTH
        self.programs = max(1, min(self.rows, _PROGRAMS_A_MULTIPROCESSOR * sm_count))
        self.shares = self.programs if self.is_fused else _SPLITS
        is_double = self.x.data_type is DataType.DOUBLE
        self.compute = tl.float64 if is_double else tl.float32
        self.share_type = "*fp64" if is_double else "*fp32"
        share_bytes = self.shares * self.width * (8 if is_double else 4)
        sizes = [("dscale shares", share_bytes)]
        if self.dbias is not None:
            sizes.append(("dbias shares", share_bytes))
        self.scratch = tuple(sizes)
        pieces = plan_workspace(sizes).pieces
        self.share_arguments = (Scratch(0), Scratch(pieces[-1].offset_bytes))
        self.share_types = (("dscale_shares", self.share_type), ("dbias_shares", self.share_type))

    def row_integers(self, names: Sequence[str]) -> dict[str, int]:
        """Rows, and the row and element steps of the named operands (grad, x, dx)."""
        tensors = {"grad": self.grad, "x": self.x, "dx": self.dx}
        steps = dict(zip(("grad", "x", "dx"), self.steps, strict=True))
        integers = {"rows": self.rows, "inner_rows": self.inner}
        for name in names:
            integers |= {f"{name}_outer": steps[name][0], f"{name}_inner": steps[name][1]}
        return integers | {f"{name}_step": tensors[name].stride[-1] for name in names}

    def kernel(
        self,
        function: Any,
        pointers: Mapping[str, Tensor],
        integers: Mapping[str, int],
        constants: Mapping[str, Any],
        grid: tuple[int, int, int],
        warps: int,
    ) -> PlannedKernel:
        """A kernel over operands, then the shares, then integers; element steps of 1 are fixed."""
        units = {n: 1 for n, value in integers.items() if n.endswith("_step") and value == 1}
        types = [(name, pointer_type(tensor)) for name, tensor in pointers.items()]
        types += [*self.share_types, *((name, "i64") for name in integers if name not in units)]
        arguments: list[Argument] = [operand(self.slots, tensor) for tensor in pointers.values()]
        arguments += self.share_arguments
        arguments += [Constant(value) for name, value in integers.items() if name not in units]
        aligned: set[str] = set()
        if self.is_aligned:
            aligned = {"dscale_shares", "dbias_shares"}
            aligned |= {"grad", "x", "scale", "dx"} & set(pointers)
            aligned |= {
                name
                for name, value in integers.items()
                if name.endswith(("_outer", "_inner")) and value % 16 == 0
            }
        shared = {"WIDTH": self.width, "HAS_DBIAS": self.dbias is not None}
        fixed = {**units, **shared, "COMPUTE": self.compute, **constants}
        spec = KernelSpec(function, tuple(types), tuple(fixed.items()), frozenset(aligned), warps)
        return PlannedKernel(spec, grid, tuple(arguments))


def _rows_kernel(facts: _Facts, warps: int) -> PlannedKernel:
    pointers = {
        "grad": facts.grad,
        "x": facts.x,
        "scale": facts.scale,
        "mean": facts.mean,
        "inverse": facts.inverse,
        "dx": facts.dx,
    }
    integers = facts.row_integers(("grad", "x", "dx"))
    integers["scale_step"] = facts.scale.stride[-1]
    # Without accumulators nothing is kept from row to row: a program a row balances best.
    programs = facts.programs if facts.is_fused else max(1, facts.rows)
    constants = {
        "BLOCK": triton.next_power_of_2(facts.width),
        "PROGRAMS": programs,
        "IS_LAYER": facts.is_layer,
        "HAS_SHARES": facts.is_fused,
    }
    return facts.kernel(norm_backward, pointers, integers, constants, (programs, 1, 1), warps)


def _shares_kernel(facts: _Facts) -> PlannedKernel:
    pointers = {"grad": facts.grad, "x": facts.x, "mean": facts.mean, "inverse": facts.inverse}
    constants = {
        "SHARES": facts.shares,
        "ROWS": _SHARE_ROWS,
        "COLUMNS": _SHARE_COLUMNS,
        "IS_LAYER": facts.is_layer,
    }
    grid = (triton.cdiv(facts.width, _SHARE_COLUMNS), facts.shares, 1)
    integers = facts.row_integers(("grad", "x"))
    return facts.kernel(norm_backward_shares, pointers, integers, constants, grid, _SHARE_WARPS)


def _sum_kernel(facts: _Facts) -> PlannedKernel:
    dscale = facts.dscale
    # An absent dbias keeps its place; the kernel does not look at it.
    dbias = dscale if facts.dbias is None else facts.dbias
    constants: dict[str, Any] = {
        "WIDTH": facts.width,
        "PROGRAMS": facts.shares,
        "HAS_DBIAS": facts.dbias is not None,
        "COMPUTE": facts.compute,
        "ROWS": _SUM_ROWS,
        "COLUMNS": _SUM_COLUMNS,
    }
    types = (
        *facts.share_types,
        ("dscale", pointer_type(dscale)),
        ("dbias", pointer_type(dbias)),
        ("dscale_step", "i64"),
        ("dbias_step", "i64"),
    )
    arguments: tuple[Argument, ...] = (
        *facts.share_arguments,
        operand(facts.slots, dscale),
        operand(facts.slots, dbias),
        Constant(dscale.stride[-1]),
        Constant(dbias.stride[-1]),
    )
    spec = KernelSpec(sum_shares, types, tuple(constants.items()))
    return PlannedKernel(spec, (triton.cdiv(facts.width, _SUM_COLUMNS), 1, 1), arguments)
