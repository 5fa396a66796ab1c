"""Rotary position embedding and its adjoint in Triton; any strides, half-split pairs.

With h = R / 2 and angles a, for i < h (Su and others 2021):

    out[i]     = output_scale (x[i] cos a[i] - x[i + h] sin a[i])
    out[i + h] = output_scale (x[i + h] cos a[i + h] + x[i] sin a[i + h])

The adjoint is the transposed rotation. Elements from R on are output_scale x.

A program makes the table of TOKENS positions once, in registers, and walks HEADS lines at a time
along it: the heads of one batch, or of all batches where those have the same angles. Angles are
rounded to float32; their sines and cosines are taken in float64 and rounded, so a table entry is
the float32 number nearest to the true one, for every angle. Each product and sum is rounded by
itself: results equal the formula's in float32 to the last bit (float64 for float64 operands). A
pair is read before it is written, by one thread: out may be the input.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from tilewright.engines.triton.device_math import cast, narrow, product
from tilewright.engines.triton.rope_config import (
    WARP_THREADS,
    choose_config,
    is_shared,
    positions_adjoin,
)
from tilewright.engines.triton.rows import only_operation
from tilewright.engines.triton.trigonometry import cosine_and_sine, is_large
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant

# Pairs of a head beyond which the tables of one position do not fit a program's registers.
MAX_HALF = 2048
# Where there may be a second table, the next lines wait in shared memory, so many steps of them.
_STAGES = 3
# A thread's limit where there is code for a second table, so that as many programs run at once as
# without: what is spilled then is spilled where the halves of the angles differ.
_REGISTERS = 64
# Elements of each half that a thread has in a step, up to which the limit leaves the rest alone.
_FEW_ELEMENTS = 8


@triton.jit
def _line(line, heads, batch_step, head_step, IS_SHARED: tl.constexpr):
    """Element offsets of lines: heads of the program's batch, or heads of all batches."""
    if IS_SHARED:
        batch = line // heads
        offset = batch.to(tl.int64) * batch_step + (line - batch * heads).to(tl.int64) * head_step
    else:
        offset = line.to(tl.int64) * head_step
    return offset


