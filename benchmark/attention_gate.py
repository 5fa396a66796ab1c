"""Attention with an output gate on a GPU: O sigmoid(gate) in one kernel, and in two.

    python benchmark/attention_gate.py

bfloat16, a gate as wide as O. A row a way of a declaration: attention alone by the engine for SM90
and by Triton, each with one pointwise kernel behind it, and Triton's attention that multiplies
before it stores. ``over_alone`` is what the gate costs beside the same engine's attention alone, in
microseconds. Medians of interleaved rounds with a cold L2, after a comparison of results. Writes
attention_gate.csv under benchmark/results/<device>/.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from building import build_ahead, build_aligned
from results import Table
from timing import device_ms

import tilewright as tw

ROUNDS = 10
TOLERANCE = 2e-2
CAUSAL = {"use_causal_mask": True}
# (batch, query heads, key heads, queries, keys, head size, mask)
DECLARATIONS = [
    *((4, 2048 // d, 2048 // d, 4096, 4096, d, mask)
      for d in (64, 128, 256) for mask in ("none", "causal")),
    (32, 16, 16, 512, 512, 128, "causal"),
    (8, 32, 8, 1, 4096, 128, "none"),
]  # fmt: skip


def built(engine: str, parts: str, declaration: tuple[Any, ...]) -> tuple[Any, list[str]]:
    """A built graph of "attention", of a "gate" or of "both", and the names of its operands."""
    batch, heads, heads_kv, rows, keys, depth, mask = declaration
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    dims = {name: (batch, heads_kv, keys, depth) for name in "kv"}
    dims |= {name: (batch, heads, rows, depth) for name in ("q", "o", "gate")}
    names = {"attention": "qkv", "gate": ("o", "gate"), "both": ("q", "k", "v", "gate")}[parts]
    given = {name: graph.tensor(dims[name], name=name) for name in names}
    made = given.get("o")
    if parts != "gate":
        masks = CAUSAL if mask == "causal" else {}
        operands = (given[name] for name in "qkv")
        made, _ = graph.sdpa(*operands, attn_scale=depth**-0.5, is_inference=True, **masks)
    if parts != "attention":
        made = graph.mul(made, graph.sigmoid(given["gate"]))
    made.set_output(True).set_name("o" if parts == "attention" else "result").set_dim(dims["q"])
    graph.deselect_engines(["aten", *({"hopper", "triton"} - {engine})])
    build_aligned(graph)
    return graph, [*names, made.name]


# Who: the engine and the parts that it runs, one behind the other.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hopper, attention": ("hopper", ("attention",)),
    "hopper, then a gate": ("hopper", ("attention", "gate")),
    "triton, attention": ("triton", ("attention",)),
    "triton, then a gate": ("triton", ("attention", "gate")),
    "triton, gated": ("triton", ("both",)),
}


def way(who: str, declaration: tuple[Any, ...]) -> list[tuple[Any, list[str]]]:
    """The graphs of a way, built; the gate alone is Triton's in each."""
    engine, parts = WAYS[who]
    return [built("triton" if part == "gate" else engine, part, declaration) for part in parts]


def measure(table: Table, declaration: tuple[Any, ...]) -> None:
    """A row a way, where its engine takes the declaration."""
    batch, heads, heads_kv, rows, keys, depth, _ = declaration
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int, length: int) -> torch.Tensor:
        made = torch.randn(batch, heads, length, depth, generator=generator, device="cuda")
        return made.bfloat16()

    buffers = {name: normal(heads, rows) for name in ("q", "gate")}
    buffers |= {name: normal(heads_kv, keys) for name in "kv"}
    calls: dict[str, Callable[[], None]] = {}
    results: dict[str, torch.Tensor] = {}
    for who in WAYS:
        try:
            graphs = way(who, declaration)
        except tw.NotSupportedError as decline:
            print(f"{declaration} {who}: {str(decline).splitlines()[0]}", flush=True)
            continue
        own = {name: torch.full_like(buffers["q"], torch.nan) for name in ("o", "result")}
        frames = []
        for graph, names in graphs:
            size = max(graph.get_workspace_size(), 1)
            workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
            frames.append(graph.bind({n: {**buffers, **own}[n] for n in names}, workspace))
        calls[who] = functools.partial(launch, frames)
        calls[who]()
        results[who] = own["o" if len(frames) == 1 and "gated" not in who else "result"]
    expected = results["triton, attention"].float() * torch.sigmoid(buffers["gate"].float())
    for who, result in results.items():
        error = 0.0 if "attention" in who else (result.float() - expected).abs().max().item()
        if not error <= TOLERANCE:
            raise SystemExit(f"{declaration} {who}: error {error}")
    times = {who: ms * 1e3 for who, ms in device_ms(calls, rounds=ROUNDS).items()}
    names = ("batch", "heads", "heads_kv", "queries", "keys", "depth", "mask")
    for who, us in times.items():
        alone = times[f"{who.partition(',')[0]}, attention"]
        row = dict(zip(names, declaration, strict=True)) | {"who": who, "us": f"{us:.1f}"}
        table.add(**row, over_alone=f"{us - alone:.1f}")


def launch(frames: list[Any]) -> None:
    """Launch them in order."""
    for frame in frames:
        frame.launch()


def prepare(who: str, declaration: tuple[Any, ...]) -> None:
    """Compile what a way needs, or leave it to the run to say why not."""
    try:
        way(who, declaration)
    except tw.NotSupportedError:
        return


def main() -> None:
    """Compile side by side, measure, write."""
    build_ahead([functools.partial(prepare, who, each) for each in DECLARATIONS for who in WAYS])
    table = Table("attention_gate", "python benchmark/attention_gate.py")
    for declaration in DECLARATIONS:
        measure(table, declaration)
    table.write()


if __name__ == "__main__":
    main()
