"""Every pair of attention's features on a GPU, each case at 36 extents, against the oracle.

    python -m pytest -n 16 -m L2 test/python/sdpa/triton/test_triton_attention_pairs.py

A case is one compiled kernel. What the engine declines is counted by reason and printed.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.case import Case, all_pairs, of_one_kernel
from attention_cases.running import Declared

from tilewright.errors import NotSupportedError

pytestmark = [
    pytest.mark.L2,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

# About 84 cases: 3,000 calls, two of three cases with many queries, one with few.
CASES = all_pairs(seed=0)


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    graph.deselect_engines(["hopper"])
    graph.build()
    if graph.selected_engine != "triton":
        verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
        raise NotSupportedError(verdict.reason)
    size = graph.get_workspace_size()
    graph.execute(pack, torch.empty(max(size, 1), dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number: int, record_property: Any) -> None:
    case: Case = CASES[number]
    if number % 8 == 0:
        case = replace(case, soft_cap="relu" if number % 16 else "index")
    ran = 0
    for drawn in of_one_kernel(case, number):
        try:
            Declared(drawn, "cuda").run(execute)
        except NotSupportedError as decline:
            reason = re.sub(r"tensor '.*?'|\d+", "..", str(decline))
            record_property("attention_pairs", reason)
        else:
            ran += 1
    record_property("attention_pairs", ran)
