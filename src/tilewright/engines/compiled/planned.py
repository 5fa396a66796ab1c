"""What a kernel family hands to its engine: kernels with their grids and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.dtypes import DataType
from tilewright.engines.compiled.compiler import POINTER_ALIGNMENT_BYTES, KernelSpec
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Operand, Scratch, TensorMap
from tilewright.records import record

TRITON_TYPES: dict[DataType, str] = {
    DataType.FLOAT: "fp32",
    DataType.DOUBLE: "fp64",
    DataType.HALF: "fp16",
    DataType.BFLOAT16: "bf16",
    DataType.INT8: "i8",
    DataType.INT32: "i32",
    DataType.INT64: "i64",
    DataType.UINT8: "u8",
    DataType.BOOLEAN: "i1",
    DataType.FP8_E4M3: "fp8e4nv",
    DataType.FP8_E5M2: "fp8e5",
}


@record(frozen=True)
class PlannedKernel:
    """One launch of a plan. ``arguments`` follow ``spec.types``.

    ``is_early``: it may start before the kernel in front of it has ended, for which it waits
    itself (SM90 and newer). ``cluster``: so many programs that follow one another along the grid's
    first axis run at the same time and reach one another's shared memory (SM90 and newer).
    """

    spec: KernelSpec
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]
    is_early: bool = False
    cluster: int = 1


@record(frozen=True)
class KernelPlan:
    """All launches of a plan in order, and the scratch (name, bytes) that they share.

    ``needs_aligned`` lists slots whose pointers the kernels assume to be multiples of 16 bytes;
    ``fallback`` is the same plan without that assumption.
    """

    kernels: tuple[PlannedKernel, ...]
    scratch: tuple[tuple[str, int], ...] = ()
    needs_aligned: tuple[int, ...] = ()
    fallback: KernelPlan | None = None


def without_unreached(plan: KernelPlan, graph: DeclaredGraph) -> KernelPlan:
    """``plan`` with nothing behind it, if the declaration promises the alignment that it needs."""
    if plan.fallback is None:
        return plan
    bound = [*graph.inputs(), *graph.outputs()]
    promised = [bound[slot].alignment_value for slot in plan.needs_aligned]
    if any(value == 0 or value % POINTER_ALIGNMENT_BYTES for value in promised):
        return plan
    arguments = [argument for kernel in plan.kernels for argument in kernel.arguments]
    has_scratch = any(
        isinstance(argument, Scratch)
        or (isinstance(argument, TensorMap) and argument.scratch_bytes is not None)
        for argument in arguments
    )
    # What only the plan behind would have used is not asked for.
    return replace(
        plan, scratch=plan.scratch if has_scratch else (), needs_aligned=(), fallback=None
    )


def slot_numbers(graph: DeclaredGraph) -> Mapping[int, int]:
    """uid -> slot number: inputs first, then outputs, as the binder orders them."""
    return {tensor.uid: number for number, tensor in enumerate([*graph.inputs(), *graph.outputs()])}


def pointer_type(tensor: Tensor) -> str:
    """Triton's pointer type of a tensor's elements."""
    return "*" + TRITON_TYPES[tensor.data_type]


def strides_aligned(tensor: Tensor, axes: tuple[int, ...]) -> bool:
    """True if stepping these axes keeps a 16-byte alignment."""
    step = POINTER_ALIGNMENT_BYTES * 8 // tensor.data_type.bits
    return all(tensor.dim[axis] == 1 or tensor.stride[axis] % step == 0 for axis in axes)


def operand(slots: Mapping[int, int], tensor: Tensor) -> Operand:
    """The pointer argument for a bound tensor."""
    return Operand(slots[tensor.uid])
