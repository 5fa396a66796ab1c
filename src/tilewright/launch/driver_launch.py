"""The driver call of a launch, by the thinnest route through ctypes.

cuLaunchKernelEx takes four arguments where cuLaunchKernel takes eleven, and every one is an object
that is made once: ctypes converts nothing. The interpreter lock is released meanwhile, as the
driver waits when its queue is full. benchmark/launch_routes.py compares the routes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from tilewright.launch.cuda_driver import check, driver

# No context is current in this thread: it has made no call of the CUDA runtime yet.
INVALID_CONTEXT = 201
# Streams whose launch configuration a kernel remembers; past that each call makes its own.
_REMEMBERED_STREAMS = 64
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_CLUSTER_SCHEDULING = 5  # CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
# CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING: programs of a cluster may share a multiprocessor.
# Left to itself the driver found room for 58 clusters of 16 small programs where there is for 66.
_LOAD_BALANCING = 2
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver API, with a number for its union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


def cluster_attributes(cluster: int) -> list[LaunchAttribute]:
    """What a launch, or a node of a graph, is told of its clusters."""
    if cluster == 1:
        return []
    return [
        LaunchAttribute(_CLUSTER_DIMENSION, 0, (cluster, 1, 1)),
        LaunchAttribute(_CLUSTER_SCHEDULING, 0, (_LOAD_BALANCING,)),
    ]


@functools.cache
def _attributes(is_early: bool, cluster: int) -> Any:
    """What a launch is told, or None. The driver reads it at each such launch; nobody writes it."""
    told = [LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (1,))] if is_early else []
    told += cluster_attributes(cluster)
    return (LaunchAttribute * len(told))(*told) if told else None


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
    """stream -> a reference to one kernel's launch configuration there. Entries never change.

    With ``is_early`` a launch need not wait for the one before it in the stream to end: once all
    programs of that have said so, or have ended, it starts. What it reads of that launch's results
    it reads after waiting in the kernel (``griddepcontrol.wait``). Recorded in a CUDA graph, the
    launches keep this between them; nodes that ``cuda_graphs`` adds do not, and start one by one.
    With a ``cluster`` so many programs along the grid's first axis run at the same time.
    """

    def __init__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        *,
        is_early: bool = False,
        cluster: int = 1,
    ) -> None:
        super().__init__()
        self.geometry = (grid, (threads, 1, 1), shared_bytes)
        told = _attributes(is_early, cluster)
        self._attributes = (None, 0) if told is None else (ctypes.addressof(told), len(told))

    def __missing__(self, stream: int) -> Any:
        """Make the configuration for a stream, and remember it."""
        config = ctypes.byref(LaunchConfig(*self.geometry, stream, *self._attributes))
        if len(self) < _REMEMBERED_STREAMS:
            self[stream] = config
        return config


class KernelCall:
    """How one kernel is launched: everything but its parameters. Immutable.

    ``launch(streams[stream], function, None, extra)`` is the call; its result is the driver's
    status. ``extra`` refers to the driver's list of where the parameter block is and its size.
    """

    __slots__ = ("cluster", "function", "handle", "launch", "name", "streams")

    def __init__(
        self,
        name: str,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        *,
        is_early: bool = False,
        cluster: int = 1,
    ) -> None:
        self.name = name
        self.cluster = cluster
        self.streams = StreamConfigs(
            grid, threads, shared_bytes, is_early=is_early, cluster=cluster
        )
        self.handle = function
        # A reference to what a handle points to is the handle itself, and needs no conversion.
        self.function = ctypes.byref(ctypes.c_char.from_address(function))
        self.launch = launch_function()

    def recover(self, status: int, stream: int, extra: Any, device_index: int) -> None:
        """After a status other than success: launch again if only a context was wanting.

        Raises:
            LaunchError: if the driver refuses.
        """
        if status == INVALID_CONTEXT:
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


@contextlib.contextmanager
def device_context(device_index: int) -> Iterator[None]:
    """The device's primary context current meanwhile, the thread's own afterwards, or none again.

    Raises:
        LaunchError: if the driver refuses.
    """
    context = _primary_context(device_index)
    check(driver().cuCtxPushCurrent_v2(context), "making a context current")
    try:
        yield
    finally:
        driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


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
