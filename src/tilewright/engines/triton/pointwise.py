"""Pointwise operations with reductions, reshapes, transposes and slices, as generated kernels.

Outputs that one index walks share a kernel: mostly there is one.

    pointwise_nodes    the graph as expressions over the tensors that are bound
    addressing         where elements are, seen through moves and broadcasting
    pointwise_layout   how one index is walked: axes, tiles, programs
    pointwise_modes    a mode as source text; pointwise_functions: what the text calls
    pointwise_codegen  the kernel's source, and the function that it defines

Arithmetic is in float32 (float64 beside float64 and wide integers, 64-bit integers where operands
and mode stay within them), and every result is rounded to its tensor's type, virtual ones too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.compiler import POINTER_ALIGNMENT_BYTES, KernelSpec
from tilewright.engines.compiled.planned import (
    KernelPlan,
    PlannedKernel,
    operand,
    pointer_type,
    slot_numbers,
)
from tilewright.engines.triton.pointwise_codegen import Generated, function_of, generate
from tilewright.engines.triton.pointwise_layout import Problem, Walk, problem_of, walk_of
from tilewright.engines.triton.pointwise_modes import DOUBLE, SINGLE, WHOLE
from tilewright.engines.triton.pointwise_nodes import Node, expressions
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant, HostScalar, Scratch
from tilewright.launch.slots import in_place_pairs, make_slots
from tilewright.launch.workspace import plan_workspace
from tilewright.torch_dtypes import to_torch

_MOST_PROGRAMS = 2**31 - 1


# Element types of what kernels hand to one another, with their bytes.
_SHARES = {SINGLE: ("*fp32", 4), DOUBLE: ("*fp64", 8), WHOLE: ("*i64", 8)}


@dataclass(frozen=True)
class _Kernel:
    """One generated kernel of a graph; ``shares`` are the names of its pieces of the workspace."""

    problem: Problem
    made: Generated
    shares: tuple[str, ...]


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal; declines what no index walks."""
    _kernels(graph, sm_count)
    return [Proposal((), 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}))]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """Mostly one kernel; aligned tensors get wide loads, with a general plan behind them."""
    kernels = _kernels(graph, sm_count)
    scratch = {
        name: size * _SHARES[kind][1]
        for kernel in kernels
        for name, (_, kind, size) in zip(kernel.shares, kernel.made.shares, strict=True)
    }
    pieces = plan_workspace(list(scratch.items())).pieces
    offsets = {piece.name: piece.offset_bytes for piece in pieces}
    slots = slot_numbers(graph)
    wide = [
        frozenset(uid for uid in kernel.made.contiguous if _stays_aligned(kernel.problem, uid))
        for kernel in kernels
    ]
    general = KernelPlan(
        tuple(_planned(kernel, slots, offsets, frozenset()) for kernel in kernels),
        tuple(scratch.items()),
    )
    if not any(wide):
        return general
    pairs = zip(kernels, wide, strict=True)
    return KernelPlan(
        tuple(_planned(kernel, slots, offsets, uids) for kernel, uids in pairs),
        tuple(scratch.items()),
        needs_aligned=tuple(slots[uid] for uid in sorted(frozenset().union(*wide))),
        fallback=general,
    )


def _planned(
    kernel: _Kernel,
    slots: Mapping[int, int],
    offsets: Mapping[str, int],
    wide: frozenset[int],
) -> PlannedKernel:
    made = kernel.made
    types: list[tuple[str, str]] = []
    arguments: list[Argument] = []
    for name, tensor in made.tensors.values():
        types.append((name, pointer_type(tensor)))
        arguments.append(operand(slots, tensor))
    for (name, kind, _), piece in zip(made.shares, kernel.shares, strict=True):
        types.append((name, _SHARES[kind][0]))
        arguments.append(Scratch(offsets[piece]))
    for name, tensor in made.scalars.values():
        types.append((name, _scalar_type(tensor)))
        arguments.append(HostScalar(slots[tensor.uid], _host_value(tensor)))
    for name, value, kind in made.integers:
        types.append((name, kind))
        arguments.append(Constant(value))
    aligned = made.aligned | {name for uid, (name, _) in made.tensors.items() if uid in wide}
    spec = KernelSpec(
        function_of(made.name, made.text),
        tuple(types),
        (("BLOCK_R", made.walk.block_rows), ("BLOCK_I", made.walk.block_inner)),
        frozenset(aligned),
        made.walk.warps,
    )
    return PlannedKernel(spec, (made.walk.programs, 1, 1), tuple(arguments))


def _kernels(graph: DeclaredGraph, sm_count: int) -> list[_Kernel]:
    """The outputs, each with the first of those before it that one index walks with it.

    Raises:
        NotSupportedError: naming the tensor or operation and the rule.
    """
    if _is_empty(graph):
        return []
    outputs = expressions(graph)
    pairs = _pairs(graph)
    walked = _grouped(outputs, frozenset(), sm_count)
    # What may overwrite a tensor that its kernel also reads elsewhere is written last.
    late = frozenset(out.uid for out, source in pairs if _is_overwritten(walked, out, source))
    if late:
        walked = _grouped(outputs, late, sm_count)
    for out, source in pairs:
        if _is_overwritten(walked, out, source):
            raise NotSupportedError(
                f"tensor {out.label()} may be bound to the buffer of {source.label()}, which is "
                "also read elsewhere than where it is written"
            )
    return [
        _Kernel(problem, made, tuple(f"shares {at}.{k}" for k in range(len(made.shares))))
        for at, (problem, walk) in enumerate(walked)
        for made in generate(problem, walk)
    ]


