"""Rotary embedding on a GPU: bandwidth against a copy and PyTorch's eager formula.

    python benchmark/rope_gpu.py

16,384 tokens of 32 heads of 128 in bfloat16, sequence-major and head-major, tables of R / 2 and of
R angles; every result is first compared with the formula. Writes results/<device>/rope.csv.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from building import build_ahead, build_aligned
from results import Table
from timing import Call, device_ms

import tilewright as tw

BATCH, HEADS, LENGTH, EXTENT = 4, 32, 4096, 128
LAYOUTS = ("BSHD", "BHSD")


def frame_of(x: torch.Tensor, freqs: torch.Tensor, out: torch.Tensor, kind: str = "rope") -> Any:
    graph = tw.Graph(io_data_type=x.dtype)
    source = graph.tensor(x.shape, x.stride(), name="x")
    angles = graph.tensor(freqs.shape, freqs.stride(), freqs.dtype, name="freqs")
    made = getattr(graph, kind)(source, angles).set_output(True).set_name("y")
    made.set_dim(x.shape).set_stride(out.stride())
    build_aligned(graph)
    return graph.bind({"x": x, "freqs": freqs, "y": out})


def by_torch(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The usual formula; freqs (1, 1, S, D / 2)."""
    cos, sin = freqs.cos(), freqs.sin()
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def exactly(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    cos, sin = freqs.double().cos().float(), freqs.double().sin().float()
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


def angles() -> torch.Tensor:
    """(1, 1, S, D / 2) in radians, base 10,000."""
    rate = 10000.0 ** (-torch.arange(0, EXTENT, 2, device="cuda", dtype=torch.float32) / EXTENT)
    position = torch.arange(LENGTH, device="cuda", dtype=torch.float32)
    return (position[:, None] * rate).reshape(1, 1, LENGTH, EXTENT // 2)


def operands(layout: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What is rotated, (B, H, S, D) laid out as named, and the tables by name."""
    half = angles()
    x = torch.randn((BATCH, HEADS, LENGTH, EXTENT), device="cuda").bfloat16()
    if layout == "BSHD":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    return x, {"R/2 angles": half, "R angles": torch.cat((half, half), -1)}


def build(layout: str, name: str, kind: str) -> None:
    x, tables = operands(layout)
    frame_of(x, tables[name], torch.empty_like(x), kind)


def measure(layout: str, table: Table) -> None:
    x, tables = operands(layout)
    half = tables["R/2 angles"]
    y, copy = torch.empty_like(x), torch.empty_like(x)
    calls: dict[str, Call] = {"copy": functools.partial(copy.copy_, x)}
    for name, freqs in tables.items():
        frame = frame_of(x, freqs, y)
        frame.launch()
        if not torch.equal(y, exactly(x, half)):
            raise SystemExit(f"wrong result: {layout}, {name}")
        calls[f"tilewright rope, {name}"] = frame.launch
        backward = frame_of(x, freqs, y, "rope_backward")
        calls[f"tilewright rope_backward, {name}"] = backward.launch
    calls["torch, eager"] = functools.partial(by_torch, x, half)
    times = device_ms(calls)
    moved = 2 * x.numel() * x.element_size()
    for name, value in times.items():
        table.add(
            layout=layout,
            subject=name,
            ms=f"{value:.4f}",
            tb_s=f"{moved / value / 1e9:.3f}",
            of_copy=f"{times['copy'] / value:.3f}",
        )
    table.write()


def main() -> None:
    names, kinds = ("R/2 angles", "R angles"), ("rope", "rope_backward")
    kernels = itertools.product(LAYOUTS, names, kinds)
    build_ahead([functools.partial(build, *kernel) for kernel in kernels])
    table = Table("rope", "python benchmark/rope_gpu.py")
    for layout in LAYOUTS:
        measure(layout, table)


if __name__ == "__main__":
    main()
