"""Every pair of the features that Hopper's backward has, each case at 24 extents, on a GPU.

    python -m pytest -n 16 -m L2 test/python/sdpa/hopper/test_hopper_backward_pairs.py

A case is one compiled kernel of each kind; every other one asks for a fixed order. The list must be
taken whole; that kernels are found for each case is seen without a GPU. test/gpu/pairs.py keeps a
record of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward
from attention_cases.case import LEVELS, UNEVEN_KEYS, UNEVEN_ROWS, Case, all_pairs
from needing_hopper import needs_hopper

from tilewright.engines.hopper import attention_backward

# What the kernels decline is left out of the levels: see DECLINES in
# test_hopper_attention_backward.py.
TAKEN: dict[str, tuple[object, ...]] = {
    **{name: LEVELS[name] for name in ("band", "lengths", "sink", "values", "index")},
    "dtype": ("bfloat16", "float16"),
    "heads": (*LEVELS["heads"], (8, 2)),
    "sizes": ((64, 64), (128, 128), (16, 16), (96, 96), (256, 256), (192, 128), (72, 40)),
    "layout": ("bhsd", "bshd", "gaps"),
    "place": ("dense", "ragged", "ragged_kv"),
    "scale": ("number", "negative"),
}
CASES = [replace(case, stats="natural") for case in all_pairs(seed=12, levels=TAKEN)]


def in_a_fixed_order(case: Case, number: int) -> bool:
    """Every other one, where that is not left to the kernels that are quicker."""
    is_left = max(case.sizes) <= 64 and case.lengths == "none" and case.band in RIGHT_ONLY
    return number % 2 == 0 and not is_left


RIGHT_ONLY = ("open", "causal", "bottom_right")


def drawn(case: Case, number: int) -> Iterator[Case]:
    """24 cases of the same code."""
    for index, rows in enumerate(UNEVEN_ROWS):
        for place, keys in enumerate(UNEVEN_KEYS):
            seed = 1000 * number + len(UNEVEN_KEYS) * index + place
            yield replace(case, rows=rows, keys=keys, batch=2, seed=seed)


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """On Hopper's kernels, with a guard behind the workspace."""
    graph.build()
    assert graph.selected_engine == "hopper", str(graph.explain())
    size = graph.get_workspace_size()
    workspace = torch.full((size + 64,), 0xFF, dtype=torch.uint8, device="cuda")
    graph.execute(pack, workspace)
    assert (workspace[size:] == 0xFF).all()


@pytest.mark.L1
def test_every_case_is_taken() -> None:
    for number, case in enumerate(CASES):
        small = replace(case, rows=65, keys=100)
        declared = DeclaredBackward(small, "cpu", is_deterministic=in_a_fixed_order(case, number))
        declared.graph.validate()
        assert attention_backward.propose(declared.graph, 132), str(case)


@pytest.mark.L2
@needs_hopper
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number: int, record_property: Any) -> None:
    case, ran = CASES[number], 0
    options = {"is_deterministic": in_a_fixed_order(case, number), "start": "promised"}
    for each in drawn(case, number):
        DeclaredBackward(each, "cuda", **options).run(execute)
        ran += 1
    record_property("attention_pairs", ran)
