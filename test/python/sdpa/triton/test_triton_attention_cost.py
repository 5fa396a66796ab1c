"""The cost model ranks tiles by a device's facts; the devices here are not there."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from tilewright.engines.triton import attention
from tilewright.engines.triton.attention_config import (
    INTERPRETED_SM_COUNT,
    ForwardConfig,
    Sharing,
    goes_in_pairs,
    takes_many_tiles,
)
from tilewright.engines.triton.attention_cost import (
    DEVICE_FACTS,
    DeviceFacts,
    cost_us,
    facts_of,
    ranked_configs,
)
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
H200 = facts_of(132)
CAUSAL = {"use_causal_mask": True}


def graph_of(
    rows: int,
    keys: int,
    *,
    batch: int = 8,
    heads: tuple[int, int] = (16, 16),
    depth: int = 128,
    **arguments: Any,
) -> Any:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q = graph.tensor((batch, heads[0], rows, depth))
    k, v = (graph.tensor((batch, heads[1], keys, depth)) for _ in range(2))
    o, _ = graph.sdpa(q, k, v, is_inference=True, **arguments)
    o.set_output(True)
    graph.validate()
    return graph


def spec_of(rows: int, keys: int, **options: Any) -> AttentionSpec:
    return read_spec(graph_of(rows, keys, **options).operations[0])


def best(spec: AttentionSpec, facts: DeviceFacts) -> ForwardConfig:
    configs = ranked_configs(spec, facts.multiprocessors)
    return min(configs, key=lambda config: cost_us(spec, config, facts))


def test_facts_are_one_table() -> None:
    counts = [facts.multiprocessors for facts in DEVICE_FACTS]
    assert len(set(counts)) == len(counts) and facts_of(148).name == "B200"
    unknown = facts_of(54)
    assert unknown.multiprocessors == 54 and unknown.shared_kib == 99
    assert unknown.matrix_tflop_s == pytest.approx(facts_of(108).matrix_tflop_s / 2)


def test_costs_are_microseconds_within_a_factor_of_two() -> None:
    # What is committed is the first plan's time, in whatever order plans were ranked then.
    path = ROOT / "benchmark" / "results" / "nvidia_h200" / "attention.csv"
    rows = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    heads = {"64": 32, "128": 16, "256": 8}
    compared = 0
    for row in csv.DictReader(rows):
        masks = {"none": {}, "causal": {"use_causal_mask": True}}
        if row["who"] != "tilewright triton":
            continue
        if row["kind"] == "dense":
            length = int(row["length"])
            options = {"batch": 16384 // length, "heads": (heads[row["depth"]],) * 2}
            options |= masks[row["mask"]]
            spec = spec_of(length, length, depth=int(row["depth"]), **options)
        elif row["kind"] == "decode" and row["mask"] == "even":
            spec = spec_of(1, int(row["length"]), heads=(32, 8))
        else:
            continue
        measured = float(row["ms"]) * 1e3
        estimate = cost_us(spec, ranked_configs(spec, 132)[0], H200)
        assert measured / 2.2 <= estimate <= measured * 2.2, (row, estimate)
        compared += 1
    assert compared >= 20


def test_of_the_plans_that_were_measured_a_quick_one_comes_first() -> None:
    path = ROOT / "benchmark" / "results" / "nvidia_h200" / "attention_plans.csv"
    rows = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    measured: dict[tuple[str, ...], dict[str, float]] = {}
    for row in csv.DictReader(rows):
        declared = tuple(row.values())[:7]
        measured.setdefault(declared, {})[row["plan"]] = float(row["us"])
    bands: dict[str, dict[str, Any]] = {"none": {}, "causal": {"use_causal_mask": True}}
    bands["window 1024"] = {"use_causal_mask": True, "sliding_window_length": 1024}
    compared = 0
    for (*extents, band), times in measured.items():
        batch, heads, heads_kv, queries, keys, depth = map(int, extents)
        options = {"batch": batch, "heads": (heads, heads_kv), "depth": depth, **bands[band]}
        spec = spec_of(queries, keys, attn_scale=depth**-0.5, **options)
        costs = {}
        for config in ranked_configs(spec, 132, deals_warps=True):
            knobs = ",".join(f"{knob.name}={value}" for knob, value in config.knobs())
            costs[f"triton:{knobs}"] = cost_us(spec, config, H200)
        # Plans that came since are not in the file.
        known = costs.keys() & times.keys()
        if len(known) < 2:
            continue
        first = min(known, key=lambda name: (costs[name], list(costs).index(name)))
        assert times[first] <= 1.1 * min(times[name] for name in known), (extents, band, costs)
        compared += 1
    assert compared >= 20


def test_a_plan_says_its_cost_and_the_least_comes_first() -> None:
    for rows, keys in ((2048, 2048), (1, 4096), (16, 300)):
        proposals = attention.propose(graph_of(rows, keys, heads=(16, 4)), 132)
        costs = [proposal.cost for proposal in proposals]
        assert costs == sorted(costs) and costs[0] > 1.0
        assert len({proposal.knobs for proposal in proposals}) == len(proposals) > 1


def test_what_masks_skip_costs_nothing() -> None:
    whole = spec_of(8192, 8192, batch=1)
    causal = spec_of(8192, 8192, batch=1, use_causal_mask=True)
    window = spec_of(8192, 8192, batch=1, use_causal_mask=True, sliding_window_length=512)
    config = ranked_configs(whole, 132)[0]
    costs = [cost_us(spec, config, H200) - H200.launch_us for spec in (whole, causal, window)]
    assert costs[0] / 2 < costs[1] < costs[0] * 0.6
    assert costs[0] * 512 / 8192 < costs[2] < costs[0] * 1250 / 8192


def test_keys_are_split_where_programs_are_too_few() -> None:
    few, many = spec_of(1, 8192, batch=1, heads=(8, 2)), spec_of(1, 8192, batch=256, heads=(8, 2))
    assert best(few, H200).splits > 1
    assert best(many, H200).splits <= 1
    # A combination is a launch more, which short sequences do not pay for.
    assert best(spec_of(1, 300, batch=8, heads=(32, 8)), H200).splits == 1


# Kernels of two shapes, and two numbers of runs.
LARGE, SMALL = ForwardConfig(128, 64, 8, 4), ForwardConfig(64, 64, 4, 2)
SPLIT, WHOLE = ForwardConfig(16, 64, 4, 4, 8), ForwardConfig(16, 64, 4, 4, 1)


def is_before(spec: AttentionSpec, facts: DeviceFacts, *configs: ForwardConfig) -> bool:
    first, second = (cost_us(spec, config, facts) for config in configs)
    return first < second


def test_facts_decide() -> None:
    square = spec_of(1024, 1024, batch=1)
    # 128 large tiles occupy 132 multiprocessors once; on half of them, twice.
    assert is_before(square, H200, LARGE, SMALL)
    half = cost_us(square, LARGE, replace(H200, multiprocessors=66, matrix_tflop_s=395.0))
    assert half > 1.6 * cost_us(square, LARGE, H200)
    # Small tiles come first where they start much sooner, or where their scores cost no more.
    assert is_before(square, replace(H200, start_of_eight_us=20.0), SMALL, LARGE)
    assert is_before(square, replace(H200, small_tile_factor=0.7, wait_us=0.5), SMALL, LARGE)
    decode = spec_of(1, 2048, batch=4, heads=(8, 2))
    assert is_before(decode, H200, SPLIT, WHOLE)
    assert is_before(decode, replace(H200, combine_us=500.0), WHOLE, SPLIT)
    # Scores are products and exponentials.
    for fact in ("exponentials_a_us", "matrix_tflop_s"):
        slow = replace(H200, **{fact: getattr(H200, fact) / 100})
        assert cost_us(square, LARGE, slow) > 10 * cost_us(square, LARGE, H200), fact
    large = spec_of(1, 32768, heads=(32, 8))
    slow = replace(H200, copy_tb_s=H200.copy_tb_s / 2)
    assert cost_us(large, SPLIT, slow) > 1.8 * cost_us(large, SPLIT, H200)


def test_tiles_of_a_program_that_takes_many_start_by_a_fact_of_their_own() -> None:
    square = spec_of(512, 512, batch=32, attn_scale=0.1)
    dealt = ranked_configs(square, 132, deals_warps=True)[0]
    assert takes_many_tiles(square, dealt)
    for fact, changes in (("start_of_dealt_us", True), ("start_of_eight_us", False)):
        slow = replace(H200, **{fact: 100.0})
        assert (cost_us(square, dealt, slow) != cost_us(square, dealt, H200)) is changes, fact


def test_a_program_of_pairs_has_an_even_number_of_tiles() -> None:
    # 44 heads a round: of 5 tiles each, pairs are 3 and take as long as those of 6.
    odd, even = (spec_of(128 * n, 768, batch=11, attn_scale=0.1, **CAUSAL) for n in (5, 6))
    alone = spec_of(128, 768, batch=11, attn_scale=0.1, **CAUSAL)
    dealt = ranked_configs(odd, 132, deals_warps=True)[0]
    assert goes_in_pairs(odd, dealt) and not goes_in_pairs(alone, dealt)
    starts = [
        cost_us(spec, dealt, replace(H200, start_of_dealt_us=1000.0)) // 1000
        for spec in (alone, odd, even)
    ]
    assert starts == [2, 8, 8]


def test_a_combination_that_begins_beside_the_runs_costs_no_launch() -> None:
    decode = spec_of(1, 2048, batch=4, heads=(8, 2))
    early = replace(SPLIT, sharing=Sharing(264, is_early=True))
    late = replace(SPLIT, sharing=Sharing(264))
    saved = cost_us(decode, late, H200) - cost_us(decode, early, H200)
    assert saved == pytest.approx(H200.combine_us)


def test_the_interpreter_takes_the_first_guess() -> None:
    graph = graph_of(1, 300, heads=(8, 2))
    spec = read_spec(graph.operations[0])
    guessed = [config.knobs() for config in ranked_configs(spec, INTERPRETED_SM_COUNT)]
    proposals = attention.propose(graph, INTERPRETED_SM_COUNT)
    assert [proposal.knobs for proposal in proposals] == guessed


def test_nothing_to_do_costs_nothing() -> None:
    assert cost_us(spec_of(0, 8), LARGE, H200) == 0.0
