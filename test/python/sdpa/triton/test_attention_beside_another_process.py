"""Long calls have the same bits while another process takes the device in the middle of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.graph.enums import knob_type

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

# Each takes some milliseconds: longer than a process has the device at a time.
BATCH, CHANNELS, LENGTH = 4, 2048, 8192
CALLS = 40
MULTIPLY = """
import sys, threading, torch
a = torch.randn(8192, 8192, device="cuda").bfloat16()
ends = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ends.set())).start()
while not ends.is_set():
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
    print("multiplied", flush=True)
"""


@pytest.fixture(scope="module")
def another_process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", MULTIPLY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline().strip() == "multiplied"
            # A pipe that nobody reads is full one day.
            threading.Thread(target=child.stdout.read, daemon=True).start()
            yield child
            child.stdin.close()
            child.wait(timeout=30)
        finally:
            child.kill()


def declared(depth: int, is_packed: bool, is_causal: bool) -> tuple[Any, dict[Any, torch.Tensor]]:
    """A graph, its operands, and the output, which is the last."""
    heads = CHANNELS // depth
    dim = (BATCH, heads, LENGTH, depth)
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    masks: dict[str, Any] = {"use_causal_mask": is_causal}
    pack: dict[Any, torch.Tensor] = {}
    layout: dict[str, Any] = {}
    if is_packed:
        sums = torch.arange(0, BATCH * LENGTH + 1, LENGTH, device="cuda").int().view(-1, 1, 1, 1)
        starts = graph.tensor(sums.shape, data_type="int32", name="starts")
        pack[starts] = sums
        layout = {"stride": (LENGTH * CHANNELS, depth, CHANNELS, 1), "ragged_offset": starts}
        masks |= {"use_padding_mask": True, "cu_seq_len_q": starts, "cu_seq_len_kv": starts}
    generator = torch.Generator("cuda").manual_seed(depth)
    shape = (BATCH * LENGTH, heads, depth) if is_packed else dim
    inputs = []
    for name in "qkv":
        tensor = graph.tensor(dim, name=name, **layout)
        pack[tensor] = torch.randn(shape, generator=generator, device="cuda").bfloat16()
        inputs.append(tensor)
    o, _ = graph.sdpa(*inputs, attn_scale=depth**-0.5, is_inference=True, **masks)
    o.set_output(True)
    if is_packed:
        o.set_dim(dim).set_stride(layout["stride"]).set_ragged_offset(layout["ragged_offset"])
    for tensor in (*inputs, o):
        tensor.alignment_value = 16
        if is_packed:
            tensor.set_ragged_offset_multiplier(CHANNELS)
    pack[o] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    return graph, pack


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
    another_process: subprocess.Popen[str],
) -> None:
    graph, pack = declared(depth, is_packed, is_causal)
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
    size = max(graph.get_workspace_size(), 1)
    workspace = torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda")
    out = list(pack.values())[-1]
    bits = None
    for _ in range(CALLS):
        out.fill_(torch.nan)
        graph.execute(pack, workspace)
        made = out.view(torch.int16).clone()
        assert bool(torch.isfinite(out).all())
        assert bits is None or torch.equal(bits, made)
        bits = made
    assert another_process.poll() is None
