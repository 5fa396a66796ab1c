"""Triton's attention forward against the oracle: interpreted without a GPU, compiled on one.

The cases are a sample of all pairs of features; ``test_triton_attention_pairs.py`` has them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.case import SMALL_EXTENTS, Case, all_pairs
from attention_cases.running import Declared, select_split

import tilewright as tw

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
SAMPLE = [
    replace(case, rows=rows, keys=keys, seed=number)
    for number, case in enumerate(all_pairs(seed=1, most=16))
    for rows, keys in (SMALL_EXTENTS[number % len(SMALL_EXTENTS)],)
]


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    graph.deselect_engines(["hopper"])
    select_split(graph)
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    size = graph.get_workspace_size()
    graph.execute(pack, torch.full((max(size, 1),), 0xAB, dtype=torch.uint8, device=DEVICE))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_sample_of_all_pairs(case: Case) -> None:
    Declared(case, DEVICE).run(execute)


# What broke other libraries, and the plain cases of each mask.
FOUND = [
    Case(rows=2, keys=5, band="causal", stats="all"),
    Case(rows=5, keys=2, band="causal", stats="natural"),
    Case(rows=2, keys=5, band="bottom_right", stats="natural"),
    # Rows 0 to 2 see nothing: 0 and -inf.
    Case(rows=5, keys=2, band="bottom_right", stats="all"),
    Case(rows=5, keys=2, band="bottom_right", stats="all", sink="same"),
    Case(rows=70, keys=70, band="window", values="hidden_nan"),
    Case(rows=33, keys=70, band="causal", values="hidden_nan", lengths="lengths", stats="log2"),
    Case(rows=1, keys=128, lengths="lengths", values="hidden_nan", batch=3),
    # Dropped, yet seen, an infinite value is NaN: 0 times it.
    Case(rows=12, keys=5, band="causal", values="hidden_nan", dropout="philox"),
    Case(rows=12, keys=5, band="causal", values="hidden_nan", dropout="mask", sizes=(96, 96)),
    Case(rows=8, keys=8, bias="hiding", sizes=(8, 8), stats="natural"),
    Case(rows=8, keys=13, place="paged_1", stats="natural", heads=(4, 2)),
    Case(rows=20, keys=37, place="paged_16_packed", lengths="sums", index="int64", batch=3),
    Case(rows=20, keys=40, soft_cap="huge", stats="natural", dtype="float32", sizes=(16, 16)),
    # Score programs that are no soft cap.
    Case(rows=33, keys=40, soft_cap="relu", stats="natural", bias="full"),
    Case(rows=20, keys=70, soft_cap="index", band="causal", heads=(4, 2)),
    Case(rows=3, keys=300, soft_cap="index", heads=(4, 2), batch=1),
    # As many rows a key head as fit, whose bias took more shared memory than there is.
    Case(rows=16, keys=300, heads=(4, 1), sizes=(32, 32), bias="full", dtype="float32", batch=1),
]


@pytest.mark.parametrize("case", FOUND, ids=str)
def test_cases_that_broke_others(case: Case) -> None:
    Declared(case, DEVICE).run(execute)


def test_draws_are_the_same_in_every_type() -> None:
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        graph = tw.Graph(io_data_type="bfloat16", handle=tw.create_handle(DEVICE))
        q = torch.ones(2, 3, 7, 16, dtype=torch.bfloat16, device=DEVICE)
        numbers = [torch.full((1, 1, 1, 1), n, device=DEVICE) for n in (5, -3)]
        o, draws = torch.empty_like(q), torch.empty(2, 3, 7, 7, dtype=dtype, device=DEVICE)
        inputs = [graph.tensor_like(t) for t in (q, *numbers)]
        stored = graph.tensor_like(draws).set_output(True)
        made, _ = graph.sdpa(*[inputs[0]] * 3, dropout=(0.5, *inputs[1:]), rng_dump=stored)
        made.set_output(True)
        execute(graph, dict(zip([*inputs, stored, made], [q, *numbers, draws, o], strict=True)))
        found[dtype] = draws.float()
    assert set(found[torch.float32].unique().tolist()) == {0.0, 1.0}
    assert all(torch.equal(draws, found[torch.float32]) for draws in found.values())


# Few queries: their keys are dealt out over programs, and the sums combined.
SPLIT = [
    Case(rows=1, keys=300, heads=(4, 2), lengths="lengths", stats="log2", batch=2),
    Case(rows=3, keys=257, heads=(3, 1), band="bottom_right", lengths="sums", sink="same"),
    Case(rows=1, keys=300, place="paged_16", index="int64", alibi=True, stats="all"),
    Case(rows=1, keys=290, place="paged_16_packed", heads=(3, 1), lengths="lengths", batch=3),
    Case(rows=2, keys=400, band="window", sizes=(96, 40), soft_cap="mul", bias="full"),
]


def test_a_sequence_does_not_depend_on_those_beside_it_where_keys_are_split() -> None:
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(3, 1, n, 32, generator=generator).half() for n in (1, 700, 700))
    made = []
    for others in (700, 0, 65):
        graph = tw.Graph(io_data_type="float16", handle=tw.create_handle(DEVICE))
        tensors = [graph.tensor(t.shape) for t in (q, k, v)]
        lengths = [graph.tensor((3, 1, 1, 1), data_type="int32") for _ in range(2)]
        masks = {"use_padding_mask": True, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]}
        o, _ = graph.sdpa(*tensors, attn_scale=0.2, is_inference=True, **masks)
        o.set_output(True)
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
        counts = torch.tensor([[1, 1, 1], [others, 643, others]], dtype=torch.int32)
        buffers = [t.to(DEVICE) for t in (q, k, v, *counts.view(2, 3, 1, 1, 1))]
        execute(graph, {**dict(zip((*tensors, *lengths), buffers, strict=True)), o: out})
        assert graph.get_workspace_size() > 0
        made.append(out[1].cpu())
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@pytest.mark.parametrize("case", SPLIT, ids=str)
def test_split_keys(case: Case) -> None:
    declared = Declared(case, DEVICE)
    declared.run(execute)
    assert declared.graph.get_workspace_size() > 0


def test_a_negative_window_of_scores_does_not_start_at_zero() -> None:
    # Scores near -120: a running maximum that starts at 0 makes all weights vanish.
    q, k = torch.randn(2, 1, 1, 64, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8.0
    v = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    o = run_plain(q.bfloat16(), k.bfloat16(), v.bfloat16(), use_causal_mask=True)
    assert torch.isfinite(o).all() and o.float().abs().max() > 0.5


def run_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **masks: Any) -> torch.Tensor:
    graph = tw.Graph(io_data_type=q.dtype, handle=tw.create_handle(DEVICE))
    tensors = [graph.tensor(t.shape, t.stride()) for t in (q, k, v)]
    o, _ = graph.sdpa(*tensors, attn_scale=q.shape[3] ** -0.5, is_inference=True, **masks)
    o.set_output(True)
    out = torch.full(o.dim or (*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device=DEVICE)
    pack = dict(zip(tensors, (t.to(DEVICE) for t in (q, k, v)), strict=True))
    execute(graph, {**pack, o: out})
    return out.cpu()


def test_heads_do_not_depend_on_the_batch_beside_them() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, 2, 2, 33, 32, generator=generator).half()
    whole = run_plain(q, k, v, use_causal_mask=True)
    for index in range(2):
        alone = run_plain(*(t[index : index + 1] for t in (q, k, v)), use_causal_mask=True)
        assert torch.equal(alone, whole[index : index + 1])


DECLINES: list[tuple[str, dict[str, Any], str]] = [
    ("head size", {"sizes": (257, 64)}, "has head size 257; the kernels take up to 256"),
    ("double", {"dtype": "float64"}, "has data type DOUBLE"),
]


@pytest.mark.parametrize(
    ("levels", "reason"), [row[1:] for row in DECLINES], ids=[row[0] for row in DECLINES]
)
def test_a_decline_names_the_tensor_and_the_rule(levels: dict[str, Any], reason: str) -> None:
    declared = Declared(Case(**levels), DEVICE)
    declared.graph.build()
    verdict = next(v for v in declared.graph.explain().verdicts if v.engine_name == "triton")
    assert declared.graph.selected_engine == "aten" and reason in verdict.reason


def test_a_score_program_that_reads_a_whole_tensor_is_declined_by_name() -> None:
    graph = tw.Graph(io_data_type="float16", handle=tw.create_handle(DEVICE))
    q, k, v = (graph.tensor((1, 1, 4, 16)) for _ in range(3))
    table = graph.tensor((1, 1, 4, 4), data_type="float32", name="table")
    program = {"score_mod": lambda g, score: g.mul(score, table)}
    o, _ = graph.sdpa(q, k, v, is_inference=True, **program)
    o.set_output(True)
    graph.build()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert "score_mod reads tensor 'table'" in verdict.reason


COMPILE = """
import tilewright as tw
from tilewright.engines.triton import attention
from tilewright.graph.enums import knob_type as K

