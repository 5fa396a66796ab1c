"""Triton's attention backward against the oracle: interpreted without a GPU, compiled on one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import SMALL_EXTENTS, Case, all_pairs

import tilewright as tw

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
GUARD = 64
# The first ones have the most pairs.
SMOKE = 12
SAMPLE = [
    pytest.param(
        replace(backward_case(case), rows=rows, keys=keys, seed=number),
        marks=pytest.mark.L0 if number < SMOKE else pytest.mark.L1,
    )
    for number, case in enumerate(all_pairs(seed=2, most=60))
    for rows, keys in (SMALL_EXTENTS[number % len(SMALL_EXTENTS)],)
]


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """On Triton, with a guard behind the workspace."""
    graph.deselect_engines(["hopper"])
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    size = graph.get_workspace_size()
    workspace = torch.full((size + GUARD,), 0xAB, dtype=torch.uint8, device=DEVICE)
    graph.execute(pack, workspace)
    assert (workspace[size:] == 0xAB).all(), "nothing beyond the stated workspace is touched"


# Each mask and each feature alone, and what broke other libraries.
FOUND = [
    Case(band="causal", sizes=(64, 64), heads=(4, 2)),
    Case(band="window", rows=70, keys=70, values="hidden_nan", dtype="float16"),
    Case(rows=5, keys=2, band="bottom_right", stats="natural", sink="same"),
    Case(band="band_bottom_right", place="ragged", lengths="lengths", index="int64"),
    Case(bias="hiding", dtype="float16", sizes=(16, 16)),
    Case(bias="keys", alibi=True, heads=(4, 2), sizes=(16, 16), rows=17, keys=33),
    Case(dropout="philox", soft_cap="mul", dtype="float16", sizes=(16, 16)),
    Case(bias="keys", dropout="philox", sizes=(16, 16), rows=17, keys=33, heads=(4, 2)),
    Case(dtype="float32", soft_cap="huge", sizes=(16, 16), rows=17, keys=33),
    Case(lengths="sums", values="hidden_nan", batch=3, layout="stepped", sizes=(16, 16)),
    Case(block_mask=True, rows=20, keys=129, sizes=(16, 16), sink="float32"),
    Case(dtype="float32", sizes=(40, 72), rows=17, keys=33, scale="device"),
    # All that acts on a bias's gradient.
    Case(
        bias="full",
        alibi=True,
        soft_cap="div",
        dropout="mask",
        block_mask=True,
        sink="same",
        band="bottom_right",
        lengths="lengths",
        heads=(4, 2),
        sizes=(16, 16),
        rows=17,
        keys=33,
    ),
    # Several tiles of rows and of keys.
    Case(band="causal", heads=(4, 2), sizes=(16, 16), batch=3, rows=130, keys=130),
]


@pytest.mark.L0
@pytest.mark.parametrize("case", FOUND, ids=str)
def test_each_feature(case: Case) -> None:
    DeclaredBackward(backward_case(case), DEVICE).run(execute)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_sample_of_all_pairs(case: Case) -> None:
    DeclaredBackward(case, DEVICE, is_deterministic=case.seed % 2 == 0).run(execute)


@pytest.mark.L0
@pytest.mark.parametrize("is_deterministic", [True, False])
def test_workspace_is_the_row_statistics(is_deterministic: bool) -> None:
    case = backward_case(Case(rows=100, batch=2))
    graph = DeclaredBackward(case, DEVICE, is_deterministic=is_deterministic).graph
    graph.deselect_engines(["hopper"])
    graph.build()
    # Two numbers for each row of two heads of two sequences; rows are padded to whole tiles.
    assert graph.get_workspace_size() == 2 * 2 * 2 * 128 * 4


@pytest.mark.L0
def test_no_sequence_is_left_to_another_engine() -> None:
    declared = DeclaredBackward(backward_case(Case(batch=0)), DEVICE)
    declared.graph.build()
    assert declared.graph.selected_engine == "aten"


@pytest.mark.L0
def test_what_is_not_taken_is_declined_by_name() -> None:
    graph = tw.Graph(io_data_type="float16", handle=tw.create_handle(DEVICE))
    q, k, v, o, d_o = (graph.tensor((1, 1, 4, 16)) for _ in range(5))
    stats = graph.tensor((1, 1, 4, 1), data_type="float32")
    made = graph.sdpa_backward(
        q, k, v, o, d_o, stats,
        score_mod=lambda g, score: g.tanh(score),
        score_mod_bprop=lambda g, d_score, score: g.tanh_backward(d_score, score),
    )  # fmt: skip
    for tensor in made:
        tensor.set_output(True)
    graph.build()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert graph.selected_engine == "aten" and "score_mod_bprop is given" in verdict.reason


COMPILE = """
import tilewright as tw
from tilewright.engines.triton import attention_backward

