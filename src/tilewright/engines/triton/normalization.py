"""RMSNorm and LayerNorm in Triton, forward, over the last axis.

    rmsnorm:    y = x * rsqrt(mean(x^2) + eps) * scale + bias
    layernorm:  y = (x - mean(x)) * rsqrt(var(x) + eps) * scale + bias

A program takes ROWS whole rows: each is read once, reduced and written once, in float32 (float64
for float64). Sources: Zhang and Sennrich 2019; Ba, Kiros and Hinton 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    Steps,
    is_packed,
    only_operation,
    require_vector,
    row_steps,
)
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.launch.prepared import Argument, Constant, HostScalar

# A row longer than this does not fit a program's registers.
MAX_WIDTH = 65536
# Elements that one warp holds comfortably, which sets warps a row and rows a program.
_ELEMENTS_A_WARP = 1024


@triton.jit
def norm_forward(
    x,
    scale,
    bias,
    y,
    mean_out,
    inverse_out,
    epsilon,
    rows,
    inner_rows,
    x_outer,
    x_inner,
    y_outer,
    y_inner,
    x_step,
    scale_step,
    bias_step,
    y_step,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_LAYER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    column = tl.arange(0, BLOCK).to(tl.int64)
    outer, inner = row // inner_rows, row % inner_rows
    in_row = (row < rows)[:, None]
    in_width = (column < WIDTH)[None, :]
    inside = in_row & in_width
    x_at = x + (outer * x_outer + inner * x_inner)[:, None] + column[None, :] * x_step
    values = tl.load(x_at, mask=inside, other=0.0).to(COMPUTE)
    if IS_LAYER:
        mean = tl.sum(values, axis=1) / WIDTH
        values = tl.where(inside, values - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / WIDTH + epsilon)
    factor = tl.load(scale + column * scale_step, mask=column < WIDTH, other=0.0).to(COMPUTE)
    result = values * inverse[:, None] * factor[None, :]
    if HAS_BIAS:
        shift = tl.load(bias + column * bias_step, mask=column < WIDTH, other=0.0).to(COMPUTE)
        result += shift[None, :]
    y_at = y + (outer * y_outer + inner * y_inner)[:, None] + column[None, :] * y_step
    tl.store(y_at, result.to(y.dtype.element_ty), mask=inside)
    if HAS_STATISTICS:
        tl.store(inverse_out + row, inverse.to(inverse_out.dtype.element_ty), mask=row < rows)
        if IS_LAYER:
            tl.store(mean_out + row, mean.to(mean_out.dtype.element_ty), mask=row < rows)


@dataclass(frozen=True)
class NormConfig:
    """ROWS rows a program, ``warps`` warps."""

    rows: int
    warps: int


def choose_config(width: int) -> NormConfig:
    """Short rows share a program; a long row takes up to 16 warps."""
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, block // _ELEMENTS_A_WARP))
    rows = max(1, min(8, 4 * _ELEMENTS_A_WARP // block))
    return NormConfig(rows, max(warps, min(4, rows * block // _ELEMENTS_A_WARP)))


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal, with the warps as a knob; declines what the kernel cannot address."""
    operation = only_operation(graph, "norms")
    _check(operation)
    config = choose_config(operation.inputs["input"].dim[-1])
    notes = frozenset({behavior_note.RUNTIME_COMPILATION})
    return [Proposal(((knob_type.WARPS, config.warps),), 1.0, notes)]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """One kernel; aligned rows get wide loads, with a general plan behind them."""
    operation = only_operation(graph, "norms")
    slots = slot_numbers(graph)
    warps = dict(knobs).get(knob_type.WARPS)
    general = _plan(operation, slots, warps, is_aligned=False)
    checked = [operation.inputs["input"], operation.outputs["Y"]]
    vectors = [operation.inputs["scale"]]
    vectors += [operation.inputs["bias"]] if "bias" in operation.inputs else []
    rank = checked[0].rank
    if not all(strides_aligned(tensor, tuple(range(rank - 1))) for tensor in checked):
        return general
    aligned = _plan(operation, slots, warps, is_aligned=True)
    return KernelPlan(
        aligned.kernels,
        needs_aligned=tuple(slots[tensor.uid] for tensor in (*checked, *vectors)),
        fallback=general,
    )