@triton.jit
def _rotate(
    low,
    high,
    tables,
    places,
    start,
    last,
    steps,
    in_table,
    scale,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    IS_ADJOINT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All lines of a block of positions; ``low`` and ``high`` are those of the first step.

    With STAGES the compiler reads ahead, by copies to shared memory that take no registers.
    """
    low_cos, low_sin, high_cos, high_sin = tables
    heads, x_row, x_batch, x_head, x_step, out_row, out_batch, out_head, out_step = places
    for first in tl.range(start, last, HEADS, num_stages=STAGES):
        line = first + steps
        inside = (line < last) & in_table[None, :, :]
        if STAGES:
            at = x_row + _line(line, heads, x_batch, x_head, IS_SHARED)
            now_low = tl.load(at, mask=inside, other=0.0)
            now_high = tl.load(at + HALF * x_step, mask=inside, other=0.0)
        else:
            now_low, now_high = low, high
            following = line + HEADS
            is_there = (following < last) & in_table[None, :, :]
            at = x_row + _line(following, heads, x_batch, x_head, IS_SHARED)
            next_low = tl.load(at, mask=is_there, other=0.0)
            next_high = tl.load(at + HALF * x_step, mask=is_there, other=0.0)
        low_f, high_f = cast(now_low, COMPUTE), cast(now_high, COMPUTE)
        if IS_ADJOINT:
            low_result = product(low_f, low_cos) + product(high_f, high_sin)
            high_result = product(high_f, high_cos) - product(low_f, low_sin)
        else:
            low_result = product(low_f, low_cos) - product(high_f, low_sin)
            high_result = product(high_f, high_cos) + product(low_f, high_sin)
        if HAS_SCALE:
            low_result, high_result = low_result * scale, high_result * scale
        to = out_row + _line(line, heads, out_batch, out_head, IS_SHARED)
        tl.store(to, narrow(low_result, out_row.dtype.element_ty), mask=inside)
        to += HALF * out_step
        tl.store(to, narrow(high_result, out_row.dtype.element_ty), mask=inside)
        if not STAGES:
            low, high = next_low, next_high


@triton.jit
def rotate_pairs(
    x,
    freqs,
    out,
    scale,
    heads,
    lines,
    blocks,
    length,
    x_batch,
    x_head,
    x_token,
    out_batch,
    out_head,
    out_token,
    freqs_batch,
    freqs_token,
    x_step,
    out_step,
    freqs_step,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    SECOND: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    POSITIONS_FIRST: tl.constexpr,
    IS_SHARED: tl.constexpr,
    IS_ADJOINT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    # In 32 bits, as the number of programs is: a division of 64 would take longer than a table.
    program = tl.program_id(0)
    if POSITIONS_FIRST:
        all_blocks = tl.num_programs(0) // GROUPS
        group = program // all_blocks
        block = program % all_blocks
    else:
        group = program % GROUPS
        block = program // GROUPS
    number = block // blocks
    batch = number.to(tl.int64)
    token = (block - number * blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK).to(tl.int64)
    in_table = (token < length)[:, None] & (pair < HALF)[None, :]
    group_lines = (lines + GROUPS - 1) // GROUPS
    start = group * group_lines
    last = min(start + group_lines, lines)
    x_row = x + batch * x_batch + (token * x_token)[None, :, None] + pair[None, None, :] * x_step
    out_row = out + batch * out_batch + (token * out_token)[None, :, None]
    steps = tl.arange(0, HEADS)[:, None, None]

    # The first lines are on their way while the table is made, and the next ones at each step.
    line = start + steps
    inside = (line < last) & in_table[None, :, :]
    first_at = x_row + _line(line, heads, x_batch, x_head, IS_SHARED)
    if STAGES:
        low, high = 0.0, 0.0
    else:
        low = tl.load(first_at, mask=inside, other=0.0)
        high = tl.load(first_at + HALF * x_step, mask=inside, other=0.0)

    angles = freqs + batch * freqs_batch + (token * freqs_token)[:, None]
    angles += pair[None, :] * freqs_step
    angle = cast(tl.load(angles, mask=in_table, other=0.0), tl.float32)
    state = is_large(angle)
    if SECOND:
        angles += SECOND * freqs_step
        other = cast(tl.load(angles, mask=in_table, other=0.0), tl.float32)
        differs = other.to(tl.int32, bitcast=True) != angle.to(tl.int32, bitcast=True)
        state = tl.maximum(state, is_large(other)) + 2 * differs.to(tl.int32)
    # One reduction tells both: 2 and more if the halves differ, 0 if in addition none is large.
    state = tl.max(state, axis=None)
    cosine, sine = cosine_and_sine(angle, state > 0)
    cosine, sine = cast(cosine, COMPUTE)[None, :, :], cast(sine, COMPUTE)[None, :, :]
    tail_row = x + batch * x_batch + (token * x_token)[None, :, None]
    out_pair = out_row + pair[None, None, :] * out_step
    places = heads, x_row, x_batch, x_head, x_step, out_pair, out_batch, out_head, out_step
    if SECOND:
        if state >= 2:
            high_cos, high_sin = cosine_and_sine(other, state > 0)
            high_cos, high_sin = cast(high_cos, COMPUTE), cast(high_sin, COMPUTE)
            tables = cosine, sine, high_cos[None, :, :], high_sin[None, :, :]
            _rotate(
                low, high, tables, places, start, last, steps, in_table, scale,
                HALF, HEADS, IS_SHARED, IS_ADJOINT, HAS_SCALE, COMPUTE, STAGES,
            )  # fmt: skip
        else:
            tables = cosine, sine, cosine, sine
            _rotate(
                low, high, tables, places, start, last, steps, in_table, scale,
                HALF, HEADS, IS_SHARED, IS_ADJOINT, HAS_SCALE, COMPUTE, STAGES,
            )  # fmt: skip
    else:
        tables = cosine, sine, cosine, sine
        _rotate(
            low, high, tables, places, start, last, steps, in_table, scale,
            HALF, HEADS, IS_SHARED, IS_ADJOINT, HAS_SCALE, COMPUTE, STAGES,
        )  # fmt: skip
    if TAIL:
        rest = tl.arange(0, TAIL_BLOCK).to(tl.int64)[None, None, :]
        in_rest = (token < length)[None, :, None] & (rest < TAIL)
        rest += 2 * HALF
        for first in range(start, last, HEADS):
            line = first + steps
            in_tail = (line < last) & in_rest
            at = tail_row + _line(line, heads, x_batch, x_head, IS_SHARED) + rest * x_step
            values = cast(tl.load(at, mask=in_tail, other=0.0), COMPUTE)
            if HAS_SCALE:
                values = values * scale
            to = out_row + _line(line, heads, out_batch, out_head, IS_SHARED) + rest * out_step
            tl.store(to, narrow(values, out.dtype.element_ty), mask=in_tail)


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal, with the warps as a knob; declines what the kernel cannot address."""
    operation = only_operation(graph, "rotations")
    source, freqs, _ = _operands(operation)
    half = _check(operation)
    config = choose_config(source, freqs, half, sm_count)
    notes = frozenset({behavior_note.RUNTIME_COMPILATION})
    return [Proposal(((knob_type.WARPS, config.warps),), 1.0, notes)]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """One kernel; aligned rows get wide loads, with a general plan behind them."""
    operation = only_operation(graph, "rotations")
    slots = slot_numbers(graph)
    warps = dict(knobs).get(knob_type.WARPS)
    general = _plan(operation, slots, sm_count, warps, is_aligned=False)
    checked = _operands(operation)
    if not all(strides_aligned(tensor, (0, 1, 2)) for tensor in checked):
        return general
    aligned = _plan(operation, slots, sm_count, warps, is_aligned=True)
    return KernelPlan(
        aligned.kernels,
        needs_aligned=tuple(slots[tensor.uid] for tensor in checked),
        fallback=general,
    )


def _plan(
    operation: Operation,
    slots: Mapping[int, int],
    sm_count: int,
    warps: int | None,
    *,
    is_aligned: bool,
) -> KernelPlan:
    x, freqs, out = _operands(operation)
    half = _check(operation)
    if 0 in x.dim:
        return KernelPlan(())
    shares = is_shared(x, freqs, half)
    config = choose_config(x, freqs, half, sm_count, warps)
    batch, heads, length, extent = x.dim
    tables, lines = (1, batch * heads) if shares else (batch, heads)
    blocks = triton.cdiv(length, config.tokens)
    scale = float(operation.output_scale)
    is_double = DataType.DOUBLE in (x.data_type, out.data_type)
    pointers = {"x": x, "freqs": freqs, "out": out}
    integers = {
        "length": length,
        "x_batch": x.stride[0],
        "x_head": x.stride[1],
        "x_token": x.stride[2],
        "out_batch": out.stride[0],
        "out_head": out.stride[1],
        "out_token": out.stride[2],
        # An extent of 1 may have any stride; the angles of a position are then everybody's.
        "freqs_batch": freqs.stride[0] if freqs.dim[0] > 1 else 0,
        "freqs_token": freqs.stride[2] if freqs.dim[2] > 1 else 0,
        "x_step": x.stride[3],
        "out_step": out.stride[3],
        "freqs_step": freqs.stride[3],
    }
    # A step of 1 is a constant: only then can neighbouring elements be loaded together.
    units = {name: 1 for name, value in integers.items() if name.endswith("_step") and value == 1}
    types = [(name, pointer_type(tensor)) for name, tensor in pointers.items()]
    types.append(("scale", "fp64" if is_double else "fp32"))
    types += [("heads", "i32"), ("lines", "i32"), ("blocks", "i32")]
    types += [(name, "i64") for name in integers if name not in units]
    arguments: list[Argument] = [operand(slots, tensor) for tensor in pointers.values()]
    arguments += [Constant(scale), Constant(heads), Constant(lines), Constant(blocks)]
    arguments += [Constant(value) for name, value in integers.items() if name not in units]
    aligned = set()
    if is_aligned:
        aligned = set(pointers)
        aligned |= {
            name
            for name, value in integers.items()
            if name.endswith(("_batch", "_head", "_token")) and value % 16 == 0
        }
    tail = extent - 2 * half
    has_second = freqs.dim[3] == 2 * half
    block = triton.next_power_of_2(half)
    held = config.tokens * config.heads * block // (WARP_THREADS * config.warps)
    is_limited = has_second and not is_double and held <= _FEW_ELEMENTS
    spec = KernelSpec(
        rotate_pairs,
        tuple(types),
        (
            *units.items(),
            ("HALF", half),
            ("HALF_BLOCK", block),
            ("SECOND", half if has_second else 0),
            ("TAIL", tail),
            ("TAIL_BLOCK", triton.next_power_of_2(max(tail, 1))),
            ("TOKENS", config.tokens),
            ("HEADS", config.heads),
            ("GROUPS", config.groups),
            ("POSITIONS_FIRST", config.groups > 1 and positions_adjoin(x)),
            ("IS_SHARED", shares),
            ("STAGES", _STAGES if is_limited and not shares else 0),
            ("IS_ADJOINT", operation.kind == "rope_backward"),
            ("HAS_SCALE", scale != 1.0),
            ("COMPUTE", tl.float64 if is_double else tl.float32),
        ),
        frozenset(aligned),
        config.warps,
        max_registers=_REGISTERS if is_limited else None,
    )
    grid = (tables * blocks * config.groups, 1, 1)
    return KernelPlan((PlannedKernel(spec, grid, tuple(arguments)),))


def _operands(operation: Operation) -> tuple[Tensor, Tensor, Tensor]:
    source = operation.inputs["dY" if operation.kind == "rope_backward" else "input"]
    return source, operation.inputs["freqs"], operation.outputs["out"]


def _check(operation: Operation) -> int:
    """The number of pairs, once everything is known to be addressable.

    Raises:
        NotSupportedError: naming the tensor and the rule.
    """
    source, freqs, out = _operands(operation)
    for tensor in (source, freqs, out):
        if tensor.ragged_offset is not None or tensor.is_pass_by_value:
            raise NotSupportedError(
                f"tensor {tensor.label()} is ragged or passed by value; the kernel takes dense "
                "tensors on the device"
            )
    half = (operation.rope_dim or source.dim[3]) // 2
    if not 0 < half <= MAX_HALF and 0 not in source.dim:
        raise NotSupportedError(
            f"tensor {source.label()} has {half} pairs a head; the kernel takes 1 to {MAX_HALF}"
        )
    return half
