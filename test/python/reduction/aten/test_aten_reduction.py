"""The ATen engine's reductions against the float64 oracle."""

from __future__ import annotations

import math

import pytest
import torch

import tilewright
from tilewright import reduction_mode

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
MODES = [mode for mode in reduction_mode if mode.name != "NOT_SET"]
OVER_NOTHING = {
    "MUL": 1.0,
    "MUL_NO_ZEROS": 1.0,
    "AVG": math.nan,
    "MAX": -math.inf,
    "MIN": math.inf,
}


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _reduce(x, mode, dim, out_type=None, stride=None):
    graph = tilewright.Graph(io_data_type=x.dtype)
    source = graph.tensor_like(x)
    out = graph.reduction(source, mode).set_dim(dim).set_output(True)
    if out_type is not None:
        out.set_data_type(out_type)
    if stride is not None:
        out.set_stride(stride)
    return graph, {source: x}, out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [(1, 1, 5, 4), (3, 1, 1, 1), (1, 1, 1, 1), (3, 1, 5, 4)])
def test_every_mode_over_some_all_and_no_axes(check_graph, dtype, mode, dim):
    x = _draw((3, 1, 5, 4), dtype)
    x[0, 0, 0, :2] = 0
    graph, feeds, _ = _reduce(x, mode, dim)
    check_graph(graph, feeds, factor=32)


@pytest.mark.parametrize("mode", MODES)
def test_strided_inputs_and_outputs(check_graph, mode):
    x = _draw((6, 4, 10), torch.float32)[::2, :, ::2].transpose(0, 1)
    graph, feeds, _ = _reduce(x, mode, (4, 1, 5), stride=(17, 1, 3))
    check_graph(graph, feeds, factor=32)
    graph, feeds, _ = _reduce(x[:1].expand(4, 3, 5), mode, (1, 3, 1))
    check_graph(graph, feeds, factor=32)


@pytest.mark.parametrize("mode", MODES)
def test_reducing_nothing_gives_the_neutral_element(run_guarded, mode):
    graph, feeds, out = _reduce(torch.zeros(0, 3), mode, (1, 3))
    expected = OVER_NOTHING.get(mode.name, 0.0)
    for value in run_guarded(graph, feeds)[out].flatten().tolist():
        assert value == expected or (math.isnan(value) and math.isnan(expected))


@pytest.mark.parametrize("mode", MODES)
def test_nan_is_never_dropped(run_guarded, mode):
    x = torch.ones(2, 40)
    x[1, 17] = math.nan
    graph, feeds, out = _reduce(x, mode, (2, 1))
    first, second = run_guarded(graph, feeds)[out].flatten().tolist()
    assert math.isfinite(first) and math.isnan(second)


def test_low_precision_sums_accumulate_in_float32(check_graph):
    x = torch.ones(4096, 2, dtype=torch.bfloat16)
    graph, feeds, out = _reduce(x, reduction_mode.ADD, (1, 2))
    assert check_graph(graph, feeds)[out].flatten().tolist() == [4096.0, 4096.0]


@pytest.mark.parametrize("mode", [reduction_mode.ADD, reduction_mode.MAX, reduction_mode.NORM1])
def test_integers_are_reduced_exactly(run_guarded, mode):
    x = torch.tensor([[2**53 + 1, 0], [0, -5]])
    graph, feeds, out = _reduce(x, mode, (1, 2))
    expected = {"ADD": [2**53 + 1, -5], "MAX": [2**53 + 1, 0], "NORM1": [2**53 + 1, 5]}
    assert run_guarded(graph, feeds)[out].flatten().tolist() == expected[mode.name]


def test_fp8_amax(check_graph):
    x = _draw((5, 64), torch.float32).to(torch.float8_e5m2)
    graph, feeds, _ = _reduce(x, reduction_mode.AMAX, (1, 1), out_type=torch.float32)
    check_graph(graph, feeds)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [(4, 3, 5, 2), (6, 3), (0, 3, 2)])
def test_generated_statistics(check_graph, dtype, dim):
    x = _draw(dim, dtype) + 1
    for buffer in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        graph = tilewright.Graph(io_data_type=dtype)
        source = graph.tensor_like(buffer)
        for output in graph.genstats(source):
            output.set_output(True)
            output.set_data_type(torch.float64 if dtype is torch.float64 else torch.float32)
        check_graph(graph, {source: buffer}, factor=32)
