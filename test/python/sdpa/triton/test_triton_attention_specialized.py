"""The forward kernel of warp groups, and the one behind it, against the oracle; interpreted here.

The compiler's deal of warps is SM90's; the interpreter runs the same loops on plain loads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from attention_cases.case import Case
from attention_cases.running import Declared
from attention_cases.warp_groups import execute, plan_with

import tilewright as tw
from tilewright.engines.triton import attention_config, attention_specialized
from tilewright.engines.triton.attention_arguments import KernelArguments
from tilewright.engines.triton.attention_config import (
    choose_config,
    has_even_edges,
)
from tilewright.engines.triton.attention_cost import ranked_configs
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec
from tilewright.engines.triton.attention_specialized import specialized_plan
from tilewright.engines.triton.engine import interpreting

pytestmark = pytest.mark.L0

interprets = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="interprets kernels")


CASES = [
    Case(rows=40, keys=64, stats="all"),
    Case(rows=33, keys=50, heads=(4, 2), layout="bshd", sink="same", stats="log2"),
    Case(rows=64, keys=64, band="causal", values="hidden_nan", stats="natural"),
    Case(rows=64, keys=33, band="causal", batch=1, sizes=(40, 72)),
    Case(rows=70, keys=33, band="bottom_right", heads=(3, 1), stats="all", sink="float32"),
    Case(rows=33, keys=70, band="window", values="hidden_nan", layout="gaps"),
    Case(rows=40, keys=50, band="band", dtype="float16", values="hidden_nan"),
    Case(rows=50, keys=40, band="band_bottom_right", values="hidden_nan", out="float32"),
]


@interprets
@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_warp_groups_compute_attention(
    case: Case, is_persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last group of heads is a smaller one.
    monkeypatch.setattr(attention_specialized, "heads_at_a_time", lambda _: 3)
    if not is_persistent:
        monkeypatch.setattr(attention_config, "DEALT_SHARED_BYTES", 0)
    taken = plan_with(specialized_plan, monkeypatch)
    with interpreting():
        Declared(case, "cpu").run(execute)
    names = [kernel.spec.name for kernel in taken[-1].kernels]
    behind = ["attention_repair"] if case.band != "open" else []
    assert names == ["attention_forward_specialized", *behind]


COMPILE = """
import json
import triton
import tilewright as tw
from tilewright.engines.compiled.compiler import TARGETS, compile_kernel
from tilewright.engines.compiled.planned import slot_numbers
from tilewright.engines.triton.attention_config import ForwardConfig, choose_config
from tilewright.engines.triton.attention_spec import read_spec
from tilewright.engines.triton.attention_specialized import specialized_plan

def declared(depth, **masks):
    graph = tw.Graph(io_data_type="bfloat16", handle=tw.create_handle("cpu"))
    q, k, v = (graph.tensor((2, 4, 256, depth)) for _ in "qkv")
    o, stats = graph.sdpa(q, k, v, generate_stats=True, attn_scale=0.1, **masks)
    o.set_output(True)
    stats.set_output(True)
    graph.validate()
    return read_spec(graph.operations[0]), slot_numbers(graph)

threads = []
spec, slots = declared(64, use_causal_mask=True, sliding_window_length=100)
small = ForwardConfig(16, 16, 4, 2, programs=3)
for kernel in specialized_plan(spec, slots, small, is_aligned=False).kernels:
    threads += [compile_kernel(kernel.spec, target).threads for target in TARGETS]
dealt = []
if triton.__version__.startswith("3.6."):
    for depth, masks in ((96, {}), (128, {"use_causal_mask": True}), (256, {})):
        spec, slots = declared(depth, **masks)
        config = choose_config(spec, 132, deals_warps=True)
        kernel = specialized_plan(spec, slots, config, is_aligned=True).kernels[0]
        dealt.append(compile_kernel(kernel.spec, (9, 0)).threads)
