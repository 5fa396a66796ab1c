"""Long calls have the same bits while another process takes the device in the middle of them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.graph.enums import knob_type
from tilewright.testing import detectors
from tilewright.testing.another_process import AnotherProcess
from tilewright.testing.detectors import Outcome

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

# Each takes some milliseconds: longer than a process has the device at a time.
BATCH, CHANNELS, LENGTH = 4, 2048, 8192


def declared(depth: int, is_packed: bool, is_causal: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """A graph, and its operands by name."""
    heads = CHANNELS // depth
    dim = (BATCH, heads, LENGTH, depth)
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    masks: dict[str, Any] = {"use_causal_mask": is_causal}
    given: dict[str, torch.Tensor] = {}
    layout: dict[str, Any] = {}
    if is_packed:
        sums = torch.arange(0, BATCH * LENGTH + 1, LENGTH, device="cuda").int().view(-1, 1, 1, 1)
        starts = graph.tensor(sums.shape, data_type="int32", name="starts")
        given["starts"] = sums
        layout = {"stride": (LENGTH * CHANNELS, depth, CHANNELS, 1), "ragged_offset": starts}
        masks |= {"use_padding_mask": True, "cu_seq_len_q": starts, "cu_seq_len_kv": starts}
    generator = torch.Generator("cuda").manual_seed(depth)
    shape = (BATCH * LENGTH, heads, depth) if is_packed else dim
    inputs = []
    for name in "qkv":
        tensor = graph.tensor(dim, name=name, **layout)
        given[name] = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        inputs.append(tensor)
    o, _ = graph.sdpa(*inputs, attn_scale=depth**-0.5, is_inference=True, **masks)
    o.set_output(True).set_name("O")
    if is_packed:
        o.set_dim(dim).set_stride(layout["stride"]).set_ragged_offset(layout["ragged_offset"])
    for tensor in (*inputs, o):
        tensor.alignment_value = 16
        if is_packed:
            tensor.set_ragged_offset_multiplier(CHANNELS)
    return graph, given


@pytest.mark.parametrize(
    ("engine", "depth", "is_packed", "is_causal"),
    [
        ("triton", 128, False, False),
        ("triton", 128, True, False),
        ("triton", 128, False, True),
        ("triton", 256, False, False),
        ("triton", 64, False, False),
        ("hopper", 128, False, False),
        ("hopper", 64, True, True),
    ],
)
def test_the_bits_are_the_same_beside_another_process(
    engine: str,
    depth: int,
    is_packed: bool,
    is_causal: bool,
    another_process: AnotherProcess,
) -> None:
    graph, given = declared(depth, is_packed, is_causal)
    plans = [
        (knob_type.ROW_BLOCK not in dict(plan.knobs), index)
        for index, plan in enumerate(graph.plans)
        if plan.engine_name == engine
    ]
    if not plans:
        pytest.skip(f"{engine!r} has no plan for this device")
    # Those of warp groups first.
    graph.select_plan(min(plans)[1])
    graph.build()
    verdict = detectors.beside_another_process(graph, given, another_process, interruptions=40)
    assert not verdict.is_broken, verdict
    # Beside the tests of many other workers, calls without one more take as long.
    assert verdict.outcome is Outcome.HELD or "nothing was shown" in verdict.text, verdict
