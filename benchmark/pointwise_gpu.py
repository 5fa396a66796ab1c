"""Generated pointwise kernels on a GPU: bandwidth against a copy and torch.compile.

    python benchmark/pointwise_gpu.py

Chains of seven operations over 16384 x 8192 in bfloat16 (one with a residual), a softmax, and
reductions of columns and rows; every result is first compared with PyTorch's in float32. Writes
results/<device>/pointwise.csv.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

# Every subject is compiled in a process of its own; a pool of more in each takes longer to end.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.nn.functional as F
from building import build_aligned, measured_in_turn
from results import Table
from timing import Call, device_ms

import tilewright as tw

ROWS, WIDTH = 16384, 8192
Tensors = dict[str, torch.Tensor]


def chain(graph: Any, t: dict[str, Any]) -> Any:
    y = graph.swish(graph.bias(graph.scale(t["x"], t["s"]), t["b"]))
    y = graph.add(graph.mul(y, graph.tensor_scalar(0.5)), graph.tensor_scalar(0.25))
    return graph.min(graph.max(y, graph.tensor_scalar(-2.0)), graph.tensor_scalar(2.0))


def torch_chain(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = F.silu(x.float() * s.float() + b.float()) * 0.5 + 0.25
    return y.clamp(-2.0, 2.0).to(x.dtype)


def residual(graph: Any, t: dict[str, Any]) -> Any:
    y = graph.add(graph.scale(graph.gelu(graph.bias(t["x"], t["b"])), t["s"]), t["r"])
    y = graph.sub(graph.mul(y, graph.tensor_scalar(0.5)), graph.tensor_scalar(0.25))
    return graph.relu(y, lower_clip=0.0, upper_clip=6.0)


def torch_residual(
    x: torch.Tensor, s: torch.Tensor, b: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    y = F.gelu(x.float() + b.float()) * s.float() + r.float()
    return (y * 0.5 - 0.25).clamp(0.0, 6.0).to(x.dtype)


def softmax(graph: Any, t: dict[str, Any]) -> Any:
    mode = tw.reduction_mode
    part = graph.exp(graph.sub(t["x"], graph.reduction(t["x"], mode.MAX).set_dim((ROWS, 1))))
    return graph.div(part, graph.reduction(part, mode.ADD).set_dim((ROWS, 1)))


def torch_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def columns(graph: Any, t: dict[str, Any]) -> Any:
    return graph.reduction(t["x"], tw.reduction_mode.AVG).set_dim((1, WIDTH))


def torch_columns(x: torch.Tensor) -> torch.Tensor:
    return x.float().mean(0, keepdim=True).to(x.dtype)


def rows(graph: Any, t: dict[str, Any]) -> Any:
    return graph.reduction(graph.mul(t["x"], t["x"]), tw.reduction_mode.ADD).set_dim((ROWS, 1))


def torch_rows(x: torch.Tensor) -> torch.Tensor:
    return x.float().square().sum(-1, keepdim=True).to(x.dtype)


def turned(graph: Any, t: dict[str, Any]) -> Any:
    return graph.relu(graph.transpose(t["x"], (1, 0))).set_dim((WIDTH, ROWS)).set_stride((ROWS, 1))


def torch_turned(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).t().contiguous()


SUBJECTS: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor], str]] = {
    "seven operations": (chain, torch_chain, "xsb"),
    "seven operations, residual": (residual, torch_residual, "xsbr"),
    "softmax of rows": (softmax, torch_softmax, "x"),
    "mean of columns": (columns, torch_columns, "x"),
    "sum of squares of rows": (rows, torch_rows, "x"),
    "relu of the transpose": (turned, torch_turned, "x"),
}


def inputs() -> Tensors:
    generator = torch.Generator("cuda").manual_seed(1)
    dims = {"x": (ROWS, WIDTH), "r": (ROWS, WIDTH), "s": (1, WIDTH), "b": (1, WIDTH)}
    return {
        name: torch.randn(dim, generator=generator, device="cuda").bfloat16()
        for name, dim in dims.items()
    }


def frame_of(name: str, tensors: Tensors) -> tuple[Any, torch.Tensor]:
    """The prepared call of a subject and its output."""
    declare, _, operands = SUBJECTS[name]
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    declared = {key: graph.tensor(tensors[key].shape, name=key) for key in operands}
    declare(graph, declared).set_output(True).set_name("y")
    build_aligned(graph)
    if graph.selected_engine != "triton":
        raise SystemExit(f"{name}: {graph.explain()}")
    (out,) = graph.outputs()
    y = torch.empty(out.dim, dtype=torch.bfloat16, device="cuda")
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    return graph.bind({**{key: tensors[key] for key in operands}, "y": y}, workspace), y


def check(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    expected = expected.double()
    error = (actual.double() - expected).abs().max().item()
    if not error <= 2**-7 * max(expected.abs().max().item(), 1e-3):
        raise SystemExit(f"{name}: wrong result, error {error}")


def prepared(name: str) -> Callable[[], dict[str, tuple[float, int]]]:
    """What measures a subject's calls: milliseconds of each, and the bytes that it moves."""
    tensors = inputs()
    copy = torch.empty_like(tensors["x"])
    _, function, operands = SUBJECTS[name]
    frame, y = frame_of(name, tensors)
    frame.launch()
    given = [tensors[key] for key in operands]
    check(name, y, function(*given))
    compiled = torch.compile(function, dynamic=False)
    calls: dict[str, Call] = {
        "copy": functools.partial(copy.copy_, tensors["x"]),
        "tilewright": frame.launch,
        "torch.compile": functools.partial(compiled, *given),
    }
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, y))
    copied = 2 * copy.numel() * copy.element_size()

    def measure() -> dict[str, tuple[float, int]]:
        times = device_ms(calls)
        return {key: (times[key], copied if key == "copy" else moved) for key in calls}

    return measure


def main() -> None:
    table = Table("pointwise", "python benchmark/pointwise_gpu.py")
    parts = [functools.partial(prepared, name) for name in SUBJECTS]
    for name, found in zip(SUBJECTS, measured_in_turn(parts), strict=True):
        copy_ms, copied = found["copy"]
        for subject, (ms, volume) in found.items():
            table.add(
                graph=name,
                subject=subject,
                ms=f"{ms:.4f}",
                tb_s=f"{volume / ms / 1e9:.3f}",
                of_copy=f"{copy_ms / ms * volume / copied:.3f}",
            )
        table.write()


if __name__ == "__main__":
    main()
