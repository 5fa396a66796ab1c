"""Packed sequences in the kernel of warp groups, against the oracle; interpreted here.

The compiler's deal of warps is SM90's; the interpreter runs the same loops on plain loads.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from attention_cases.case import Case
from attention_cases.running import Declared
from attention_cases.warp_groups import execute, plan_with

import tilewright as tw
from tilewright.engines.triton import attention_config
from tilewright.engines.triton.attention_config import choose_config
from tilewright.engines.triton.attention_packed import packed_plan, packed_units
from tilewright.engines.triton.attention_packed_order import HEADER, WORDS
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec
from tilewright.engines.triton.engine import interpreting

interprets = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="interprets kernels")


def packed(**levels: Any) -> Case:
    return Case(**{"place": "ragged", "lengths": "sums", **levels})


CASES = [
    (packed(rows=70, keys=50, batch=5, band="causal", index="int64", heads=(4, 2)), True),
    (packed(rows=40, keys=64, batch=3, stats="all"), False),
    (packed(rows=50, keys=70, band="bottom_right", heads=(3, 1), sink="same", stats="log2"), True),
    (packed(rows=70, keys=70, band="window", batch=3, dtype="float16"), True),
    (packed(rows=40, keys=50, band="band_bottom_right", out="float32", sizes=(64, 40)), False),
]


@pytest.mark.L0
@interprets
@pytest.mark.parametrize(("case", "is_persistent"), CASES, ids=str)
def test_packed_sequences(case: Case, is_persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_persistent:
        monkeypatch.setattr(attention_config, "DEALT_SHARED_BYTES", 0)
    taken = plan_with(packed_plan, monkeypatch)
    with interpreting():
        Declared(case, "cpu").run(execute)
    names = [kernel.spec.name for kernel in taken[-1].kernels]
    assert names == ["order_packed", "attention_forward_packed", "attention_packed_repair"]


@pytest.mark.L0
@interprets
def test_of_lengths_that_pass_the_declared_bound_no_more_are_placed_than_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_with(packed_plan, monkeypatch)
    sums = torch.arange(0, 1201, 40).int().view(-1, 1, 1, 1)
    graph = tw.Graph(io_data_type="float32", handle=tw.create_handle("cpu"))
    total = graph.tensor(sums.shape, data_type="int32")
    ragged = {"ragged_offset": total, "ragged_offset_multiplier": 32}
    dim, stride = (30, 2, 40, 16), (1280, 16, 32, 1)
    q, k, v = (graph.tensor(dim, stride, "bfloat16", **ragged) for _ in "qkv")
    masks = {"use_padding_mask": True, "cu_seq_len_q": total, "cu_seq_len_kv": total}
    bounds = {"max_total_seq_len_q": 16, "max_total_seq_len_kv": 1200}
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True, **masks, **bounds)
    o.set_output(True).set_dim(dim).set_stride(stride).set_data_type("bfloat16")
    o.set_ragged_offset(total).set_ragged_offset_multiplier(32)
    tokens = torch.ones(1200, 2, 16, dtype=torch.bfloat16)
    with interpreting():
        graph.build()
        size = graph.get_workspace_size()
        memory = torch.full((size,), 0xAB, dtype=torch.uint8)
        pack = {total: sums, q: tokens, k: tokens, v: tokens, o: torch.zeros_like(tokens)}
        graph.execute(pack, memory)
    # One whole tile, and a last one a sequence; the lengths have 90.
    units = 16 // 16 + 30
    assert memory[:8].view(torch.int32).tolist() == [units, 0]
    assert size == 4 * (HEADER.value + (WORDS.value + 2) * units)


def spec_of(case: Case) -> AttentionSpec:
    graph = Declared(case, "cpu").graph
    graph.validate()
    return read_spec(graph.operations[0])


@pytest.mark.L0
def test_plain_scores_of_packed_operands_are_dealt() -> None:
    wide = {"rows": 130, "keys": 70, "sizes": (128, 128)}
    for levels, is_taken in (
        ({}, True),
        ({"band": "window", "sink": "same", "stats": "all", "lengths": "lengths"}, True),
        ({"sizes": (256, 256), "heads": (3, 1)}, True),
        ({"sizes": (128, 72)}, True),
        # Of a row of Q a head would bring the next one's first elements.
        ({"sizes": (96, 128)}, False),
        ({"sizes": (64, 64)}, False),
        ({"rows": 64}, False),
        ({"alibi": True}, False),
        ({"scale": "negative"}, False),
        ({"dtype": "float32"}, False),
        ({"place": "ragged_kv"}, False),
    ):
        case = packed(**{**wide, **levels})
        assert choose_config(spec_of(case), 132, deals_warps=True).is_specialized is is_taken, case


def declared(batch: int, rows: int, multiplier: int = 512, **options: Any) -> AttentionSpec:
    """4 heads of 128, O dense or ragged."""
    graph = tw.Graph(io_data_type="bfloat16")
    sums = graph.tensor((batch + 1, 1, 1, 1), data_type="int32")
    ragged = {"ragged_offset": sums, "ragged_offset_multiplier": multiplier}
    dim, stride = (batch, 4, rows, 128), (rows * 512, 128, 512, 1)
    q, k, v = (graph.tensor(dim, stride, **ragged) for _ in "qkv")
    is_dense = options.pop("is_dense", False)
    masks = {"use_padding_mask": True, "cu_seq_len_q": sums, "cu_seq_len_kv": sums, **options}
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True, **masks)
    o.set_output(True).set_dim(dim).set_stride(stride)
    if not is_dense:
        o.set_ragged_offset(sums).set_ragged_offset_multiplier(multiplier)
    graph.validate()
    return read_spec(graph.operations[0])


@pytest.mark.L0
def test_sequences_that_are_not_whole_rows_or_too_many_are_not_dealt() -> None:
    for spec, is_taken in (
        (declared(3, 200), True),
        (declared(3, 200, multiplier=1024), True),
        # Elements: a sequence might start within a row.
        (declared(3, 200, multiplier=8), False),
        # Padded rows would have to be written.
        (declared(3, 200, is_dense=True), False),
        (declared(1, 128 * 2**14 - 128), True),
        (declared(1, 128 * 2**14), False),
        (declared(2**14, 128 * 2**13), False),
    ):
        config = choose_config(spec, 132, deals_warps=True)
        assert config.is_specialized is is_taken, (spec.batch, spec.rows)


@pytest.mark.L0
def test_a_bound_of_the_queries_bounds_the_units() -> None:
    spec = declared(100, 1000)
    assert packed_units(spec, 128, in_pairs=False) == 800
    assert packed_units(spec, 128, in_pairs=True) == 400
    spec = declared(100, 1000, max_total_seq_len_q=5000, max_total_seq_len_kv=5000)
    assert packed_units(spec, 128, in_pairs=False) == 39 + 100


COMPILE = """
import json
import triton
from test_triton_attention_packed import declared
from tilewright.engines.compiled.compiler import TARGETS, compile_kernel
from tilewright.engines.triton.attention_config import ForwardConfig, choose_config
from tilewright.engines.triton.attention_packed import packed_plan

class Slots(dict):
    def __missing__(self, uid):
        return 0

threads = []
small = ForwardConfig(16, 16, 4, 2, programs=3)
spec = declared(3, 200, use_causal_mask=True)
for kernel in packed_plan(spec, Slots(), small, is_aligned=False).kernels:
    threads += [compile_kernel(kernel.spec, target).threads for target in TARGETS]
dealt = []
if triton.__version__.startswith("3.6."):
    for masks in ({}, {"use_causal_mask": True}):
        spec = declared(3, 200, **masks)
        config = choose_config(spec, 132, deals_warps=True)
        kernel = packed_plan(spec, Slots(), config, is_aligned=True).kernels[1]
        dealt.append(compile_kernel(kernel.spec, (9, 0)).threads)
print(json.dumps([threads, dealt]))
"""


@pytest.mark.L1
def test_the_kernels_compile_for_four_targets_and_are_dealt_to_three_warp_groups() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folder = os.path.dirname(__file__)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [folder, os.environ.get("PYTHONPATH")])
    )
    child = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr
    threads, dealt = json.loads(child.stdout)
    assert threads == [256] * 4 + [128] * 8
    # One warp group that loads, two that compute; only this compiler's deal is taken.
    assert dealt in ([], [384] * 2)
