"""Every pair of the features that the quickest kernels have, on a GPU, against the oracle.

    python -m pytest -n 16 -m L2 test/python/sdpa/triton/test_triton_plain_pairs.py

The cases of ``test_triton_attention_pairs.py`` have some feature each that only the general kernels
take. Here are those of plain scores: on SM90 they go to warp groups, to loops that tensor maps
feed, to one warp a program where there are few queries, and to the backward's kernels with maps,
which is looked up in each plan. test/gpu/pairs.py keeps a record.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import FEW_KEYS, LEVELS, Case, all_pairs
from attention_cases.running import Declared, select_split

from tilewright.artifact.environment import installed_version
from tilewright.engines.triton import attention, attention_backward, attention_decode_config
from tilewright.graph.enums import knob_type

pytestmark = [
    pytest.mark.L2,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

PLAIN: dict[str, tuple[object, ...]] = {
    **{name: LEVELS[name] for name in ("heads", "band", "sink", "stats", "values")},
    "dtype": ("bfloat16", "float16"),
    "sizes": (
        *((64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (32, 32), (72, 40)),
        *((24, 72), (72, 24)),
    ),
    "layout": ("bhsd", "bshd", "gaps"),
}
DENSE = all_pairs(seed=30, levels={**PLAIN, "out": LEVELS["out"]})
OF_SEQUENCES = {"lengths": ("lengths", "sums"), "sizes": ((128, 128), (256, 256), (256, 128))}
PACKED = all_pairs(seed=31, levels={**PLAIN, **OF_SEQUENCES, "place": ("ragged",)})
OF_FEW = {
    "heads": ((2, 2), (4, 1), (8, 2)),
    "sizes": ((64, 64), (128, 128), (64, 128), (128, 64)),
    "band": ("open",),
    "lengths": ("lengths", "sums"),
    "index": LEVELS["index"],
    "place": ("dense", "paged_1", "paged_16", "paged_24", "paged_128"),
}
FEW = all_pairs(seed=32, levels={**PLAIN, **OF_FEW})
# The queries of a key head are more than a tile holds.
OF_TILES = {**OF_FEW, "heads": ((20, 1), (40, 2)), "sizes": ((64, 64), (128, 128), (256, 256))}
TILES = all_pairs(seed=34, levels={**PLAIN, **OF_TILES})
OF_BACKWARD = {"band": ("open", "causal", "bottom_right"), "values": ("normal", "large")}
BACKWARD = [backward_case(case) for case in all_pairs(seed=33, levels={**PLAIN, **OF_BACKWARD})]
# Rows of whole warp groups, and others; keys of whole blocks, and others.
ROWS = ((128, 192, 320, 576), (100, 257, 333, 450))
KEYS = ((128, 384, 640), (65, 130, 513))
# So many that each of a cluster's runs has blocks, but for the lengths' sake.
JOINED_KEYS = (1024, 1025, 1100, 1500, 2047, 2048)
# Differences that the diagonal's start is a whole tile at.
BACKWARD_EXTENTS = ((65, 65), (128, 384), (300, 300), (513, 257), (190, 446), (640, 128))


def extents(number: int, case: Case) -> Iterator[Case]:
    """Twelve of one kind of rows and of keys."""
    for index, (rows, keys) in enumerate(
        itertools.product(ROWS[number % 2], KEYS[number // 2 % 2])
    ):
        yield replace(case, rows=rows, keys=keys, batch=2, seed=1000 * number + index)


class Run:
    """Executes graphs on Triton's kernels, and looks up that the quick ones are among them."""

    def __init__(self, family: Any, names: tuple[str, ...], runs: int = 0) -> None:
        self.family, self.names, self.runs = family, names, runs
        properties = torch.cuda.get_device_properties(0)
        self.count = properties.multi_processor_count
        is_quick = properties.major == 9 and installed_version("triton").startswith("3.6.")
        self.has_quick, self.ran = is_quick, 0

    def __call__(self, graph: Any, pack: dict[Any, torch.Tensor]) -> None:
        graph.deselect_engines(["hopper"])
        select_split(graph)
        for index, plan in enumerate(graph.plans):
            # Warp groups, where there are any, whether they would be quicker or not.
            if plan.engine_name == "triton" and knob_type.ROW_BLOCK in dict(plan.knobs):
                graph.select_plan(index)
            # Of few queries there is a plan of twice as many runs, too, which are combined.
            if (
                plan.engine_name == "triton"
                and dict(plan.knobs).get(knob_type.SPLIT_K) == self.runs
            ):
                graph.select_plan(index)
        graph.build()
        assert graph.selected_engine == "triton", graph.explain()
        if self.has_quick:
            kernels = self.family.plan(graph, graph._active_plan().plan.knobs, self.count).kernels
            assert any(kernel.spec.name in self.names for kernel in kernels) or any(
                "tensordesc" in kind for kernel in kernels for _, kind in kernel.spec.types
            )
        size = graph.get_workspace_size()
        workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8, device="cuda")
        graph.execute(pack, workspace)
        assert (workspace[size:] == 0xFF).all()
        self.ran += 1


