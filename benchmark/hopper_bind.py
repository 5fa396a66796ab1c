"""Host time of binding and calling Hopper attention, whose operands are four tensor maps.

    python benchmark/hopper_bind.py

A map is encoded by the driver once, and made for another address by writing that into a copy; a
packed operand's map also has the rows that its buffer owns. Medians of interleaved rounds; the
device is never behind. Writes benchmark/results/<device>/hopper_bind.csv.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from building import build_ahead
from results import Table
from timing import Call, host_us

import tilewright as tw

Pack = dict[str, torch.Tensor]
CALLS = 50
ROUNDS = 30
PACKS = 16
BATCH, HEADS, ROWS, SIZE = 2, 4, 64, 64


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


def measure(name: str, table: Table | None) -> None:
    """One kind of operands; with no table the graph is only built."""
    graph, packs = KINDS[name]()
    calls = calls_of(name, graph, packs)
    if table is None:
        return
    for call, us in host_us(calls, CALLS, ROUNDS).items():
        table.add(subject=call, host_us=f"{us:.2f}")
    table.write()


KINDS = {"dense": dense, "packed": packed}


def main() -> None:
    build_ahead([functools.partial(measure, name, None) for name in KINDS])
    table = Table("hopper_bind", "python benchmark/hopper_bind.py")
    for name in KINDS:
        measure(name, table)


if __name__ == "__main__":
    main()
