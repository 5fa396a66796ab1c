"""Attention backward on SM90: what is taken, and the launches around the Gluon kernel.

The order in which dQ's sums are made is not fixed: ``use_deterministic_algorithm`` is declined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import (
    KernelPlan,
    PlannedKernel,
    operand,
    pointer_type,
    slot_numbers,
)
from tilewright.engines.hopper.attention_backward_kernel import attention_backward
from tilewright.engines.hopper.attention_backward_rows import (
    finish_rows,
    finish_sinks,
    prepare_rows,
)
from tilewright.engines.hopper.attention_backward_spec import BackwardSpec, read_backward
from tilewright.engines.hopper.map_types import map_type
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import behavior_note, knob_type, numeric_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant, Scratch
from tilewright.launch.tensor_maps import tensor_map
from tilewright.launch.workspace import plan_workspace

# Keys of a program and rows of a tile; see ``attention_backward_kernel``.
_BLOCK_KEYS, _ROWS = 128, 64
_STAGES = 2
_ENTRY_REGISTERS = 168
_PART_WARPS = 4
_SINK_ROWS = 1024
_FLOAT_BYTES = 4


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """One proposal."""
    _only_spec(graph)
    return [
        Proposal(
            ((knob_type.STAGES, _STAGES),),
            1.0,
            frozenset({behavior_note.RUNTIME_COMPILATION}),
            frozenset({numeric_note.NONDETERMINISTIC}),
        )
    ]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """Row statistics, the products, dQ, and dSink where it is asked for."""
    call = _Call(_only_spec(graph), slot_numbers(graph))
    kernels = [call.prepare(), call.products(dict(knobs).get(knob_type.STAGES, _STAGES))]
    kernels.append(call.finish())
    if "dSink_token" in call.spec.ports:
        kernels.append(call.sinks())
    return KernelPlan(tuple(kernels), call.scratch)


def padded(head_size: int) -> int:
    """The head size that the products are made with; the copies fill up with zeros."""
    return 64 if head_size <= 64 else 128


@dataclass
class _Arguments:
    """A kernel's run-time arguments in order."""

    slots: Mapping[int, int]
    types: list[tuple[str, str]] = field(default_factory=list)
    values: list[Argument] = field(default_factory=list)
    aligned: set[str] = field(default_factory=set)

    def add(self, name: str, kind: str, value: Argument, *, is_aligned: bool = False) -> None:
        """One argument."""
        self.types.append((name, kind))
        self.values.append(value)
        if is_aligned:
            self.aligned.add(name)

    def pointer(self, name: str, tensor: Tensor, *, is_aligned: bool = False) -> None:
        """A bound operand's address."""
        self.add(name, pointer_type(tensor), operand(self.slots, tensor), is_aligned=is_aligned)

    def counts(self, **values: int) -> None:
        """Counts, int32."""
        for name, value in values.items():
            self.add(name, "i32", Constant(value))

    def steps(self, name: str, tensor: Tensor) -> None:
        """The steps of batch, head and row."""
        for axis, suffix in enumerate(("batch", "head", "row")):
            step = tensor.stride[axis] if tensor.dim[axis] > 1 else 0
            self.add(f"{name}_{suffix}", "i64", Constant(step), is_aligned=step % 16 == 0)

    def kernel(
        self,
        function: Any,
        programs: int,
        constants: Mapping[str, Any],
        warps: int,
        max_registers: int | None = None,
    ) -> PlannedKernel:
        """The launch."""
        spec = KernelSpec(
            function,
            tuple(self.types),
            tuple(constants.items()),
            frozenset(self.aligned),
            warps,
            max_registers=max_registers,
        )
        return PlannedKernel(spec, (programs, 1, 1), tuple(self.values))


