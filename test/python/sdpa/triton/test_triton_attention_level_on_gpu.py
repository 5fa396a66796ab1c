"""Weights at one level, and the even edges of a window, on a GPU.

Scores that go far beyond those of the first keys, and rows that see nothing.
"""

from __future__ import annotations

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
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

CASES = [
    Case(rows=128, keys=384, band="causal", values="large", stats="natural"),
    Case(rows=190, keys=1100, values="large", stats="log2", heads=(4, 2)),
    Case(rows=100, keys=1024, sizes=(40, 56), sink="float32", layout="bshd"),
    Case(rows=257, keys=511, sizes=(16, 16), band="bottom_right", values="large", sink="same"),
    Case(rows=300, keys=500, band="band", stats="natural", layout="gaps", out="float32"),
    Case(rows=128, keys=1030, band="window", values="hidden_nan"),
    Case(rows=300, keys=100, band="bottom_right", stats="natural", heads=(3, 1)),
]


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    """By the plan of programs of four warps, wherever it is ranked."""
    graph.deselect_engines(["hopper"])
    for index, plan in enumerate(graph.plans):
        knobs = dict(plan.knobs)
        is_tile = (knobs.get(knob_type.TILE_M), knobs.get(knob_type.WARPS)) == (128, 4)
        if plan.engine_name == "triton" and is_tile and knob_type.ROW_BLOCK not in knobs:
            graph.select_plan(index)
            break
    graph.build()
    size = max(graph.get_workspace_size(), 1)
    graph.execute(pack, torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_of_a_row_at_one_level_on_a_gpu(case: Case) -> None:
    Declared(case, "cuda", start="promised").run(execute)


def test_a_gate_behind_weights_at_one_level() -> None:
    Gated(Case(rows=200, keys=1100, values="large", stats="natural"), "cuda").run(execute)


@pytest.mark.parametrize(
    ("rows", "keys", "left", "right", "is_bottom_right"),
    [
        (1024, 1024, 256, 0, False),
        (512, 1024, 128, 0, True),
        (640, 512, 384, 0, False),
        (512, 512, 128, 128, False),
        (1024, 512, 256, 0, True),
    ],
)
def test_windows_of_whole_blocks(
    rows: int, keys: int, left: int, right: int, is_bottom_right: bool
) -> None:
    generator = torch.Generator("cuda").manual_seed(rows + keys + left)
    q, k, v = (
        torch.randn(1, 2, length, 128, generator=generator, device="cuda").bfloat16()
        for length in (rows, keys, keys)
    )
    v[0, 0, keys // 2 + 3], v[0, 1, 130] = torch.nan, torch.inf
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    inputs = [graph.tensor(x.shape, name=name) for name, x in zip("qkv", (q, k, v), strict=True)]
    kind = tw.diagonal_alignment
    o, stats = graph.sdpa(
        *inputs,
        attn_scale=128**-0.5,
        generate_stats=True,
        diagonal_band_left_bound=left,
        diagonal_band_right_bound=right,
        diagonal_alignment=kind.BOTTOM_RIGHT if is_bottom_right else kind.TOP_LEFT,
    )
    o.set_output(True)
    stats.set_output(True).set_data_type("float32")
    graph.deselect_engines(["hopper"])
    graph.build()
    out = torch.full_like(q, torch.nan)
    sums = torch.full((1, 2, rows, 1), torch.nan, device="cuda")
    size = max(graph.get_workspace_size(), 1)
    workspace = torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda")
    pack = dict(zip(inputs, (q, k, v), strict=True))
    graph.execute({**pack, o: out, stats: sums}, workspace)
    row = torch.arange(rows, device="cuda")[:, None] + (keys - rows if is_bottom_right else 0)
    col = torch.arange(keys, device="cuda")[None]
    seen = (col <= row + right) & (col > row - left)
    scores = (q.double() @ k.double().transpose(2, 3) * 128**-0.5).masked_fill(~seen, -torch.inf)
    spoilt = ~torch.isfinite(v)
    weights = scores.softmax(-1).nan_to_num(0.0)
    expected = weights @ v.double().masked_fill(spoilt, 0.0)
    expected[seen.double() @ spoilt.double() > 0.0] = torch.nan
    is_finite = torch.isfinite(out)
    assert torch.equal(is_finite, torch.isfinite(expected))
    assert (out - expected)[is_finite].abs().max() <= 2**-7 * expected[is_finite].abs().max()
    assert torch.allclose(sums.double()[..., 0], scores.logsumexp(-1), atol=1e-4, rtol=0)
