"""Convolutions in float32 do so whatever PyTorch's setting of TF32 is, and leave it as it was."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tilewright
from tilewright.engines.aten import convolution
from tilewright.engines.aten.full_float32 import in_full_float32
from tilewright.engines.aten.registry import prepare
from tilewright.oracle import evaluate

pytestmark = pytest.mark.L0

IMAGE, WEIGHT, RESULT = (2, 64, 10, 11), (64, 64, 3, 3), (2, 64, 10, 11)
CHANNELS_LAST = torch.channels_last
# Direction: shapes of the two inputs and of the result.
DIRECTIONS = {
    "conv_fprop": (IMAGE, WEIGHT, RESULT),
    "conv_dgrad": (RESULT, WEIGHT, IMAGE),
    "conv_wgrad": (IMAGE, RESULT, WEIGHT),
}


def setting() -> str:
    return str(torch.backends.cudnn.conv.fp32_precision)


@pytest.fixture(params=["tf32", "ieee"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = setting()
    torch.backends.cudnn.conv.fp32_precision = request.param
    yield request.param
    torch.backends.cudnn.conv.fp32_precision = before


def declare(direction: str, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, list[Any], Any]:
    first, second, result = DIRECTIONS[direction]
    graph = tilewright.Graph(io_data_type=dtype, handle=tilewright.create_handle(device))
    given = [graph.tensor_like(draw(dim, n).to(dtype)) for n, dim in enumerate((first, second))]
    out = getattr(graph, direction)(*given, padding=1).set_dim(result).set_output(True)
    return graph, given, out


def draw(dim: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator).to(memory_format=CHANNELS_LAST)


def test_the_setting_is_put_back(precision: str) -> None:
    assert in_full_float32(lambda given: (given, setting()), 3) == (3, "ieee")
    assert setting() == precision

    def fails(given: int) -> None:
        raise ValueError(given)

    with pytest.raises(ValueError):
        in_full_float32(fails, 3)
    assert setting() == precision


def test_one_within_another_leaves_it_to_the_outer_one(precision: str) -> None:
    def outer(given: int) -> tuple[str, str]:
        return in_full_float32(lambda _: setting(), given), setting()

    assert in_full_float32(outer, 3) == ("ieee", "ieee")
    assert setting() == precision


def test_nobody_puts_it_back_for_another_thread(precision: str) -> None:
    first_is_in, second_started, first_ended = (threading.Event() for _ in range(3))
    seen = []

    def first(_: None) -> None:
        first_is_in.set()
        second_started.wait(10)
        # Time for the second to be let in, if nothing holds it.
        time.sleep(0.05)

    def second(_: None) -> None:
        first_ended.wait(10)
        seen.append(setting())

    def run_second() -> None:
        second_started.set()
        in_full_float32(second, None)

    threads = [
        threading.Thread(target=in_full_float32, args=(first, None)),
        threading.Thread(target=run_second),
    ]
    threads[0].start()
    assert first_is_in.wait(10)
    threads[1].start()
    threads[0].join(10)
    first_ended.set()
    threads[1].join(10)
    assert seen == ["ieee"]
    assert setting() == precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_gpu_is_asked_for_float32(
    monkeypatch: pytest.MonkeyPatch, precision: str, direction: str, dtype: torch.dtype
) -> None:
    # Prepared for a GPU, called with operands on a CPU: what is asked for can be seen without one.
    seen = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.append(setting())
            return function(*arguments)

        return call

    monkeypatch.setattr(torch, "convolution", recording(torch.convolution))
    monkeypatch.setattr(
        convolution, "_backward_function", recording(convolution._backward_function)
    )
    graph, given, out = declare(direction, dtype)
    graph.validate()
    operation = graph.operations[0]
    buffers = [draw(tensor.dim, n).to(dtype) for n, tensor in enumerate(given)]
    inputs = dict(zip(operation.inputs, buffers, strict=True))
    prepare(operation, torch.device("cuda"))(inputs, {"out": torch.empty(out.dim, dtype=dtype)})
    assert seen == ["ieee" if dtype is torch.float32 else precision]
    assert setting() == precision


@pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_values_where_tf32_is_on(
    monkeypatch: pytest.MonkeyPatch, precision: str, direction: str
) -> None:
    graph, given, out = declare(direction, torch.float32, "cuda")
    buffers = [draw(tensor.dim, n) for n, tensor in enumerate(given)]
    pack = {tensor: x.cuda() for tensor, x in zip(given, buffers, strict=True)}
    graph.build()
    size = max(graph.get_workspace_size(), 1)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")

    def run() -> torch.Tensor:
        made = torch.empty_strided(out.dim, out.stride, device="cuda")
        graph.execute({**pack, out: made}, workspace)
        return made.cpu().double()

    exact = evaluate(graph, dict(zip(given, buffers, strict=True)))[out.uid]
    allowed = 64 * torch.finfo(torch.float32).eps * max(float(exact.abs().max()), 1.0)
    assert float((run() - exact).abs().max()) <= allowed
    assert setting() == precision
    # That TF32 would be seen: what the setting gives by itself.
    monkeypatch.setattr(convolution, "in_full_float32", lambda function, given: function(given))
    is_off = float((run() - exact).abs().max()) > allowed
    assert is_off == (precision == "tf32")
