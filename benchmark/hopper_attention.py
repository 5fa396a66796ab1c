"""Hopper attention on an H100 or H200 against cuDNN and FlashAttention.

    python benchmark/hopper_attention.py [--quick]

Peers: cuDNN through PyTorch and, for packed sequences, through its own front end; PyTorch's flash
attention; FlashAttention's CuTe kernels. One run measures everything, on the same random inputs,
medians of interleaved rounds, host time hidden; every result is compared with a peer's first. It
writes benchmark/results/<device>/hopper.csv (teraflops a second; a causal mask counts half the
products). A peer that is not installed is left out.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import sys
from typing import Any

import cudnn_frontend
import flash_cute
import torch
import torch.nn.functional as F
from building import build_ahead
from results import Table
from timing import Call, device_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewright as tw

TOKENS = 16384
WIDTH = 2048
SIZES = (128, 64, 256)
# 65,536 tokens in 60 sequences, half of them in one.
HEAVY_TAIL = (32768, 8192, 4096, 4096, *(1024,) * 8, *(256,) * 24, *(85,) * 23, 93)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PEERS = ("cudnn", "cute", "flash")
# What the slowest front end takes on the host for a call.
HOST_US = 600.0


def built(graph: Any) -> Any:
    """The graph, which the Hopper engine has taken."""
    graph.build()
    if graph.selected_engine != "hopper":
        raise SystemExit(str(graph.explain()))
    return graph


def frame(q: Any, k: Any, v: Any, o: Any, causal: bool) -> Any:
    """A bound call of the Hopper engine."""
    graph = tw.Graph(io_data_type=q.dtype, intermediate_data_type="float32")
    declared = [
        graph.tensor(x.shape, x.stride(), x.dtype, name=n)
        for x, n in zip((q, k, v), "qkv", strict=True)
    ]
    out, _ = graph.sdpa(
        *declared,
        is_inference=True,
        attn_scale=q.shape[-1] ** -0.5,
        use_causal_mask=causal,
    )
    out.set_output(True).set_name("o").set_dim(o.shape).set_stride(o.stride())
    return built(graph).bind({"q": q, "k": k, "v": v, "o": o})


def peer(backend: SDPBackend, q: Any, k: Any, v: Any, causal: bool, grouped: bool) -> Any:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def measure(table: Table, case: str, q: Any, k: Any, v: Any, causal: bool, rounds: int) -> None:
    """One cell: ours, cuDNN and flash on the same inputs."""
    o = torch.full_like(q, torch.nan)
    launch = frame(q, k, v, o, causal).launch
    arguments = (q, k, v, causal, q.shape[1] != k.shape[1])
    calls: dict[str, Call] = {
        "hopper": launch,
        "cudnn": functools.partial(peer, SDPBackend.CUDNN_ATTENTION, *arguments),
        "flash": functools.partial(peer, SDPBackend.FLASH_ATTENTION, *arguments),
    }
    cute = flash_cute.forward(q, k, v, causal)
    if cute is not None:
        calls["cute"] = cute
    times = device_ms(calls, rounds, HOST_US)
    compare(case, o, calls["cudnn"]())
    batch, heads, rows, size = q.shape
    work = 4 * batch * heads * rows * k.shape[2] * size * (0.5 if causal else 1)
    add(table, case, (size, rows, f"{heads}/{k.shape[1]}", causal), times, work)


def compare(case: str, o: Any, reference: Any) -> None:
    """End the run if the result is not the peer's within what bfloat16 allows."""
    reference = reference.float()
    error = ((o.float() - reference).norm() / reference.norm()).item()
    if not error < 8e-3:
        raise SystemExit(f"{case}: wrong result, relative error {error}")


def add(table: Table, case: str, shape: Any, times: dict[str, float], work: float) -> None:
    """A row: speeds of all, and ours over each peer that ran."""
    size, length, heads, causal = shape
    speeds = {name: work / ms / 1e9 for name, ms in times.items()}
    ran = [peer for peer in PEERS if peer in speeds]
    table.add(
        case=case,
        head_size=size,
        length=length,
        heads=heads,
        mask="causal" if causal else "full",
        ms=f"{times['hopper']:.4f}",
        hopper=f"{speeds['hopper']:.0f}",
        **{peer: f"{speeds[peer]:.0f}" if peer in ran else "" for peer in PEERS},
        **{
            f"over_{peer}": f"{speeds['hopper'] / speeds[peer]:.3f}" if peer in ran else ""
            for peer in PEERS
        },
    )


