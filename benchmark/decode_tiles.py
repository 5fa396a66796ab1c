"""Tiles of decoding where values may be hidden, by the knobs of the Triton engine.

    python benchmark/decode_tiles.py

8 sequences of 8192 keys in bfloat16, under a causal mask from the bottom right, a window in it, or
with a bias. A row a tile of a declaration: queries of a key head and keys of a step, and warps, all
with as many runs of keys as the first plan has; "chosen" is 1 for that plan's own tile. Medians of
interleaved rounds with a cold L2; all tiles' results are compared first. Writes decode_tiles.csv
under benchmark/results/<device>/.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from building import build_ahead, declare_aligned
from results import Table
from timing import device_ms

import tilewright as tw
from tilewright.engines.compiled.code_cache import kernel_code, key_of
from tilewright.engines.triton.engine import ENGINE
from tilewright.graph.enums import knob_type
from tilewright.planning.built import BuiltPlan

DEVICE = "cuda"
BATCH, KEYS, WINDOW = 8, 8192, 4096
ROUNDS = 5
# Of an H200, and of bfloat16's rounding of weights beside float32.
TARGET, SM_COUNT, TOLERANCE = (9, 0), 132, 2e-2
CAUSAL = {"use_causal_mask_bottom_right": True}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": CAUSAL,
    "window": {**CAUSAL, "sliding_window_length": WINDOW},
    "bias": {},
}
TILE_KNOBS = (knob_type.TILE_M, knob_type.TILE_N, knob_type.WARPS)


@dataclass(frozen=True)
class Case:
    """A declaration, and the tiles to set beside the chosen one: (queries, keys, warps)."""

    depth: int
    rows: int
    heads: int
    heads_kv: int
    mask: str
    tiles: tuple[tuple[int, int, int], ...]


def tiles_of(rows: int, *keys: int) -> tuple[tuple[int, int, int], ...]:
    """Tiles of four warps."""
    return tuple((rows, each, 4) for each in keys)


CASES = [
    *(Case(128, 16, 32, 4, mask, (*tiles_of(64, 64, 32, 16), (64, 64, 8), (64, 32, 8),
                                  *tiles_of(32, 64, 32))) for mask in ("causal", "bias")),
    *(Case(64, 16, 32, 4, mask, (*tiles_of(64, 128, 64, 32), (64, 128, 8), (64, 64, 8),
                                 *tiles_of(32, 128, 64))) for mask in ("causal", "bias")),
    *(Case(256, 16, 16, 4, mask, (*tiles_of(64, 32, 16), (64, 32, 8), (64, 16, 8),
                                  *tiles_of(32, 32, 16))) for mask in ("causal", "bias")),
    Case(128, 16, 32, 4, "none", ((64, 64, 4), (64, 64, 8))),
    Case(128, 4, 32, 8, "causal", tiles_of(16, 64, 32, 16)),
    *(Case(128, 1, 32, 8, mask, tiles_of(16, 64, 32, 16)) for mask in ("bias", "window")),
    *(Case(128, 8, 32, 8, mask, tiles_of(32, 64, 32, 16)) for mask in ("causal", "bias")),
    Case(64, 4, 32, 8, "causal", tiles_of(16, 128, 64, 32)),
    Case(64, 1, 32, 8, "bias", tiles_of(16, 128, 64, 32)),
    *(Case(256, 4, 16, 4, mask, (*tiles_of(16, 32, 16), (16, 32, 8)))
      for mask in ("causal", "bias")),
    Case(256, 8, 16, 4, "causal", (*tiles_of(32, 32, 16), (32, 32, 8))),
]  # fmt: skip


def declared(case: Case) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """A graph of one operation, without a plan, and the extents of what it is bound to."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    dims = {
        "q": (BATCH, case.heads, case.rows, case.depth),
        "k": (BATCH, case.heads_kv, KEYS, case.depth),
        "v": (BATCH, case.heads_kv, KEYS, case.depth),
    }
    if case.mask == "bias":
        dims["bias"] = (1, case.heads, case.rows, KEYS)
    given = {name: graph.tensor(dim, name=name) for name, dim in dims.items()}
    o, _ = graph.sdpa(**given, attn_scale=case.depth**-0.5, is_inference=True, **MASKS[case.mask])
    o.set_output(True).set_name("o")
    return declare_aligned(graph), {**dims, "o": dims["q"]}


