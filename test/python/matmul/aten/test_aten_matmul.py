"""The ATen engine's matrix products against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


def _draw(dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype)


def _product(a, b, c_type=None, c_stride=None):
    graph = tilewright.Graph(io_data_type=a.dtype)
    left, right = graph.tensor_like(a, name="left"), graph.tensor_like(b, name="right")
    out = graph.matmul(left, right).set_output(True)
    if c_type is not None:
        out.set_data_type(c_type)
    if c_stride is not None:
        out.set_stride(c_stride)
    return graph, {left: a, right: b}, out


SHAPES = [
    ((5, 7), (7, 3)),
    ((64, 48), (48, 80)),
    ((2, 1, 33, 17), (1, 3, 17, 40)),
    ((3, 1, 9), (3, 9, 1)),
    ((1, 16, 8), (4, 8, 16)),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_products_of_every_float_type_match_the_oracle(check_graph, dtype, shapes):
    a, b = _draw(shapes[0], dtype), _draw(shapes[1], dtype, seed=1)
    graph, feeds, _ = _product(a, b)
    check_graph(graph, feeds, factor=32)


@pytest.mark.parametrize("dtype", FLOATS)
def test_transposed_sliced_and_expanded_operands_and_a_strided_result(check_graph, dtype):
    a = _draw((2, 20, 36), dtype)[:, :, ::2].transpose(1, 2)
    b = _draw((20, 24), dtype, seed=1).expand(2, 20, 24)
    # Rows of C are 5 elements apart beyond their extent, columns come first.
    graph, feeds, _ = _product(a, b, c_stride=(24 * 23, 1, 23))
    check_graph(graph, feeds, factor=32)


def test_an_empty_inner_axis_gives_zeros_and_an_empty_batch_nothing(check_graph):
    for dtype in FLOATS:
        graph, feeds, out = _product(_draw((2, 3, 0), dtype), _draw((2, 0, 4), dtype))
        assert (check_graph(graph, feeds)[out] == 0).all()
        graph, feeds, out = _product(_draw((0, 3, 2), dtype), _draw((0, 2, 4), dtype))
        assert check_graph(graph, feeds)[out].numel() == 0


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("out_type", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_fp8_operands_accumulate_in_float32_and_round_once(check_graph, dtype, out_type):
    a, b = _draw((2, 9, 33), dtype), _draw((2, 33, 5), dtype, seed=1)
    graph, feeds, _ = _product(a, b, c_type=out_type)
    check_graph(graph, feeds, factor=32)


def test_fp8_results_saturate_and_nan_stays():
    a = torch.tensor([[400.0, 0.0], [float("nan"), 0.0]]).to(torch.float8_e4m3fn)
    b = torch.tensor([[400.0, -400.0], [0.0, 0.0]]).to(torch.float8_e4m3fn)
    graph, feeds, out = _product(a, b)
    graph.build()
    result = torch.zeros(2, 2, dtype=torch.float8_e4m3fn)
    graph.execute({**feeds, out: result})
    assert result[0].tolist() == [448.0, -448.0]
    assert torch.isnan(result[1].float()).all()


def test_int8_products_are_exact(check_graph):
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-128, 128, (3, 3001), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (3001, 5), generator=generator, dtype=torch.int8)
    # This sum, 3001 * 127 ** 2, is odd and beyond the 24 bits of float32.
    a[0], b[:, 0] = 127, 127
    graph, feeds, out = _product(a, b, c_type=torch.int32)
    result = check_graph(graph, feeds)[out]
    assert torch.equal(result.long(), a.long() @ b.long())


def test_a_large_inner_extent_keeps_float32_accumulation_in_bfloat16(check_graph):
    # With bfloat16 partial sums, 1 added to 256 is lost.
    a = torch.ones(32, 4096, dtype=torch.bfloat16)
    graph, feeds, out = _product(a, a.t().contiguous())
    assert (check_graph(graph, feeds)[out] == 4096).all()


def test_a_ragged_operand_is_declined_by_name():
    graph = tilewright.Graph(io_data_type=torch.float32)
    offset = graph.tensor((3, 1, 1), data_type=torch.int32, name="offset")
    left = graph.tensor((2, 4, 8), ragged_offset=offset, name="left")
    right = graph.tensor((2, 8, 4), name="right")
    graph.matmul(left, right).set_output(True)
    with pytest.raises(NotSupportedError, match=r"'left'.*ragged"):
        graph.build()
