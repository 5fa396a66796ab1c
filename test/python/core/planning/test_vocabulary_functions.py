"""Functions of the vocabulary: handles, devices, streams, graphs as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_samples import product

import tilewright as tw

pytestmark = pytest.mark.L0


def test_module_functions_of_the_vocabulary() -> None:
    assert tw.backend_version() >= 92200 and tw.backend_version_string().count(".") == 2
    assert tw.get_last_error_string() == ""
    handle = tw.create_handle("cpu")
    tw.set_stream(handle=handle, stream=None)
    assert tw.get_stream(handle) is None
    tw.destroy_handle(handle)
    with pytest.raises(tw.BindingError, match="was destroyed"):
        tw.get_stream(handle)
    assert tw.create_device_properties("cpu").type == "cpu"
    built_count = 0

    @tw.jit(heur_modes=[tw.heur_mode.A])
    @tw.graph_cache(key_fn=lambda handle, a, b: (tuple(a.shape), tuple(b.shape)), maxsize=2)
    def declare(handle: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        nonlocal built_count
        built_count += 1
        with tw.graph(handle, io_data_type="float32") as (graph, _):
            left, right = graph.tensor_like(a), graph.tensor_like(b)
            return graph, [left, right, graph.matmul(left, right).set_output(True)]

    a, b = torch.rand(3, 4), torch.rand(4, 2)
    for _ in range(2):
        graph, uids = declare(tw.create_handle("cpu"), a, b)
        out = torch.empty(3, 2)
        graph.execute(dict(zip(uids, (a, b, out), strict=True)))
        assert torch.allclose(out, a @ b)
    assert built_count == 1
    for size in (3, 4, 5):
        declare(None, torch.rand(size + 5, 4), b)
    declare(None, a, b)
    assert built_count == 5, "the least recently used entry was dropped"


WRONG_HANDLES: dict[str, Callable[[], Any]] = {
    "device: got 'sm_90'; expected what torch.device takes": lambda: tw.create_handle("sm_90"),
    "device: got 'gpu'; expected what": lambda: tw.create_device_properties("gpu"),
    "handle: got str; expected a Handle": lambda: tw.destroy_handle("cpu"),
    "stream: got -1; expected an address": lambda: tw.set_stream(tw.create_handle("cpu"), -1),
    f"stream: got {2**64}; expected": lambda: tw.set_stream(tw.create_handle("cpu"), 2**64),
}


@pytest.mark.parametrize("message", WRONG_HANDLES)
def test_wrong_devices_and_streams_are_named(message: str) -> None:
    with pytest.raises(tw.BindingError) as caught:
        WRONG_HANDLES[message]()
    assert message in str(caught.value)


def test_a_handle_on_cuda_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(tw.BindingError, match="device: got 'cuda', and torch finds no CUDA device"):
        tw.create_handle("cuda")


def test_a_graph_is_a_context_manager_and_a_function() -> None:
    image, weight = torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3)
    with tw.Graph(io_data_type="float32", intermediate_data_type="float32") as graph:
        made = graph.conv_fprop(image, weight, padding=[1, 1], name="conv2d")
        graph.relu(made, name="relu").set_output(True).set_name("result")
        graph.set_io_tuples(["conv2d::weight", "conv2d::image"], ["result"])
    result = graph(weight, image)
    expected = torch.relu(torch.nn.functional.conv2d(image, weight, padding=1))
    assert torch.allclose(result, expected, atol=1e-6)
    with pytest.raises(tw.BindingError, match="1 inputs given; expected 2"):
        graph(weight)
    with pytest.raises(tw.GraphError, match="no tensor named 'nope'"):
        graph.set_io_tuples(["nope"], [])
    for names in (None, "result", [3]):
        with pytest.raises(
            tw.GraphError, match=r"expected a (list of tensors' names|tensor's name)"
        ):
            graph.set_io_tuples(names, [])


def test_methods_of_the_vocabulary_that_are_not_served_decline() -> None:
    graph, _ = product()
    for method in ("populate_cuda_graph", "update_cuda_graph"):
        with pytest.raises(tw.NotSupportedError, match=method):
            getattr(graph, method)(None, {}, None, None)
