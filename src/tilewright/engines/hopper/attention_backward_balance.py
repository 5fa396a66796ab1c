"""How the work of attention's backward is shared out, so that all multiprocessors end together.

A multiprocessor takes the next program when it has ended one. Those of a last round that is not
whole would leave the others idle: the rows of their keys are shared out among several programs.
Under a mask programs are of different lengths, the longest of a group of heads first: the last
group should end as evenly as it can. Plain arithmetic; lengths are in tiles of rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.engines.hopper.declared import Declared

# What a program takes besides its tiles, and one that shares its keys with others.
_OVERHEAD, _OVERHEAD_OF_SHARES = 2.5, 8.0
# Programs that share keys: of the same ones at most; tiles of each at least; in all, in rounds.
_MOST_SHARES, _FEWEST_TILES, _MOST_ROUNDS = 8, 4, 3
# Widths of a group that are tried, and groups that are looked at, the last ones.
_MOST_WIDTHS, _LAST_GROUPS = 8, 3


@dataclass(frozen=True)
class Division:
    """Blocks of keys up to number ``whole`` have a program each, later ones ``shares`` each."""

    whole: int
    shares: int
    programs: int

    @property
    def sharing(self) -> int:
        """Programs that share their keys."""
        return self.programs - self.whole


def undivided(blocks: int) -> Division:
    """A program a block of keys."""
    return Division(blocks, 1, blocks)


def divide(blocks: int, tiles: int, group: int, sm_count: int) -> Division:
    """For ``blocks`` blocks of keys that all see ``tiles`` tiles of each of ``group`` heads."""
    left = blocks % sm_count
    if left == 0:
        return undivided(blocks)

    def duration(shares: int) -> float:
        if shares == 1:
            return tiles * group + _OVERHEAD
        rounds = -(-left * shares // sm_count)
        return rounds * (-(-tiles // shares) * group + _OVERHEAD_OF_SHARES)

    most = min(_MOST_SHARES, tiles // _FEWEST_TILES, _MOST_ROUNDS * sm_count // left)
    shares = min(range(1, max(most, 1) + 1), key=duration)
    if shares == 1:
        return undivided(blocks)
    return Division(blocks - left, shares, blocks - left + left * shares)


def heads_together(most: int, heads: int, lengths: Sequence[int], sm_count: int) -> int:
    """Of how many of ``heads`` heads, at most ``most``, the programs take turns.

    ``lengths`` are those of the programs of one head, the longest first.
    """
    most = min(most, heads)
    widths = range(most, most // 2, -1 - most // (2 * _MOST_WIDTHS))
    return min(widths, key=lambda width: _idle(width, heads, lengths, sm_count))


def _idle(width: int, heads: int, lengths: Sequence[int], sm_count: int) -> float:
    """For how long a multiprocessor waits for the last one, after some groups of ``width``."""
    ends = [0.0] * sm_count
    looked_at = min(heads, heads % width + _LAST_GROUPS * width)
    for first in range(0, looked_at, width):
        for tiles in lengths:
            for _ in range(min(width, looked_at - first)):
                heapq.heapreplace(ends, ends[0] + tiles + _OVERHEAD)
    return max(ends) - sum(ends) / sm_count


def rows_seen(spec: Declared, tile_rows: int, block_keys: int) -> list[int]:
    """Tiles of rows that each block of keys sees, as long as sequences are declared."""
    found = []
    for first in range(0, spec.keys, block_keys):
        low, end = 0, spec.rows
        if spec.right is not None:
            low = max(first - spec.right, 0) // tile_rows
        if spec.left is not None:
            last = min(first + block_keys, spec.keys) - 1
            end = min(end, max(last + spec.left, 0))
        found.append(max(-(-end // tile_rows) - low, 1) * spec.group)
    return found


def keys_seen(spec: Declared, tile_rows: int, block_keys: int) -> list[int]:
    """Blocks of keys that each tile of rows sees, from the last rows on."""
    found = []
    for first in reversed(range(0, spec.rows, tile_rows)):
        low, end = 0, spec.keys
        if spec.left is not None:
            low = max(first - spec.left + 1, 0) // block_keys
        if spec.right is not None:
            end = min(end, first + tile_rows + spec.right)
        found.append(max(-(-end // block_keys) - low, 1))
    return found