def declare(dtype, depth, depth_v, rows, **arguments):
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    q, k = graph.tensor((2, 4, rows, depth)), graph.tensor((2, 2, 300, depth))
    v, o, d_o = (
        graph.tensor(dim) for dim in ((2, 2, 300, depth_v), *[(2, 4, rows, depth_v)] * 2)
    )
    stats = graph.tensor((2, 4, rows, 1), data_type="float32")
    if arguments.pop("everything", False):
        lengths = graph.tensor((2, 1, 1, 1), data_type="int32")
        arguments |= dict(
            use_padding_mask=True, seq_len_q=lengths, seq_len_kv=lengths, use_alibi_mask=True,
            bias=graph.tensor((1, 1, rows, 300)), dropout=(0.1, graph.tensor_scalar(1),
            graph.tensor_scalar(2)), sink_token=graph.tensor((1, 4, 1, 1)),
            block_mask=graph.tensor((2, 4, (rows + 127) // 128, 1), data_type="uint8"),
            score_mod=lambda g, s: g.mul(g.tanh(s), g.tensor_scalar(2.0)),
            dBias=graph.tensor(), dSink_token=graph.tensor(),
        )
    made = graph.sdpa_backward(q, k, v, o, d_o, stats, attn_scale=0.1, **arguments)
    for tensor in (*made, *(arguments.get(name) for name in ("dBias", "dSink_token"))):
        if tensor is not None:
            tensor.set_output(True)
    graph.validate()
    return graph

for graph, aligned, sm_count in (
    (declare("bfloat16", 128, 128, 300, use_causal_mask=True), True, 108),
    (declare("float16", 192, 128, 300, everything=True, sliding_window_length=70), False, 108),
    (declare("float32", 64, 64, 300), False, 108),
    # Kernels with tensor maps are for SM90 alone.
    (declare("bfloat16", 128, 128, 320, use_causal_mask=True), True, 132),
    (declare("float16", 192, 128, 320), True, 132),
):
    knobs = attention_backward.propose(graph, sm_count)[0].knobs
    plan = attention_backward.plan(graph, knobs, sm_count)
    for kernel in (plan if aligned else plan.fallback).kernels:
        for target in TARGETS if sm_count == 108 else [(9, 0)]:
            told.append(facts_of(kernel, target))
"""


@pytest.mark.L1
def test_every_kernel_compiles_for_four_targets_and_is_called_as_compiled(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    results = compiled_facts(COMPILE)
    assert {result["target"] for result in results} == {(8, 0), (9, 0), (10, 0), (12, 0)}
    parts = ("prepare", "keys", "rows", "sink", "bias", "plain_keys", "plain_rows")
    assert {r["kernel"] for r in results} == {f"attention_backward_{part}" for part in parts}


TIGHT = """
import tilewright as tw
from tilewright.engines.triton import attention_backward

for dtype, depth, has_bias in (("bfloat16", 256, False), ("float32", 128, True)):
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    q, k, v, o, d_o = (graph.tensor((2, 2, 512, depth)) for _ in range(5))
    stats, bias = graph.tensor((2, 2, 512, 1), data_type="float32"), graph.tensor((1, 1, 1, 512))
    given = dict(bias=bias, dBias=graph.tensor()) if has_bias else {}
    made = [*graph.sdpa_backward(q, k, v, o, d_o, stats, attn_scale=0.1, **given)]
    for tensor in (*made, given.get("dBias")):
        if tensor is not None:
            tensor.set_output(True)
    graph.validate()
    knobs = attention_backward.propose(graph, 188)[0].knobs
    for kernel in attention_backward.plan(graph, knobs, 188).kernels:
        shared = compile_kernel(kernel.spec, (12, 0)).shared_bytes
        told.append(facts_of(kernel, (12, 0)) | {"shared_bytes": shared})
"""


@pytest.mark.L1
def test_wide_heads_fit_into_the_shared_memory_of_sm120(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    found = compiled_facts(TIGHT)
    parts = {"attention_backward_keys", "attention_backward_rows", "attention_backward_bias"}
    assert {facts["kernel"] for facts in found} > parts
    assert all(facts["shared_bytes"] <= 99 * 1024 for facts in found), found
