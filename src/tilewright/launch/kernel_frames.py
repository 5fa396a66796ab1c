"""Prepared kernels that are bound to one call: parameter blocks, frames, and a pool of blocks.

At launch there is one driver call a kernel, nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.launch.driver_launch import KernelCall
from tilewright.launch.handles import as_stream_pointer
from tilewright.launch.prepared import TENSOR_MAP_BYTES, KernelLaunch

# Keys of cuLaunchKernel's "extra" list: where the parameter buffer is, and its size.
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 0
_ExtraList = ctypes.c_void_p * 5
# Looked up once: a build of torch without CUDA has neither, and launches nothing here.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class BoundLaunch:
    """The parameter block of one call of one kernel.

    ``block`` is the memory that the driver copies the parameters from; ``extra`` tells it where
    that is.
    """

    __slots__ = (
        "_device_index",
        "_function",
        "_keep",
        "_launch",
        "_launch_kernel",
        "_mapped",
        "_streams",
        "block",
        "extra",
    )

    def __init__(self, launch: KernelLaunch, device_index: int) -> None:
        self._launch = launch
        self._device_index = device_index
        self.block = bytearray(launch.template)
        memory = launch.memory_type.from_buffer(self.block)
        where = _ExtraList(
            _BUFFER_POINTER,
            ctypes.addressof(memory),
            _BUFFER_SIZE,
            ctypes.addressof(launch.size_in_memory),
            _END,
        )
        self._keep = (where, memory)
        self.extra = ctypes.byref(where)
        # What the block's tensor maps point to now: the same again needs no encoding. An empty
        # operand is at (0, 0).
        self._mapped: list[tuple[int, int] | None] = [None] * len(launch.maps)
        call = launch.call
        self._launch_kernel, self._streams, self._function = (
            call.launch,
            call.streams,
            call.function,
        )

    @property
    def call(self) -> KernelCall:
        """How the kernel is launched."""
        return self._launch.call

    @property
    def extra_address(self) -> int:
        """Where the list is that ``extra`` refers to."""
        return ctypes.addressof(self._keep[0])

    def fill(
        self, starts: Sequence[int], stops: Sequence[int], views: Sequence[Any], scratch: int
    ) -> None:
        """Bind: see ``KernelLaunch.fill``; operands end at ``stops``.

        Raises:
            BindingError: if an operand's address does not suit its tensor map.
        """
        for number, (offset, encoder) in enumerate(self._launch.maps):
            if encoder.scratch_bytes is None:
                start, stop = starts[encoder.slot], stops[encoder.slot]
            else:
                start = stop = scratch + encoder.scratch_bytes
            if self._mapped[number] != (start, stop):
                made = encoder.encode(start, stop, self._device_index)
                self.block[offset : offset + TENSOR_MAP_BYTES] = made
                self._mapped[number] = (start, stop)
        self._launch.fill(self.block, starts, views, scratch)

    def run(self, stream: int) -> None:
        """Launch on ``stream``; asynchronous.

        Raises:
            LaunchError: if the driver refuses.
        """
        status = self._launch_kernel(self._streams[stream], self._function, None, self.extra)
        if status:
            self._launch.call.recover(status, stream, self.extra, self._device_index)


class BoundPlan:
    """The blocks of all kernels of a plan, filled for one call."""

    __slots__ = ("launches", "run")

    def __init__(self, launches: Sequence[KernelLaunch], device_index: int) -> None:
        self.launches = tuple(BoundLaunch(launch, device_index) for launch in launches)
        # Launches every kernel in order on a stream.
        self.run: Callable[[int], None] = (
            self.launches[0].run if len(self.launches) == 1 else self._run_all
        )

    def fill(
        self, starts: Sequence[int], stops: Sequence[int], views: Sequence[Any], scratch: int
    ) -> None:
        """Bind every kernel."""
        for launch in self.launches:
            launch.fill(starts, stops, views, scratch)

    def _run_all(self, stream: int) -> None:
        for launch in self.launches:
            launch.run(stream)


class KernelFrame:
    """One call of a plan made of prepared kernels. ``launch`` is the hot path."""

    __slots__ = ("_device_index", "_keep", "_run", "bound", "handle", "plan_name")

    def __init__(self, bound: BoundPlan, device_index: int, plan_name: str, keep: Any) -> None:
        self.bound = bound
        self._run = bound.run
        self._device_index = device_index
        # The caller's buffers stay alive as long as the frame may be launched.
        self._keep = keep
        self.plan_name = plan_name
        # The graph's, if it has one: its stream is asked for at each launch.
        self.handle: Any = None

    def launch(self, stream: Any = None) -> None:
        """Run on ``stream`` (an int or a torch stream).

        Default the stream of the graph's handle, else the device's current one.
        """
        if stream is None and self.handle is not None:
            stream = self.handle.stream
        if stream is None:
            stream = current_stream(self._device_index)
        elif type(stream) is not int:
            stream = as_stream_pointer(stream)
        if current_device() == self._device_index:
            self._run(stream)
        else:
            launch_on(self._run, self._device_index, stream)


def launch_on(run: Callable[[int], None], device_index: int, stream: Any) -> None:
    """``run(stream)`` with the device current; None is torch's current stream there."""
    if stream is None:
        stream = current_stream(device_index)
    elif type(stream) is not int:
        stream = as_stream_pointer(stream)
    if current_device() == device_index:
        run(stream)
        return
    with torch.cuda.device(device_index):
        run(stream)


class BlockPool:
    """A plan's parameter blocks for calls that are bound and launched at once.

    A call takes an entry for itself, so that concurrent calls share none, and gives it back: the
    driver has copied the blocks by then. An entry is a list: the facts that the blocks are filled
    for (None if unknown), the bound plan, and each kernel's block and ``extra``.
    """

    def __init__(self, launches: Sequence[KernelLaunch], device_index: int) -> None:
        self.launches = tuple(launches)
        self.device_index = device_index
        self._entries: list[list[Any]] = []
        # Appending to a list and popping from it are atomic.
        self.give = self._entries.append
        self.pop = self._entries.pop

    def take(self) -> list[Any]:
        """An entry that no other call has."""
        try:
            return self.pop()
        except IndexError:
            return self.make()

    def make(self) -> list[Any]:
        """A new entry."""
        bound = BoundPlan(self.launches, self.device_index)
        parts = [part for launch in bound.launches for part in (launch.block, launch.extra)]
        return [None, bound, *parts]
