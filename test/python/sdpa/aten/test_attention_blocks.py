"""How attention is cut: every score is computed once, and a block is as large as it may be."""

from __future__ import annotations

import itertools
import random

import pytest

from tilewright.engines.aten.attention_blocks import (
    OPEN_BAND,
    Band,
    Block,
    Chunk,
    Tiling,
    blocks,
    choose_tiling,
    chunks,
)

pytestmark = pytest.mark.L0

BANDS = [
    OPEN_BAND,
    Band(None, 0, 0),
    Band(None, 0, 3),
    Band(None, 2, -3),
    Band(3, None, 0),
    Band(2, 1, 2),
    Band(1, 0, -4),
    Band(4, None, -2),
]


def sees(band, row, key):
    """The definition of the band."""
    left = band.left is None or key > row + band.shift - band.left
    right = band.right is None or key <= row + band.shift + band.right
    return left and right


@pytest.mark.parametrize("band", BANDS)
def test_the_visible_range_is_the_hull_of_what_the_rows_see(band):
    for keys, first, count in itertools.product((0, 1, 5, 9), (0, 2, 6), (1, 2, 4)):
        rows = range(first, first + count)
        seen = [key for key in range(keys) if any(sees(band, row, key) for row in rows)]
        low, high = band.visible(first, first + count, keys)
        if seen:
            assert (low, high) == (seen[0], seen[-1] + 1)
        else:
            assert low == high


def test_the_shape_of_a_block_counts_from_its_starts():
    block = Block((1, 4), (2, 4), (6, 12), (5, 12), (3, 14))
    assert block.shape == (3, 2, 3, 7, 11)


@pytest.mark.parametrize("heads_kv", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 5])
def test_chunks_and_blocks_cover_each_row_once(heads_kv, group):
    draw = random.Random(heads_kv * 10 + group)
    for _ in range(40):
        batches, rows, keys = draw.randint(1, 4), draw.randint(1, 9), draw.randint(1, 9)
        band = draw.choice(BANDS)
        budget = draw.choice((1, 3, 10, 50, 200, 10**6))
        tiling = choose_tiling(batches, heads_kv, group, rows, keys, band, budget)
        found = []
        for chunk in chunks(batches, heads_kv, tiling):
            assert chunk.batch[1] - chunk.batch[0] <= tiling.batches
            assert chunk.head_kv[1] - chunk.head_kv[0] <= tiling.heads_kv
            for block in blocks(chunk, group, rows, keys, band, tiling):
                assert (block.batch, block.head_kv) == chunk
                # All query heads of a block belong to its key heads, each to as many.
                low, high = block.head_kv
                assert low * group <= block.head[0] < block.head[1] <= high * group
                assert (block.head[1] - block.head[0]) % (high - low) == 0
                assert block.key == band.visible(*block.row, keys)
                ranges = (block.batch, block.head, block.row)
                found += itertools.product(*(range(*bounds) for bounds in ranges))
        expected = itertools.product(range(batches), range(heads_kv * group), range(rows))
        assert sorted(found) == list(expected)


def test_a_group_is_split_in_a_chunk_of_one_key_head():
    tiling = Tiling(1, 1, 2, 4)
    found = [
        (block.head, block.row)
        for block in blocks(Chunk((0, 1), (2, 3)), 5, 6, 3, OPEN_BAND, tiling)
    ]
    rows = [(0, 4), (4, 6)]
    heads = [(10, 12), (12, 14), (14, 15)]
    assert found == list(itertools.product(heads, rows))


def scores(tiling, width):
    return tiling.batches * tiling.heads_kv * tiling.group * tiling.rows * width


def test_without_a_band_blocks_fill_the_budget():
    for batches, heads, group, rows, keys in itertools.product(
        (1, 3), (1, 2, 7), (1, 4), (1, 31, 200), (1, 60, 500)
    ):
        for budget in (64, 1000, 40_000, 10**7):
            tiling = choose_tiling(batches, heads, group, rows, keys, OPEN_BAND, budget)
            # One row of one head may exceed it alone.
            assert scores(tiling, keys) <= budget or tiling == (1, 1, 1, 1)
            if tiling.batches < batches and tiling.heads_kv == heads:
                # Another sequence would not fit.
                assert scores(tiling, keys) + heads * group * rows * keys > budget
            if tiling.heads_kv < heads:
                assert tiling.batches == 1
                more = (tiling.heads_kv + 1) * tiling.group * tiling.rows * keys
                assert more > budget or tiling.group < group
            if tiling.group < group:
                assert tiling.rows == 1 and (tiling.group + 1) * keys > budget
            elif tiling.rows < rows:
                step = 32 if tiling.rows >= 32 else 1
                assert (tiling.rows + step) * group * keys > budget


# batches, key heads, group, rows, keys, band, budget; and the tiling.
TILINGS = [
    ((2, 3, 4, 10, 10, OPEN_BAND, 10**6), (2, 3, 4, 10)),
    ((5, 3, 4, 10, 10, OPEN_BAND, 2500), (2, 3, 4, 10)),
    ((5, 3, 4, 10, 10, OPEN_BAND, 1000), (1, 2, 4, 10)),
    ((5, 3, 4, 10, 10, OPEN_BAND, 100), (1, 1, 4, 2)),
    ((5, 3, 4, 10, 10, OPEN_BAND, 25), (1, 1, 2, 1)),
    ((5, 3, 4, 10, 10, OPEN_BAND, 9), (1, 1, 1, 1)),
    # Rows in whole steps of 32 once there are more.
    ((1, 1, 2, 500, 100, OPEN_BAND, 200 * 79), (1, 1, 2, 64)),
    ((1, 1, 2, 500, 100, OPEN_BAND, 200 * 32), (1, 1, 2, 32)),
    ((1, 1, 2, 500, 100, OPEN_BAND, 200 * 31), (1, 1, 2, 31)),
    # A band keeps row blocks short; two bounds also make the width that counts narrow.
    ((1, 1, 1, 1000, 1000, Band(None, 0, 0), 10**7), (1, 1, 1, 256)),
    ((1, 1, 1, 1000, 1000, Band(9, None, 0), 10**7), (1, 1, 1, 256)),
    ((1, 4, 1, 1000, 1000, Band(9, 0, 0), 64 * 73 * 3), (1, 3, 1, 64)),
    ((1, 4, 1, 1000, 1000, Band(90, 10, 0), 100 * 200 * 3), (1, 3, 1, 100)),
    ((1, 4, 1, 1000, 1000, Band(0, 0, 0), 64 * 65 * 3), (1, 3, 1, 64)),
    ((1, 4, 1, 1000, 50, Band(90, 10, 0), 100 * 50 * 3), (1, 3, 1, 100)),
    # Empty extents.
    ((0, 3, 4, 10, 10, OPEN_BAND, 10**6), (1, 3, 4, 10)),
    ((2, 0, 4, 10, 10, OPEN_BAND, 10**6), (2, 0, 4, 10)),
    ((2, 3, 4, 0, 10, OPEN_BAND, 240), (2, 3, 4, 1)),
    ((2, 3, 4, 10, 0, OPEN_BAND, 240), (2, 3, 4, 10)),
]


@pytest.mark.parametrize(("given", "expected"), TILINGS)
def test_tilings(given, expected):
    assert choose_tiling(*given) == expected
