"""The ATen engine's reshape, slice, transpose and concatenate: every bit where it belongs."""

from __future__ import annotations

import pytest
import torch

import tilewright
from tilewright import reshape_mode
from tilewright.engines.aten.registry import prepare
from tilewright.graph.graph import DeclaredGraph

pytestmark = pytest.mark.L0

TYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int64,
    torch.uint8,
]
CPU = torch.device("cpu")


def _draw(dim, dtype, seed=0):
    """Numbers that every type holds; for 8-bit types every code."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, dim, generator=generator, dtype=torch.uint8)
    return codes.view(dtype) if dtype.itemsize == 1 else codes.to(dtype)


def _raw(tensor):
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _layouts(dim, dtype):
    x = _draw(dim, dtype)
    yield x
    yield x.transpose(0, 1).contiguous().transpose(0, 1)
    yield _draw((dim[0], 2 * dim[1], *dim[2:]), dtype)[:, ::2]


def _run(graph, feeds, out, stride=None):
    """The output's buffer; unlike the fixture's values it keeps the bits of every type."""
    if stride is not None:
        out.set_stride(stride)
    out.set_output(True)
    graph.build()
    first = next(iter(feeds.values()))
    span = 1 + sum((n - 1) * s for n, s in zip(out.get_dim(), out.get_stride(), strict=True))
    storage = torch.zeros(span, dtype=first.dtype)
    view = storage.as_strided(out.get_dim(), out.get_stride())
    graph.execute({**feeds, out: view})
    return view


@pytest.mark.parametrize("dtype", TYPES)
def test_reshape_in_row_major_order(dtype):
    for x in _layouts((4, 6, 5), dtype):
        for stride in (None, (1, 2), (70, 1)):
            graph = tilewright.Graph(io_data_type=dtype)
            source = graph.tensor_like(x)
            out = graph.reshape(source, reshape_mode=reshape_mode.LOGICAL)
            got = _run(graph, {source: x}, out.set_dim((2, 60)), stride)
            assert torch.equal(_raw(got), _raw(x).reshape(2, 60))


def test_a_view_keeps_the_inputs_strides(check_graph):
    x = _draw((4, 6, 10), torch.float32)[:, :, ::2]
    graph = tilewright.Graph(io_data_type=torch.float32)
    source = graph.tensor_like(x)
    out = graph.reshape(source).set_dim((24, 5)).set_output(True)
    check_graph(graph, {source: x})
    assert out.get_stride() == [10, 2]


@pytest.mark.parametrize("dtype", TYPES)
def test_transpose(dtype):
    for x in _layouts((4, 6, 5), dtype):
        for permutation in ((2, 0, 1), (0, 2, 1), (0, 1, 2)):
            for stride in (None, (200, 30, 1)):
                graph = tilewright.Graph(io_data_type=dtype)
                source = graph.tensor_like(x)
                got = _run(graph, {source: x}, graph.transpose(source, permutation), stride)
                assert torch.equal(_raw(got), _raw(x).permute(permutation))


@pytest.mark.parametrize("dtype", TYPES)
def test_slice(dtype):
    for x in _layouts((4, 6, 5), dtype):
        for index in (
            (slice(1, 3), slice(0, None, 2)),
            (slice(None), slice(None), slice(-3, -1)),
            (slice(2, 2),),
        ):
            graph = tilewright.Graph(io_data_type=dtype)
            source = graph.tensor_like(x)
            got = _run(graph, {source: x}, graph.slice(source, index))
            assert torch.equal(_raw(got), _raw(x)[index])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenate(dtype, axis):
    parts = list(_layouts((4, 6, 5), dtype))
    parts.append(_draw((4, 6, 5), dtype, seed=1).narrow(axis, 0, 2))
    parts.append(_draw((4, 6, 5), dtype, seed=2).narrow(axis, 0, 0))
    graph = tilewright.Graph(io_data_type=dtype)
    tensors = [graph.tensor_like(part) for part in parts]
    got = _run(graph, dict(zip(tensors, parts, strict=True)), graph.concatenate(tensors, axis=axis))
    assert torch.equal(_raw(got), torch.cat([_raw(part) for part in parts], axis))


def test_more_than_ten_inputs_keep_their_order(check_graph):
    parts = [torch.full((1, 2), float(number)) for number in range(12)]
    graph = tilewright.Graph(io_data_type=torch.float32)
    tensors = [graph.tensor_like(part) for part in parts]
    graph.concatenate(tensors, axis=0).set_output(True)
    check_graph(graph, dict(zip(tensors, parts, strict=True)))


@pytest.mark.parametrize("lies_there", [True, False])
def test_an_input_may_lie_in_its_place_of_the_output(lies_there):
    whole = torch.zeros(4, 5)
    first, second = _draw((4, 2), torch.float32), _draw((4, 3), torch.float32, seed=1)
    expected = torch.cat((first, second), 1)
    graph = DeclaredGraph(io_data_type=torch.float32)
    a, b = graph.tensor((4, 2)), graph.tensor((4, 3), (5, 1) if lies_there else (3, 1))
    graph.concatenate([a, b], axis=1, in_place_index=1).set_output(True)
    graph.validate()
    kernel = prepare(graph.operations[0], CPU)
    if lies_there:
        whole[:, 2:] = second
        second = whole[:, 2:]
    kernel({"input_0": first, "input_1": second}, {"out": whole})
    assert torch.equal(whole, expected)


def _nibbles(data, dim):
    return torch.stack((data & 15, data >> 4), -1).flatten()[: dim[0] * dim[1]].reshape(dim)


def _packed_kernel(declare, dims):
    """The kernel and output record of one operation on packed FP4 tensors of these dims."""
    graph = DeclaredGraph(io_data_type="FP4_E2M1")
    out = declare(graph, [graph.tensor(dim) for dim in dims]).set_output(True)
    graph.validate()
    return prepare(graph.operations[0], CPU), out


def test_packed_4_bit_elements_move_across_the_packed_axis():
    data = _draw((12,), torch.uint8)
    kernel, _ = _packed_kernel(
        lambda graph, t: graph.transpose(t[0], (1, 0)).set_stride((4, 1)), [(4, 6)]
    )
    result = torch.zeros(12, dtype=torch.uint8)
    kernel({"input": data}, {"out": result})
    assert torch.equal(_nibbles(result, (6, 4)), _nibbles(data, (4, 6)).t())

    # 3 elements a row: rows begin in the middle of a byte.
    kernel, _ = _packed_kernel(lambda graph, t: graph.slice(t[0], [(1, 4), (1, 4)]), [(4, 6)])
    result = torch.full((6,), 0xFF, dtype=torch.uint8)
    kernel({"input": data}, {"out": result})
    assert torch.equal(_nibbles(result, (3, 3)), _nibbles(data, (4, 6))[1:4, 1:4])
    assert result[4] >> 4 == 15 and result[5] == 255

    kernel, _ = _packed_kernel(lambda graph, t: graph.concatenate(t, axis=1), [(4, 6), (4, 3)])
    more = _draw((6,), torch.uint8, seed=1)
    result = torch.zeros(18, dtype=torch.uint8)
    kernel({"input_0": data, "input_1": more}, {"out": result})
    expected = torch.cat((_nibbles(data, (4, 6)), _nibbles(more, (4, 3))), 1)
    assert torch.equal(_nibbles(result, (4, 9)), expected)
