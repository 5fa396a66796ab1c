"""Packed sequences in the kernel of warp groups on a GPU.

Against the oracle, beside values that are not finite, and with the same bits in each run.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from attention_cases.case import Case
from attention_cases.gated import Gated
from attention_cases.running import Declared

import tilewright as tw
from tilewright.graph.enums import knob_type

pytestmark = [
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

HEADS, HEADS_KV, GAP = 4, 2, 3
UNTOUCHED = 7.0


def build_packed(graph: Any) -> None:
    """By the plan of warp groups, wherever it is ranked."""
    graph.deselect_engines(["hopper"])
    for index, plan in enumerate(graph.plans):
        if plan.engine_name == "triton" and knob_type.ROW_BLOCK in dict(plan.knobs):
            graph.select_plan(index)
            break
    else:
        pytest.skip("this Triton deals no kernel to warp groups, or the device is not SM90")
    graph.build()


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    build_packed(graph)
    size = max(graph.get_workspace_size(), 1)
    graph.execute(pack, torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda"))


def packed(**levels: Any) -> Case:
    return Case(**{"sizes": (128, 128), "place": "ragged", "lengths": "sums", **levels})


CASES = [
    packed(rows=300, keys=300, batch=40, stats="all"),
    packed(rows=513, keys=700, batch=5, band="causal", heads=(4, 2), stats="natural"),
    packed(rows=700, keys=513, band="bottom_right", heads=(3, 1), sink="same", index="int64"),
    packed(rows=257, keys=257, batch=9, band="window", dtype="float16", lengths="lengths"),
    packed(rows=150, keys=400, band="band_bottom_right", values="large"),
    packed(rows=300, keys=300, batch=9, sizes=(256, 256), band="causal", stats="log2"),
    packed(rows=200, keys=700, sizes=(256, 128), heads=(4, 2), sink="float32", index="int64"),
    packed(rows=300, keys=300, batch=5, sizes=(128, 72), band="causal"),
]


@pytest.mark.L0
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_sequences_on_a_gpu(case: Case) -> None:
    Declared(case, "cuda", start="promised").run(execute)


@pytest.mark.L0
@pytest.mark.parametrize("band", ["open", "causal"])
def test_a_gate_behind_packed_sequences(band: str) -> None:
    Gated(packed(rows=300, keys=300, batch=5, band=band), "cuda").run(execute)


class Sequences:
    """Packed operands with GAP rows of NaN behind each sequence, and the graph."""

    def __init__(self, lengths: list[int], depth: int, window: int | None, causal: bool) -> None:
        self.lengths, self.window, self.causal = lengths, window, causal
        self.starts = [0, *itertools.accumulate(n + GAP for n in lengths)]
        offsets = torch.tensor(self.starts, device="cuda").int().view(-1, 1, 1, 1)
        counts = torch.tensor(lengths, device="cuda").int().view(-1, 1, 1, 1)
        generator = torch.Generator("cuda").manual_seed(len(lengths))
        graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        start = graph.tensor(offsets.shape, data_type="int32", name="starts")
        length = graph.tensor(counts.shape, data_type="int32", name="lengths")
        self.pack: dict[Any, torch.Tensor] = {start: offsets, length: counts}
        self.values: dict[str, torch.Tensor] = {}
        inputs = []
        for name, heads in (("q", HEADS), ("k", HEADS_KV), ("v", HEADS_KV)):
            tokens = (self.starts[-1], heads, depth)
            value = torch.randn(tokens, generator=generator, device="cuda").bfloat16()
            for first, count in zip(self.starts, lengths, strict=False):
                value[first + count : first + count + GAP] = torch.nan
            dim, stride, unit = self._layout(heads, depth)
            tensor = graph.tensor(dim, stride, name=name, ragged_offset=start)
            tensor.set_ragged_offset_multiplier(unit)
            tensor.alignment_value = 16
            self.pack[tensor], self.values[name] = value, value
            inputs.append(tensor)
        masks = {} if window is None else {"sliding_window_length": window}
        o, _ = graph.sdpa(
            *inputs,
            attn_scale=depth**-0.5,
            is_inference=True,
            use_padding_mask=True,
            seq_len_q=length,
            seq_len_kv=length,
            use_causal_mask=causal,
            **masks,
        )
        dim, stride, unit = self._layout(HEADS, depth)
        o.set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(start)
        o.set_ragged_offset_multiplier(unit)
        o.alignment_value = 16
        self.out = torch.full_like(self.values["q"], UNTOUCHED)
        self.pack[o] = self.out
        self.graph = graph

    def _layout(self, heads: int, depth: int) -> tuple[Any, Any, int]:
        # At most 16 queries would go to another kernel.
        longest, unit = max(*self.lengths, 130), heads * depth
        return (len(self.lengths), heads, longest, depth), (longest * unit, depth, unit, 1), unit

    def expected(self) -> torch.Tensor:
        """Float64; NaN where a row sees a value that is not finite, UNTOUCHED between sequences."""
        made = torch.full(self.out.shape, UNTOUCHED, dtype=torch.float64, device="cuda")
        for first, count in zip(self.starts, self.lengths, strict=False):
            q, k, v = (
                x[first : first + count].double().transpose(0, 1) for x in self.values.values()
            )
            k, v = (x.repeat_interleave(HEADS // HEADS_KV, 0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
            seen = torch.ones(count, count, dtype=torch.bool, device="cuda")
            if self.causal:
                seen = seen.tril()
            if self.window is not None:
                seen = seen.triu(1 - self.window)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            spoilt = ~torch.isfinite(v)
            sums = weights @ v.masked_fill(spoilt, 0.0)
            sums[seen.double() @ spoilt.double() > 0.0] = torch.nan
            made[first : first + count] = sums.transpose(0, 1)
        return made


MIXED = [1, 0, 127, 128, 129, 64, 16, 700, 333, 0, 257, 1024, 5]
TINY = [(37 * number) % 41 for number in range(600)]


@pytest.mark.L0
@pytest.mark.parametrize("depth", [128, 256])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 200)])
@pytest.mark.parametrize("lengths", [MIXED, TINY, [0, 0, 0]], ids=["mixed", "tiny", "none"])
def test_what_other_sequences_hold_does_not_matter(
    lengths: list[int], causal: bool, window: int | None, depth: int
) -> None:
    sequences = Sequences(lengths, depth, window, causal)
    for number, (first, count) in enumerate(zip(sequences.starts, lengths, strict=False)):
        if number % 5 == 2 and count > 2:
            sequences.values["v"][first + count // 2, 0] = torch.inf if number % 2 else torch.nan
    build_packed(sequences.graph)
    size = max(sequences.graph.get_workspace_size(), 1)
    workspace = torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda")
    expected, bits = sequences.expected(), None
    for _ in range(5):
        sequences.out.fill_(UNTOUCHED)
        sequences.graph.execute(sequences.pack, workspace)
        made = sequences.out.view(torch.int16).clone()
        assert bits is None or torch.equal(bits, made)
        bits = made
    got = sequences.out.double()
    is_finite = torch.isfinite(got)
    assert torch.equal(is_finite, torch.isfinite(expected))
    error = (got - expected)[is_finite].abs().max().item()
    assert error <= 2**-7 * max(1.0, expected[is_finite].abs().max().item())
