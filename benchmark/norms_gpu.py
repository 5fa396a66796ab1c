"""RMSNorm and LayerNorm on a GPU: host time a call, and bandwidth against PyTorch and a copy.

    python benchmark/norms_gpu.py

One run measures everything, on the same inputs, medians of interleaved rounds; it writes
benchmark/results/<device>/launch.csv (host microseconds) and torch.csv (bandwidth).
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from results import Table

import tilewright as tw
from tilewright import ops
from tilewright.launch.cuda_driver import driver

ROWS = 16384
WIDTHS = (1024, 4096, 8192, 16384)
HOST_CALLS = 2000
ROUNDS = 30
Call = Callable[[], Any]


def host_us(calls: dict[str, Call]) -> dict[str, float]:
    """Median host microseconds of each call, interleaved; the device never falls behind."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(15):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS // 20):
                call()
            samples[name].append((time.perf_counter() - start) / (HOST_CALLS // 20) * 1e6)
            torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


def device_ms(calls: dict[str, Call], clear: torch.Tensor) -> dict[str, float]:
    """Median device milliseconds of each call, interleaved, with a cold L2."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            clear.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in samples.items()}


def norm_graph(kind: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
    graph = tw.Graph(io_data_type=x.dtype, intermediate_data_type="float32")
    source = graph.tensor(x.shape, x.stride(), name="x")
    scale = graph.tensor((1, w.shape[0]), name="scale")
    bias = None if b is None else graph.tensor((1, b.shape[0]), name="bias")
    phase = tw.norm_forward_phase.INFERENCE
    made = getattr(graph, kind)(phase, source, scale, bias, graph.tensor_scalar(1e-6))
    made[0].set_output(True).set_name("y")
    graph.build()
    return graph


def bare_launch(frame: Any) -> Call:
    """cuLaunchKernel on a packed parameter block, with nothing around it."""
    launch = frame._bound._launches[0]
    function = driver().cuLaunchKernel
    stream = torch.cuda.current_stream().cuda_stream
    arguments = (*launch._geometry, ctypes.c_void_p(stream), None, launch._extra)
    return lambda: function(*arguments)


def measure_host(table: Table) -> None:
    x, w = (
        torch.randn(32, 1024, device="cuda").bfloat16(),
        torch.ones(1024, device="cuda").bfloat16(),
    )
    y = torch.empty_like(x)
    graph = norm_graph("rmsnorm", x, w, None)
    pack = {"x": x, "scale": w, "y": y}
    frame = graph.bind(pack)
    calls: dict[str, Call] = {
        "bare cuLaunchKernel": bare_launch(frame),
        "frame.launch": frame.launch,
        "graph.execute": lambda: graph.execute(pack),
        "graph.bind": lambda: graph.bind(pack),
        "ops.rms_norm": lambda: ops.rms_norm(x, w),
        "torch rms_norm": lambda: F.rms_norm(x, (1024,), w),
    }
    times = host_us(calls)
    bare = times["bare cuLaunchKernel"]
    for name, value in times.items():
        table.add(subject=name, host_us=f"{value:.2f}", ratio_to_bare=f"{value / bare:.2f}")


def measure_bandwidth(table: Table) -> None:
    clear = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for width in WIDTHS:
        x = torch.randn(ROWS, width, device="cuda").bfloat16()
        w, b = (torch.randn(width, device="cuda").bfloat16() for _ in range(2))
        y, z = torch.empty_like(x), torch.empty_like(x)
        rms, layer = norm_graph("rmsnorm", x, w, None), norm_graph("layernorm", x, w, b)
        rms_frame = rms.bind({"x": x, "scale": w, "y": y})
        layer_frame = layer.bind({"x": x, "scale": w, "bias": b, "y": z})
        rms_frame.launch()
        layer_frame.launch()
        check(y, F.rms_norm(x.double(), (width,), w.double(), 1e-6))
        check(z, F.layer_norm(x.double(), (width,), w.double(), b.double(), 1e-6))
        copy = torch.empty_like(x)
        times = device_ms(
            {
                "copy": lambda: copy.copy_(x),
                "tilewright rms_norm": rms_frame.launch,
                "torch rms_norm": lambda: F.rms_norm(x, (width,), w, 1e-6),
                "tilewright layer_norm": layer_frame.launch,
                "torch layer_norm": lambda: F.layer_norm(x, (width,), w, b, 1e-6),
            },
            clear,
        )
        moved = 2 * x.numel() * x.element_size()
        for name, value in times.items():
            peer = {"tilewright": f"torch {name.split()[-1]}"}.get(name.split()[0])
            table.add(
                subject=name,
                width=width,
                ms=f"{value:.4f}",
                tb_s=f"{moved / value / 1e9:.3f}",
                of_copy=f"{times['copy'] / value:.3f}",
                speed_over_torch=f"{times[peer] / value:.2f}" if peer else "",
            )


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).abs().max().item()
    if not error <= 2**-7 * expected.abs().max().item():
        raise SystemExit(f"wrong result: error {error}")


def main() -> None:
    host = Table("launch", "python benchmark/norms_gpu.py")
    measure_host(host)
    host.write()
    bandwidth = Table("torch", "python benchmark/norms_gpu.py")
    measure_bandwidth(bandwidth)
    bandwidth.write()


if __name__ == "__main__":
    main()
