"""How attention is cut: head chunks, row blocks, and the keys that a row block can see.

A row block holds all the keys that any of its rows sees, so its softmax needs no running maximum.
Keys beyond the diagonal band of the whole block are cut off, not masked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

# Elements of one block of scores: 4 MiB in float32, which the caches of a core still help with.
# Only a single row of a single head with more visible keys than this exceeds it.
SCORE_BLOCK_ELEMENTS = 1 << 20
# 32 MiB where launches cost more than caches help.
DEVICE_SCORE_BLOCK_ELEMENTS = 1 << 23
# Under a band, longer row blocks would spend their time on hidden keys.
_BANDED_ROWS = 256


class Chunk(NamedTuple):
    """A range of sequences and of key heads, whose keys are converted once; half-open."""

    batch: tuple[int, int]
    head_kv: tuple[int, int]


class Block(NamedTuple):
    """A row block of a chunk: query heads, rows, and the range of keys that some row sees."""

    batch: tuple[int, int]
    head_kv: tuple[int, int]
    head: tuple[int, int]
    row: tuple[int, int]
    key: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Sequences, key heads, query heads a key head, rows, keys."""
        heads_kv = self.head_kv[1] - self.head_kv[0]
        return (
            self.batch[1] - self.batch[0],
            heads_kv,
            (self.head[1] - self.head[0]) // heads_kv,
            self.row[1] - self.row[0],
            self.key[1] - self.key[0],
        )


class Band(NamedTuple):
    """A diagonal band: row i sees keys j with i + shift - left < j <= i + shift + right."""

    left: int | None
    right: int | None
    shift: int

    def visible(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """The range of keys that some row of [first, last) sees, maybe empty."""
        low = 0 if self.left is None else first + self.shift - self.left + 1
        high = keys if self.right is None else last + self.shift + self.right
        low = max(low, 0)
        return low, max(low, min(high, keys))


OPEN_BAND = Band(None, None, 0)


class Tiling(NamedTuple):
    """Sequences and key heads a chunk, query heads a key head and rows a block."""

    batches: int
    heads_kv: int
    group: int
    rows: int


@functools.lru_cache(maxsize=256)
def choose_tiling(
    batches: int,
    heads_kv: int,
    group: int,
    rows: int,
    keys: int,
    band: Band,
    budget: int = SCORE_BLOCK_ELEMENTS,
) -> Tiling:
    """The largest blocks of at most ``budget`` scores, whole sequences first."""
    step, width = max(rows, 1), max(keys, 1)
    if band.left is not None or band.right is not None:
        step = min(step, _BANDED_ROWS)
    if band.left is not None and band.right is not None:
        span = max(band.left + band.right, 1)
        step = min(step, max(64, span))
        width = min(width, step + span)
    if group * step * width > budget:
        step = max(1, min(step, budget // (group * width)))
        if step > 32:
            step -= step % 32
    if group * width > budget:
        part = max(1, budget // width)
        return Tiling(1, 1, part, 1)
    fit = max(1, budget // (group * step * width))
    if fit < heads_kv:
        return Tiling(1, fit, group, step)
    return Tiling(max(1, min(batches, fit // max(heads_kv, 1))), heads_kv, group, step)


def chunks(batches: int, heads_kv: int, tiling: Tiling) -> Iterator[Chunk]:
    """Every (sequences, key heads) range once."""
    for batch in range(0, batches, tiling.batches):
        last = min(batch + tiling.batches, batches)
        for head in range(0, heads_kv, tiling.heads_kv):
            yield Chunk((batch, last), (head, min(head + tiling.heads_kv, heads_kv)))


def blocks(
    chunk: Chunk, group: int, rows: int, keys: int, band: Band, tiling: Tiling
) -> Iterator[Block]:
    """The row blocks of a chunk; together they cover each row once."""
    first_head, last_head = chunk.head_kv[0] * group, chunk.head_kv[1] * group
    # A group is split only in a chunk of one key head.
    step = last_head - first_head if tiling.group >= group else tiling.group
    for head in range(first_head, last_head, max(step, 1)):
        heads = (head, min(head + step, last_head))
        for row in range(0, rows, tiling.rows):
            last = min(row + tiling.rows, rows)
            yield Block(
                chunk.batch, chunk.head_kv, heads, (row, last), band.visible(row, last, keys)
            )
