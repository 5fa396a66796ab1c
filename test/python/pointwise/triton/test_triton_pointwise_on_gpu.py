"""What only a GPU shows of generated kernels: strides in device memory, replay, no wait."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tilewright as tw

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

WIDTH = 1024


def build(x_stride: Any, y_stride: Any, dim: Any = (2, WIDTH)) -> Any:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    x, b = graph.tensor(dim, x_stride, name="x"), graph.tensor((1, dim[1]), name="b")
    y = graph.mul(graph.relu(graph.add(x, b)), graph.tensor_scalar(0.5))
    y.set_output(True).set_name("y").set_dim(dim).set_stride(y_stride)
    graph.build()
    assert graph.selected_engine == "triton"
    return graph


def expected(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((x.float() + b.float()).relu() * 0.5).bfloat16()


@pytest.mark.parametrize("width", [WIDTH, 1000])
def test_strides_beyond_32_bits_are_addressed(width: int) -> None:
    # B1: the address truncated to 32 bits holds a decoy inside the allocation, on both sides.
    step = 2**32 + 16
    try:
        storage = torch.empty(step + WIDTH, dtype=torch.bfloat16, device="cuda")
        target = torch.empty(step + WIDTH, dtype=torch.bfloat16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("16 GiB of device memory are not free")
    storage[: 64 + WIDTH].fill_(777.0)
    target[: 64 + WIDTH].fill_(-1.0)
    x, y = (t.as_strided((2, width), (step, 1)) for t in (storage, target))
    b = torch.randn(1, width, device="cuda").bfloat16()
    x.normal_()
    build(x.stride(), y.stride(), (2, width)).execute({"x": x, "b": b, "y": y})
    assert torch.equal(y, expected(x, b))
    assert torch.all(target[width : width + 16] == -1.0), "nothing landed at the narrow address"
    # Neighbours this far apart, through a transpose.
    graph = tw.Graph(io_data_type="bfloat16")
    turned = graph.transpose(graph.tensor((2, width), (step, 1), name="x"), (1, 0))
    graph.neg(turned).set_output(True).set_name("y").set_dim((width, 2)).set_stride((2, 1))
    graph.build()
    assert graph.selected_engine == "triton"
    out = torch.empty(width, 2, dtype=torch.bfloat16, device="cuda")
    graph.execute({"x": x, "y": out})
    assert torch.equal(out, -x.t())


def test_more_elements_than_32_bits_count() -> None:
    # B2: no stride is wide, but the index is.
    count = 2**32 + 1000
    try:
        x = torch.ones(count, dtype=torch.int8, device="cuda")
        y = torch.zeros(count, dtype=torch.int8, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("8 GiB of device memory are not free")
    x[-1000:] = 3
    graph = tw.Graph(io_data_type="int8")
    graph.neg(graph.tensor((count,), name="x")).set_output(True).set_name("y")
    graph.build()
    assert graph.selected_engine == "triton"
    graph.execute({"x": x, "y": y})
    assert torch.all(y[-1000:] == -3) and torch.all(y[:-1000] == -1)


def test_neither_bind_nor_launch_waits_or_allocates_and_replay_reads_anew(captured: Any) -> None:
    # L2, L3, L9.
    graph = build((WIDTH, 1), (WIDTH, 1), (64, WIDTH))
    x, y = (torch.randn(64, WIDTH, device="cuda").bfloat16() for _ in range(2))
    b = torch.randn(1, WIDTH, device="cuda").bfloat16()
    pack = {"x": x, "b": b, "y": y}
    frame = graph.bind(pack)
    frame.launch()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.bind(pack).launch()
        graph.execute(pack)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(y, expected(x, b))
    with captured(frame.launch) as recorded:
        for _ in range(2):
            x.normal_()
            b.normal_()
            y.fill_(torch.nan)
            recorded.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, expected(x, b))


def test_misaligned_tensors_take_the_general_kernel() -> None:
    graph = build((WIDTH, 1), (WIDTH, 1))
    storage = torch.randn(2 * WIDTH + 1, device="cuda").bfloat16()
    b = torch.randn(1, WIDTH, device="cuda").bfloat16()
    for start in (0, 1):
        x = storage[start : start + 2 * WIDTH].view(2, WIDTH)
        y = torch.empty_like(x)
        graph.execute({"x": x, "b": b, "y": y})
        assert torch.equal(y, expected(x, b))
