"""Hopper attention on an H100 or H200: the launch contract, and what hidden keys hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_on_hopper import (
    CAUSAL,
    EACH_SIZE,
    NO_BAND,
    TOLERANCE,
    Tensors,
    check,
    declare,
    draw,
    expected,
)
from needing_hopper import NEEDS_HOPPER

import tilewright as tw

pytestmark = NEEDS_HOPPER


@pytest.fixture
def call() -> tuple[Any, Tensors]:
    """A built causal graph and its operands by name."""
    tensors = draw(8, (8, 2), (512, 512), (128, 128))
    return declare(tensors, CAUSAL), tensors


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.L0
def test_neither_bind_nor_launch_waits_or_allocates(call: Any, sync_is_an_error: None) -> None:
    # L2, L3, B22.
    graph, tensors = call
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph.bind(tensors).launch()
    graph.execute(tensors)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.set_sync_debug_mode("default")
    check(tensors, CAUSAL)


@pytest.mark.L0
def test_replay_reads_buffers_as_they_are_and_rebinding_uses_others(
    call: Any, captured: Any
) -> None:
    # L9, B16: values changed in place after capture; then other buffers, whose maps are new.
    graph, tensors = call
    frame = graph.bind(tensors)
    frame.launch()
    with captured(frame.launch) as recorded:
        for _ in range(2):
            for name in "qkv":
                tensors[name].normal_()
            tensors["o"].fill_(torch.nan)
            recorded.replay()
            torch.cuda.synchronize()
            check(tensors, CAUSAL)
    other = draw(9, (8, 2), (512, 512), (128, 128))
    graph.execute(other)
    check(other, CAUSAL)
    tensors["o"].fill_(torch.nan)
    graph.execute(tensors)
    check(tensors, CAUSAL)


@pytest.mark.L0
def test_concurrent_frames_on_several_streams(call: Any) -> None:
    # L10, B15.
    graph, tensors = call
    graph.execute(tensors)
    packs = [draw(10 + i, (8, 2), (512, 512), (128, 128)) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in packs]
    torch.cuda.synchronize()
    frames = [graph.bind(pack) for pack in packs]
    for _ in range(5):
        for frame, stream in zip(frames, streams, strict=True):
            frame.launch(stream)
    torch.cuda.synchronize()
    for pack in packs:
        check(pack, CAUSAL)


@pytest.mark.L0
@pytest.mark.parametrize("way", ["execute", "bind"])
def test_a_threads_first_call_makes_its_tensor_maps(call: Any, way: str) -> None:
    # A thread that made no call of the CUDA runtime has no context, which the driver asks for.
    graph, tensors = call
    graph.execute(tensors)
    tensors["o"].fill_(torch.nan)
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    failures: list[Exception] = []

    def first() -> None:
        try:
            if way == "execute":
                graph.execute(other)
            else:
                graph.bind(other).launch()
        except tw.TilewrightError as error:
            failures.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert not failures, str(failures[0])
    torch.cuda.synchronize()
    check(other, CAUSAL)


@pytest.mark.L0
@pytest.mark.parametrize("port", ["q", "k", "v", "o", "stats"])
def test_strides_beyond_32_bits_are_addressed(port: str) -> None:
    # B1, L4: the address truncated to 32 bits holds a decoy inside the allocation.
    tensors = draw(11, (2, 2), (70, 70), (64, 64), batch=1)
    given = tensors[port]
    step = 2**32 + 64
    span = step + given[0, 0].numel()
    try:
        storage = torch.empty(span, dtype=given.dtype, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("16 GiB of device memory are not free")
    storage[: 64 + given[0, 0].numel() + 64].fill_(777.0)
    wide = storage.as_strided(given.shape, (2 * step, step, given.stride(2), given.stride(3)))
    wide.copy_(given)
    tensors[port] = wide
    declare(tensors, CAUSAL).execute(tensors)
    check(tensors, CAUSAL)
    if port in ("o", "stats"):
        rest = storage[given[0, 0].numel() :][:64]
        assert torch.all(rest == 777.0), "nothing landed at the narrow address"


@pytest.mark.L0
def test_only_declared_elements_are_written() -> None:
    # L11: margins, gaps between rows and between heads keep their bytes.
    for extents in ((70, 70), (128, 130)):
        tensors = draw(12, (3, 3), extents, (64, 64))
        rows = extents[0]
        room = torch.full((2, 3, rows + 9, 96), 7.0, dtype=torch.bfloat16, device="cuda")
        notes = torch.full((2, 3, rows + 9, 4), 7.0, device="cuda")
        tensors["o"] = room[:, :, 3 : 3 + rows, 16:80]
        tensors["stats"] = notes[:, :, 2 : 2 + rows, 1:2]
        declare(tensors, CAUSAL).execute(tensors)
        check(tensors, CAUSAL)
        tensors["o"].fill_(7.0)
        tensors["stats"].fill_(7.0)
        assert torch.all(room == 7.0) and torch.all(notes == 7.0)


@pytest.mark.L0
def test_a_tail_reads_no_other_head() -> None:
    # What lies behind a head, another's rows or foreign bytes, never reaches it, as NaN either.
    tensors = draw(13, (2, 2), (100, 100), (64, 64))
    for name in "qkv":
        given = tensors[name]
        room = torch.full((2, 2, 128, 64), torch.nan, dtype=given.dtype, device="cuda")
        room[:, :, :100] = given
        tensors[name] = room[:, :, :100]
    for band in (NO_BAND, CAUSAL):
        declare(tensors, band).execute(tensors)
        check(tensors, band)


@EACH_SIZE
@pytest.mark.parametrize("left", [None, 130])
def test_what_a_hidden_key_or_value_holds_reaches_no_row(size: int, left: int | None) -> None:
    # A probability of 0 times NaN or infinity is NaN: such tiles are computed again.
    band = (left, 0, "top_left")
    tensors = draw(14, (2, 2), (600, 600), (size, size), batch=1)
    wanted, _ = expected(tensors, band)
    at, last = 300, 600 if left is None else 300 + 130
    tensors["v"][0, 0, at, 3] = torch.nan
    tensors["v"][0, 0, at, 5] = torch.inf
    tensors["k"][0, 1, at] = torch.nan
    declare(tensors, band).execute(tensors)
    got = tensors["o"].double()
    sees = torch.zeros(600, dtype=torch.bool, device="cuda")
    sees[at:last] = True
    bound = TOLERANCE[torch.bfloat16]
    assert (got - wanted)[0, :, ~sees].abs().max() <= bound
    others = [column for column in range(size) if column not in (3, 5)]
    assert (got - wanted)[0, 0][:, others].abs().max() <= bound
    assert torch.isnan(got[0, 0, sees, 3]).all() and torch.isinf(got[0, 0, sees, 5]).all()
    assert torch.isnan(got[0, 1, sees]).all()


@pytest.mark.L0
def test_a_refused_call_launches_nothing(call: Any) -> None:
    # L1: an address that no tensor map takes, a wrong type, a short buffer.
    graph, tensors = call
    tensors["o"].fill_(7.0)
    odd = torch.zeros(tensors["q"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    for name, wrong in (
        ("q", odd.view(tensors["q"].shape)),
        ("k", tensors["k"].float()),
        ("v", tensors["v"][:, :, :100]),
    ):
        with pytest.raises(tw.BindingError):
            graph.execute({**tensors, name: wrong})
    torch.cuda.synchronize()
    assert torch.all(tensors["o"] == 7.0)
