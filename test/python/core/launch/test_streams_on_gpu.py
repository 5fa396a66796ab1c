"""Work goes to the stream that is named, by whatever name, and all of it; the caller's stays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright import ops

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

ROWS, WIDTH = 64, 1024
# Some milliseconds at any clock: longer than it takes to launch what is behind it.
SLEEP_CYCLES = 100_000_000


def streams() -> dict[str, tuple[Any, torch.cuda.Stream]]:
    """How a caller may name a stream, and torch's stream for it."""
    side = torch.cuda.Stream()
    default = torch.cuda.default_stream()
    own = torch.cuda.ExternalStream(2)
    return {
        "none": (None, torch.cuda.current_stream()),
        "default": (default, default),
        "0": (0, default),
        "legacy": (1, default),
        "of the thread": (2, own),
        "side": (side, side),
        "pointer": (side.cuda_stream, side),
    }


NAMES = ("none", "default", "0", "legacy", "of the thread", "side", "pointer")


@contextmanager
def held(stream: torch.cuda.Stream) -> Iterator[torch.cuda.Event]:
    """What is sent to the stream inside waits; the event is pending until it may go on."""
    event = torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    yield event


@pytest.fixture(autouse=True)
def caller() -> Iterator[torch.cuda.Stream]:
    """Each test runs on a stream of its own, which is current afterwards too."""
    own = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(own):
        yield own
        assert torch.cuda.current_stream() == own, "the caller's stream is restored"
    torch.cuda.synchronize()


def norm(engine: str) -> tuple[Any, dict[str, torch.Tensor]]:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    x, scale = graph.tensor((ROWS, WIDTH), name="x"), graph.tensor((1, WIDTH), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(phase, x, scale, None, graph.tensor_scalar(1e-6))
    y.set_output(True).set_name("y")
    graph.create_execution_plans()
    graph.deselect_engines(["aten" if engine == "triton" else "triton"])
    graph.build()
    assert graph.selected_engine == engine
    made = {"x": torch.zeros(ROWS, WIDTH, device="cuda").bfloat16()}
    made |= {"scale": torch.ones(1, WIDTH, device="cuda").bfloat16(), "y": torch.empty(0)}
    made["y"] = torch.full_like(made["x"], torch.nan)
    graph.execute(made)
    torch.cuda.synchronize()
    return graph, made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["execute", "frame", "frame of a handle"])
@pytest.mark.parametrize("engine", ["triton", "aten"])
def test_work_is_behind_what_is_on_its_stream(engine: str, way: str, name: str) -> None:
    # L8: a producer held back on the stream writes what the call reads.
    graph, pack = norm(engine)
    given, stream = streams()[name]
    value = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()
    handle = tw.create_handle()
    tw.set_stream(handle=handle, stream=given)
    if way == "frame of a handle":
        graph.handle = handle
    frame = graph.bind(pack)
    torch.cuda.synchronize()
    with held(stream) as event:
        with torch.cuda.stream(stream):
            pack["x"].copy_(value)
            event.record()
        if way == "execute":
            graph.execute(pack, None, handle)
        else:
            frame.launch(given if way == "frame" else None)
        assert not event.query(), "the producer was done before the call was made"
    torch.cuda.synchronize()
    expected = F.rms_norm(value.double(), (WIDTH,), None, 1e-6)
    assert (pack["y"].double() - expected).abs().max() <= 2**-8 * expected.abs().max()


class Masked:
    """Attention forward: a mask joins a bias, lengths are packed, a gate is multiplied."""

    has_backward = False

    def __init__(self) -> None:
        self.q, self.k, self.v, self.gate = (
            torch.empty(2, 4, 100, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        self.bias = torch.empty(1, 4, 1, 100, device="cuda", dtype=torch.bfloat16)
        self.lengths = torch.empty(2, 2, device="cuda", dtype=torch.int32)
        self.mask = torch.empty(100, 100, device="cuda", dtype=torch.bool)

    def set(self, seed: int) -> None:
        """Other numbers in the same buffers."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for tensor in (self.q, self.k, self.v, self.gate, self.bias):
            tensor.normal_(generator=generator)
        self.mask.bernoulli_(0.7, generator=generator)
        self.lengths.random_(1, 101, generator=generator)

    def __call__(self, stream: Any) -> list[torch.Tensor]:
        options = {"mask": self.mask, "bias": self.bias, "gate": self.gate}
        lengths = self.lengths[:, 0]
        made = ops.sdpa(self.q, self.k, self.v, seqlens_kv=lengths, stream=stream, **options)
        assert isinstance(made, torch.Tensor)
        return [made]


class Packed:
    """Gradients of packed operands, which are made of zeros."""

    has_backward = True

    def __init__(self) -> None:
        self.leaves = [
            torch.empty(120, 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        ]
        self.prefix = torch.tensor([0, 50, 110], device="cuda", dtype=torch.int32)
        self.ones = torch.ones(120, 4, 64, device="cuda", dtype=torch.bfloat16)

    def set(self, seed: int) -> None:
        """Other numbers in the same buffers."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for leaf in self.leaves:
            leaf.detach().normal_(generator=generator)

    def __call__(self, stream: Any) -> list[torch.Tensor]:
        options = {"causal": True, "stream": stream}
        o = ops.sdpa_varlen(*self.leaves, self.prefix, self.prefix, 64, 64, **options)
        assert isinstance(o, torch.Tensor)
        return list(torch.autograd.grad(o, self.leaves, self.ones))


class Norm:
    """The gradient of a weight, which is summed in float32 and converted."""

    has_backward = True

    def __init__(self) -> None:
        self.x = torch.empty(3000, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.weight = torch.ones(512, device="cuda", dtype=torch.bfloat16).requires_grad_()
        self.ones = torch.ones(3000, 512, device="cuda", dtype=torch.bfloat16)

    def set(self, seed: int) -> None:
        """Other numbers in the same buffers."""
        self.x.detach().normal_(generator=torch.Generator("cuda").manual_seed(seed))

    def __call__(self, stream: Any) -> list[torch.Tensor]:
        y = ops.rms_norm(self.x, self.weight, stream=stream)
        assert isinstance(y, torch.Tensor)
        return list(torch.autograd.grad(y, (self.x, self.weight), self.ones))


@pytest.mark.parametrize("make", [Masked, Packed, Norm])
@pytest.mark.parametrize("held_back", ["its own", "the caller's"])
def test_the_whole_of_a_function_is_on_its_stream(
    make: Callable[[], Any], held_back: str, caller: torch.cuda.Stream
) -> None:
    # B14: copies, conversions and workspaces too. One of the streams is held back: what went to
    # the other one would be early, or late. Memory of earlier calls holds other numbers.
    call, side = make(), torch.cuda.Stream()
    call.set(1)
    expected = [t.clone() for t in call(None)]
    call.set(2)
    torch.cuda.synchronize()
    for stream in (None, side):
        call(stream)
        torch.cuda.synchronize()
    call.set(1)
    torch.cuda.synchronize()
    is_own = held_back == "its own"
    with held(side if is_own else caller) as event:
        event.record(side if is_own else caller)
        results = call(side)
        if not is_own and not call.has_backward:
            side.synchronize()
        assert not event.query(), "the stream was held back until here"
    with torch.cuda.stream(side):
        found = [t.clone() for t in results]
    torch.cuda.synchronize()
    # As they were on the stream, and as they are when both are done: what is late overwrites.
    for results_then in (found, results):
        for index, (result, wanted) in enumerate(zip(results_then, expected, strict=True)):
            assert torch.equal(result, wanted), f"result {index}"
