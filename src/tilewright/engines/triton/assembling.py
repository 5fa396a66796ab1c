"""Putting one launch together: a kernel's arguments by name, in the kernel's own order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import PlannedKernel, operand, pointer_type
from tilewright.engines.triton.rows import Plane, Steps
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant

# What the compiler is told of a pointer or a step: it is a multiple of this.
_MULTIPLE = 16
STEP_NAMES = ("outer", "inner", "jump", "step")


@dataclass
class Assembly:
    """Arguments of a kernel, gathered by name.

    Integers that are 0 or 1 become compile-time constants: only a step of 1 lets neighbouring
    elements be loaded together, and one of 0 falls away. With ``is_aligned``, pointers in
    ``aligned`` and the steps of their rows are stated to be multiples of 16 bytes.
    """

    slots: Mapping[int, int]
    is_aligned: bool = False
    types: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Argument] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: set[str] = field(default_factory=set)

    def tensor(self, name: str, tensor: Tensor, *, is_aligned: bool = False) -> None:
        """A bound tensor's pointer."""
        self.types[name] = pointer_type(tensor)
        self.arguments[name] = operand(self.slots, tensor)
        if is_aligned and self.is_aligned:
            self.aligned.add(name)

    def pointer(self, name: str, kind: str, argument: Argument) -> None:
        """A pointer into the workspace, whose pieces are aligned always."""
        self.types[name] = kind
        self.arguments[name] = argument
        if self.is_aligned:
            self.aligned.add(name)

    def scalar(self, name: str, kind: str, argument: Argument) -> None:
        """A scalar that a call may bind."""
        self.types[name] = kind
        self.arguments[name] = argument

    def integer(self, name: str, value: int, element_bytes: int = 0) -> None:
        """An integer of the declaration; ``element_bytes`` if it steps through such elements."""
        if value in (0, 1):
            self.constants[name] = value
            return
        if element_bytes and self.is_aligned and value % _MULTIPLE == 0:
            self.aligned.add(name)
        elif element_bytes and self.is_aligned and value * element_bytes % _MULTIPLE == 0:
            # A multiple of 16 bytes, though not of 16 elements: only the value itself says so.
            self.constants[name] = value
            return
        self.types[name] = "i64"
        self.arguments[name] = Constant(value)

    def steps(self, name: str, steps: Steps, tensor: Tensor) -> None:
        """The four steps of an operand, as ``name_outer``, ``_inner``, ``_jump`` and ``_step``."""
        values = (steps.row_outer, steps.row_inner, steps.column_outer, steps.column_inner)
        for suffix, value in zip(STEP_NAMES, values, strict=True):
            self.integer(f"{name}_{suffix}", value, max(1, tensor.data_type.bits // 8))

    def kernel(
        self, function: Any, grid: tuple[int, int, int], warps: int, **constants: Any
    ) -> PlannedKernel:
        """The launch; what the kernel does not name is left out."""
        names = list(function.arg_names)
        fixed = {**self.constants, **constants}
        absent = [name for name in names if name not in self.types and name not in fixed]
        if absent:
            raise TypeError(f"kernel {function.__name__!r}: no value for {', '.join(absent)}")
        run_time = [name for name in names if name in self.types and name not in fixed]
        spec = KernelSpec(
            function,
            tuple((name, self.types[name]) for name in run_time),
            tuple((name, fixed[name]) for name in names if name in fixed),
            frozenset(self.aligned & set(run_time)),
            warps,
        )
        return PlannedKernel(spec, grid, tuple(self.arguments[name] for name in run_time))


def row_integers(assembly: Assembly, grounds: Plane, x: Tensor) -> None:
    """How many rows there are; the compiler is told what divides that where lanes go along rows."""
    size = max(1, x.data_type.bits // 8) if grounds.is_row_contiguous("x") else 0
    assembly.integer("rows", grounds.rows, size)
    assembly.integer("inner_rows", grounds.inner_rows, size)
