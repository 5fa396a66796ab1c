"""Every pair of the features that Hopper attention has, each case at 36 extents, on a GPU.

    python -m pytest -n 16 -m L2 test/python/sdpa/hopper/test_hopper_attention_pairs.py

A case is one compiled kernel. The list must be taken whole; that a kernel is found for each case
is seen without a GPU. test/gpu/pairs.py keeps a record of it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.case import LEVELS, all_pairs, of_one_kernel
from attention_cases.running import Declared

from tilewright.engines.hopper import attention

# What the kernels decline is left out of the levels: see DECLINES in test_hopper_attention.py.
TAKEN: dict[str, tuple[object, ...]] = {
    **{name: LEVELS[name] for name in ("heads", "band", "lengths", "sink", "soft_cap", "scale")},
    **{name: LEVELS[name] for name in ("values", "index")},
    "dtype": ("bfloat16", "float16"),
    "sizes": ((64, 64), (128, 128), (16, 16), (96, 96), (256, 256), (192, 128), (72, 40)),
    "layout": ("bhsd", "bshd", "gaps"),
    "place": (*LEVELS["place"], "paged_24", "paged_128"),
    "stats": ("none", "natural", "log2"),
}
CASES = all_pairs(seed=0, levels=TAKEN)


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    graph.build()
    assert graph.selected_engine == "hopper", str(graph.explain())
    graph.execute(pack)


@pytest.mark.L1
def test_every_case_is_taken() -> None:
    for case in CASES:
        declared = Declared(replace(case, rows=65, keys=100), "cpu")
        declared.graph.validate()
        assert attention.propose(declared.graph, 132), str(case)


@pytest.mark.L2
@pytest.mark.skipif(
    not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU of compute capability 9.0"
)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number: int, record_property: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    case, ran = CASES[number], 0
    # Three times a number: every case with many queries.
    for drawn in of_one_kernel(case, 3 * number + 1):
        Declared(drawn, "cuda").run(execute)
        ran += 1
    record_property("attention_pairs", ran)
