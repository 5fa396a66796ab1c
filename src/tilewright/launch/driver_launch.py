"""The driver call of a launch, by the thinnest route through ctypes.

cuLaunchKernelEx takes four arguments where cuLaunchKernel takes eleven, and every one is an object
that is made once: ctypes converts nothing. The interpreter lock is released meanwhile, as the
driver waits when its queue is full. benchmark/launch_routes.py compares the routes.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from tilewright.launch.cuda_driver import check, driver

# No context is current in this thread: it has made no call of the CUDA runtime yet.
_INVALID_CONTEXT = 201
# Streams whose launch configuration a kernel remembers; past that each call makes its own.
_REMEMBERED_STREAMS = 64


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class StreamConfigs(dict[int, Any]):
    """stream -> a reference to one kernel's launch configuration there. Entries never change."""

    def __init__(self, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> None:
        super().__init__()
        self.geometry = (grid, (threads, 1, 1), shared_bytes)

    def __missing__(self, stream: int) -> Any:
        """Make the configuration for a stream, and remember it."""
        config = ctypes.byref(LaunchConfig(*self.geometry, stream, None, 0))
        if len(self) < _REMEMBERED_STREAMS:
            self[stream] = config
        return config


class KernelCall:
    """How one kernel is launched: everything but its parameters. Immutable.

    ``launch(streams[stream], function, None, extra)`` is the call; its result is the driver's
    status. ``extra`` refers to the driver's list of where the parameter block is and its size.
    """

    __slots__ = ("function", "handle", "launch", "name", "streams")

    def __init__(
        self,
        name: str,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
    ) -> None:
        self.name = name
        self.streams = StreamConfigs(grid, threads, shared_bytes)
        self.handle = function
        # A reference to what a handle points to is the handle itself, and needs no conversion.
        self.function = ctypes.byref(ctypes.c_char.from_address(function))
        self.launch = launch_function()

    def recover(self, status: int, stream: int, extra: Any, device_index: int) -> None:
        """After a status other than success: launch again if only a context was wanting.

        Raises:
            LaunchError: if the driver refuses.
        """
        if status == _INVALID_CONTEXT:
            make_context_current(device_index)
            status = self.launch(self.streams[stream], self.function, None, extra)
        check(status, f"kernel {self.name!r}: launch")


@functools.cache
def launch_function() -> Any:
    """cuLaunchKernelEx, without argument types: its arguments are made as the driver wants them."""
    return driver()["cuLaunchKernelEx"]


def make_context_current(device_index: int) -> None:
    """Make the device's primary context current in this thread; waits for nothing.

    Raises:
        LaunchError: if the driver refuses.
    """
    check(driver().cuCtxSetCurrent(_primary_context(device_index)), "making a context current")


@functools.cache
def _primary_context(device_index: int) -> ctypes.c_void_p:
    library = driver()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(library.cuDeviceGet(ctypes.byref(device), device_index), f"device {device_index}")
    check(
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        f"the context of device {device_index}",
    )
    return context
