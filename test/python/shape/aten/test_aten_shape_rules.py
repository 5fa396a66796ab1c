"""Which moves of elements the ATen engine declines, and what it moves between types."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import shape
from tilewright.errors import NotSupportedError
from tilewright.torch_dtypes import to_torch

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")


def record(dim, stride=None, data_type="FLOAT"):
    stride = stride or torch.empty(dim, device="meta").stride()
    return tilewright.Graph().tensor(dim, stride, tilewright.data_type[data_type])


def operation(inputs, out, **attributes):
    if not isinstance(inputs, dict):
        inputs = {"input": inputs}
    return SimpleNamespace(kind="move", inputs=inputs, outputs={"out": out}, **attributes)


def concatenation(dims, out, **attributes):
    inputs = {f"input_{number}": record(dim) for number, dim in enumerate(dims)}
    return shape.prepare_concatenate(operation(inputs, record(out), **attributes), CPU)


def test_a_transpose_takes_each_axis_once():
    def prepare(order, out):
        return shape.prepare_transpose(
            operation(record((2, 3, 4)), record(out), permutation=order), CPU
        )

    for order in itertools.permutations(range(3)):
        prepare(order, tuple((2, 3, 4)[axis] for axis in order))
    for order in ((0, 1), (0, 1, 1), (1, 2, 3), (0, 1, 2, 3), (-1, 0, 1)):
        with pytest.raises(NotSupportedError, match="each of 0 to 2 once"):
            prepare(order, (2, 3, 4))
    with pytest.raises(NotSupportedError, match="permuted by"):
        prepare((2, 0, 1), (2, 3, 4))


def test_a_reshape_keeps_the_number_of_elements():
    for out in ((6,), (3, 2), (1, 6, 1)):
        shape.prepare_reshape(operation(record((2, 3)), record(out)), CPU)
    for out in ((5,), (7,), (2, 4)):
        with pytest.raises(NotSupportedError, match="keeps the number"):
            shape.prepare_reshape(operation(record((2, 3)), record(out)), CPU)


def test_slices_have_positive_steps_and_the_declared_extent():
    def prepare(slices, out):
        return shape.prepare_slice(operation(record((4, 5)), record(out), slices=slices), CPU)

    x = torch.arange(20.0).view(4, 5)
    # The last two: a step times a stride would be beyond 64 bits.
    given = [[(1, 3)], [slice(None), (0, 5, 2)], [(0, 4, 3), (-2, None)], [(3, 1)], []]
    for slices in (*given, [(1, 4, 2**62), (0, 5, 2**63 - 1)], [(4, None, 2**62)]):
        index = tuple(s if isinstance(s, slice) else slice(*s) for s in slices)
        expected = torch.from_numpy(x.numpy()[index].copy())
        out = torch.full(expected.shape, 99.0)
        prepare(slices, tuple(expected.shape))({"input": x}, {"out": out})
        assert torch.equal(out, expected)
    for slices in ([(0, 4, 0)], [(3, 0, -1)], [(0, 1), (0, 1, -2)]):
        with pytest.raises(NotSupportedError, match="steps are at least 1"):
            prepare(slices, (4, 5))
    with pytest.raises(NotSupportedError, match="at most one an axis"):
        prepare([(0, 1)] * 3, (1, 1))
    for out in ((2, 4), (3, 5), (2, 5, 1)):
        with pytest.raises(NotSupportedError, match="sliced by"):
            prepare([(1, 3)], out)


def test_the_parts_of_a_concatenation_make_its_output():
    a, b = torch.arange(6.0).view(2, 3), 10 + torch.arange(8.0).view(2, 4)
    for axis in (1, -1):
        out = torch.zeros(2, 7)
        kernel = concatenation([(2, 3), (2, 4)], (2, 7), axis=axis)
        kernel({"input_0": a, "input_1": b}, {"out": out})
        assert torch.equal(out, torch.cat((a, b), 1))
    concatenation([(2, 3), (5, 3)], (7, 3), axis=-2)
    concatenation([(2, 3)], (2, 3), axis=0)
    for axis in (2, -3, 5):
        with pytest.raises(NotSupportedError, match="an axis of the output"):
            concatenation([(2, 3), (2, 4)], (2, 7), axis=axis)
    with pytest.raises(NotSupportedError, match="of 0 inputs"):
        concatenation([], (2, 7), axis=0)
    for dims in (((2, 3), (3, 4)), ((2, 3), (2, 4, 1)), ((2,), (2, 4))):
        with pytest.raises(NotSupportedError, match="on every axis but 1"):
            concatenation(dims, (2, 7), axis=1)
    for dims in (((3, 2, 5), (4, 2, 6)), ((3, 2, 6), (4, 2, 5))):
        with pytest.raises(NotSupportedError, match="on every axis but 0"):
            concatenation(dims, (7, 2, 5), axis=0)
    for total in (6, 8):
        with pytest.raises(NotSupportedError, match="7 in all"):
            concatenation([(2, 3), (2, 4)], (2, total), axis=1)


def test_an_input_may_lie_in_place_if_it_is_one():
    for index in (0, 1, None):
        concatenation([(2, 3), (2, 4)], (2, 7), axis=1, in_place_index=index)
    for index in (-1, 2, 3):
        with pytest.raises(NotSupportedError, match="an index of its 2 inputs"):
            concatenation([(2, 3), (2, 4)], (2, 7), axis=1, in_place_index=index)


def test_ports_are_numbered():
    assert shape._position("input_10") == 10
    with pytest.raises(NotSupportedError, match="expected ports input_0"):
        shape._position("input_x")


VALUES = {
    "FLOAT": [0.5, -2.75, 300.0, 1e10, -0.0],
    "INT32": [0, -3, 300, 2**24 + 1, 2**31 - 1],
    "INT64": [0, -3, 300, 2**53 + 1, -(2**63)],
    "INT8": [0, -3, 100, 127, -128],
    "UINT8": [0, 3, 200, 255, 17],
    "BFLOAT16": [0.5, -2.75, 300.0, 1e10, -0.0],
}


@pytest.mark.parametrize("target", VALUES)
@pytest.mark.parametrize("source", VALUES)
def test_elements_moved_between_types_are_rounded_once(source, target):
    kinds = [to_torch(tilewright.data_type[name]) for name in (source, target)]
    x = torch.tensor(VALUES[source]).to(kinds[0])
    given, wanted = record((5,), data_type=source), record((5,), data_type=target)
    op = operation({"input_0": given}, wanted, axis=0)
    out = torch.zeros(5, dtype=kinds[1])
    shape.prepare_concatenate(op, CPU)({"input_0": x}, {"out": out})
    if kinds[1].is_floating_point:
        expected = x.double().to(kinds[1]) if source != "INT64" else x.to(kinds[1])
    else:
        low, high = torch.iinfo(kinds[1]).min, torch.iinfo(kinds[1]).max
        exact = [int(value) for value in x.tolist()]
        expected = torch.tensor([min(max(v, low), high) for v in exact], dtype=kinds[1])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("stride", [(1,), (3,)])
def test_a_reshape_into_gaps_and_out_of_them(stride):
    x = torch.arange(6.0).view(2, 3)
    out = torch.full((16,), 9.0).as_strided((6,), stride)
    op = operation(record((2, 3)), record((6,), stride))
    shape.prepare_reshape(op, CPU)({"input": x}, {"out": out})
    assert torch.equal(out, x.flatten())
    given = torch.zeros(30).as_strided((2, 3), (9, 2))
    given.copy_(x)
    out = torch.zeros(3, 2)
    op = operation(record((2, 3), (9, 2)), record((3, 2)))
    shape.prepare_reshape(op, CPU)({"input": given}, {"out": out})
    assert torch.equal(out, x.reshape(3, 2))