print(json.dumps([threads, dealt]))
"""


def test_the_kernels_compile_for_four_targets_and_are_dealt_to_three_warp_groups() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr
    threads, dealt = json.loads(child.stdout)
    assert threads == [128] * 8
    # One warp group that loads, two that compute; only this compiler's deal is taken.
    assert dealt in ([], [384] * 3)


def test_divisors_of_tiles_and_heads_are_exact() -> None:
    most = 2**31 - 1
    for divisor in (1, 2, 3, 5, 7, 12, 127, 128, 129, 641, 2**15 + 1, 2**30 - 1, 2**30 + 1, most):
        arguments = KernelArguments({})
        arguments.divisor("some", divisor)
        factor, shift = (arguments.values[name].value for name in ("by_some", "some_shift"))
        assert most * factor < 2**63
        for number in range(0, most, most // 97):
            for near in (
                number,
                number // divisor * divisor,
                number // divisor * divisor - 1,
                most,
            ):
                if near >= 0:
                    assert near * factor >> shift == near // divisor


def test_only_plain_scores_of_dense_operands_are_dealt() -> None:
    for case, is_taken in (
        (Case(rows=128, keys=70, sizes=(128, 128), band="causal"), True),
        (Case(rows=192, keys=33, sizes=(256, 256), band="window", sink="same"), True),
        (Case(rows=128, keys=70, sizes=(192, 128)), True),
        (Case(rows=128, keys=70, sizes=(128, 128), lengths="lengths"), False),
        (Case(rows=130, keys=70, sizes=(128, 128)), False),
        (Case(rows=64, keys=70, sizes=(128, 128)), False),
        (Case(rows=128, keys=70, sizes=(64, 64)), False),
        (Case(rows=128, keys=70, sizes=(128, 128), alibi=True), False),
        (Case(rows=128, keys=70, sizes=(128, 128), scale="negative"), False),
        (Case(rows=128, keys=70, sizes=(128, 128), scale="device"), False),
        (Case(rows=128, keys=70, sizes=(128, 128), dtype="float32"), False),
        (Case(rows=128, keys=70, sizes=(128, 128), block_mask=True), False),
        (Case(rows=128, keys=70, sizes=(128, 128), dropout="philox"), False),
        # In float32, O on its way out has no room beside what is loaded.
        (Case(rows=128, keys=70, sizes=(128, 128), out="float32"), False),
    ):
        graph = Declared(case, "cpu").graph
        graph.validate()
        spec = read_spec(graph.operations[0])
        config = choose_config(spec, 132, deals_warps=True)
        assert config.is_specialized is is_taken, case
        assert not choose_config(spec, 132).is_specialized
        if is_taken:
            # A plan is made of its knobs alone: the same, or another kernel's tile.
            assert config.with_knobs(dict(config.knobs())) == config
            ranked = ranked_configs(spec, 132, deals_warps=True)
            assert [each.is_specialized for each in ranked] == [True, False]
            assert all(config.with_knobs(dict(each.knobs())) == each for each in ranked)


def windowed(rows: int, keys: int, **masks: Any) -> AttentionSpec:
    graph = tw.Graph(io_data_type="bfloat16", handle=tw.create_handle("cpu"))
    q, k, v = (graph.tensor((1, 2, length, 128)) for length in (rows, keys, keys))
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True, **masks)
    o.set_output(True)
    graph.validate()
    return read_spec(graph.operations[0])


def test_edges_of_a_window_are_even_where_they_are_diagonals_of_blocks() -> None:
    causal = {"use_causal_mask": True}
    for spec, is_even in (
        (windowed(512, 512, **causal, sliding_window_length=256), True),
        (windowed(512, 512, **causal), False),
        (windowed(512, 512, **causal, sliding_window_length=250), False),
        (windowed(512, 500, **causal, sliding_window_length=256), False),
        (windowed(512, 512, diagonal_band_left_bound=128, diagonal_band_right_bound=128), True),
        (windowed(512, 512, diagonal_band_left_bound=128, diagonal_band_right_bound=5), False),
        (windowed(256, 512, use_causal_mask_bottom_right=True, sliding_window_length=128), True),
        (windowed(320, 512, use_causal_mask_bottom_right=True, sliding_window_length=128), False),
        # The first rows see nothing.
        (windowed(512, 256, use_causal_mask_bottom_right=True, sliding_window_length=128), False),
    ):
        config = choose_config(spec, 132, deals_warps=True)
        assert config.is_specialized
        assert has_even_edges(spec, config) is is_even, (spec.left, spec.right, spec.keys)
        assert not has_even_edges(spec, replace(config, block_n=64))
