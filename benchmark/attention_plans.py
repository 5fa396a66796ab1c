"""Every plan that the Triton engine proposes for attention, timed beside what its model says.

    python benchmark/attention_plans.py

bfloat16. A row a plan of a declaration, in the order in which they are ranked: the model's cost and
the measured time in microseconds, and the time over that of the quickest plan of the declaration
(of_best). Medians of interleaved rounds with a cold L2. Prints how the first plans came out, and
writes attention_plans.csv under benchmark/results/<device>/.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

import torch
from building import build_ahead, declare_aligned
from results import Table
from timing import device_ms

import tilewright as tw
from tilewright.engines.compiled.code_cache import kernel_code, key_of
from tilewright.engines.triton.engine import ENGINE

TOKENS, CHANNELS = 16384, 2048
ROUNDS = 6
# Of an H200.
TARGET, SM_COUNT = (9, 0), 132
CAUSAL = {"use_causal_mask": True}
BANDS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": CAUSAL,
    "window 1024": {**CAUSAL, "sliding_window_length": 1024},
}
# (batch, query heads, key heads, queries, keys, head size, band)
DECLARATIONS = [
    *((TOKENS // s, CHANNELS // d, CHANNELS // d, s, s, d, band)
      for d in (64, 128, 256) for s in (512, 2048, 8192) for band in ("none", "causal")),
    *((1, CHANNELS // d, CHANNELS // d, TOKENS, TOKENS, d, "window 1024") for d in (64, 128, 256)),
    (4, 16, 4, 1000, 1100, 128, "causal"),
    (4, 16, 4, 4000, 4100, 96, "none"),
    (1, 8, 8, 1024, 1024, 128, "causal"),
    *((8, 32, 8, 1, keys, 128, "none") for keys in (1024, 4096, 32768)),
    *((64, 32, 8, 1, keys, 128, "none") for keys in (1024, 8192)),
    (8, 32, 8, 4, 4096, 64, "none"),
    (32, 8, 8, 1, 1024, 128, "none"),
    (8, 32, 32, 1, 4096, 128, "none"),
    # More queries of a key head than a tile has.
    (8, 32, 4, 16, 8192, 128, "none"),
    (1, 128, 1, 1, 32768, 128, "none"),
]  # fmt: skip


def declared(
    batch: int, heads: int, heads_kv: int, rows: int, keys: int, depth: int, band: str
) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A graph of one operation, without a plan, and the extents of what it is bound to."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    dims = {
        "q": (batch, heads, rows, depth),
        "k": (batch, heads_kv, keys, depth),
        "v": (batch, heads_kv, keys, depth),
    }
    operands = [graph.tensor(dim, name=name) for name, dim in dims.items()]
    o, _ = graph.sdpa(*operands, attn_scale=depth**-0.5, is_inference=True, **BANDS[band])
    o.set_output(True).set_name("o")
    return declare_aligned(graph), {**dims, "o": dims["q"]}


def kernels() -> list[Any]:
    """What the plans of all declarations launch on the device of the committed results."""
    found = {}
    for declaration in DECLARATIONS:
        graph, _ = declared(*declaration)
        graph.validate()
        for proposal in ENGINE.family(graph).propose(graph, SM_COUNT):
            for kernel in ENGINE.plan(graph, proposal.knobs, SM_COUNT).kernels:
                found[key_of(kernel.spec, TARGET).digest()] = kernel.spec
    return list(found.values())


def measure(table: Table, declaration: tuple[Any, ...]) -> None:
    graph, dims = declared(*declaration)
    graph.deselect_engines(["hopper", "aten"])
    generator = torch.Generator("cuda").manual_seed(0)
    pack = {
        name: torch.randn(dim, generator=generator, device="cuda").bfloat16()
        for name, dim in dims.items()
    }
    calls = {}
    for index, plan in enumerate(graph.plans):
        if plan.engine_name == "triton":
            size = graph.get_workspace_size_plan_at_index(index)
            workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
            calls[plan.name] = functools.partial(
                graph.execute_plan_at_index, pack, workspace, index=index
            )
    times = device_ms(calls, rounds=ROUNDS)
    best = min(times.values())
    names = ("batch", "heads", "heads_kv", "queries", "keys", "depth", "mask")
    for plan in graph.plans:
        if plan.name in times:
            us = times[plan.name] * 1e3
            row = dict(zip(names, declaration, strict=True))
            row |= {"plan": plan.name, "model_us": f"{plan.cost:.4g}", "us": f"{us:.4g}"}
            table.add(**row, of_best=f"{us / best / 1e3:.3f}")


def main() -> None:
    # Elsewhere, nothing is compiled ahead.
    build_ahead([functools.partial(kernel_code, spec, TARGET) for spec in kernels()])
    table = Table("attention_plans", "python benchmark/attention_plans.py")
    for declaration in DECLARATIONS:
        measure(table, declaration)
        # Rows are kept as they come.
        table.write()
    firsts: dict[tuple[Any, ...], float] = {}
    for row in table.rows:
        firsts.setdefault(tuple(list(row.values())[:7]), float(row["of_best"]))
    off = [math.log(float(row["model_us"]) / float(row["us"])) for row in table.rows]
    print(
        f"{len(firsts)} declarations: the first plan takes {statistics.mean(firsts.values()):.3f} "
        f"of the quickest one's time on average, {max(firsts.values()):.2f} at most; the model is "
        f"off by a factor of {math.exp(max(map(abs, off))):.2f} at most"
    )


if __name__ == "__main__":
    main()
