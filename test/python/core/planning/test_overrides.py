"""Shapes and strides that a call overrides (G4)."""

from __future__ import annotations

import pytest
import torch
from plan_samples import StubEngine, product

import tilewright as tw

pytestmark = pytest.mark.L0


def test_an_override_reaches_the_executor() -> None:
    # G4: other shapes and strides within one plan; what is computed is the override's.
    graph, _ = product(is_override_shape_enabled=True)
    graph.build()
    storage = torch.rand(9, 8)
    left, right = storage[:, :6], torch.rand(6, 3)
    out = torch.empty(9, 3)
    graph.execute(
        {1: left, 2: right, 3: out},
        override_uids=[1, 2, 3],
        override_shapes=[(9, 6), (6, 3), (9, 3)],
        override_strides=[(8, 1), (3, 1), (3, 1)],
    )
    assert torch.allclose(out, left @ right)


def test_an_override_raises_before_any_write() -> None:
    graph, pack = product(is_override_shape_enabled=True)
    graph.build()
    pack["c"].fill_(7.0)
    for uids, shapes, message in (
        ([1], [(40, 6)], "owns 96 bytes"),
        ([1], [(4, 7)], "expected 7 rows"),
        ([99], [(4, 6)], "no tensor has uid 99"),
        ([1, 2], [(4, 6)], "2 uids, 1 shapes"),
        ([1, 1], [(4, 6), (4, 6)], "expected each once"),
        ([1], [4], "expected a list of uids, and of a tuple of integers for each"),
    ):
        with pytest.raises(tw.BindingError, match=message):
            graph.execute(
                pack,
                override_uids=uids,
                override_shapes=shapes,
                override_strides=[(6, 1)] * len(shapes),
            )
    assert torch.equal(pack["c"], torch.full((4, 5), 7.0))
    plain, pack = product()
    with pytest.raises(tw.BindingError, match="is_override_shape_enabled=True"):
        plain.execute(pack, override_uids=[1], override_shapes=[(4, 6)], override_strides=[(6, 1)])


def test_an_override_takes_the_engines_best_plan_for_its_shapes(stub: StubEngine) -> None:
    graph, pack = product(is_override_shape_enabled=True)
    workspace = torch.empty(1024, dtype=torch.uint8)
    graph.select_plan("triton:TILE_M=64")
    graph.execute(pack, workspace)
    rows = {"override_uids": [1, 3], "override_shapes": [(2, 6), (2, 5)]}
    graph.execute(pack, workspace, **rows)
    assert stub.launched == [((tw.knob_type.TILE_M, 64),), ((tw.knob_type.TILE_M, 128),)]
