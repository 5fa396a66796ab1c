"""Which stream a call is sent to: the default ones by every name, and the whole of a function."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.launch.context import device_and_stream
from tilewright.launch.handles import as_stream_pointer
from tilewright.ops import streams

pytestmark = pytest.mark.L0

DEVICE = torch.device("cuda", 0)


class Runtime:
    """torch.cuda as it is with one device: 0 makes a stream of the pool, 1 is an error."""

    def __init__(self) -> None:
        self.current = ["the caller's"]

    def ExternalStream(self, pointer: int, device: Any) -> str:
        if pointer == 1:
            raise RuntimeError("invalid StreamId 1")
        return f"pointer {pointer}" if pointer else "one of the pool"

    def default_stream(self, device: Any) -> str:
        return "the default"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    for name in ("ExternalStream", "default_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return made


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (None, "the caller's"),
        (0, "the default"),
        (1, "the default"),
        (2, "pointer 2"),
        (0x7F00, "pointer 32512"),
    ],
)
def test_each_name_of_a_stream(runtime: Runtime, stream: Any, expected: str) -> None:
    # L8: the default stream by both of its numbers, the thread's own, and a genuine one.
    with device_and_stream(DEVICE, stream):
        assert runtime.current[-1] == expected
    assert runtime.current == ["the caller's"]
    with pytest.raises(KeyError), device_and_stream(DEVICE, stream):
        raise KeyError
    assert runtime.current == ["the caller's"]


def test_a_stream_is_an_int_a_torch_stream_or_none() -> None:
    class Stream:
        cuda_stream = 0

    assert [as_stream_pointer(each) for each in (None, 0, 1, 2, Stream())] == [None, 0, 1, 2, 0]
    for wrong in ("side", True, 1.5, object()):
        with pytest.raises(tw.BindingError, match="stream: got"):
            as_stream_pointer(wrong)


def test_every_function_with_a_stream_goes_there_whole() -> None:
    taking = [
        function
        for name in ops.__all__
        for function in (getattr(ops, name),)
        if "stream" in inspect.signature(function).parameters
    ]
    assert len(taking) >= 13
    bare = [function.__name__ for function in taking if not hasattr(function, "__wrapped__")]
    assert not bare, "on_its_stream is missing"


@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_function_does_is_done_on_its_stream(
    runtime: Runtime, by_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    # What is on no device stands for what is on one.
    there = functools.partial(device_and_stream, DEVICE)
    monkeypatch.setattr(streams, "device_and_stream", lambda device, stream: there(stream))

    @streams.on_its_stream
    def work(x: torch.Tensor, *, stream: Any = None) -> str:
        seen.append((runtime.current[-1], stream))
        return "done"

    def call(x: torch.Tensor, **options: Any) -> str:
        return work(x=x, **options) if by_name else work(x, **options)

    operand = torch.empty(1, device="meta")
    for stream, expected in ((7, "pointer 7"), (0, "the default"), (None, "the caller's")):
        assert call(operand, stream=stream) == "done"
        assert seen.pop() == (expected, None)
    # What is not on a device keeps its stream, which the call then refuses by name.
    assert call(torch.empty(1), stream=7) == "done"
    assert seen.pop() == ("the caller's", 7)
    with pytest.raises(tw.BindingError, match="stream: got 'side'"):
        call(operand, stream="side")
    with pytest.raises(tw.BindingError, match="has no streams"):
        ops.rms_norm(torch.ones(2, 4), stream=7)
