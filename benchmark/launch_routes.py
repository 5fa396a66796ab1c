"""Host time of a launch by every route there is, on one kernel with three operands.

    python benchmark/launch_routes.py

One run measures all routes, medians of interleaved rounds, on a GPU that is never behind; a route
whose library is not here is left out. Writes benchmark/results/<device>/launch_routes.csv.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from results import Table

from tilewright.engines.compiled.compiler import KernelSpec, compile_kernel
from tilewright.launch.cuda_driver import Module, driver
from tilewright.launch.driver_launch import LaunchConfig
from tilewright.launch.kernel_frames import BoundLaunch
from tilewright.launch.prepared import Constant, KernelLaunch, Operand

Call = Callable[[], Any]
CALLS = 100
ROUNDS = 40
BLOCK = 1024

# What a launch costs where no Python is: the floor of every route.
LOOP = """
#include <stddef.h>
typedef int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                      void*, void**, void**);
void loop(launch call, void* function, unsigned threads, void* stream, void** extra, int count) {
    for (int i = 0; i < count; ++i)
        call(function, 1, 1, 1, threads, 1, 1, 0, stream, NULL, extra);
}
"""


@triton.jit
def scaled(x, w, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * tl.load(w + at, mask=at < n)
    tl.store(y + at, value, mask=at < n)


class Prepared:
    """The kernel in the form that each route wants it."""

    def __init__(self) -> None:
        self.x, self.w, self.y = (torch.ones(BLOCK, device="cuda") for _ in range(3))
        types = (("x", "*fp32"), ("w", "*fp32"), ("y", "*fp32"), ("n", "i32"))
        spec = KernelSpec(scaled, types, (("BLOCK", BLOCK),))
        code = compile_kernel(spec, torch.cuda.get_device_capability())
        module = Module(code.image, code.name, code.shared_bytes, torch.cuda.current_device())
        self.function, self.threads = module.function, code.threads
        arguments = (Operand(0), Operand(1), Operand(2), Constant(BLOCK))
        kinds = tuple(kind for _, kind in types)
        self.launch = KernelLaunch(
            code.name, self.function, (1, 1, 1), code.threads, 0, kinds, arguments
        )
        self.bound = BoundLaunch(self.launch, torch.cuda.current_device())
        starts = [t.data_ptr() for t in (self.x, self.w, self.y)]
        self.bound.fill(starts, [start + 4 * BLOCK for start in starts], (), 0)
        self.stream = torch.cuda.current_stream().cuda_stream
        self.block = (ctypes.c_char * self.launch.size).from_buffer(self.bound.block)
        # The driver's other form of the parameters: where each one is.
        base = ctypes.addressof(self.block)
        places = [base + offset for offset in self.launch.offsets]
        self.pointers = (ctypes.c_void_p * len(places))(*places)
        self.size = ctypes.c_size_t(self.launch.size)
        self.extra = (ctypes.c_void_p * 5)(1, base, 2, ctypes.addressof(self.size), 0)


def handle(value: int) -> Any:
    """An argument that is a handle, and needs no conversion."""
    return ctypes.byref(ctypes.c_char.from_address(value)) if value else None


def ctypes_routes(made: Prepared) -> dict[str, Call]:
    pointer, uint = ctypes.c_void_p, ctypes.c_uint
    typed = driver()["cuLaunchKernel"]
    typed.argtypes = [pointer, *([uint] * 7), pointer, pointer, pointer]
    untyped, extended = driver()["cuLaunchKernel"], driver()["cuLaunchKernelEx"]
    locked = ctypes.PyDLL("libcuda.so.1")["cuLaunchKernelEx"]
    geometry = (1, 1, 1, made.threads, 1, 1, 0)
    stream, function = handle(made.stream), handle(made.function)
    config = ctypes.byref(LaunchConfig((1, 1, 1), (made.threads, 1, 1), 0, made.stream, None, 0))
    extra, pointers = ctypes.byref(made.extra), ctypes.byref(made.pointers)
    first = (made.function, *geometry, ctypes.c_void_p(made.stream), None, made.extra)
    second = (function, *geometry, stream, None, extra)
    return {
        "bare cuLaunchKernel, argument types": lambda: typed(*first),
        "bare cuLaunchKernel, made arguments": lambda: untyped(*second),
        "cuLaunchKernelEx, parameter block": lambda: extended(config, function, None, extra),
        "cuLaunchKernelEx, parameter pointers": lambda: extended(config, function, pointers, None),
        "cuLaunchKernelEx, lock kept": lambda: locked(config, function, None, extra),
        "tilewright BoundLaunch.run": lambda: made.bound.run(made.stream),
    }


def triton_routes(made: Prepared) -> dict[str, Call]:
    x, w, y = made.x, made.w, made.y
    compiled = scaled[(1,)](x, w, y, BLOCK, BLOCK=BLOCK)
    function, metadata, stream = compiled.function, compiled.packed_metadata, made.stream
    arguments = (x, w, y, BLOCK, BLOCK)
    run = compiled.run
    return {
        "triton kernel[grid]": lambda: scaled[(1,)](x, w, y, BLOCK, BLOCK=BLOCK),
        "triton compiled launcher": lambda: run(
            1, 1, 1, stream, function, metadata, None, None, None, *arguments
        ),
    }


def torch_routes(made: Prepared) -> dict[str, Call]:
    launcher = getattr(torch._C, "_StaticCudaLauncher", None)
    if launcher is None:
        return {}
    run = launcher._launch_kernel
    arguments = (made.x, made.w, made.y, BLOCK)
    warps = made.threads // 32
    # Pointers, an int32; the kernel's two scratch pointers count as pointers there too.
    given = (made.function, 1, 1, 1, warps, 0, "OOOiOO", (*arguments, None, None), made.stream)
    return {"torch static launcher": lambda: run(*given)}


def binding_routes(made: Prepared) -> dict[str, Call]:
    from cuda.bindings import driver as bindings

    function, stream = bindings.CUfunction(made.function), bindings.CUstream(made.stream)
    pointers = ctypes.addressof(made.pointers)
    geometry = (1, 1, 1, made.threads, 1, 1, 0)
    run = bindings.cuLaunchKernel
    return {"cuda-bindings, made parameters": lambda: run(function, *geometry, stream, pointers, 0)}


def loop_route(made: Prepared) -> dict[str, Call]:
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None:
        return {}
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "loop.c", folder / "loop.so"
    source.write_text(LOOP)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    run = ctypes.CDLL(str(library)).loop
    call = ctypes.cast(driver()["cuLaunchKernel"], ctypes.c_void_p)
    function, stream = ctypes.c_void_p(made.function), ctypes.c_void_p(made.stream)
    return {"a loop in C": lambda: run(call, function, made.threads, stream, made.extra, CALLS)}


def measure(routes: dict[str, Call]) -> dict[str, float]:
    """Median host microseconds a launch, rounds interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in routes}
    for _ in range(ROUNDS):
        for name, call in routes.items():
            count = 1 if name == "a loop in C" else CALLS
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def runs(made: Prepared, name: str, call: Call) -> bool:
    """True if the route launches the kernel: its result is there afterwards."""
    made.y.fill_(torch.nan)
    torch.cuda.synchronize()
    try:
        call()
        torch.cuda.synchronize()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        print(f"left out: {name}: {type(error).__name__}: {error}")
        return False
    if not torch.equal(made.y, made.x * made.w):
        print(f"left out: {name}: it did not run the kernel")
        return False
    return True


def main() -> None:
    made = Prepared()
    routes: dict[str, Call] = {}
    for find in (loop_route, ctypes_routes, triton_routes, torch_routes, binding_routes):
        try:
            found = find(made)
        except (AttributeError, ImportError, OSError, subprocess.CalledProcessError) as error:
            print(f"left out: {find.__name__}: {error}")
            continue
        routes |= {name: call for name, call in found.items() if runs(made, name, call)}
    times = measure(routes)
    floor = times.get("a loop in C", min(times.values()))
    table = Table("launch_routes", "python benchmark/launch_routes.py")
    for name, value in sorted(times.items(), key=lambda item: item[1]):
        table.add(route=name, host_us=f"{value:.2f}", ratio_to_least=f"{value / floor:.2f}")
    table.write()


if __name__ == "__main__":
    main()