def _grouped(
    outputs: list[tuple[Tensor, Node]], late: frozenset[int], sm_count: int
) -> list[tuple[Problem, Walk]]:
    """Kernels in order; each of the outputs ``late`` (uids) has its own, after the others."""
    groups: list[list[tuple[Tensor, Node]]] = []
    walked: list[tuple[Problem, Walk]] = []
    for output in sorted(outputs, key=lambda output: output[0].uid in late):
        for position, group in enumerate(groups):
            if output[0].uid in late:
                continue
            try:
                walked[position] = _walked([*group, output], sm_count)
            except NotSupportedError:
                continue
            group.append(output)
            break
        else:
            walked.append(_walked([output], sm_count))
            groups.append([output])
    return walked


def _walked(outputs: list[tuple[Tensor, Node]], sm_count: int) -> tuple[Problem, Walk]:
    problem = problem_of(outputs)
    walk = walk_of(problem, sm_count)
    if walk.programs > _MOST_PROGRAMS:
        raise NotSupportedError(f"the kernel would have {walk.programs} programs")
    return problem, walk


def _is_empty(graph: DeclaredGraph) -> bool:
    """True if nothing is to be written.

    Raises:
        NotSupportedError: if something is to be written from nothing.
    """
    if all(0 in tensor.dim for tensor in graph.outputs()):
        return True
    for operation in graph.operations:
        for tensor in (*operation.inputs.values(), *operation.outputs.values()):
            if 0 in tensor.dim:
                raise NotSupportedError(
                    f"tensor {tensor.label()} has dim {tensor.dim}; generated kernels do not "
                    "reduce nothing to something"
                )
    return False


def _pairs(graph: DeclaredGraph) -> list[tuple[Tensor, Tensor]]:
    """(output, input) that may be one buffer."""
    tensors = {tensor.uid: tensor for tensor in (*graph.inputs(), *graph.outputs())}
    pairs = sorted(in_place_pairs(graph, make_slots(graph)))
    return [(tensors[out], tensors[source]) for out, source in pairs]


def _is_overwritten(walked: list[tuple[Problem, Walk]], out: Tensor, source: Tensor) -> bool:
    """True if ``source`` is read where, or after, ``out`` may have been written over it."""
    problems = [problem for problem, _ in walked]
    writer = next(
        at for at, problem in enumerate(problems) if any(t is out for t, _ in problem.outputs)
    )
    later = problems[writer + 1 :]
    return _reads_elsewhere(problems[writer], out, source) or any(
        node.tensor is source for problem in later for node in problem.reads
    )


def _reads_elsewhere(problem: Problem, out: Tensor, source: Tensor) -> bool:
    """True if the kernel reads ``source`` other than once, where it writes ``out``."""
    place = next(at for at, (tensor, _) in enumerate(problem.outputs) if tensor is out)
    place += len(problem.reads)
    axes = [axis for axes in problem.axes for axis in axes if axis.extent > 1]
    for at, node in enumerate(problem.reads):
        if node.tensor is not source:
            continue
        if problem.offsets[at]:
            return True
        # Without a step along an axis, programs that come later read it again.
        steps = [(axis.strides[at], axis.strides[place]) for axis in axes]
        if any(own != other or not own for own, other in steps):
            return True
    return False


def _stays_aligned(problem: Problem, uid: int) -> bool:
    """True if all steps of a tensor but that between neighbours are whole 16-byte vectors."""
    accesses = [(at, node.tensor) for at, node in enumerate(problem.reads)]
    first = len(problem.reads)
    accesses += [(first + at, tensor) for at, (tensor, _) in enumerate(problem.outputs)]
    for at, tensor in accesses:
        if tensor is None or tensor.uid != uid:
            continue
        vector = POINTER_ALIGNMENT_BYTES * 8 // tensor.data_type.bits
        offset = problem.offsets[at] if at < first else 0
        steps = [axis.strides[at] for axes in problem.axes for axis in axes if axis.extent > 1]
        if offset % vector or any(step != 1 and step % vector for step in steps):
            return False
    return True


def _scalar_type(tensor: Tensor) -> str:
    if tensor.data_type is DataType.DOUBLE:
        return "fp64"
    return "fp32" if tensor.data_type.is_floating else "i64"


def _host_value(tensor: Tensor) -> int | float | None:
    """A declared value, rounded as the tensor's type holds it."""
    if tensor.value is None:
        return None
    value: int | float = (
        torch.tensor(tensor.value, device="cpu").to(to_torch(tensor.data_type)).item()
    )
    return int(value) if isinstance(value, bool) else value