def declare(dtype, depth, depth_v, rows, **arguments):
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    q = graph.tensor((2, 4, rows, depth))
    k, v = graph.tensor((2, 2, 300, depth)), graph.tensor((2, 2, 300, depth_v))
    if arguments.pop("everything", False):
        lengths = graph.tensor((2, 1, 1, 1), data_type="int32")
        arguments |= dict(
            use_padding_mask=True, seq_len_q=lengths, seq_len_kv=lengths, use_alibi_mask=True,
            bias=graph.tensor((1, 1, rows, 300)), dropout=(0.1, graph.tensor_scalar(1),
            graph.tensor_scalar(2)), sink_token=graph.tensor((1, 4, 1, 1)),
            block_mask=graph.tensor((2, 4, (rows + 127) // 128, 1), data_type="uint8"),
            score_mod=lambda g, s: g.mul(g.tanh(s), g.tensor_scalar(2.0)),
        )
    o, stats = graph.sdpa(q, k, v, generate_stats=True, attn_scale=0.1, **arguments)
    o.set_output(True)
    stats.set_output(True)
    graph.validate()
    return graph

# Tiles small enough that the compiler is quick; what it takes is the same code.
small = ((K.TILE_M, 16), (K.TILE_N, 16), (K.WARPS, 4), (K.STAGES, 2))
for graph, knobs in (
    (declare("float16", 24, 16, 300, everything=True, sliding_window_length=70), small),
    (declare("bfloat16", 16, 16, 2), (*small[1:], (K.SPLIT_K, 4))),
):
    # As many multiprocessors as an SM80 has: no tensor maps, which it cannot read.
    plan = attention.plan(graph, knobs, 108)
    for kernel in plan.kernels:
        for target in TARGETS:
            told.append(facts_of(kernel, target))
graph = declare("bfloat16", 64, 64, 300, use_causal_mask=True)
mapped = attention.plan(graph, ((K.TILE_M, 64), (K.TILE_N, 32), (K.WARPS, 4)), 132)
spec = mapped.kernels[0].spec
assert dict(spec.types)["k_map"] == "tensordesc<bf16[1, 1, 32, 64]>"
assert len(compile_kernel(spec, (9, 0)).image) > 1000
"""


def test_every_kernel_compiles_for_four_targets_and_is_called_as_compiled(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    results = compiled_facts(COMPILE)
    assert {result["target"] for result in results} == {(8, 0), (9, 0), (10, 0), (12, 0)}
