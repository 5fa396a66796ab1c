"""The run-time arguments of attention's backward kernels on SM90, and a launch of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import PlannedKernel, operand, pointer_type
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant


@dataclass
class Arguments:
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

    def starts(self, name: str, tensor: Tensor, *, in_rows: bool = False) -> None:
        """Where a packed operand's sequences start, in rows or elements; a dense one has none."""
        given = tensor.ragged_offset
        unit = tensor.ragged_offset_multiplier
        if in_rows:
            unit //= max(tensor.stride[2], 1)
        self.pointer(f"{name}_starts", tensor if given is None else given)
        step = 0 if given is None else given.stride[0]
        self.add(f"{name}_starts_step", "i64", Constant(step))
        unit = 0 if given is None else unit
        self.add(f"{name}_unit", "i64", Constant(unit), is_aligned=unit % 16 == 0)

    def lengths(self, name: str, tensor: Tensor | None, stand_in: Tensor) -> None:
        """Lengths of sequences, or their running sums."""
        self.pointer(f"lengths_{name}", stand_in if tensor is None else tensor)
        step = 0 if tensor is None else tensor.stride[0]
        self.add(f"lengths_{name}_step", "i64", Constant(step))

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
