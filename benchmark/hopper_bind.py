"""Host time of binding and calling Hopper attention, whose operands are four tensor maps.

    python benchmark/hopper_bind.py

A map is encoded by the driver once, and made for another address by writing that into a copy; a
packed operand's map also has the rows that its buffer owns. Medians of interleaved rounds; the
device is never behind. Writes benchmark/results/<device>/hopper_bind.csv.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results import Table

import tilewright as tw

Call = Callable[[], Any]
Pack = dict[str, torch.Tensor]
CALLS = 50
ROUNDS = 30
PACKS = 16
BATCH, HEADS, ROWS, SIZE = 2, 4, 64, 64


def host_us(calls: dict[str, Call]) -> dict[str, float]:
    """Median host microseconds of each call."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            samples[name].append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}


def dense() -> tuple[Any, list[Pack]]:
    """A graph and sets of buffers for it."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    dim = (BATCH, HEADS, ROWS, SIZE)
    o, _ = graph.sdpa(*(graph.tensor(dim, name=n) for n in "qkv"), is_inference=True)
    o.set_output(True).set_name("o")
    graph.build()
    packs = [{n: torch.randn(dim, device="cuda").bfloat16() for n in "qkvo"} for _ in range(PACKS)]
    return graph, packs


def packed() -> tuple[Any, list[Pack]]:
    """The same over packed sequences; every set of buffers owns another number of rows."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    unit = HEADS * SIZE
    dim, stride = (BATCH, HEADS, ROWS, SIZE), (ROWS * unit, SIZE, unit, 1)
    sums = graph.tensor((BATCH + 1, 1, 1, 1), data_type="int32", name="sums")
    options = {"ragged_offset": sums, "ragged_offset_multiplier": unit}
    o, _ = graph.sdpa(
        *(graph.tensor(dim, stride, name=n, **options) for n in "qkv"),
        is_inference=True,
        use_padding_mask=True,
        cu_seq_len_q=sums,
        cu_seq_len_kv=sums,
    )
    o.set_output(True).set_name("o").set_dim(dim).set_stride(stride)
    o.set_ragged_offset(sums).set_ragged_offset_multiplier(unit)
    graph.build()
    lengths = torch.tensor([0, ROWS, 2 * ROWS], device="cuda").int()
    packs = []
    for number in range(PACKS):
        tokens = BATCH * ROWS + number
        pack = {n: torch.randn(tokens, HEADS, SIZE, device="cuda").bfloat16() for n in "qkvo"}
        packs.append({**pack, "sums": lengths})
    return graph, packs


def calls_of(name: str, graph: Any, packs: list[Pack]) -> dict[str, Call]:
    """Binding and calling with the same buffers, and with others each time."""
    if graph.selected_engine != "hopper":
        raise SystemExit(str(graph.explain()))
    frame = graph.bind(packs[0])
    turns = itertools.cycle(packs)
    return {
        f"{name}, frame.launch": frame.launch,
        f"{name}, graph.bind, the same buffers": lambda: graph.bind(packs[0]),
        f"{name}, graph.bind, {PACKS} sets in turn": lambda: graph.bind(next(turns)),
        f"{name}, graph.execute, the same buffers": lambda: graph.execute(packs[0]),
        f"{name}, graph.execute, {PACKS} sets in turn": lambda: graph.execute(next(turns)),
    }


def main() -> None:
    calls: dict[str, Call] = {}
    for name, (graph, packs) in {"dense": dense(), "packed": packed()}.items():
        calls |= calls_of(name, graph, packs)
    table = Table("hopper_bind", "python benchmark/hopper_bind.py")
    for name, us in host_us(calls).items():
        table.add(subject=name, host_us=f"{us:.2f}")
    table.write()


if __name__ == "__main__":
    main()
