"""Decoding whose programs join their sums in a cluster, on a GPU, held to the oracle.

A case is one compiled kernel at several lengths; together they hold every pair of what the kernel
takes: types, heads, head sizes, layouts, lengths, pages, sinks and statistics.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.case import all_pairs, at_extents
from attention_cases.running import Declared

import tilewright as tw
from tilewright.engines.triton import attention_decode_config
from tilewright.graph.enums import knob_type
from tilewright.launch.cuda_driver import check, driver

HAS_GPU = os.path.exists("/dev/nvidiactl")
pytestmark = [
    pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(
        HAS_GPU and torch.cuda.get_device_capability()[0] != 9, reason="clusters are for SM90"
    ),
]

LEVELS: dict[str, tuple[object, ...]] = {
    "dtype": ("bfloat16", "float16"),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "sizes": ((128, 128), (64, 64), (64, 128), (128, 64)),
    "layout": ("bhsd", "bshd", "gaps", "expanded"),
    "lengths": ("none", "lengths", "sums"),
    "place": ("dense", "paged_16", "paged_48", "paged_1"),
    "sink": ("none", "float32", "same"),
    "stats": ("none", "natural", "log2", "all"),
    "values": ("normal", "hidden_nan", "large"),
    "index": ("int32", "int64"),
    "out": ("same", "float32"),
}
CASES = all_pairs(seed=30, levels=LEVELS)
# Around the ends of blocks of 16 and of runs.
KEYS = (300, 513, 1024)


# Runs of a cluster, and warps of a program.
SHAPES = ((16, 2), (8, 2), (16, 1), (4, 1), (16, 4), (8, 1))


@pytest.fixture(params=SHAPES, ids=str)
def runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many runs a cluster, whether it pays or not."""
    join(*request.param, monkeypatch)
    count: int = request.param[0]
    return count


def join(count: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode_config, "pays_in_registers", lambda *_: True)
    monkeypatch.setattr(attention_decode_config, "_joined_runs", lambda *_: count)
    monkeypatch.setattr(attention_decode_config, "JOINED_WARPS", warps)


def build(graph: Any, count: int) -> None:
    """Select the plan of so many runs, wherever it is ranked, and build it."""
    graph.deselect_engines(["hopper"])
    knobs = [dict(plan.knobs) if plan.engine_name == "triton" else {} for plan in graph.plans]
    graph.select_plan([x.get(knob_type.SPLIT_K) for x in knobs].index(count))
    graph.build()
    assert graph.get_workspace_size() == 0, "what is joined in a cluster needs none"


@pytest.mark.L1
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    count, warps = SHAPES[number % len(SHAPES)]
    join(count, warps, monkeypatch)
    rows = (1, 4, 2)[number // len(SHAPES) % 3]

    def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
        build(graph, count)
        graph.execute(pack, None)

    plain = CASES[number]
    if plain.band != "open":
        # What is hidden is hidden by lengths.
        plain = replace(plain, band="open", lengths="lengths")
    for case in at_extents(plain, tuple((rows, keys) for keys in KEYS), seed=number):
        Declared(replace(case, batch=2), "cuda", start="promised").run(execute)


class Call:
    """A declared call of 3 sequences whose operands hold NaN behind their lengths."""

    def __init__(self, lengths: list[int], runs: int) -> None:
        generator = torch.Generator("cuda").manual_seed(runs)
        self.graph = graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        q = torch.randn(3, 8, 1, 128, generator=generator, device="cuda").bfloat16()
        k, v = (
            torch.randn(3, 2, 1024, 128, generator=generator, device="cuda").bfloat16()
            for _ in range(2)
        )
        used = torch.tensor(lengths, device="cuda").int()
        hidden = torch.arange(1024, device="cuda") >= used[:, None]
        for x in (k, v):
            x.masked_fill_(hidden[:, None, :, None], torch.nan)
        buffers = {"q": q, "k": k, "v": v, "ones": torch.ones_like(used).view(-1, 1, 1, 1)}
        buffers["used"] = used.view(-1, 1, 1, 1)
        declared = {
            name: graph.tensor(x.shape, x.stride(), x.dtype, name=name, alignment_value=16)
            for name, x in buffers.items()
        }
        self.o, _ = graph.sdpa(
            *(declared[name] for name in "qkv"),
            attn_scale=128**-0.5,
            is_inference=True,
            use_padding_mask=True,
            seq_len_q=declared["ones"],
            seq_len_kv=declared["used"],
        )
        # Promised, so that no plan for other addresses needs a workspace.
        self.o.set_output(True).alignment_value = 16
        build(graph, runs)
        self.pack = {declared[name]: x for name, x in buffers.items()}
        self.out = torch.full_like(q, torch.nan)
        self.pack[self.o] = self.out

    def run(self) -> torch.Tensor:
        self.out.fill_(torch.nan)
        self.graph.execute(self.pack, None)
        return self.out.clone()


@pytest.mark.L0
def test_a_call_repeats_and_does_not_depend_on_its_neighbours(runs: int) -> None:
    call = Call([1000, 0, 17], runs)
    first = call.run()
    assert not first.isnan().any() and not first[1].any()
    assert all(torch.equal(first, call.run()) for _ in range(5))
    among = Call([1000, 1024, 1024], runs).run()
    assert torch.equal(first[0], among[0])


@pytest.mark.L0
def test_it_is_captured_and_becomes_a_node(runs: int) -> None:
    call = Call([1000, 333, 17], runs)
    want = call.run()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call.graph.execute(call.pack, None)
    call.out.fill_(torch.nan)
    recorded.replay()
    torch.cuda.synchronize()
    assert torch.equal(call.out, want)

    graph, instance = ctypes.c_void_p(), ctypes.c_void_p()
    check(driver().cuGraphCreate(ctypes.byref(graph), 0), "create")
    call.graph.populate_cuda_graph(None, call.pack, None, graph.value)
    status = driver().cuGraphInstantiateWithFlags(
        ctypes.byref(instance), graph, ctypes.c_ulonglong(0)
    )
    check(status, "instantiate")
    for _ in range(2):
        call.out.fill_(torch.nan)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        check(driver().cuGraphLaunch(instance, stream), "launch")
        torch.cuda.synchronize()
        assert torch.equal(call.out, want)
        call.graph.update_cuda_graph(None, call.pack, None, graph.value, instance.value)
    check(driver().cuGraphExecDestroy(instance), "destroy")
    check(driver().cuGraphDestroy(graph), "destroy")
