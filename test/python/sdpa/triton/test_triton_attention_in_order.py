"""The forward's loop for two programs a multiprocessor, against the oracle; interpreted here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attention_cases.case import Case
from attention_cases.running import Declared

from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton import attention
from tilewright.engines.triton.attention_config import ForwardConfig
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.engines.triton.engine import interpreting

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="interprets kernels"),
]

CASES = [
    Case(rows=40, keys=64, stats="all"),
    Case(rows=33, keys=50, heads=(4, 2), layout="bshd", sink="same", stats="log2"),
    Case(rows=64, keys=64, band="causal", values="hidden_nan", stats="natural"),
    Case(rows=70, keys=33, band="bottom_right", heads=(3, 1), stats="all", sink="float32"),
    Case(rows=33, keys=70, band="window", values="hidden_nan", layout="gaps"),
    Case(rows=50, keys=40, band="band_bottom_right", values="hidden_nan", out="float32"),
    Case(rows=33, keys=70, lengths="lengths", band="causal", values="hidden_nan", stats="all"),
    Case(rows=40, keys=50, values="large", stats="all"),
]


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    workspace = torch.full((max(graph.get_workspace_size(), 1),), 0xAB, dtype=torch.uint8)
    graph.execute(pack, workspace)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_loop_over_all_blocks_of_keys(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[KernelPlan] = []

    def plan(spec: AttentionSpec, slots: Mapping[int, int], *_: Any) -> KernelPlan:
        config = ForwardConfig(16, 16, 4, 2, is_in_order=True)
        taken.append(attention._forward(spec, slots, config, is_aligned=False))
        return taken[-1]

    monkeypatch.setattr(attention, "_plan", plan)
    with interpreting():
        Declared(case, "cpu").run(execute)
    constants = dict(taken[-1].kernels[0].spec.constants)
    assert constants["IN_ORDER"] and not constants["IS_AHEAD"]
