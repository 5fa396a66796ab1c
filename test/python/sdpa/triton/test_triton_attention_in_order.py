"""The forward's loop for two programs a multiprocessor, against the oracle; interpreted here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from attention_cases.case import Case
from attention_cases.running import Declared

import tilewright as tw
from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton import attention, attention_config
from tilewright.engines.triton.attention_config import ForwardConfig, choose_config, keeps_level
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec
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


LEVEL_CASES = [
    Case(rows=70, keys=150, band="causal", values="large", stats="natural"),
    Case(rows=40, keys=200, values="large", stats="log2", sink="same", heads=(4, 2)),
    Case(rows=33, keys=150, band="band", values="hidden_nan", out="float32"),
    Case(rows=70, keys=33, band="bottom_right", stats="natural"),
]


@pytest.mark.parametrize("case", LEVEL_CASES, ids=str)
def test_weights_of_a_row_at_one_level(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[KernelPlan] = []

    def plan(spec: AttentionSpec, slots: Mapping[int, int], *_: Any) -> KernelPlan:
        config = ForwardConfig(16, 64, 4, 2, is_in_order=True, max_registers=168)
        taken.append(attention._forward(spec, slots, config, is_aligned=False))
        return taken[-1]

    monkeypatch.setattr(attention, "_plan", plan)
    monkeypatch.setattr(attention_config, "MIN_KEYS_AT_A_LEVEL", 1)
    with interpreting():
        Declared(case, "cpu").run(execute)
    assert dict(taken[-1].kernels[0].spec.constants)["KEEPS_LEVEL"]
    assert [kernel.spec.name for kernel in taken[-1].kernels][1:] == ["attention_repair"]


def test_a_level_is_kept_where_weights_have_room_and_nobody_asks_for_the_greatest_score() -> None:
    for levels, keeps in (
        ({}, True),
        ({"band": "causal", "keys": 70}, True),
        ({"keys": 1000}, False),
        ({"dtype": "float16"}, False),
        ({"stats": "all"}, False),
        ({"sizes": (128, 128), "rows": 100}, False),
    ):
        case = Case(**{"rows": 128, "keys": 1024, "batch": 1, **levels})
        graph = Declared(case, "cpu").graph
        graph.validate()
        spec = read_spec(graph.operations[0])
        config = choose_config(spec, 132)
        assert config.is_in_order
        assert keeps_level(spec, config) is keeps, case


@pytest.mark.parametrize("port", ["score_max", "score_sum_exp"])
def test_no_level_is_kept_where_one_of_what_goes_with_the_greatest_score_is_asked_for(
    port: str,
) -> None:
    # The sum is that of exp(S - max): at another level it is another number.
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q, k, v = (graph.tensor((1, 2, 2048, 64), name=name) for name in "qkv")
    asked = graph.tensor((1, 2, 2048, 1), data_type="float32", name=port).set_output(True)
    graph.sdpa(q, k, v, attn_scale=0.125, **{port: asked})[0].set_output(True)
    graph.validate()
    spec = read_spec(graph.operations[0])
    assert not keeps_level(spec, choose_config(spec, 132))
