"""Every pair of attention's features on a GPU, forward and backward, against the oracle.

    python -m pytest -n 16 -m L2 test/python/sdpa/triton/test_triton_attention_pairs.py

A case is one compiled kernel, forward, or one of each kind, backward, and runs at 36 or 24 extents.
Most promise how their buffers are aligned, so that nothing else is compiled; of every eighth they
lie elsewhere, and the general kernels run. What the engine declines is counted by reason and
printed; test/gpu/pairs.py keeps a record of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import (
    FEW_KEYS,
    LARGE_EXTENTS,
    LEVELS,
    Case,
    all_pairs,
    at_extents,
    of_one_kernel,
    uneven,
)
from attention_cases.running import Declared, select_split

from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU")

# About 100 cases: 3,500 calls, two of three cases with many queries, one with few.
CASES = all_pairs(seed=0)
# Few queries whose keys are split, which takes neither dropout nor block masks: 12 calls a case.
# The queries of 20 heads that share one key head are more than a tile holds.
SPLIT_LEVELS = {
    name: levels for name, levels in LEVELS.items() if name not in ("dropout", "block_mask")
}
SPLIT_LEVELS["heads"] += ((20, 1),)
SPLIT_CASES = all_pairs(seed=20, levels=SPLIT_LEVELS)
# As many, and 2,000 calls.
BACKWARD_CASES = [backward_case(case) for case in all_pairs(seed=10)]
MORE_BACKWARD_CASES = [backward_case(case) for case in all_pairs(seed=11)]


def start(number: int) -> str:
    """How the buffers of a case lie."""
    return "odd" if number % 8 == 0 else "promised"


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    graph.deselect_engines(["hopper"])
    select_split(graph)
    graph.build()
    if graph.selected_engine != "triton":
        verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
        raise NotSupportedError(verdict.reason)
    size = graph.get_workspace_size()
    workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device="cuda")
    graph.execute(pack, workspace)


def execute_split(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """As ``execute``, by a plan that splits keys alone."""
    graph.deselect_engines(["hopper"])
    if not select_split(graph):
        raise NotSupportedError("no plan splits its keys")
    execute(graph, pack)


def run(cases: Iterable[Declared], record_property: Any, by: Any = execute) -> None:
    """Run them and hand in how many ran, and every reason why one did not."""
    ran = 0
    try:
        for declared in cases:
            try:
                declared.run(by)
            except NotSupportedError as decline:
                reason = re.sub(r"tensor '.*?'|\d+", "..", str(decline))
                record_property("attention_pairs", reason)
            else:
                ran += 1
    finally:
        record_property("attention_pairs", ran)


@pytest.mark.L2
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number: int, record_property: Any) -> None:
    case: Case = CASES[number]
    if number % 8 == 0:
        case = replace(case, soft_cap="relu" if number % 16 else "index")
    drawn = of_one_kernel(case, number)
    run((Declared(one, "cuda", start=start(number)) for one in drawn), record_property)


@pytest.mark.L2
@pytest.mark.parametrize("number", range(len(SPLIT_CASES)))
def test_every_pair_of_features_where_keys_are_split(number: int, record_property: Any) -> None:
    rows = (1, 4, 7)[number % 3]
    drawn = at_extents(SPLIT_CASES[number], tuple((rows, keys) for keys in FEW_KEYS), seed=number)
    cases = (Declared(replace(case, batch=2), "cuda", start=start(number)) for case in drawn)
    run(cases, record_property, execute_split)


@pytest.mark.L2
@pytest.mark.parametrize("number", range(len(BACKWARD_CASES)))
def test_every_pair_of_features_backward(number: int, record_property: Any) -> None:
    drawn = uneven(BACKWARD_CASES[number], number)
    options = {"is_deterministic": number % 2 == 0, "start": start(number)}
    run((DeclaredBackward(case, "cuda", **options) for case in drawn), record_property)


@pytest.mark.L3
@pytest.mark.parametrize("number", range(len(MORE_BACKWARD_CASES)))
def test_other_extents_backward(number: int, record_property: Any) -> None:
    """Twelve extents, small ones and whole tiles among them, each compiled for itself."""
    drawn = at_extents(MORE_BACKWARD_CASES[number], LARGE_EXTENTS, seed=number)
    cases = (DeclaredBackward(case, "cuda", is_deterministic=number % 2 == 0) for case in drawn)
    run(cases, record_property)
