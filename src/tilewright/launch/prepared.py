"""A prepared kernel call: one parameter block, packed when the plan is built.

At bind, pointers (and scalars that a caller passes by value) go into a copy of the block. At
launch, one driver call a kernel, nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.errors import LaunchError
from tilewright.launch.cuda_driver import c_type, check, current_raw_stream, driver


@dataclass(frozen=True, slots=True)
class Operand:
    """A pointer argument: slot number, and bytes from the operand's start."""

    slot: int
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Scratch:
    """A pointer argument into the workspace, ``offset_bytes`` from its start."""

    offset_bytes: int


@dataclass(frozen=True, slots=True)
class HostScalar:
    """A scalar argument that is read at bind from a pass-by-value slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A scalar argument that the declaration fixes."""

    value: int | float


Argument = Operand | Scratch | HostScalar | Constant


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One kernel of a plan, ready to be bound.

    ``types`` are the argument types in the kernel's order (Triton's spelling), ``arguments``
    what goes there. ``function`` is the driver's handle.
    """

    name: str
    function: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    types: tuple[str, ...]
    arguments: tuple[Argument, ...]


class BoundLaunch:
    """The parameter block of one call of one kernel. Owned by its frame alone (L10)."""

    __slots__ = ("_fixed", "_keep", "_launch", "_parameters", "name")

    def __init__(
        self, launch: KernelLaunch, starts: Sequence[int], values: Sequence[Any], scratch: int
    ) -> None:
        storage = []
        for kind, argument in zip(launch.types, launch.arguments, strict=True):
            if isinstance(argument, Operand):
                value: Any = starts[argument.slot] + argument.offset_bytes
            elif isinstance(argument, Scratch):
                value = scratch + argument.offset_bytes
            elif isinstance(argument, HostScalar):
                value = values[argument.slot].item()
            else:
                value = argument.value
            storage.append(c_type(kind)(value))
        # Triton's own two trailing pointers, global and profile scratch; no kernel here uses them.
        storage += [ctypes.c_uint64(0), ctypes.c_uint64(0)]
        self._keep = storage
        self._parameters = (ctypes.c_void_p * len(storage))(
            *(ctypes.addressof(cell) for cell in storage)
        )
        self._fixed = (
            launch.function,
            *launch.grid,
            launch.threads,
            1,
            1,
            launch.shared_bytes,
        )
        self._launch = driver().cuLaunchKernel
        self.name = launch.name

    def run(self, stream: int) -> None:
        """Launch on ``stream``; asynchronous.

        Raises:
            LaunchError: if the driver refuses.
        """
        status = self._launch(*self._fixed, stream, self._parameters, None)
        if status:
            check(status, f"kernel {self.name!r}: launch")


class KernelFrame:
    """One call of a plan made of prepared kernels. ``launch`` is the hot path."""

    __slots__ = ("_device_index", "_keep", "_launches", "plan_name")

    def __init__(
        self, launches: Sequence[BoundLaunch], device_index: int, plan_name: str, keep: Any
    ) -> None:
        self._launches = tuple(launches)
        self._device_index = device_index
        self._keep = keep
        self.plan_name = plan_name

    def launch(self, stream: Any = None) -> None:
        """Run on ``stream`` (an int or a torch stream), default the device's current stream."""
        import torch

        index = self._device_index
        if stream is None:
            stream = current_raw_stream(index)
        elif not isinstance(stream, int):
            stream = stream.cuda_stream
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                for launch in self._launches:
                    launch.run(stream)
            return
        for launch in self._launches:
            launch.run(stream)


def require_grid(grid: tuple[int, int, int], name: str) -> tuple[int, int, int]:
    """``grid`` if the driver takes it: x below 2^31, y and z below 2^16.

    Raises:
        LaunchError: naming the kernel and the axis.
    """
    for axis, extent, limit in zip("xyz", grid, (2**31 - 1, 65535, 65535), strict=True):
        if extent > limit:
            raise LaunchError(f"kernel {name!r}: grid {grid} is over {limit} on axis {axis}")
    return grid
