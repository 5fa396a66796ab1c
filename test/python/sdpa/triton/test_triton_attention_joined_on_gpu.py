"""Decoding whose programs join their sums in a cluster, on a GPU, held to the oracle.

Clusters have the runs of one sequence, or of two where these have lengths. A case is one
compiled kernel at several lengths; together they hold every pair of what the kernel
takes: types, heads, head sizes, layouts, lengths, pages, sinks and statistics.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention_cases.case import all_pairs, at_extents
from attention_cases.running import Declared

import tilewright as tw
from tilewright.engines.triton import attention, attention_decode_config
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


@dataclass(frozen=True)
class Shape:
    """So many runs of a sequence, in programs of so many warps, whether it pays or not."""

    runs: int
    warps: int
    is_paired: bool = False

    def force(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = attention_decode_config
        alone = self.runs // 2 if self.is_paired else self.runs
        monkeypatch.setattr(config, "pays_in_registers", lambda *_: True)
        monkeypatch.setattr(config, "_joined_runs", lambda *_: alone)
        monkeypatch.setattr(config, "JOINED_WARPS", self.warps)


SHAPES = (Shape(16, 2), Shape(8, 2), Shape(16, 1), Shape(4, 1), Shape(16, 4), Shape(8, 1))
PAIRED = (Shape(16, 2, is_paired=True), Shape(8, 1, is_paired=True))


@pytest.fixture(params=(*SHAPES, *PAIRED), ids=str)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shape:
    made: Shape = request.param
    made.force(monkeypatch)
    return made


def build(graph: Any, shape: Shape) -> None:
    """Select the plan of the shape, wherever it is ranked, and build it."""
    graph.deselect_engines(["hopper"])
    knobs = [dict(plan.knobs) if plan.engine_name == "triton" else {} for plan in graph.plans]
    graph.select_plan([x.get(knob_type.SPLIT_K) for x in knobs].index(shape.runs))
    graph.build()
    assert graph.get_workspace_size() == 0, "what is joined in a cluster needs none"
    (kernel,) = attention.plan(graph, graph._active_plan().plan.knobs, 132).kernels
    assert kernel.spec.name == f"attention_decode_{'paired' if shape.is_paired else 'joined'}"


@pytest.mark.L1
@pytest.mark.parametrize("is_paired", [False, True], ids=["alone", "paired"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(
    number: int, is_paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = PAIRED if is_paired else SHAPES
    shape = shapes[number % len(shapes)]
    shape.force(monkeypatch)
    rows = (1, 4, 2)[number // len(shapes) % 3]

    def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
        build(graph, shape)
        graph.execute(pack, None)

    plain = CASES[number]
    if plain.band != "open" or (is_paired and plain.lengths == "none"):
        # What is hidden is hidden by lengths.
        plain = replace(plain, band="open", lengths="lengths")
    if is_paired and rows * plain.heads[0] // plain.heads[1] > attention_decode_config.DIRECT_ROWS:
        rows = 2
    for case in at_extents(plain, tuple((rows, keys) for keys in KEYS), seed=number):
        batch = 2 + case.keys % 2 if is_paired else 2
        Declared(replace(case, batch=batch), "cuda", start="promised").run(execute)


class Call:
    """A declared call of sequences of 1024 keys at most, with NaN behind their lengths."""

    def __init__(self, lengths: list[int], shape: Shape) -> None:
        generator = torch.Generator("cuda").manual_seed(shape.runs)
        self.graph = graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        count = len(lengths)
        q = torch.randn(count, 8, 1, 128, generator=generator, device="cuda").bfloat16()
        k, v = (
            torch.randn(count, 2, 1024, 128, generator=generator, device="cuda").bfloat16()
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
        build(graph, shape)
        self.buffers = buffers
        self.pack = {declared[name]: x for name, x in buffers.items()}
        self.out = torch.full_like(q, torch.nan)
        self.pack[self.o] = self.out

    def run(self) -> torch.Tensor:
        self.out.fill_(torch.nan)
        self.graph.execute(self.pack, None)
        return self.out.clone()

    def expected(self) -> torch.Tensor:
        """In float64, a sequence at a time."""
        q, k, v = (self.buffers[name].double() for name in "qkv")
        out = torch.zeros_like(q)
        for batch, length in enumerate(self.buffers["used"].flatten().tolist()):
            length = min(max(length, 0), 1024)
            keys, values = (x[batch, :, :length].repeat_interleave(4, 0) for x in (k, v))
            if length:
                scores = q[batch] @ keys.transpose(1, 2) * 128**-0.5
                out[batch] = scores.softmax(-1) @ values
        return out


@pytest.mark.L0
def test_lengths_about_the_ends_of_runs(shape: Shape) -> None:
    # A run is so many blocks of 16 keys of a sequence's own, the last one's may be fewer.
    whole = 16 * shape.runs
    ends = [n for end in (16, whole, 2 * whole, 1024) for n in (end - 1, end, end + 1)]
    ends = sorted({1, whole - 16, whole + 16, 700, *ends} - {1025})
    for some in zip(ends, ends[1:], ends[2:], strict=False):
        assert_sums_of_all_keys(list(some), shape)


@pytest.mark.L0
def test_more_sequences_than_whose_lengths_are_looked_at(shape: Shape) -> None:
    # Lengths below 0 and above what is declared are those.
    assert_sums_of_all_keys([-3, 0, 5000, 1024, 1, *range(20, 980, 32), 1000], shape)


def assert_sums_of_all_keys(lengths: list[int], shape: Shape) -> None:
    call = Call(lengths, shape)
    expected = call.expected()
    # Rounding of the weights adds up as its root; a key too few, or one twice, is 1 / n.
    counts = torch.tensor(lengths, device="cuda").clamp(1, 1024)
    bound = 2**-8 * expected.abs() + 2**-6 * counts.double().rsqrt().view(-1, 1, 1, 1)
    assert ((call.run().double() - expected).abs() <= bound).all(), lengths


@pytest.mark.L0
def test_a_call_repeats_and_does_not_depend_on_its_neighbours(shape: Shape) -> None:
    call = Call([1000, 0, 17], shape)
    first = call.run()
    assert not first.isnan().any() and not first[1].any()
    assert all(torch.equal(first, call.run()) for _ in range(5))
    among = Call([1000, 1024, 1024], shape).run()
    assert torch.equal(first[0], among[0])
    # Nor on the sequence that it shares a cluster with, the first or the second of the two.
    last = Call([0, 1, 1000], shape)
    among = Call([1024, 1024, 1000], shape).run()
    assert torch.equal(last.run()[2], among[2])


@pytest.mark.L0
def test_it_is_captured_and_becomes_a_node(shape: Shape) -> None:
    call = Call([1000, 333, 17], shape)
    want = call.run()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        call.graph.execute(call.pack, None)
    call.out.fill_(torch.nan)
    recorded.replay()
    torch.cuda.synchronize()
    assert torch.equal(call.out, want)
    # Lengths are read when it runs.
    others = [517, 0, 16]
    call.buffers["used"].copy_(torch.tensor(others).view(-1, 1, 1, 1))
    recorded.replay()
    torch.cuda.synchronize()
    assert torch.equal(call.out, Call(others, shape).run())
    call.buffers["used"].copy_(torch.tensor([1000, 333, 17]).view(-1, 1, 1, 1))

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