def run(cases: Iterator[Any], execute: Run, record_property: Any) -> None:
    try:
        for declared in cases:
            declared.run(execute)
    finally:
        record_property("attention_pairs", execute.ran)


@pytest.mark.parametrize("number", range(len(DENSE)))
def test_dense(number: int, record_property: Any) -> None:
    cases = (Declared(c, "cuda", start="promised") for c in extents(number, DENSE[number]))
    run(cases, Run(attention, ()), record_property)


@pytest.mark.parametrize("number", range(len(PACKED)))
def test_packed(number: int, record_property: Any) -> None:
    cases = (Declared(c, "cuda", start="promised") for c in extents(number, PACKED[number]))
    run(cases, Run(attention, ("attention_forward_packed",)), record_property)


@pytest.mark.parametrize("way", ["direct", "joined", "paired"])
@pytest.mark.parametrize("number", range(len(FEW)))
def test_few_queries(
    number: int, way: str, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So little would not be worth it, nor fill the device.
    runs = alone = 8 if number % 2 else 16
    is_joined, is_paired = way != "direct", way == "paired"
    rows, least = (1, 2, 4)[number % 3], 1
    if is_paired:
        # Two sequences at least, of 8 rows at most; a warp has a run of each.
        heads, heads_kv = FEW[number].heads
        rows, least = min(rows, attention_decode_config.DIRECT_ROWS * heads_kv // heads), 2
        alone = runs // 2
    monkeypatch.setattr(attention_decode_config, "pays_in_registers", lambda *_: True)
    monkeypatch.setattr(
        attention_decode_config, "_joined_runs", lambda *_: alone if is_joined else 1
    )
    drawn = (
        replace(
            FEW[number], rows=rows, keys=keys, batch=least + index % 3, seed=1000 * number + index
        )
        for index, keys in enumerate(JOINED_KEYS if is_joined else FEW_KEYS)
    )
    cases = (Declared(c, "cuda", start="promised") for c in drawn)
    run(cases, Run(attention, (f"attention_decode_{way}",), runs * is_joined), record_property)


@pytest.mark.parametrize("number", range(len(TILES)))
def test_queries_of_several_tiles(number: int, record_property: Any) -> None:
    rows = (4, 7, 16)[number % 3]
    drawn = (
        replace(
            TILES[number], rows=rows, keys=keys, batch=1 + index % 3, seed=1000 * number + index
        )
        for index, keys in enumerate(FEW_KEYS)
    )
    cases = (Declared(c, "cuda", start="promised") for c in drawn)
    run(cases, Run(attention, ("attention_decode",)), record_property)


@pytest.mark.parametrize("number", range(len(BACKWARD)))
def test_backward(number: int, record_property: Any) -> None:
    drawn = (
        replace(BACKWARD[number], rows=rows, keys=keys, batch=2, seed=1000 * number + index)
        for index, (rows, keys) in enumerate(BACKWARD_EXTENTS)
    )
    cases = (
        DeclaredBackward(c, "cuda", is_deterministic=number % 2 == 0, start="promised")
        for c in drawn
    )
    run(cases, Run(attention_backward, ("attention_backward_plain_rows",)), record_property)
