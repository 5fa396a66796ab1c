"""The one band that each spelling of a mask means."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright.dtypes import DataType
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.json_form import fill_from_json, to_json
from tilewright.graph.operations.attention_masks import AttentionMasks

pytestmark = pytest.mark.L0

TOP, BOTTOM = diagonal_alignment.TOP_LEFT, diagonal_alignment.BOTTOM_RIGHT


def declared(rows: int = 3, **masks: Any) -> AttentionMasks:
    graph = DeclaredGraph(io_data_type=DataType.HALF)
    q, k, v = (graph.tensor((1, 2, length, 8)) for length in (rows, 5, 5))
    output, _ = graph.sdpa(q, k, v, **masks)
    assert output is not None
    output.set_output(True)
    graph.validate()
    again = DeclaredGraph()
    fill_from_json(again, to_json(graph))
    again.validate()
    first, second = graph.operations[0], again.operations[0]
    assert isinstance(first, AttentionMasks)
    assert first.attributes() == second.attributes()
    return first


@pytest.mark.parametrize(
    ("masks", "left", "right", "alignment"),
    [
        ({}, None, None, TOP),
        ({"use_causal_mask": True}, None, 0, TOP),
        ({"use_causal_mask_bottom_right": True}, None, 0, BOTTOM),
        ({"diagonal_band_right_bound": 0}, None, 0, TOP),
        ({"diagonal_band_right_bound": 2}, None, 2, TOP),
        (
            {"diagonal_band_right_bound": 0, "diagonal_alignment": BOTTOM},
            *(None, 0, BOTTOM),
        ),
        (
            {"use_causal_mask_bottom_right": True, "diagonal_alignment": BOTTOM},
            *(None, 0, BOTTOM),
        ),
        ({"diagonal_band_left_bound": 1}, 1, None, TOP),
        ({"sliding_window_length": 4}, 4, None, TOP),
        ({"sliding_window_length": 4, "use_causal_mask": True}, 4, 0, TOP),
        ({"sliding_window_length": 4, "use_causal_mask_bottom_right": True}, 4, 0, BOTTOM),
        ({"diagonal_band_left_bound": 2, "diagonal_band_right_bound": 1}, 2, 1, TOP),
        ({"diagonal_alignment": "BOTTOM_RIGHT"}, None, None, BOTTOM),
        ({"use_alibi_mask": True}, None, None, TOP),
    ],
)
def test_every_spelling_means_one_band(
    masks: dict[str, Any],
    left: int | None,
    right: int | None,
    alignment: diagonal_alignment,
) -> None:
    operation = declared(**masks)
    assert operation.left_bound == left
    assert operation.right_bound == right
    assert operation.alignment is alignment
    assert operation.is_banded is (left is not None or right is not None)


@pytest.mark.parametrize(
    "masks",
    [
        {"use_causal_mask_bottom_right": True},
        {"diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_right_bound": 0},
        {"diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_right_bound": 2},
    ],
)
def test_nothing_is_hidden_to_the_right_of_the_newest_token(masks: dict[str, Any]) -> None:
    assert declared(rows=1, **masks).right_bound is None
    assert declared(rows=2, **masks).right_bound is not None


def test_one_row_at_the_top_left_sees_the_first_key_alone() -> None:
    assert declared(rows=1, use_causal_mask=True).right_bound == 0
    windowed = declared(rows=1, use_causal_mask_bottom_right=True, sliding_window_length=2)
    assert windowed.left_bound == 2


def test_attributes_keep_the_users_spelling() -> None:
    operation = declared(sliding_window_length=4, use_causal_mask=True)
    given = operation.attributes()
    assert given["sliding_window_length"] == 4
    assert given["use_causal_mask"] is True
    assert given["diagonal_band_left_bound"] is None
    assert given["diagonal_band_right_bound"] is None
