"""Tensors: chainable setters, uids, roles, and what a buffer's description becomes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.enums import tensor_reordering
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0


@pytest.fixture
def graph() -> DeclaredGraph:
    return DeclaredGraph(io_data_type="FLOAT")


def test_setters_chain_and_getters_answer(graph: DeclaredGraph) -> None:
    offset = graph.tensor((3, 1, 1, 1), data_type="INT32")
    tensor = graph.tensor()
    chained = (
        tensor.set_name("x")
        .set_uid(7)
        .set_dim([2, 4])
        .set_stride(torch.Size([4, 1]))
        .set_data_type(torch.bfloat16)
        .set_is_virtual(False)
        .set_is_pass_by_value(False)
        .set_reordering_type(tensor_reordering.F8_128x4)
        .set_ragged_offset(offset)
        .set_ragged_offset_multiplier(16)
        .set_output(True)
    )
    assert chained is tensor
    assert (tensor.get_uid(), tensor.get_name()) == (7, "x")
    assert (tensor.get_dim(), tensor.get_stride()) == ([2, 4], [4, 1])
    assert tensor.get_data_type() is DataType.BFLOAT16
    assert not tensor.get_is_virtual() and not tensor.get_is_pass_by_value()
    assert tensor.get_reordering_type() is tensor_reordering.F8_128x4
    assert tensor.get_ragged_offset() is offset
    assert tensor.ragged_offset_multiplier == 16


def test_set_output_is_the_opposite_of_virtual(graph: DeclaredGraph) -> None:
    out = graph.exp(graph.tensor((4,)))
    assert out.is_virtual and not out.is_output
    out.set_output(True)
    assert out.is_output and not out.is_virtual
    out.set_output(False)
    assert out.is_virtual and not out.is_output


@pytest.mark.parametrize(
    "given", [DataType.HALF, "HALF", "float16", "torch.float16", torch.float16, "half"]
)
def test_types_come_in_every_spelling(graph: DeclaredGraph, given: object) -> None:
    assert graph.tensor((4,), data_type=given).data_type is DataType.HALF


@pytest.mark.parametrize("dim", [(2, 3, 4), [2, 3, 4], torch.Size([2, 3, 4]), np.array([2, 3, 4])])
def test_an_omitted_stride_is_packed(graph: DeclaredGraph, dim: object) -> None:
    tensor = graph.tensor(dim)  # type: ignore[arg-type]
    assert tensor.stride == (12, 4, 1)
    assert all(type(extent) is int for extent in tensor.dim)


@pytest.mark.parametrize(
    ("dim", "stride"), [((), ()), ((0, 3), (3, 1)), ((3, 0, 2), (2, 2, 1)), ((1,), (1,))]
)
def test_packed_strides_of_small_shapes(
    graph: DeclaredGraph, dim: tuple[int, ...], stride: tuple[int, ...]
) -> None:
    assert graph.tensor(dim).stride == stride


def test_a_singleton_axis_keeps_any_stride(graph: DeclaredGraph) -> None:
    wide = 2**62
    x = graph.tensor((1, 4), (wide, 1))
    graph.exp(x).set_output(True)
    graph.validate()
    assert x.stride == (wide, 1)


def test_automatic_uids_avoid_the_given_ones(graph: DeclaredGraph) -> None:
    a, b, c = (graph.tensor((4,)) for _ in range(3))
    b.set_uid(1)
    c.set_uid(0)
    out = graph.add(graph.add(a, b), c).set_output(True)
    assert a.uid == -1
    graph.validate()
    uids = [tensor.uid for tensor in graph.tensors]
    assert (b.uid, c.uid) == (1, 0)
    assert len(set(uids)) == len(uids) and min(uids) == 0
    assert out.uid in uids


def test_a_uid_given_last_wins_over_an_automatic_one(graph: DeclaredGraph) -> None:
    x = graph.tensor((4,))
    out = graph.exp(x).set_output(True).set_uid(1)
    graph.validate()
    assert (x.uid, out.uid) == (2, 1)


def test_a_uid_can_be_changed_and_freed(graph: DeclaredGraph) -> None:
    x, y = graph.tensor((4,), uid=5), graph.tensor((4,))
    x.set_uid(6)
    y.set_uid(5)
    x.set_uid(6)
    assert (x.uid, y.uid) == (6, 5)
    with pytest.raises(GraphError, match="uid 6 is taken"):
        y.set_uid(6)
    assert y.uid == 5


@pytest.mark.parametrize(
    "uid", [-1, -7, True, 1.0, "1", None, 2**63, pytest.param(10**5000, id="long")]
)
def test_what_is_no_uid_is_refused(graph: DeclaredGraph, uid: object) -> None:
    with pytest.raises(GraphError, match="expected an int >= 0"):
        graph.tensor((4,), name="x").set_uid(uid)  # type: ignore[arg-type]


def test_names_may_repeat(graph: DeclaredGraph) -> None:
    x, y = graph.tensor((4,), name="x"), graph.tensor((4,), name="x")
    graph.add(x, y, name="x").set_output(True)
    graph.validate()
    assert [t.name for t in graph.tensors] == ["x", "x", "x::out"]


def test_a_label_is_the_name_or_the_uid(graph: DeclaredGraph) -> None:
    assert graph.tensor((4,), name="it's").label() == '"it\'s"'
    assert graph.tensor((4,), uid=9).label() == "#9"


@pytest.mark.parametrize(
    "bad",
    [
        (2.5,),
        ("2",),
        (None,),
        3,
        (2**64,),
        (-(2**64),),
        pytest.param((10**5000,), id="long"),
        [[1]],
    ],
)
@pytest.mark.parametrize("setter", ["set_dim", "set_stride"])
def test_what_is_no_shape_is_refused(graph: DeclaredGraph, setter: str, bad: object) -> None:
    tensor = graph.tensor((4,), name="x")
    with pytest.raises(GraphError, match="tensor 'x': "):
        getattr(tensor, setter)(bad)
    assert tensor.dim == (4,)


@pytest.mark.parametrize("bad", ["2", 1.5, None])
def test_what_is_no_multiplier_is_refused(graph: DeclaredGraph, bad: object) -> None:
    with pytest.raises(GraphError, match="; expected an integer"):
        graph.tensor((4,)).set_ragged_offset_multiplier(bad)  # type: ignore[arg-type]


def test_a_ragged_offset_of_another_graph_is_refused(graph: DeclaredGraph) -> None:
    foreign = DeclaredGraph().tensor((3, 1), data_type="INT32", name="offset")
    with pytest.raises(GraphError, match="tensor 'offset' belongs to another graph"):
        graph.tensor((2, 4), ragged_offset=foreign)


def test_an_offset_is_an_input_though_no_port_reads_it(graph: DeclaredGraph) -> None:
    offset = graph.tensor((3, 1), data_type="INT64", name="offset")
    x = graph.tensor((2, 4), name="x", ragged_offset=offset)
    unread = graph.tensor((4,), name="unread")
    out = graph.exp(x).set_output(True)
    graph.validate()
    assert graph.inputs() == [offset, x]
    assert graph.outputs() == [out]
    assert unread not in graph.inputs()


@pytest.mark.parametrize(
    ("value", "data_type"),
    [
        (1.5, DataType.FLOAT),
        (3, DataType.INT32),
        (2**40, DataType.INT64),
        (True, DataType.BOOLEAN),
    ],
)
def test_scalars_have_a_type_of_their_own(
    graph: DeclaredGraph, value: float, data_type: DataType
) -> None:
    scalar = graph.tensor_scalar(value)
    assert (scalar.dim, scalar.data_type, scalar.value) == ((1, 1, 1, 1), data_type, value)
    assert scalar.is_pass_by_value and not scalar.is_virtual
    assert graph.tensor_scalar(value, torch.float64).data_type is DataType.DOUBLE


def test_tensor_like_reads_a_torch_tensor_as_it_lies(graph: DeclaredGraph) -> None:
    source = torch.empty(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    tensor = graph.tensor_like(source.transpose(1, 3), name="x")
    assert tensor.dim == (2, 5, 4, 3)
    assert tensor.stride == source.transpose(1, 3).stride()
    assert tensor.data_type is DataType.BFLOAT16
    assert not tensor.is_pass_by_value and tensor.value is None


def test_tensor_like_reads_numpy_strides_in_elements(graph: DeclaredGraph) -> None:
    tensor = graph.tensor_like(np.zeros((4, 6), np.float32)[:, ::2])
    assert (tensor.dim, tensor.stride, tensor.data_type) == ((4, 3), (6, 2), DataType.FLOAT)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_one_element_on_the_cpu_may_pass_by_value(
    graph: DeclaredGraph, shape: tuple[int, ...]
) -> None:
    tensor = graph.tensor_like(torch.full(shape, 0.25))
    assert tensor.is_pass_by_value and tensor.value == 0.25
    assert tensor.dim == (shape or (1,))


def test_tensor_like_copies_a_declaration_and_not_its_uid(graph: DeclaredGraph) -> None:
    source = graph.tensor((2, 4), (8, 2), "HALF", uid=4, name="x")
    copy = graph.tensor_like(source, name="y")
    assert (copy.dim, copy.stride, copy.data_type) == (source.dim, source.stride, source.data_type)
    assert copy.uid == -1 and copy.name == "y"


@pytest.mark.parametrize(
    "source",
    [
        *(3, "x", None, [1, 2], np.zeros(2, np.complex64)),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
        torch.nested.nested_tensor([torch.zeros(2, 3)]),
        # A field of records lies in steps that are no whole number of elements.
        np.zeros((2, 3), [("x", "f4"), ("y", "u1")])["x"],
    ],
    ids=["int", "str", "None", "list", "complex", "sparse", "mkldnn", "nested", "field of records"],
)
def test_tensor_like_refuses_what_tells_no_shape_or_type(
    graph: DeclaredGraph, source: object
) -> None:
    with pytest.raises(GraphError, match="tensor_like: "):
        graph.tensor_like(source)


def test_a_repr_tells_the_layout(graph: DeclaredGraph) -> None:
    tensor: Tensor = graph.tensor((2, 3), data_type="INT8", uid=3, name="x")
    assert repr(tensor) == ("Tensor(uid=3, name='x', dim=(2, 3), stride=(3, 1), data_type=INT8)")
