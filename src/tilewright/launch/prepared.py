"""A prepared kernel call: one parameter block, packed when the plan is built.

At bind, pointers (and scalars that a caller passes by value) go into a copy of the block: see
``kernel_frames``. The block is laid out as the driver's parameter buffer: each argument at its
natural alignment, or where the driver says it is.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewright.dtypes import DataType
from tilewright.errors import BindingError, LaunchError
from tilewright.launch.cuda_driver import parameter_layout
from tilewright.launch.driver_launch import KernelCall
from tilewright.records import record

if TYPE_CHECKING:
    from tilewright.launch.tensor_maps import TensorMapEncoder

_FORMATS = {"i1": "b", "i8": "b", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
_FORMATS |= {"fp32": "f", "fp64": "d"}
TENSOR_MAP_BYTES = 128
_MAP = "tensor map"
_FORMATS[_MAP] = f"{TENSOR_MAP_BYTES}s"


@record(frozen=True)
class Operand:
    """A pointer argument: slot number, and bytes from the operand's start."""

    slot: int
    offset_bytes: int = 0


@record(frozen=True)
class Scratch:
    """A pointer argument into the workspace, ``offset_bytes`` from its start."""

    offset_bytes: int


@record(frozen=True)
class HostScalar:
    """A scalar argument from a pass-by-value slot: ``value``, unless a call binds a buffer."""

    slot: int
    value: int | float | None = None


@record(frozen=True)
class Constant:
    """A scalar argument that the declaration fixes."""

    value: int | float


@record(frozen=True)
class TensorMap:
    """A tensor-map argument: an operand, or a piece of the workspace, as the copy engine sees it.

    ``tilewright.launch.tensor_maps`` makes and encodes them.

    ``dim`` and ``stride`` are in elements, outermost axis first, the last stride 1; ``box`` is
    what one copy moves; ``swizzle_bytes`` is the width of the swizzle in shared memory. With
    ``is_flat`` the operand is a ragged one: its second axis from the end (rows of all sequences,
    one after another) reaches as far as the bytes that a call's buffer owns. A piece of the
    workspace begins ``scratch_bytes`` from its start, and has ``slot`` -1.
    """

    slot: int
    label: str
    data_type: DataType
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int
    is_flat: bool = False
    scratch_bytes: int | None = None

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.dim)


Argument = Operand | Scratch | HostScalar | Constant | TensorMap


class KernelLaunch:
    """One kernel of a plan, ready to be bound. Immutable.

    ``types`` are the argument types in the kernel's order (Triton's spelling, "*bf16" for a
    pointer), ``arguments`` what goes there; ``function`` is the driver's handle. A tensor map is
    three things in the block: the map itself, its extents, and its steps in elements. With
    ``is_early`` it may start before the kernel in front of it in the stream has ended; ``cluster``
    programs along the grid's first axis run at the same time.
    """

    def __init__(
        self,
        name: str,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        types: Sequence[str],
        arguments: Sequence[Argument],
        *,
        is_early: bool = False,
        cluster: int = 1,
    ) -> None:
        self.name = name
        geometry = (grid, threads, shared_bytes)
        self.call = KernelCall(name, function, *geometry, is_early=is_early, cluster=cluster)
        # Triton's own two trailing pointers, global and profile scratch, are null.
        types, self.arguments = _expanded(types, arguments)
        formats = [*("Q" if kind.startswith("*") else _FORMATS[kind] for kind in types), "Q", "Q"]
        self.formats = tuple(formats)
        self.offsets, self.size = (
            parameter_layout(function, len(formats), name)
            if _FORMATS[_MAP] in formats
            else _layout(formats)
        )
        self.template = bytearray(self.size)
        # What every block of the kernel has in common, so that binding makes little.
        self.memory_type = ctypes.c_char * self.size
        self.size_in_memory = ctypes.c_size_t(self.size)
        leading: list[int] = []
        self._rest: list[tuple[str, int, Argument]] = []
        maps: list[tuple[int, TensorMapEncoder]] = []
        for position, argument in enumerate(self.arguments):
            code, offset = "<" + formats[position], self.offsets[position]
            if isinstance(argument, TensorMap):
                # Few kernels take any.
                from tilewright.launch.tensor_maps import TensorMapEncoder

                maps.append((offset, TensorMapEncoder(argument)))
            elif isinstance(argument, Constant):
                struct.pack_into(code, self.template, offset, argument.value)
            elif argument == Operand(getattr(argument, "slot", -1)) and position == len(leading):
                leading.append(argument.slot)
            else:
                self._rest.append((code, offset, argument))
        self.maps = tuple(maps)
        # The common case, pointers first, is packed in one go.
        self._pack = struct.Struct(f"<{len(leading)}Q").pack_into
        self._pick: Callable[[Sequence[int]], tuple[int, ...]] = _picker(leading)

    def fill(
        self, block: bytearray, starts: Sequence[int], views: Sequence[Any], scratch: int
    ) -> None:
        """Write one call's pointers and scalars into a copy of the template."""
        self._pack(block, 0, *self._pick(starts))
        for code, offset, argument in self._rest:
            if isinstance(argument, Operand):
                value: Any = starts[argument.slot] + argument.offset_bytes
            elif isinstance(argument, Scratch):
                value = scratch + argument.offset_bytes
            elif isinstance(argument, HostScalar):
                if argument.value is not None and not starts[argument.slot]:
                    value = argument.value
                else:
                    value = _host_value(views[argument.slot], self.name)
            else:
                continue
            struct.pack_into(code, block, offset, value)


def _host_value(view: torch.Tensor, kernel: str) -> int | float:
    if view.device.type != "cpu":
        # Reading it would wait for the device (L3).
        raise BindingError(
            f"kernel {kernel!r}: a scalar that is passed by value was bound to a buffer on "
            f"{view.device}; expected one on the CPU"
        )
    return view.item()


def require_grid(grid: tuple[int, int, int], name: str) -> tuple[int, int, int]:
    """``grid`` if the driver takes it: x below 2^31, y and z below 2^16.

    Raises:
        LaunchError: naming the kernel and the axis.
    """
    for axis, extent, limit in zip("xyz", grid, (2**31 - 1, 65535, 65535), strict=True):
        if extent > limit:
            raise LaunchError(f"kernel {name!r}: grid {grid} is over {limit} on axis {axis}")
    return grid


def _expanded(
    types: Sequence[str], arguments: Sequence[Argument]
) -> tuple[list[str], list[Argument]]:
    """One entry a parameter: what a tensor map is followed by in the kernel's signature."""
    kinds: list[str] = []
    entries: list[Argument] = []
    for kind, argument in zip(types, arguments, strict=True):
        entries.append(argument)
        if isinstance(argument, TensorMap):
            kinds.append(_MAP)
            kinds += ["i32"] * argument.rank + ["i64"] * argument.rank
            entries += [Constant(extent) for extent in argument.dim]
            entries += [Constant(step) for step in argument.stride]
        else:
            kinds.append(kind)
    return kinds, entries


def _layout(formats: Sequence[str]) -> tuple[list[int], int]:
    """Offsets at natural alignment, and the size of the whole."""
    offsets = []
    end = 0
    for code in formats:
        size = struct.calcsize("<" + code)
        start = -(-end // size) * size
        offsets.append(start)
        end = start + size
    return offsets, end


def _picker(slots: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    if not slots:
        return lambda starts: ()
    if len(slots) == 1:
        only = slots[0]
        return lambda starts: (starts[only],)
    return operator.itemgetter(*slots)
