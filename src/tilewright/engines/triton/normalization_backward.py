"""RMSNorm and LayerNorm backward in Triton, over the last axis.

With xhat the normalized input, g the incoming gradient and gw = g * scale:

    rmsnorm:    dx = inverse * (gw - xhat * mean(gw * xhat))
    layernorm:  dx = inverse * (gw - mean(gw) - xhat * mean(gw * xhat))
    dscale = sum over rows of g * xhat,   dbias = sum over rows of g

Two kernels: each program of the first walks rows in strides of the grid, keeps its share of
dscale and dbias in float32 registers, and writes it to the workspace once; the second adds the
shares in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.triton.compiler import KernelSpec
from tilewright.engines.triton.planned import (
    PlannedKernel,
    TritonPlan,
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
from tilewright.launch.prepared import Argument, Constant, Scratch

# Wider rows would spill the two accumulators.
MAX_WIDTH = 16384
_PROGRAMS_A_MULTIPROCESSOR = 2
# Columns that one program of the second kernel sums.
_SUM_COLUMNS = 64
_SUM_ROWS = 32


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
        dscale += g * values
        if HAS_DBIAS:
            dbias += g
        row += PROGRAMS
    share = program.to(tl.int64) * WIDTH + column
    tl.store(dscale_shares + share, dscale, mask=inside)
    if HAS_DBIAS:
        tl.store(dbias_shares + share, dbias, mask=inside)


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


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> TritonPlan:
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
    return TritonPlan(
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
) -> TritonPlan:
    rows, inner, steps = _check(operation)
    x, scale, grad = (operation.inputs[name] for name in ("input", "scale", "grad"))
    dx, dscale, dbias = (operation.outputs.get(name) for name in ("DX", "DScale", "DBias"))
    if dx is None or dscale is None:
        raise NotSupportedError(f"{operation.title()}: DX and DScale are made together")
    inverse = operation.inputs["inv_variance"]
    mean = operation.inputs.get("mean", inverse)
    is_layer = operation.kind.startswith("layernorm")
    width = x.dim[-1]
    programs = max(1, min(rows, _PROGRAMS_A_MULTIPROCESSOR * sm_count))
    is_double = x.data_type is DataType.DOUBLE
    compute = tl.float64 if is_double else tl.float32
    share_type = "*fp64" if is_double else "*fp32"
    share_bytes = programs * width * (8 if is_double else 4)
    scratch = [("dscale shares", share_bytes)]
    bias_offset = 0
    if dbias is not None:
        scratch.append(("dbias shares", share_bytes))
        bias_offset = -(-share_bytes // 256) * 256
    pointers = {
        "grad": grad,
        "x": x,
        "scale": scale,
        "mean": mean,
        "inverse": inverse,
        "dx": dx,
    }
    integers = {
        "rows": rows,
        "inner_rows": inner,
        "grad_outer": steps[0][0],
        "grad_inner": steps[0][1],
        "x_outer": steps[1][0],
        "x_inner": steps[1][1],
        "dx_outer": steps[2][0],
        "dx_inner": steps[2][1],
        "grad_step": grad.stride[-1],
        "x_step": x.stride[-1],
        "dx_step": dx.stride[-1],
        "scale_step": scale.stride[-1],
    }
    units = {name: 1 for name, value in integers.items() if name.endswith("_step") and value == 1}
    types = [(name, pointer_type(tensor)) for name, tensor in pointers.items()]
    types += [("dscale_shares", share_type), ("dbias_shares", share_type)]
    types += [(name, "i64") for name in integers if name not in units]
    arguments: list[Argument] = [operand(slots, tensor) for tensor in pointers.values()]
    arguments += [Scratch(0), Scratch(bias_offset)]
    arguments += [Constant(value) for name, value in integers.items() if name not in units]
    aligned: set[str] = set()
    if is_aligned:
        aligned = {"grad", "x", "scale", "dx", "dscale_shares", "dbias_shares"}
        aligned |= {
            name
            for name, value in integers.items()
            if name.endswith(("_outer", "_inner")) and value % 16 == 0
        }
    constants: tuple[tuple[str, Any], ...] = (
        ("WIDTH", width),
        ("PROGRAMS", programs),
        ("HAS_DBIAS", dbias is not None),
        ("COMPUTE", compute),
    )
    first = KernelSpec(
        norm_backward,
        tuple(types),
        (
            *units.items(),
            ("BLOCK", triton.next_power_of_2(width)),
            ("IS_LAYER", is_layer),
            *constants,
        ),
        frozenset(aligned),
        choose_warps(width) if warps is None else warps,
    )
    out_bias = dscale if dbias is None else dbias
    second = KernelSpec(
        sum_shares,
        (
            ("dscale_shares", share_type),
            ("dbias_shares", share_type),
            ("dscale", pointer_type(dscale)),
            ("dbias", pointer_type(out_bias)),
            ("dscale_step", "i64"),
            ("dbias_step", "i64"),
        ),
        (*constants, ("ROWS", _SUM_ROWS), ("COLUMNS", _SUM_COLUMNS)),
    )
    sums: tuple[Argument, ...] = (
        Scratch(0),
        Scratch(bias_offset),
        operand(slots, dscale),
        operand(slots, out_bias),
        Constant(dscale.stride[-1]),
        Constant(out_bias.stride[-1]),
    )
    return TritonPlan(
        (
            PlannedKernel(first, (programs, 1, 1), tuple(arguments)),
            PlannedKernel(second, (triton.cdiv(width, _SUM_COLUMNS), 1, 1), sums),
        ),
        tuple(scratch),
    )
