"""RMSNorm and LayerNorm on a GPU: bandwidth against PyTorch and a copy.

    python benchmark/norms_gpu.py

One run measures everything, on the same inputs, medians of interleaved rounds; it writes
benchmark/results/<device>/torch.csv. Host time a call is in launch_gpu.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from building import build_ahead, build_aligned
from results import Table
from timing import Call, device_ms

import tilewright as tw

ROWS = 16384
WIDTHS = (1024, 4096, 8192, 16384)
NORMS = {"rms_norm": "rmsnorm", "layer_norm": "layernorm"}


def norm_graph(kind: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
    graph = tw.Graph(io_data_type=x.dtype, intermediate_data_type="float32")
    source = graph.tensor(x.shape, x.stride(), name="x")
    scale = graph.tensor((1, w.shape[0]), name="scale")
    bias = None if b is None else graph.tensor((1, b.shape[0]), name="bias")
    phase = tw.norm_forward_phase.INFERENCE
    made = getattr(graph, kind)(phase, source, scale, bias, graph.tensor_scalar(1e-6))
    made[0].set_output(True).set_name("y")
    build_aligned(graph)
    return graph


def backward_graph(name: str, x: torch.Tensor) -> tuple[Any, list[Any], list[Any]]:
    """The backward of a norm, its operands (dy, x, scale, inverse, mean) and its results."""
    graph = tw.Graph(io_data_type=x.dtype, intermediate_data_type="float32")
    g, x_, w_ = graph.tensor(x.shape), graph.tensor(x.shape), graph.tensor((1, x.shape[1]))
    i = graph.tensor((x.shape[0], 1), data_type="float32")
    operands = [g, x_, w_, i]
    if name == "layer_norm":
        m = graph.tensor((x.shape[0], 1), data_type="float32")
        made = graph.layernorm_backward(g, x_, w_, m, i)
        operands.append(m)
    else:
        made = graph.rmsnorm_backward(g, x_, w_, i, False)
    results = [tensor for tensor in made if tensor is not None]
    for tensor in results:
        tensor.set_output(True)
    build_aligned(graph)
    return graph, operands, results


def build(width: int, name: str) -> None:
    x = torch.empty(ROWS, width, dtype=torch.bfloat16, device="cuda")
    norm_graph(NORMS[name], x, x[0], x[0] if name == "layer_norm" else None)
    backward_graph(name, x)


def measure(width: int, table: Table) -> None:
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
    copy, shape = torch.empty_like(x), (width,)
    forward: dict[str, Call] = {
        "copy": functools.partial(copy.copy_, x),
        "tilewright rms_norm": rms_frame.launch,
        "torch rms_norm": functools.partial(F.rms_norm, x, shape, w, 1e-6),
        "tilewright layer_norm": layer_frame.launch,
        "torch layer_norm": functools.partial(F.layer_norm, x, shape, w, b, 1e-6),
    }
    times = device_ms(forward) | device_ms(backward_calls(x, w, b))
    for name, value in times.items():
        # Forward and copy read x and write y; backward reads x and dy and writes dx.
        moved = (3 if "backward" in name else 2) * x.numel() * x.element_size()
        peer = "torch" + name.removeprefix("tilewright") if "tilewright" in name else ""
        table.add(
            subject=name,
            width=width,
            ms=f"{value:.4f}",
            tb_s=f"{moved / value / 1e9:.3f}",
            of_copy=f"{times['copy'] / value * moved / (2 * x.numel() * 2):.3f}",
            speed_over_torch=f"{times[peer] / value:.2f}" if peer else "",
        )
    table.write()


def backward_calls(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> dict[str, Call]:
    """Backward of both norms: ours as one frame, PyTorch's own backward function."""
    width = x.shape[-1]
    dy, dx = torch.randn_like(x), torch.empty_like(x)
    dw, db = (torch.empty_like(w) for _ in range(2))
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + 1e-6)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    calls: dict[str, Call] = {}
    for kind, statistic in (("rms_norm", inverse_rms), ("layer_norm", inverse)):
        graph, operands, results = backward_graph(kind, x)
        pack = dict(zip(operands, (dy, x, w, statistic, mean), strict=False))
        pack |= dict(zip(results, (dx, dw, db), strict=False))
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
        frame = graph.bind(pack, workspace)
        frame.launch()
        leaf = x.detach().clone().requires_grad_()
        weight = w.detach().clone().requires_grad_()
        if kind == "rms_norm":
            y = F.rms_norm(leaf, (width,), weight, 1e-6)
            torch_backward = torch_backward_of(y, (leaf, weight), dy)
        else:
            shift = b.detach().clone().requires_grad_()
            y = F.layer_norm(leaf, (width,), weight, shift, 1e-6)
            torch_backward = torch_backward_of(y, (leaf, weight, shift), dy)
        reference = torch_backward()
        for ours, theirs in zip((dx, dw), reference, strict=False):
            check(ours, theirs.double(), 2**-5)
        calls[f"tilewright {kind} backward"] = frame.launch
        calls[f"torch {kind} backward"] = torch_backward
    return calls


def torch_backward_of(y: torch.Tensor, leaves: tuple[torch.Tensor, ...], dy: torch.Tensor) -> Call:
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def check(actual: torch.Tensor, expected: torch.Tensor, tol: float = 2**-7) -> None:
    error = (actual.double() - expected).abs().max().item()
    if not error <= tol * expected.abs().max().item():
        raise SystemExit(f"wrong result: error {error}")


def main() -> None:
    build_ahead([functools.partial(build, *part) for part in itertools.product(WIDTHS, NORMS)])
    table = Table("torch", "python benchmark/norms_gpu.py")
    for width in WIDTHS:
        measure(width, table)


if __name__ == "__main__":
    main()
