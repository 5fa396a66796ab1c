"""Every pair of the features that Hopper attention has, each case at 36 extents, on a GPU.

Where calls of many keys take another kernel (``attention_late``), at two long ones too.

    python -m pytest -n 16 -m L2 test/python/sdpa/hopper/test_hopper_attention_pairs.py

A case is one compiled kernel, or those two. The list must be taken whole; that a kernel is found
for each case is seen without a GPU. test/gpu/pairs.py keeps a record of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.case import LEVELS, Case, all_pairs, of_one_kernel
from attention_cases.running import Declared
from needing_hopper import needs_hopper

from tilewright.engines.hopper import attention
from tilewright.engines.hopper.attention_spec import read_spec
from tilewright.engines.hopper.operand_rules import only_operation

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
LONG = ((800, 1100), (1100, 800))


def long_calls(case: Case, number: int) -> Iterator[Case]:
    """The case at LONG extents, if maxima are taken late there."""
    for index, (rows, keys) in enumerate(LONG):
        drawn = replace(case, rows=rows, keys=keys, batch=2, seed=1000 + 10 * number + index)
        declared = Declared(drawn, "cpu")
        declared.graph.validate()
        if attention.choose_config(read_spec(only_operation(declared.graph))).late:
            yield drawn


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
    assert sum(bool(list(long_calls(case, number))) for number, case in enumerate(CASES)) > 10


@pytest.mark.L2
@needs_hopper
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number: int, record_property: Any) -> None:
    case, ran = CASES[number], 0
    # Three times a number: every case with many queries.
    for drawn in (*of_one_kernel(case, 3 * number + 1), *long_calls(case, number)):
        Declared(drawn, "cuda").run(execute)
        ran += 1
    record_property("attention_pairs", ran)