def packed_graph(batch: int, longest: int, heads: int, size: int) -> Any:
    """The graph of packed sequences under a causal mask."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    offsets = graph.tensor((batch + 1, 1, 1, 1), data_type="int32", name="sums")
    unit = heads * size
    dim, stride = (batch, heads, longest, size), (longest * unit, size, unit, 1)
    declared = [
        graph.tensor(dim, stride, name=n, ragged_offset=offsets, ragged_offset_multiplier=unit)
        for n in "qkv"
    ]
    out, _ = graph.sdpa(
        *declared,
        is_inference=True,
        attn_scale=size**-0.5,
        use_causal_mask=True,
        use_padding_mask=True,
        cu_seq_len_q=offsets,
        cu_seq_len_kv=offsets,
    )
    out.set_output(True).set_name("o").set_dim(dim).set_stride(stride)
    out.set_ragged_offset(offsets).set_ragged_offset_multiplier(unit)
    return built(graph)


def measure_packed(table: Table, lengths: tuple[int, ...], heads: int, rounds: int) -> None:
    """Packed sequences under a causal mask; cuDNN's own front end, PyTorch has no such call."""
    size, longest, batch = 128, max(lengths), len(lengths)
    generator = random.Random(1)
    order = list(lengths)
    generator.shuffle(order)
    sums = torch.tensor([0, *order]).cumsum(0).int().cuda()
    q, k, v = (
        torch.randn(sum(order), heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    graph = packed_graph(batch, longest, heads, size)
    o = torch.full_like(q, torch.nan)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    launch = graph.bind({"q": q, "k": k, "v": v, "o": o, "sums": sums}, workspace).launch

    def flash() -> Any:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, sums, sums, longest, longest, 0.0, True, False, scale=size**-0.5
        )[0]

    calls: dict[str, Call] = {"hopper": launch, "flash": flash}
    cudnn_o = torch.full_like(q, torch.nan)
    others = {
        "cudnn": cudnn_frontend.packed(q, k, v, cudnn_o, sums, longest),
        "cute": flash_cute.packed(q, k, v, sums, longest),
    }
    calls |= {name: call for name, call in others.items() if call is not None}
    times = device_ms(calls, rounds, HOST_US)
    compare("packed", o, flash())
    if "cudnn" in calls:
        compare("packed, cuDNN", cudnn_o, flash())
    work = sum(2 * heads * length * length * size for length in order)
    add(table, "packed, heavy tail", (size, sum(order), f"{heads}/{heads}", True), times, work)


def draw(heads: int, length: int, size: int) -> Any:
    dim = (max(TOKENS // length, 1), heads, length, size)
    return torch.randn(dim, device="cuda", dtype=torch.bfloat16)


def build(size: int, length: int, causal: bool) -> None:
    """Compile what a cell of the grid runs."""
    q, k, v = (draw(WIDTH // size, length, size) for _ in range(3))
    frame(q, k, v, torch.empty_like(q), causal)


def main() -> None:
    # The lengths on both sides of where another tile is taken.
    ends = itertools.product(SIZES, (LENGTHS[0], LENGTHS[-1]), (False, True))
    ahead: list[Any] = [functools.partial(build, *cell) for cell in ends]
    ahead.append(functools.partial(packed_graph, len(HEAVY_TAIL), max(HEAVY_TAIL), 16, 128))
    build_ahead(ahead)
    rounds = 4 if "--quick" in sys.argv else 9
    torch.manual_seed(0)
    table = Table("hopper", "python benchmark/hopper_attention.py")
    for size in SIZES:
        heads = WIDTH // size
        for length in LENGTHS:
            q, k, v = (draw(heads, length, size) for _ in range(3))
            for causal in (False, True):
                measure(table, "grid", q, k, v, causal, rounds)
        # What there is stays, should the run be cut short.
        table.write()
    summary = [told for peer in PEERS if (told := means(table, peer))]
    best = [
        min(float(row[f"over_{peer}"]) for peer in PEERS if row[f"over_{peer}"])
        for row in table.rows
    ]
    q, k, v = draw(32, 4096, 128), draw(8, 4096, 128), draw(8, 4096, 128)
    measure(table, "grouped", q, k, v, True, rounds)
    measure_packed(table, HEAVY_TAIL, 16, rounds)
    table.write()
    print("\n".join(summary), f"grid: least over the better peer {min(best):.3f}", sep="\n")


def means(table: Table, peer: str) -> str:
    """What the grid says of a peer; nothing if it did not run."""
    ratios = [float(row[f"over_{peer}"]) for row in table.rows if row[f"over_{peer}"]]
    if not ratios:
        return ""
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    return f"grid: geometric mean over {peer} {mean:.3f}, least {min(ratios):.3f}"


if __name__ == "__main__":
    main()
