"""An output gate in Triton's attention behind a sample of all pairs of features, and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from attention_cases.case import SMALL_EXTENTS, Case, all_pairs
from attention_cases.gated import DEVICE, Gated, execute, run_in_warp_groups

pytestmark = [pytest.mark.L1, pytest.mark.usefixtures("interpreted")]

GATES = ("full", "heads", "batch rows", "columns")
PAIRS = all_pairs(seed=7, most=24)
# What pairs need not hold.
MORE: list[tuple[Case, dict[str, Any]]] = [
    (Case(stats="natural"), {}),
    (Case(layout="gaps", sizes=(96, 96), dtype="float16"), {"gate": "batch rows"}),
    (Case(layout="bshd", out="float32"), {"kind": "float16", "is_endless": True}),
    (Case(dtype="float32", sizes=(16, 16), rows=20), {"gate": "batch heads columns"}),
    (Case(band="causal", values="hidden_nan", rows=33, keys=70, stats="all"), {}),
    (Case(place="ragged", lengths="sums", index="int64", sizes=(96, 40)), {"is_swapped": True}),
    (Case(rows=3, keys=257, heads=(3, 1), band="bottom_right", lengths="sums"), {"gate": "rows"}),
]


@pytest.mark.parametrize(("case", "gate"), MORE, ids=str)
def test_more_gates_behind_attention(case: Case, gate: dict[str, Any]) -> None:
    Gated(case, DEVICE, **gate).run(execute)


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_a_gate_behind_pairs_of_features(number: int) -> None:
    rows, keys = SMALL_EXTENTS[number % len(SMALL_EXTENTS)]
    case = replace(PAIRS[number], rows=rows, keys=keys, seed=number)
    gate = GATES[number % 4] if number % 3 else "full"
    Gated(case, DEVICE, gate, is_swapped=number % 2 == 0).run(execute)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("band", ["open", "bottom_right", "window"])
def test_a_gate_behind_warp_groups(
    band: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = "normal" if band == "open" else "hidden_nan"
    case = Case(rows=64, keys=64, band=band, values=values, sizes=(32, 40), stats="natural")
    run_in_warp_groups(case, monkeypatch, is_apart=is_apart)


COMPILE = """
import tilewright as tw
from tilewright.engines.compiled.planned import KernelPlan, slot_numbers
from tilewright.engines.triton import attention
from tilewright.engines.triton.attention_config import ForwardConfig
from tilewright.engines.triton.attention_gate import read_graph
from tilewright.engines.triton.attention_gate_rows import gate_kernel
from tilewright.engines.triton.attention_specialized import specialized_plan
from tilewright.graph.enums import knob_type as K

def declared(rows, keys, heads):
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q, gate = (graph.tensor((2, 4, rows, 16)) for _ in range(2))
    k, v = (graph.tensor((2, heads, keys, 16)) for _ in range(2))
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True, use_causal_mask=rows > 1)
    graph.mul(o, graph.sigmoid(gate)).set_output(True)
    graph.validate()
    return graph

small = ((K.TILE_M, 16), (K.TILE_N, 16), (K.WARPS, 4), (K.STAGES, 1))
graph = declared(16, 16, 4)
plans = [attention.plan(graph, small, 108)]
config = ForwardConfig(16, 16, 4, 2, programs=3)
spec, slots = read_graph(graph), slot_numbers(graph)
plans.append(specialized_plan(spec, slots, config, is_aligned=False))
plans.append(KernelPlan((gate_kernel(spec, slots, is_aligned=False),)))
graph = declared(1, 512, 2)
for splits in (1, 4):
    plans.append(attention.plan(graph, (*small, (K.SPLIT_K, splits)), 108))
kernels = {kernel.spec.name: kernel for plan in plans for kernel in plan.kernels}
for kernel in kernels.values():
    assert "gate" in dict(kernel.spec.types) or kernel.spec.name == "attention_decode", kernel
    for target in TARGETS:
        told.append(facts_of(kernel, target))
"""


def test_all_gated_kernels_compile_for_four_targets(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    parts = ("forward", "forward_specialized", "repair", "gate", "decode", "combine")
    found = {(facts["kernel"], facts["target"]) for facts in compiled_facts(COMPILE)}
    targets = ((8, 0), (9, 0), (10, 0), (12, 0))
    assert found == {(f"attention_{part}", target) for part in parts for target in targets}