class _Call:
    """What the launches of one plan have in common."""

    def __init__(self, spec: BackwardSpec, slots: Mapping[int, int]) -> None:
        self.spec, self.slots = spec, slots
        self.depth, self.depth_v = padded(spec.depth), padded(spec.depth_v)
        self.lines = spec.batch * spec.heads_q
        self.padded_rows = -(-spec.rows // _ROWS) * _ROWS
        count = self.lines * self.padded_rows * _FLOAT_BYTES
        sizes = [("row statistics", count), ("row products", count)]
        sizes.append(("sums of dQ", count * self.depth))
        self.scratch = tuple(sizes)
        self.offsets = [piece.offset_bytes for piece in plan_workspace(sizes).pieces]

    def prepare(self) -> PlannedKernel:
        """Row statistics, and zeros in dQ's sums."""
        spec, arguments = self.spec, _Arguments(self.slots)
        ports = {"o": spec.ports["o"], "d_o": spec.ports["dO"], "stats": spec.ports["stats"]}
        for name, tensor in ports.items():
            arguments.pointer(name, tensor, is_aligned=name != "stats")
        self._workspace(arguments)
        arguments.counts(rows=spec.rows, padded_rows=self.padded_rows, heads=spec.heads_q)
        for name, tensor in ports.items():
            arguments.steps(name, tensor)
        constants = {
            "WIDTH": spec.depth_v,
            "BLOCK_WIDTH": self.depth_v,
            "DEPTH": self.depth,
            "ROWS": _ROWS,
        }
        programs = self.lines * (self.padded_rows // _ROWS)
        return arguments.kernel(prepare_rows, programs, constants, _PART_WARPS)

    def products(self, stages: int) -> PlannedKernel:
        """The Gluon kernel."""
        spec, arguments = self.spec, _Arguments(self.slots)
        for name, port, depth in (
            ("q_map", "q", self.depth),
            ("k_map", "k", self.depth),
            ("v_map", "v", self.depth_v),
            ("d_o_map", "dO", self.depth_v),
        ):
            tensor, box = spec.ports[port], (1, 1, _ROWS, depth)
            value = tensor_map(tensor, self.slots[tensor.uid], box)
            arguments.add(name, map_type(tensor, box), value)
        d_k, d_v = spec.ports["dK"], spec.ports["dV"]
        arguments.pointer("d_k", d_k, is_aligned=True)
        arguments.pointer("d_v", d_v, is_aligned=True)
        self._workspace(arguments)
        arguments.add("scale", "fp32", Constant(spec.scale))
        arguments.counts(
            rows=spec.rows,
            keys=spec.keys,
            padded_rows=self.padded_rows,
            left=spec.left or 0,
            right=spec.right or 0,
            heads_kv=spec.heads_kv,
            group=spec.group,
            depth=spec.depth,
            depth_v=spec.depth_v,
        )
        arguments.steps("d_k", d_k)
        arguments.steps("d_v", d_v)
        constants = {
            "DEPTH": self.depth,
            "DEPTH_V": self.depth_v,
            "STAGES": stages,
            "HAS_LEFT": spec.left is not None,
            "HAS_RIGHT": spec.right is not None,
            "HAS_TAIL": spec.keys % _BLOCK_KEYS != 0,
        }
        programs = -(-spec.keys // _BLOCK_KEYS) * spec.heads_kv * spec.batch
        return arguments.kernel(attention_backward, programs, constants, 4, _ENTRY_REGISTERS)

    def finish(self) -> PlannedKernel:
        """DQ from its sums."""
        spec, arguments = self.spec, _Arguments(self.slots)
        d_q = spec.ports["dQ"]
        arguments.add("sums", "*fp32", Scratch(self.offsets[2]), is_aligned=True)
        arguments.pointer("d_q", d_q, is_aligned=True)
        arguments.add("scale", "fp32", Constant(spec.scale))
        arguments.counts(rows=spec.rows, padded_rows=self.padded_rows, heads=spec.heads_q)
        arguments.counts(width=spec.depth)
        arguments.steps("d_q", d_q)
        programs = self.lines * (self.padded_rows // _ROWS) * 2
        return arguments.kernel(finish_rows, programs, {"DEPTH": self.depth}, _PART_WARPS)

    def sinks(self) -> PlannedKernel:
        """DSink."""
        spec, arguments = self.spec, _Arguments(self.slots)
        d_sink = spec.ports["dSink_token"]
        arguments.pointer("sink", spec.ports["sink_token"])
        self._workspace(arguments, with_sums=False)
        arguments.pointer("d_sink", d_sink)
        arguments.counts(padded_rows=self.padded_rows, batches=spec.batch, heads=spec.heads_q)
        step = d_sink.stride[1] if spec.heads_q > 1 else 0
        arguments.add("d_sink_head", "i64", Constant(step))
        return arguments.kernel(finish_sinks, spec.heads_q, {"ROWS": _SINK_ROWS}, _PART_WARPS)

    def _workspace(self, arguments: _Arguments, *, with_sums: bool = True) -> None:
        names = ("lse", "delta", "sums") if with_sums else ("lse", "delta")
        for name, offset in zip(names, self.offsets, strict=False):
            arguments.add(name, "*fp32", Scratch(offset), is_aligned=True)


def _only_spec(graph: DeclaredGraph) -> BackwardSpec:
    if len(graph.operations) != 1:
        raise NotSupportedError(
            f"graph {graph.name!r} has {len(graph.operations)} operations; Hopper attention takes "
            "graphs of one"
        )
    return read_backward(graph.operations[0])
