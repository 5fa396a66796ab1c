"""Collecting a kernel's arguments: types, what is bound, and what is known when it is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tilewright.dtypes import DataType
from tilewright.engines.compiled.compiler import KernelSpec
from tilewright.engines.compiled.planned import PlannedKernel, operand, pointer_type
from tilewright.engines.triton.attention_spec import AttentionSpec, Length
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, Constant, HostScalar, Scratch

_AXES = ("batch", "head", "row", "col")


@dataclass
class KernelArguments:
    """Arguments of one kernel by name, in any order; ``planned`` puts them in the kernel's.

    An absent operand is the compile-time constant None: the kernel does not look at it.
    """

    slots: Mapping[int, int]
    types: dict[str, str] = field(default_factory=dict)
    values: dict[str, Argument] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: set[str] = field(default_factory=set)

    def pointer(self, name: str, tensor: Tensor | None, *, is_aligned: bool = False) -> None:
        """A bound operand's address."""
        if tensor is None:
            self.constants[name] = None
            return
        self.types[name], self.values[name] = pointer_type(tensor), operand(self.slots, tensor)
        if is_aligned:
            self.aligned.add(name)

    def scratch(self, name: str, kind: str, offset_bytes: int | None) -> None:
        """An address in the workspace, which is aligned; ``kind`` is Triton's, as "*fp32"."""
        if offset_bytes is None:
            self.constants[name] = None
            return
        self.types[name], self.values[name] = kind, Scratch(offset_bytes)
        self.aligned.add(name)

    def integer(self, name: str, value: int, kind: str = "i64") -> None:
        """A number that the declaration fixes; 0 and 1 become part of the code.

        A step of 1 that the compiler knows is what makes wide loads possible.
        """
        if value in (0, 1):
            self.constants[name] = value
            return
        self.types[name], self.values[name] = kind, Constant(value)

    def extent(self, name: str, value: int) -> None:
        """A count, int32, never part of the code."""
        self.types[name], self.values[name] = "i32", Constant(value)

    def number(self, name: str, value: float) -> None:
        """A float32 that the declaration fixes."""
        self.types[name], self.values[name] = "fp32", Constant(value)

    def scalar(self, name: str, tensor: Tensor | None, kind: str) -> None:
        """A one-element operand: a number where it is passed by value, else its address.

        ``kind`` is the number's type. ``scalar_value`` in a kernel takes both.
        """
        if tensor is not None and tensor.is_pass_by_value:
            self.types[name] = kind
            self.values[name] = HostScalar(self.slots[tensor.uid], tensor.value)
        else:
            self.pointer(name, tensor)

    def steps(self, name: str, tensor: Tensor | None, *, unit: int = 1) -> None:
        """``name``_batch, _head, _row and _col: the strides of four axes, in ``unit`` elements.

        An axis of extent 1 is not stepped, whatever its stride is.
        """
        for axis, suffix in enumerate(_AXES):
            step = 0
            if tensor is not None and tensor.dim[axis] > 1:
                step = tensor.stride[axis]
            self.integer(f"{name}_{suffix}", step if suffix == "col" else step // unit)

    def ragged(self, name: str, tensor: Tensor | None, *, unit: int = 1) -> None:
        """``name``_offsets, _offset_step and _multiplier (in ``unit`` elements) of an operand."""
        offsets = None if tensor is None else tensor.ragged_offset
        self.pointer(f"{name}_offsets", offsets)
        self.integer(f"{name}_offset_step", 0 if offsets is None else offsets.stride[0])
        multiplier = 1 if tensor is None else tensor.ragged_offset_multiplier
        self.integer(f"{name}_multiplier", 1 if offsets is None else multiplier // unit)

    def length(self, name: str, length: Length | None) -> None:
        """``name`` and ``name``_step, and the constant NAME_IS_SUM."""
        self.pointer(name, None if length is None else length.tensor)
        self.integer(f"{name}_step", 0 if length is None else length.tensor.stride[0])
        self.constants[f"{name.upper()}_IS_SUM"] = length is not None and length.is_sum

    def constant(self, **values: Any) -> None:
        """Compile-time arguments."""
        self.constants.update(values)

    def planned(
        self, function: Any, grid: tuple[int, int, int], warps: int, stages: int
    ) -> PlannedKernel:
        """The launch; every parameter of ``function`` must have been given."""
        names = function.arg_names
        given = [name for name in names if name in self.types]
        spec = KernelSpec(
            function,
            tuple((name, self.types[name]) for name in given),
            tuple((name, self.constants[name]) for name in names if name not in self.types),
            frozenset(self.aligned & set(given)),
            warps,
            stages,
        )
        return PlannedKernel(spec, grid, tuple(self.values[name] for name in given))


def vector_unit(data_type: DataType) -> int:
    """Elements of one 16-byte access."""
    return 128 // data_type.bits


def steps_in_vectors(spec: AttentionSpec, ports: tuple[str, ...]) -> bool:
    """True if a step along batch, head or row of these ports keeps a 16-byte alignment.

    Their elements must follow one another, and where they are ragged a sequence must start
    aligned, whatever its offset is.
    """
    for port in ports:
        tensor = spec.ports.get(port)
        if tensor is None:
            continue
        unit = vector_unit(tensor.data_type)
        if tensor.dim[3] > 1 and tensor.stride[3] != 1:
            return False
        axes = (1, 2) if tensor.ragged_offset is not None else (0, 1, 2)
        if any(tensor.dim[axis] > 1 and tensor.stride[axis] % unit for axis in axes):
            return False
        if tensor.ragged_offset is not None and tensor.ragged_offset_multiplier % unit:
            return False
    return True
