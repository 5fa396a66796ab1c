"""Visible keys, query by query: hand-drawn patterns, and the block masks held against them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tilewright.oracle import visible_keys
from tilewright.oracle.visibility import visible_block

pytestmark = pytest.mark.L0


def _drawn(rows: list[str]) -> list[list[bool]]:
    return [[letter == "x" for letter in row] for row in rows]


def _all_rows(count: int, **rules: object) -> list[list[bool]]:
    return [visible_keys(row, **rules) for row in range(count)]  # type: ignore[arg-type]


def test_causal_top_left_of_wide_scores() -> None:
    seen = _all_rows(2, length_q=2, length_kv=5, right_bound=0)
    assert seen == _drawn(["x....", "xx..."])


def test_causal_bottom_right_of_wide_scores() -> None:
    seen = _all_rows(2, length_q=2, length_kv=5, right_bound=0, bottom_right=True)
    assert seen == _drawn(["xxxx.", "xxxxx"])


def test_causal_of_tall_scores() -> None:
    seen = _all_rows(5, length_q=5, length_kv=2, right_bound=0)
    assert seen == _drawn(["x.", "xx", "xx", "xx", "xx"])
    seen = _all_rows(5, length_q=5, length_kv=2, right_bound=0, bottom_right=True)
    assert seen == _drawn(["..", "..", "..", "x.", "xx"])


def test_a_window_of_four_with_causal_sees_four_keys_itself_included() -> None:
    seen = _all_rows(12, length_q=12, length_kv=12, left_bound=4, right_bound=0)
    assert [sum(row) for row in seen] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    assert all(row[index] for index, row in enumerate(seen))


def test_a_band_without_causal() -> None:
    seen = _all_rows(5, length_q=5, length_kv=5, left_bound=2, right_bound=1)
    assert seen == _drawn(["xx...", "xxx..", ".xxx.", "..xxx", "...xx"])
    seen = _all_rows(4, length_q=4, length_kv=4, left_bound=1)
    assert seen == _drawn(["xxxx", ".xxx", "..xx", "...x"])
    seen = _all_rows(3, length_q=3, length_kv=4, left_bound=0)
    assert seen == _drawn([".xxx", "..xx", "...x"])


def test_padding_moves_the_bottom_right_diagonal() -> None:
    seen = _all_rows(4, length_q=2, length_kv=3, columns=5, right_bound=0, bottom_right=True)
    assert seen == _drawn(["xx...", "xxx..", ".....", "....."])


def test_block_mask_bits_are_little_endian() -> None:
    # Ten tiles of keys: byte 0 has tiles 0..7, byte 1 tiles 8 and 9.
    block_mask = [[0b0000_0010, 0b0000_0001], [0, 0b10]]
    rules = {"length_q": 200, "length_kv": 1280, "block_mask": block_mask}
    first = visible_keys(127, **rules)  # type: ignore[arg-type]
    assert [index for index in range(10) if first[index * 128]] == [1, 8]
    assert sum(first) == 256
    second = visible_keys(128, **rules)  # type: ignore[arg-type]
    assert [index for index in range(10) if second[index * 128 + 127]] == [9]


def test_boolean_mask() -> None:
    mask = [[True, False, True]]
    assert visible_keys(0, length_q=1, length_kv=3, mask=mask, right_bound=1) == [
        True,
        False,
        False,
    ]


def _bounds() -> list[tuple[int | None, int | None, bool]]:
    lefts, rights = (None, 1, 2, 4, 9), (None, 0, 1, 3)
    return [*itertools.product(lefts, rights, (False, True))]


@pytest.mark.parametrize(("left", "right", "bottom_right"), _bounds())
def test_block_masks_equal_visible_keys_query_by_query(
    left: int | None, right: int | None, bottom_right: bool
) -> None:
    chosen = random.Random(f"{left} {right} {bottom_right}")
    for rows, columns in ((1, 1), (7, 7), (3, 11), (11, 3), (1, 9)):
        for _ in range(2):
            length_q, length_kv = chosen.randint(0, rows), chosen.randint(0, columns)
            block = visible_block(
                torch.arange(rows),
                torch.arange(columns),
                length_q=length_q,
                length_kv=length_kv,
                left_bound=left,
                right_bound=right,
                bottom_right=bottom_right,
            )
            for row in range(rows):
                assert block[row].tolist() == visible_keys(
                    row,
                    columns=columns,
                    length_q=length_q,
                    length_kv=length_kv,
                    left_bound=left,
                    right_bound=right,
                    bottom_right=bottom_right,
                )


def test_block_masks_with_tiles_and_booleans_equal_visible_keys() -> None:
    generator = torch.Generator().manual_seed(11)
    rows, columns = 260, 1300
    tiles = torch.randint(0, 256, (3, 2), generator=generator, dtype=torch.uint8)
    mask = torch.rand(rows, columns, generator=generator) > 0.3
    block = visible_block(
        torch.arange(100, rows),
        torch.arange(columns),
        length_q=rows - 2,
        length_kv=columns - 3,
        left_bound=700,
        right_bound=100,
        block_mask=tiles,
        mask=mask[100:],
    )
    for row in (100, 127, 128, 200, 256, 257, 258):
        expected = visible_keys(
            row,
            columns=columns,
            length_q=rows - 2,
            length_kv=columns - 3,
            left_bound=700,
            right_bound=100,
            block_mask=tiles.tolist(),
            mask=mask.tolist(),
        )
        assert block[row - 100].tolist() == expected
    assert block.any() and not block.all()