def knobs_of(case: Case, first: dict[Any, int]) -> dict[tuple[int, ...], dict[Any, int]]:
    """The knobs of each tile: those of the first plan but for the tile's; its own is the first."""
    own = tuple(first[knob] for knob in TILE_KNOBS)
    tiles = dict.fromkeys((own, *case.tiles))
    return {tile: {**first, **dict(zip(TILE_KNOBS, tile, strict=True))} for tile in tiles}


def kernels() -> list[Any]:
    """What all tiles launch on the device of the committed results."""
    found = {}
    for case in CASES:
        graph, _ = declared(case)
        graph.validate()
        first = dict(ENGINE.family(graph).propose(graph, SM_COUNT)[0].knobs)
        for knobs in knobs_of(case, first).values():
            for kernel in ENGINE.plan(graph, tuple(knobs.items()), SM_COUNT).kernels:
                found[key_of(kernel.spec, TARGET).digest()] = kernel.spec
    return list(found.values())


def reference(case: Case, pack: dict[str, torch.Tensor]) -> torch.Tensor:
    """O in float32."""
    q, k, v = (pack[name].float() for name in "qkv")
    k, v = (each.repeat_interleave(case.heads // case.heads_kv, 1) for each in (k, v))
    scores = q @ k.mT * case.depth**-0.5
    if case.mask == "bias":
        scores += pack["bias"].float()
    if case.mask in ("causal", "window"):
        last = torch.arange(KEYS - case.rows, KEYS, device=q.device)[:, None]
        key = torch.arange(KEYS, device=q.device)
        is_hidden = key > last
        if case.mask == "window":
            is_hidden |= key <= last - WINDOW
        scores.masked_fill_(is_hidden, -torch.inf)
    return scores.softmax(-1) @ v


def measure(table: Table, case: Case) -> None:
    """One row a tile."""
    graph, dims = declared(case)
    graph.deselect_engines(["hopper", "aten"])
    first = next(plan for plan in graph.plans if plan.engine_name == "triton")
    generator = torch.Generator(DEVICE).manual_seed(0)
    pack = {
        name: torch.randn(dim, generator=generator, device=DEVICE).bfloat16()
        for name, dim in dims.items()
    }
    expected = reference(case, pack)
    calls = {}
    for tile, knobs in knobs_of(case, dict(first.knobs)).items():
        plan = replace(first, knobs=tuple(knobs.items()))
        built = BuiltPlan(graph, plan, pack["q"].device)
        workspace = torch.empty(max(built.workspace_bytes, 1), dtype=torch.uint8, device=DEVICE)
        calls[tile] = functools.partial(built.execute, pack, workspace)
        pack["o"].fill_(torch.nan)
        calls[tile]()
        worst = (pack["o"].float() - expected).abs().max().item()
        # Written so that NaN fails.
        if not worst <= TOLERANCE:
            raise SystemExit(f"{case}: {plan.name} is off by {worst}")
    times = device_ms(calls, rounds=ROUNDS)
    best = min(times.values())
    for number, (tile, ms) in enumerate(times.items()):
        table.add(
            depth=case.depth,
            queries=case.rows,
            heads=case.heads,
            heads_kv=case.heads_kv,
            mask=case.mask,
            **dict(zip(("tile_m", "tile_n", "warps"), tile, strict=True)),
            splits=dict(first.knobs)[knob_type.SPLIT_K],
            chosen=int(number == 0),
            us=f"{ms * 1e3:.1f}",
            of_best=f"{ms / best:.2f}",
        )


def main() -> None:
    # Elsewhere, nothing is compiled ahead.
    build_ahead([functools.partial(kernel_code, spec, TARGET) for spec in kernels()])
    table = Table("decode_tiles", "python benchmark/decode_tiles.py")
    for case in CASES:
        measure(table, case)
        # Rows are kept as they come.
        table.write()


if __name__ == "__main__":
    main()
