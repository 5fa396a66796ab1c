"""How long rows are cut into parts, and parts into tiles, so that all of a device works on them."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from tilewright.engines.triton.assembling import Assembly, row_integers
from tilewright.engines.triton.rows import Plane
from tilewright.graph.tensor import Tensor

TILE_ELEMENTS = 2048
_MAX_ROWS_A_TILE = 64


@dataclass(frozen=True)
class Cut:
    """How rows are cut: tiles of ``rows`` x ``columns``, ``parts`` of ``tiles_a_part`` a row."""

    rows: int
    columns: int
    row_blocks: int
    tiles_a_row: int
    tiles_a_run: int
    tiles_a_part: int
    parts: int


def cut_rows(grounds: Plane, name: str, programs: int, max_parts: int) -> Cut:
    """The cut for about ``programs`` programs; ``name`` is the operand whose layout decides."""
    # Lanes go along the axis that is contiguous in memory.
    if grounds.is_row_contiguous(name):
        rows = min(_MAX_ROWS_A_TILE, triton.next_power_of_2(grounds.inner_rows))
        columns = min(TILE_ELEMENTS // rows, triton.next_power_of_2(grounds.inner_columns))
    else:
        columns = _columns_of(grounds.inner_columns)
        rows = max(1, min(TILE_ELEMENTS // columns, triton.next_power_of_2(grounds.rows)))
    runs = grounds.columns // grounds.inner_columns
    tiles_a_run = triton.cdiv(grounds.inner_columns, columns)
    tiles_a_row = runs * tiles_a_run
    row_blocks = triton.cdiv(grounds.rows, rows)
    parts = max(1, min(max_parts, tiles_a_row, triton.cdiv(programs, row_blocks)))
    tiles_a_part = triton.cdiv(tiles_a_row, parts)
    return Cut(
        rows,
        columns,
        row_blocks,
        tiles_a_row,
        tiles_a_run,
        tiles_a_part,
        triton.cdiv(tiles_a_row, tiles_a_part),
    )


def _columns_of(extent: int) -> int:
    """The power of two, up to a tile, that wastes the fewest lanes at a run's end."""
    sizes = [size for size in (2048, 1024, 512, 256, 128, 64, 32, 16) if size <= TILE_ELEMENTS]
    covering = [size for size in sizes if size < 2 * extent] or [16]
    return min(covering, key=lambda size: (round(8 * size * -(-extent // size) / extent), -size))


def cut_integers(assembly: Assembly, grounds: Plane, cut: Cut, x: Tensor) -> None:
    """The integers that every kernel over a cut takes."""
    row_integers(assembly, grounds, x)
    for name, value in (
        ("columns", grounds.columns),
        ("row_blocks", cut.row_blocks),
        ("tiles_a_row", cut.tiles_a_row),
        ("tiles_a_run", cut.tiles_a_run),
        ("tiles_a_part", cut.tiles_a_part),
        ("programs", cut.row_blocks * cut.parts),
    ):
        assembly.integer(name, value)
