"""Extents, strides and views as torch has them; what may be written in place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.shapes import view_strides
from tilewright.graph.tensor import strides_in_order_of

pytestmark = pytest.mark.L0


def new_graph() -> DeclaredGraph:
    return DeclaredGraph(io_data_type="HALF", intermediate_data_type="FLOAT")


CONVOLUTIONS = [
    # image spatial, filter spatial, padding, stride, dilation
    ((9,), (3,), (1,), (2,), (1,)),
    ((16,), (4,), (0,), (3,), (2,)),
    ((7, 12), (3, 5), (1, 2), (1, 1), (1, 1)),
    ((7, 12), (1, 1), (0, 0), (2, 3), (1, 1)),
    ((13, 10), (3, 3), (2, 0), (2, 1), (2, 3)),
    ((5, 5), (5, 5), (0, 0), (1, 1), (1, 1)),
    ((5, 5), (7, 7), (1, 1), (9, 9), (1, 1)),
    ((6, 7, 8), (3, 2, 1), (1, 0, 3), (2, 2, 1), (1, 2, 1)),
]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions_have_the_extents_that_torch_gives(case: tuple, groups: int) -> None:
    """Against torch's own shape function, on its meta device; gradients close the circle."""
    spatial, taps, padding, stride, dilation = case
    image, weight = (2, 8, *spatial), (12, 8 // groups, *taps)
    functional = getattr(torch.nn.functional, f"conv{len(spatial)}d")
    expected = functional(
        torch.empty(image, device="meta"),
        torch.empty(weight, device="meta"),
        padding=padding,
        stride=stride,
        dilation=dilation,
        groups=groups,
    )
    attributes = {"padding": padding, "stride": stride, "dilation": dilation}
    graph = new_graph()
    out = graph.conv_fprop(graph.tensor(image), graph.tensor(weight), **attributes)
    out.set_output(True)
    dx = graph.conv_dgrad(graph.tensor(expected.shape), graph.tensor(weight), **attributes)
    dx.set_output(True).set_dim(image)
    dw = graph.conv_wgrad(graph.tensor(image), graph.tensor(expected.shape), **attributes)
    dw.set_output(True).set_dim(weight)
    graph.validate()
    assert out.dim == tuple(expected.shape)
    assert out.stride == expected.stride()


def test_uneven_paddings_add_up() -> None:
    graph = new_graph()
    out = graph.conv_fprop(
        graph.tensor((1, 2, 9, 9)), graph.tensor((1, 2, 3, 3)), pre_padding=[2, 0], post_padding=3
    ).set_output(True)
    graph.validate()
    padded = torch.empty((1, 2, 9 + 2 + 3, 9 + 0 + 3), device="meta")
    weight = torch.empty((1, 2, 3, 3), device="meta")
    assert out.dim == tuple(torch.nn.functional.conv2d(padded, weight).shape)
    (operation,) = graph.operations
    assert operation.attributes() == {
        "pre_padding": (2, 0),
        "post_padding": (3, 3),
        "stride": (1, 1),
        "dilation": (1, 1),
    }


def test_strides_in_order_agree_with_torch_on_every_dense_layout() -> None:
    """torch's elementwise results keep the axis order of a dense operand."""
    dim = (2, 3, 1, 4)
    for order in itertools.permutations(range(4)):
        model = torch.empty([dim[axis] for axis in order], device="meta")
        inverse = [order.index(axis) for axis in range(4)]
        model = model.permute(inverse)
        ours = strides_in_order_of(dim, model.stride(), dim)
        assert ours == tuple(model.stride()), order


def view_cases() -> Iterable[tuple[torch.Tensor, tuple[int, ...]]]:
    base = torch.empty(4 * 6 * 2 * 3, device="meta")
    full = base.view(4, 6, 2, 3)
    sources = [
        full,
        full.transpose(0, 1),
        full.transpose(1, 2),
        full.permute(3, 2, 1, 0),
        full[:, ::2],
        full[:, :, :1],
        full[::2, :3],
        full[:1].expand(4, 6, 2, 3),
        full[..., :0],
        full.view(4, 1, 6, 1, 2, 3),
    ]
    for source in sources:
        count = source.numel()
        shapes = {
            (count,),
            (1, count, 1),
            *(
                (a, b, count // (a * b))
                for a in range(1, 25)
                for b in range(1, 25)
                if count and count % (a * b) == 0
            ),
        }
        for shape in sorted(shapes):
            yield source, shape


def test_views_exist_exactly_where_torch_makes_them() -> None:
    seen = {True: 0, False: 0}
    for source, shape in view_cases():
        ours = view_strides(tuple(source.shape), source.stride(), shape)
        try:
            theirs = source.view(shape).stride()
        except RuntimeError:
            theirs = None
        seen[theirs is not None] += 1
        assert (ours is None) is (theirs is None), (source.shape, source.stride(), shape)
        if ours is not None and theirs is not None and 0 not in shape:
            stepped = [axis for axis, extent in enumerate(shape) if extent > 1]
            assert [ours[a] for a in stepped] == [theirs[a] for a in stepped]
    assert min(seen.values()) > 50


def test_in_place_pairs_need_one_layout() -> None:
    graph = new_graph()
    x, wide = graph.tensor((4, 3)), graph.tensor((4, 3), data_type="FLOAT")
    turned = graph.tensor((4, 3), (1, 4))
    row = graph.tensor((1, 3))
    for source in (x, wide, turned, row):
        graph.exp(source).set_output(True).set_dim((4, 3)).set_stride((3, 1))
    same, converts, reorders, repeats = graph.operations
    graph.validate()
    assert same.in_place == (("out", "in0"),)
    assert converts.in_place == reorders.in_place == repeats.in_place == ()


def test_concatenate_shares_the_input_it_names() -> None:
    graph = new_graph()
    parts = [graph.tensor((2, 3)), graph.tensor((4, 3))]
    graph.concatenate(parts, axis=0, in_place_index=1).set_output(True)
    graph.concatenate(parts, axis=0).set_output(True)
    assert [op.in_place for op in graph.operations] == [(("out", "input_1"),), ()]
