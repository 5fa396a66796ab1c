"""The ATen engine's grouped products against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tilewright import moe_grouped_matmul_mode as modes
from tilewright.engines.aten import moe
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
ROWS, FEATURES, COLUMNS, EXPERTS = 10, 4, 3, 4
# Group starts, some with an end: empty groups, rows before the first and after the last.
OFFSETS = [[0, 3, 3, 7], [0, 3, 3, 7, 10], [1, 3, 3, 7, 9], [0, 0, 0, 0], [10, 10, 10, 10]]


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _offsets(starts, dtype=torch.int32):
    return torch.tensor(starts, dtype=dtype).reshape(-1, 1, 1)


def _forward(token, weight, offsets, mode, index=None, out_type=None, **extra):
    graph = tilewright.Graph(io_data_type=token.dtype)
    buffers = [token, weight, offsets, *([] if index is None else [index])]
    tensors = [graph.tensor_like(buffer) for buffer in buffers]
    feeds = dict(zip(tensors, buffers, strict=True))
    if "token_ks" in extra:
        slots = extra["token_ks"]
        extra["token_ks"] = graph.tensor_like(slots)
        feeds[extra["token_ks"]] = slots
    out = graph.moe_grouped_matmul(*tensors, mode=mode, **extra).set_output(True)
    if out_type is not None:
        out.set_data_type(out_type)
    return graph, feeds, out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("starts", OFFSETS)
@pytest.mark.parametrize("mode", [modes.NONE, modes.GATHER, modes.SCATTER])
def test_forward_with_indices_that_are_garbage_outside_groups(check_graph, dtype, starts, mode):
    token, weight = _draw((1, ROWS, FEATURES), dtype), _draw((4, FEATURES, COLUMNS), dtype, seed=1)
    index = None
    if mode is not modes.NONE:
        index = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2)).int()
        bounds = [*starts, ROWS]
        index[: bounds[0]], index[bounds[EXPERTS] :] = 2**30, -(2**30)
        index = index.reshape(1, ROWS, 1)
    graph, feeds, _ = _forward(token, weight, _offsets(starts), mode, index)
    check_graph(graph, feeds, factor=16)


def test_a_gather_may_read_tokens_several_times_and_offsets_may_be_int64(check_graph):
    token = _draw((1, 5, FEATURES), torch.float32)
    weight = _draw((EXPERTS, FEATURES, COLUMNS), torch.float32, seed=1)
    index = torch.tensor([0, 0, 4, 3, 1, 2, 2, 2], dtype=torch.int32).reshape(1, 8, 1)
    offsets = _offsets([0, 2, 5, 5], torch.int64)
    graph, feeds, _ = _forward(token, weight, offsets, modes.GATHER, index)
    check_graph(graph, feeds, factor=16)


def test_a_scatter_with_slots_writes_row_index_times_top_k_plus_slot(run_guarded):
    token = _draw((1, 4, FEATURES), torch.float32)
    weight = _draw((2, FEATURES, COLUMNS), torch.float32, seed=1)
    index = torch.tensor([1, 0, 0, 1], dtype=torch.int32).reshape(1, 4, 1)
    slots = torch.tensor([1, 1, 0, 0], dtype=torch.int32).reshape(1, 4, 1)
    graph, feeds, out = _forward(
        token, weight, _offsets([0, 2]), modes.SCATTER, index, token_ks=slots, top_k=2
    )
    result = run_guarded(graph, feeds)[out][0]
    product = torch.cat((token[0, :2] @ weight[0], token[0, 2:] @ weight[1]))
    assert torch.allclose(result, product[[2, 1, 3, 0]], atol=1e-6)


def test_transposed_weights_and_sliced_tokens(check_graph):
    token = _draw((1, ROWS, 2 * FEATURES), torch.bfloat16)[:, :, ::2]
    weight = _draw((EXPERTS, COLUMNS, FEATURES), torch.bfloat16, seed=1).transpose(1, 2)
    graph, feeds, _ = _forward(token, weight, _offsets(OFFSETS[0]), modes.NONE)
    check_graph(graph, feeds, factor=16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("starts", OFFSETS)
def test_weight_gradient(check_graph, dtype, starts):
    token, grad = _draw((1, ROWS, FEATURES), dtype), _draw((1, ROWS, COLUMNS), dtype, seed=1)
    offsets = _offsets(starts)
    graph = tilewright.Graph(io_data_type=dtype)
    tensors = [graph.tensor_like(buffer) for buffer in (grad, token, offsets)]
    out = graph.moe_grouped_matmul_bwd(*tensors).set_dim((EXPERTS, FEATURES, COLUMNS))
    out.set_output(True).set_data_type(torch.float32)
    check_graph(graph, dict(zip(tensors, (grad, token, offsets), strict=True)), factor=32)


@pytest.mark.parametrize("starts", OFFSETS)
@pytest.mark.parametrize("mode", ["NONE", "GATHER", "SCATTER"])
def test_the_product_that_reads_nothing_on_the_host_equals_the_one_that_does(starts, mode):
    token = _draw((ROWS, FEATURES), torch.float32)
    weight = _draw((EXPERTS, FEATURES, COLUMNS), torch.float32, seed=1)
    index = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))
    bounds = [*starts, ROWS]
    index[: bounds[0]], index[bounds[EXPERTS] :] = 2**30, -(2**30)
    graph = tilewright.Graph()
    record = graph.tensor_like(_offsets(starts))
    results = []
    for device, multiply in (
        ("cpu", moe._multiply_on_host),
        ("cuda", moe._multiply_on_device),
    ):
        groups = moe._grouping(record, EXPERTS, ROWS, torch.device(device))
        result = torch.zeros(ROWS, COLUMNS)
        given = None if mode == "NONE" else index
        multiply(token, weight, groups(_offsets(starts)), given, mode, result)
        results.append(result)
    assert torch.allclose(*results, atol=1e-6)


def test_combine_and_slots_without_a_scatter_are_declined():
    token, weight = _draw((1, 4, FEATURES), torch.float32), _draw((2, FEATURES, 3), torch.float32)
    index = torch.zeros(1, 4, 1, dtype=torch.int32)
    for mode, extra, message in (
        (modes.COMBINE, {}, "mode COMBINE"),
        (modes.GATHER, {"token_ks": index, "top_k": 2}, "token_ks"),
        (modes.SCATTER, {"token_ks": index}, "top_k 0"),
        (modes.SCATTER, {"top_k": 2}, "no token_ks"),
    ):
        graph, _, _ = _forward(token, weight, _offsets([0, 2]), mode, index, **extra)
        with pytest.raises(NotSupportedError, match=message):
            graph.build()
