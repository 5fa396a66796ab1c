"""The few driver calls that a prepared launch needs, through ctypes. No compiler, no toolkit.

The launch itself is in ``driver_launch``. Loading is lazy: importing this module needs no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator

from tilewright.errors import LaunchError, NotSupportedError

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT_PERCENT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_WIDE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
# Programs of a cluster that every device of SM90 and newer takes.
MAX_PORTABLE_CLUSTER = 8
_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# Above this a kernel has to ask for its shared memory.
_DEFAULT_SHARED_BYTES = 48 * 1024


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver library.

    Raises:
        LaunchError: if this machine has none.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LaunchError(f"no CUDA driver on this machine: {error}") from error
    pointer, uint = ctypes.c_void_p, ctypes.c_uint
    library.cuDeviceGet.argtypes = [pointer, ctypes.c_int]
    library.cuDevicePrimaryCtxRetain.argtypes = [pointer, ctypes.c_int]
    library.cuCtxSetCurrent.argtypes = [pointer]
    library.cuCtxGetCurrent.argtypes = [pointer]
    library.cuCtxPushCurrent_v2.argtypes = [pointer]
    library.cuCtxPopCurrent_v2.argtypes = [pointer]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [pointer]
    library.cuModuleLoadData.argtypes = [pointer, pointer]
    library.cuModuleGetFunction.argtypes = [pointer, pointer, ctypes.c_char_p]
    library.cuFuncSetAttribute.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    # Drivers older than the devices that have tensor maps do not have it.
    if hasattr(library, "cuTensorMapEncodeTiled"):
        library.cuTensorMapEncodeTiled.argtypes = [
            *(pointer, ctypes.c_int, uint, ctypes.c_uint64),
            *([pointer] * 4),
            *([ctypes.c_int] * 4),
        ]
        library.cuTensorMapReplaceAddress.argtypes = [pointer, pointer]
    # Since CUDA 12.4.
    if hasattr(library, "cuFuncGetParamInfo"):
        library.cuFuncGetParamInfo.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    library.cuGetErrorString.argtypes = [ctypes.c_int, pointer]
    return library


def check(status: int, what: str) -> None:
    """Raise for a driver status other than success.

    Raises:
        LaunchError: with the driver's own words.
    """
    if status == 0:
        return
    text = ctypes.c_char_p()
    driver().cuGetErrorString(status, ctypes.byref(text))
    message = (text.value or b"unknown error").decode()
    raise LaunchError(f"{what}: CUDA error {status}: {message}")


def parameter_layout(function: int, count: int, name: str) -> tuple[list[int], int]:
    """Where a kernel has each of its ``count`` parameters in its block, and the block's size.

    Natural alignment tells that of all parameters but tensor maps: those are aligned in the
    constant bank, whose first parameter is at an address that is no multiple of theirs.

    Raises:
        NotSupportedError: if the driver cannot say.
        LaunchError: if the kernel has fewer parameters.
    """
    library = driver()
    if not hasattr(library, "cuFuncGetParamInfo"):
        raise NotSupportedError(
            f"kernel {name!r} takes tensor maps; this driver does not tell where parameters are "
            "(cuFuncGetParamInfo, since CUDA 12.4)"
        )
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    offsets = []
    for position in range(count):
        status = library.cuFuncGetParamInfo(
            function, position, ctypes.byref(offset), ctypes.byref(size)
        )
        check(status, f"kernel {name!r}: where parameter {position} is")
        offsets.append(offset.value)
    return offsets, offset.value + size.value


class Module:
    """Device code loaded into the primary context of one device; kept for the process's life."""

    def __init__(self, image: bytes, name: str, shared_bytes: int, device_index: int) -> None:
        import torch

        library = driver()
        with torch.cuda.device(device_index), _as_if_none_captured(library):
            # A thread that made no call of the runtime yet has no context, which is loaded into.
            context = ctypes.c_void_p()
            check(library.cuCtxGetCurrent(ctypes.byref(context)), "the current context")
            if not context.value:
                from tilewright.launch.driver_launch import make_context_current

                make_context_current(device_index)
            self._module = ctypes.c_void_p()
            buffer = ctypes.create_string_buffer(image, len(image))
            check(
                library.cuModuleLoadData(ctypes.byref(self._module), buffer),
                f"kernel {name!r}: loading its code",
            )
            function = ctypes.c_void_p()
            check(
                library.cuModuleGetFunction(ctypes.byref(function), self._module, name.encode()),
                f"kernel {name!r}: finding its entry",
            )
            if shared_bytes > _DEFAULT_SHARED_BYTES:
                check(
                    library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes),
                    f"kernel {name!r}: {shared_bytes} bytes of shared memory",
                )
                # Left to itself the driver may keep so much for the cache that only one of several
                # programs that would fit runs at a time. Triton's own loader asks for the same.
                check(
                    library.cuFuncSetAttribute(function, _SHARED_CARVEOUT_PERCENT, 100),
                    f"kernel {name!r}: shared memory before cache",
                )
        self.function: int = function.value or 0
        self.name = name


def allow_wide_clusters(function: int, name: str, device_index: int) -> None:
    """Let launches of a kernel have clusters of more than MAX_PORTABLE_CLUSTER programs.

    Raises:
        LaunchError: if the driver refuses.
    """
    from tilewright.launch.driver_launch import device_context

    handle = ctypes.c_void_p(function)
    # A thread that finds the module loaded may have no context, which this is asked in.
    with device_context(device_index):
        status = driver().cuFuncSetAttribute(handle, _WIDE_CLUSTERS, 1)
    check(status, f"kernel {name!r}: clusters of more than {MAX_PORTABLE_CLUSTER} programs")


@contextlib.contextmanager
def _as_if_none_captured(library: ctypes.CDLL) -> Iterator[None]:
    """Loading is allowed inside while a stream is captured: it is no work on a stream."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    check(library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "the capture mode")
    try:
        yield
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


_modules: dict[tuple[str, int], Module] = {}
_modules_lock = threading.Lock()


def load_module(
    digest: str, image: bytes, name: str, shared_bytes: int, device_index: int
) -> Module:
    """The module of this code on this device, loaded once a process."""
    key = (digest, device_index)
    with _modules_lock:
        if key not in _modules:
            _modules[key] = Module(image, name, shared_bytes, device_index)
        return _modules[key]
