"""Every pair of attention's features on a GPU, each case at twelve extents, against the oracle.

    python -m pytest -n 16 -m L2 test/python/sdpa/triton/test_triton_attention_pairs.py

A case is one compiled kernel. What the engine declines is counted by reason and printed.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from attention_cases.case import LARGE_EXTENTS, Case, all_pairs, at_extents
from attention_cases.running import Declared

from tilewright.errors import NotSupportedError

pytestmark = [
    pytest.mark.L2,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

# Several draws of all pairs: about 90 cases each.
CASES = [case for seed in range(3) for case in all_pairs(seed)]


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
    ran = 0
    for drawn in at_extents(case, LARGE_EXTENTS, seed=number):
        try:
            Declared(drawn, "cuda").run(execute)
        except NotSupportedError as decline:
            reason = re.sub(r"tensor '.*?'|\d+", "..", str(decline))
            record_property("attention_pairs", reason)
        else:
            ran += 1
    record_property("attention_pairs", ran)
