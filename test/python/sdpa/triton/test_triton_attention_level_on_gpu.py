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


def execute(graph: Any, pack: dict[Any, torch.Tensor], *, by_groups: bool = False) -> None:
    """By the plan of programs of four warps, or of warp groups, wherever it is ranked."""
    graph.deselect_engines(["hopper"])
    for index, plan in enumerate(graph.plans):
        knobs = dict(plan.knobs)
        is_tile = (knobs.get(knob_type.TILE_M), knobs.get(knob_type.WARPS)) == (128, 4)
        is_tile = is_tile and (knob_type.ROW_BLOCK in knobs) is by_groups
        if plan.engine_name == "triton" and is_tile:
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
    hold(out, sums, (q, k, v), (col <= row + right) & (col > row - left))


def hold(
    out: torch.Tensor,
    sums: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
    rtol: float = 0.0,
) -> None:
    """Compare with float64; rows are NaN that see a value that is not finite, and no others."""
    q, k, v = operands
    scores = (q.double() @ k.double().transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(
        ~seen, -torch.inf
    )
    spoilt = ~torch.isfinite(v)
    weights = scores.softmax(-1).nan_to_num(0.0)
    expected = weights @ v.double().masked_fill(spoilt, 0.0)
    expected[seen.double() @ spoilt.double() > 0.0] = torch.nan
    is_finite = torch.isfinite(out)
    assert torch.equal(is_finite, torch.isfinite(expected))
    assert (out - expected)[is_finite].abs().max() <= 2**-7 * expected[is_finite].abs().max()
    assert torch.allclose(sums.double()[..., 0], scores.logsumexp(-1), atol=1e-4, rtol=rtol)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("every", [1, 300])
def test_rows_that_pass_their_level_beside_values_that_are_not_finite(
    is_causal: bool, every: int
) -> None:
    # Scores of keys behind the first block are 120 above it, in every row or in a few.
    generator = torch.Generator("cuda").manual_seed(every)
    q, k, v = (
        torch.randn(2, 3, 1100, 64, generator=generator, device="cuda").bfloat16() for _ in "qkv"
    )
    q[..., 0], k[..., 0] = 0.0, 60.0
    q[:, :, ::every, 0], k[:, :, :64, 0] = 16.0, 0.0
    v[0, 0, 700], v[1, 2, 1050, 5] = torch.nan, torch.inf
    hold_square((q, k, v), is_causal, by_groups=False, rtol=2e-6)


@pytest.mark.parametrize(("rows", "keys"), [(128, 128), (128, 700), (320, 320)])
def test_triangles_of_few_tiles_by_warp_groups(rows: int, keys: int) -> None:
    # More heads than there are programs.
    generator = torch.Generator("cuda").manual_seed(rows + keys)
    q, k, v = (
        torch.randn(3, 50, length, 128, generator=generator, device="cuda").bfloat16()
        for length in (rows, keys, keys)
    )
    v[0, 0, 100], v[2, 49, 70] = torch.nan, torch.inf
    hold_square((q, k, v), True, by_groups=True)


def hold_square(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    is_causal: bool,
    *,
    by_groups: bool,
    rtol: float = 0.0,
) -> None:
    q, k, _ = operands
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    inputs = [
        graph.tensor(tensor.shape, name=name) for name, tensor in zip("qkv", operands, strict=True)
    ]
    for tensor in inputs:
        tensor.alignment_value = 16
    o, stats = graph.sdpa(
        *inputs, attn_scale=q.shape[3] ** -0.5, generate_stats=True, use_causal_mask=is_causal
    )
    o.set_output(True).alignment_value = 16
    stats.set_output(True).set_data_type("float32")
    out = torch.full_like(q, torch.nan)
    sums = torch.full((*q.shape[:3], 1), torch.nan, device="cuda")
    pack = {**dict(zip(inputs, operands, strict=True)), o: out, stats: sums}
    execute(graph, pack, by_groups=by_groups)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device="cuda")
    hold(out, sums, operands, seen.tril() if is_causal else seen, rtol)
