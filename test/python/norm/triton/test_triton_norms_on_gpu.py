"""What only a GPU shows of the prepared norms: streams, replay, no wait, no allocation, strides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewright as tw

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

WIDTH = 1024


@pytest.fixture
def call() -> tuple[Any, dict[str, torch.Tensor]]:
    """A built RMSNorm graph and its operands by name."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, WIDTH, generator=generator).bfloat16().cuda()
    scale = torch.randn(1, WIDTH, generator=generator).bfloat16().cuda()
    return build(x), {"x": x, "scale": scale, "y": torch.full_like(x, torch.nan)}


def build(x: torch.Tensor, y_stride: Any = None) -> Any:
    graph = tw.Graph(io_data_type=x.dtype, intermediate_data_type="float32")
    source = graph.tensor(x.shape, x.stride(), name="x")
    scale = graph.tensor((1, x.shape[1]), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(phase, source, scale, None, graph.tensor_scalar(1e-6))
    y.set_output(True).set_name("y").set_dim(x.shape).set_stride(y_stride or x.stride())
    graph.build()
    assert graph.selected_engine == "triton"
    return graph


def expected(pack: dict[str, torch.Tensor]) -> torch.Tensor:
    x = pack["x"].double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * pack["scale"].double()


def check(pack: dict[str, torch.Tensor]) -> None:
    reference = expected(pack)
    error = (pack["y"].double() - reference).abs().max()
    assert error <= 2**-8 * reference.abs().max()


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_neither_bind_nor_launch_waits_or_allocates(call: Any, sync_is_an_error: None) -> None:
    # L2, L3, B22.
    graph, pack = call
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    frame = graph.bind(pack)
    frame.launch()
    graph.execute(pack)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.set_sync_debug_mode("default")
    check(pack)


def test_a_given_stream_is_used_and_the_current_one_otherwise(call: Any) -> None:
    # L8: work waits for what is on its stream already, and for nothing on others.
    graph, pack = call
    frame = graph.bind(pack)
    side = torch.cuda.Stream()
    blocked, done = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        blocked.record()
    frame.launch(side)
    done.record(side)
    assert not done.query(), "the launch is behind the sleep on its stream"
    done.synchronize()
    check(pack)
    pack["y"].fill_(torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        blocked.record()
    frame.launch()
    torch.cuda.current_stream().synchronize()
    assert not blocked.query(), "the current stream did not wait for the side stream"
    check(pack)
    torch.cuda.synchronize()


def test_replay_reads_buffers_as_they_are(call: Any, captured: Any) -> None:
    # L9, B16: inputs and weights changed in place after capture; rebinding uses other values.
    graph, pack = call
    frame = graph.bind(pack)
    frame.launch()
    with captured(frame.launch) as recorded:
        for _ in range(3):
            pack["x"].normal_()
            pack["scale"].normal_()
            pack["y"].fill_(torch.nan)
            recorded.replay()
            torch.cuda.synchronize()
            check(pack)
    other = {name: torch.randn_like(tensor) for name, tensor in pack.items()}
    graph.execute(other)
    check(other)


def test_concurrent_frames_on_several_streams(call: Any) -> None:
    # L10, B15: distinct buffers, poisoned outputs, after one serial warm-up.
    graph, pack = call
    graph.execute(pack)
    torch.cuda.synchronize()
    packs = [
        {"x": torch.randn_like(pack["x"]), "scale": torch.randn_like(pack["scale"])}
        | {"y": torch.full_like(pack["y"], torch.nan)}
        for _ in range(8)
    ]
    streams = [torch.cuda.Stream() for _ in packs]
    torch.cuda.synchronize()
    frames = [graph.bind(each) for each in packs]
    for _ in range(5):
        for frame, stream in zip(frames, streams, strict=True):
            frame.launch(stream)
    torch.cuda.synchronize()
    for each in packs:
        check(each)


def test_row_strides_beyond_32_bits_are_addressed() -> None:
    # B1: the address truncated to 32 bits holds a decoy inside the allocation, on both sides.
    step = 2**32 + 16
    try:
        storage = torch.empty(step + WIDTH, dtype=torch.bfloat16, device="cuda")
        target = torch.empty(step + WIDTH, dtype=torch.bfloat16, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("16 GiB of device memory are not free")
    x = storage.as_strided((2, WIDTH), (step, 1))
    storage[: 64 + WIDTH].fill_(777.0)
    target[: 64 + WIDTH].fill_(-1.0)
    x.normal_()
    y = target.as_strided((2, WIDTH), (step, 1))
    scale = torch.randn(1, WIDTH, device="cuda").bfloat16()
    graph = build(x, y.stride())
    pack = {"x": x, "scale": scale, "y": y}
    graph.execute(pack)
    torch.cuda.synchronize()
    check(pack)
    assert torch.all(target[WIDTH : WIDTH + 64] == -1.0), "nothing landed at the narrow address"


def test_a_refused_call_launches_nothing(call: Any) -> None:
    graph, pack = call
    pack["y"].fill_(7.0)
    for name, wrong in (
        ("x", pack["x"].cpu()),
        ("x", pack["x"][:63]),
        ("scale", pack["scale"].float()),
        ("y", pack["x"]),
    ):
        with pytest.raises(tw.BindingError):
            graph.execute({**pack, name: wrong})
    torch.cuda.synchronize()
    assert torch.all(pack["y"] == 7.0)
