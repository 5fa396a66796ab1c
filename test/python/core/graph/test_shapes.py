"""Arithmetic on shapes and strides, against enumerations of the elements."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tilewright.graph.shapes import (
    broadcast_dims,
    element_count,
    self_overlaps,
    span_elements,
    view_strides,
)

pytestmark = pytest.mark.L0


def places(dim: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The element that each index names, in row-major order."""
    indices = itertools.product(*(range(extent) for extent in dim))
    return [sum(i * step for i, step in zip(index, stride, strict=True)) for index in indices]


def test_broadcasts_are_those_of_torch() -> None:
    extents = (0, 1, 2, 3)
    shapes = [s for rank in range(4) for s in itertools.product(extents, repeat=rank)]
    draw = random.Random(1)
    for _ in range(1500):
        first, second = draw.choice(shapes), draw.choice(shapes)
        try:
            expected = tuple(torch.broadcast_shapes(first, second))
        except RuntimeError:
            expected = None
        assert broadcast_dims(first, second) == expected, (first, second)


def test_count_and_span() -> None:
    assert element_count(()) == 1 and element_count((2, 3, 4)) == 24
    assert span_elements((), ()) == 1
    draw = random.Random(2)
    for _ in range(300):
        rank = draw.randint(1, 4)
        dim = tuple(draw.choice((0, 1, 2, 3, 5)) for _ in range(rank))
        stride = tuple(draw.randint(0, 9) for _ in range(rank))
        named = places(dim, stride)
        assert element_count(dim) == len(named)
        assert span_elements(dim, stride) == (max(named) + 1 if named else 0)


def test_overlaps_of_nested_views_are_those_of_the_elements() -> None:
    draw = random.Random(3)
    for _ in range(400):
        rank = draw.randint(1, 4)
        dim = tuple(draw.choice((1, 2, 3)) for _ in range(rank))
        # Strides of a permuted and padded dense tensor; then one of them is changed.
        stride, step = [0] * rank, 1
        for axis in draw.sample(range(rank), rank):
            stride[axis] = step
            step *= dim[axis] + draw.randint(0, 1)
        assert not self_overlaps(dim, stride), (dim, stride)
        stride[draw.randrange(rank)] = draw.randint(0, 4)
        named = places(dim, tuple(stride))
        if len(set(named)) < len(named):
            assert self_overlaps(dim, stride), (dim, stride)
    assert self_overlaps((2, 2), (0, 1)) and self_overlaps((3, 2), (1, 2))
    assert self_overlaps((2, 2), (1, 1)) and not self_overlaps((2, 2), (1, 2))
    # Without a shared element, and yet not nested.
    assert self_overlaps((2, 3), (3, 2))
    assert not self_overlaps((0, 2), (1, 1)) and not self_overlaps((2, 0), (0, 0))
    assert not self_overlaps((-1 + 2, 5), (0, 1)) and not self_overlaps((1,), (0,))


def factors(draw: random.Random, count: int) -> list[int]:
    """Extents whose product is ``count``, ones among them."""
    found = []
    while count > 1:
        extent = draw.choice([f for f in range(2, count + 1) if count % f == 0])
        found.append(extent)
        count //= extent
    for _ in range(draw.randint(0, 2)):
        found.insert(draw.randint(0, len(found)), 1)
    return found


def test_views_are_those_that_torch_makes() -> None:
    draw = random.Random(4)
    made = 0
    for _ in range(800):
        dim = factors(draw, draw.choice((1, 2, 4, 6, 12, 24)))
        new = factors(draw, element_count(dim))
        stride, step = [0] * len(dim), 1
        order = list(range(len(dim)))
        if draw.random() < 0.5:
            draw.shuffle(order)
        for axis in reversed(order):
            stride[axis] = step
            step *= dim[axis] + (draw.random() < 0.2)
        strides = view_strides(dim, stride, new)
        tensor = torch.arange(step).as_strided(dim, stride)
        try:
            expected = tensor.view(new)
        except RuntimeError:
            assert strides is None, (dim, stride, new)
            continue
        assert strides is not None, (dim, stride, new)
        assert places(tuple(new), strides) == expected.flatten().tolist(), (dim, stride, new)
        made += 1
    assert made > 300


@pytest.mark.parametrize(
    ("dim", "new", "expected"),
    [
        ((0,), (0, 3), (3, 1)),
        ((2, 0), (4, 0, 3), (3, 3, 1)),
        ((3, 0), (5, 2, 0), (2, 1, 1)),
        ((0, 2), (0,), (1,)),
    ],
)
def test_views_of_nothing_are_packed(dim, new, expected) -> None:
    assert view_strides(dim, (7,) * len(dim), new) == expected
    # As torch packs an empty tensor.
    assert expected == torch.empty(new).stride()


@pytest.mark.parametrize(
    ("dim", "stride", "new", "expected"),
    [
        ((2, 3), (3, 1), (6,), (1,)),
        ((2, 3), (4, 1), (6,), None),
        ((6,), (5,), (2, 3), (15, 5)),
        ((4, 3), (3, 1), (2, 6), (6, 1)),
        ((4, 3), (3, 1), (2, 2, 3), (6, 3, 1)),
        ((3, 4), (4, 1), (4, 3), (3, 1)),
        ((3, 4), (8, 2), (2, 6), (12, 2)),
        ((2, 3, 4), (12, 4, 1), (6, 1, 4), (4, 4, 1)),
        ((1, 5), (99, 2), (5, 1), (2, 1)),
        ((5, 1), (2, 99), (1, 5), (10, 2)),
        ((2, 3), (1, 2), (6,), None),
        ((2, 3), (1, 2), (2, 3), (1, 2)),
        ((2, 2, 3), (6, 3, 1), (4, 3), (3, 1)),
        ((2, 2, 3), (7, 3, 1), (4, 3), None),
        ((2, 2, 3), (7, 3, 1), (2, 6), (7, 1)),
        ((2, 4), (0, 1), (2, 2, 2), (0, 2, 1)),
    ],
)
def test_strides_of_a_view(dim, stride, new, expected) -> None:
    assert view_strides(dim, stride, new) == expected