def _plan(
    operation: Operation, slots: Mapping[int, int], warps: int | None, *, is_aligned: bool
) -> KernelPlan:
    x, y = operation.inputs["input"], operation.outputs["Y"]
    scale, bias = operation.inputs["scale"], operation.inputs.get("bias")
    inverse, mean = operation.outputs.get("inv_variance"), operation.outputs.get("mean")
    width = x.dim[-1]
    config = choose_config(width)
    rows, inner, (x_steps, y_steps) = _check(operation)
    has_statistics = inverse is not None and not inverse.is_virtual
    is_layer = operation.kind == "layernorm"
    compute = tl.float64 if x.data_type is DataType.DOUBLE else tl.float32
    # Absent operands keep their place; y stands in, and the kernel does not look at it.
    pointers = {
        "x": x,
        "scale": scale,
        "bias": bias or y,
        "y": y,
        "mean_out": mean if mean is not None and has_statistics else y,
        "inverse_out": inverse if inverse is not None and has_statistics else y,
    }
    integers = {
        "rows": rows,
        "inner_rows": inner,
        "x_outer": x_steps[0],
        "x_inner": x_steps[1],
        "y_outer": y_steps[0],
        "y_inner": y_steps[1],
        "x_step": x.stride[-1],
        "scale_step": scale.stride[-1],
        "bias_step": 1 if bias is None else bias.stride[-1],
        "y_step": y.stride[-1],
    }
    # A step of 1 is a constant: only then can neighbouring elements be loaded together.
    units = {name: 1 for name, value in integers.items() if name.endswith("_step") and value == 1}
    types = [(name, pointer_type(tensor)) for name, tensor in pointers.items()]
    types.append(("epsilon", "fp64" if compute == tl.float64 else "fp32"))
    types += [(name, "i64") for name in integers if name not in units]
    arguments: list[Argument] = [operand(slots, tensor) for tensor in pointers.values()]
    arguments.append(_epsilon(operation, slots))
    arguments += [Constant(value) for name, value in integers.items() if name not in units]
    aligned = set()
    if is_aligned:
        aligned = {"x", "y", "scale", "bias"}
        aligned |= {
            name
            for name, value in integers.items()
            if name.endswith(("_outer", "_inner")) and value % 16 == 0
        }
    spec = KernelSpec(
        norm_forward,
        tuple(types),
        (
            *units.items(),
            ("WIDTH", width),
            ("BLOCK", triton.next_power_of_2(width)),
            ("ROWS", config.rows),
            ("IS_LAYER", is_layer),
            ("HAS_BIAS", bias is not None),
            ("HAS_STATISTICS", has_statistics),
            ("COMPUTE", compute),
        ),
        frozenset(aligned),
        config.warps if warps is None else warps,
    )
    grid = (triton.cdiv(rows, config.rows), 1, 1)
    return KernelPlan((PlannedKernel(spec, grid, tuple(arguments)),) if rows else ())


def _epsilon(operation: Operation, slots: Mapping[int, int]) -> Argument:
    tensor = operation.inputs["epsilon"]
    if not tensor.is_pass_by_value:
        raise NotSupportedError(
            f"tensor {tensor.label()} (epsilon) is on the device; expected it passed by value"
        )
    return HostScalar(slots[tensor.uid], None if tensor.value is None else float(tensor.value))


def _check(operation: Operation) -> tuple[int, int, tuple[Steps, ...]]:
    """Rows and steps of x and y, once everything is known to be addressable.

    Raises:
        NotSupportedError: naming the tensor and the rule.
    """
    x, y, scale = operation.inputs["input"], operation.outputs["Y"], operation.inputs["scale"]
    require_vector(scale, x, "scale", MAX_WIDTH)
    for name in ("mean", "inv_variance"):
        tensor = operation.outputs.get(name)
        if tensor is not None and not tensor.is_virtual and not is_packed(tensor):
            raise NotSupportedError(
                f"tensor {tensor.label()} ({name}) has stride {tensor.stride}; the kernel writes "
                "statistics packed"
            )
    return row_steps((x, y))
