"""Which keys a query may attend.

`visible_keys` answers for one query by asking each key in turn, in plain integers, straight from
the rules below. `visible_block` answers for a block of queries at once with tensor comparisons.
The two are written apart, so that one can be held against the other; an engine's loop bounds and
masks are held against `visible_keys`.

The rules, for query `row` of `length_q` and key `col` of `length_kv`:

- both lie within their lengths (padding);
- with `aligned = row`, or `row + length_kv - length_q` for bottom-right alignment, a left bound L
  hides `col <= aligned - L`, a right bound R hides `col > aligned + R`;
- a block mask has one bit for each tile of 128 x 128, bit `tile % 8` (little-endian) of byte
  `tile // 8` of the row of tiles; 0 hides;
- a boolean mask hides where it is false.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["BLOCK_MASK_TILE", "visible_block", "visible_keys"]

BLOCK_MASK_TILE = 128


def visible_keys(
    row: int,
    *,
    length_q: int,
    length_kv: int,
    columns: int | None = None,
    left_bound: int | None = None,
    right_bound: int | None = None,
    bottom_right: bool = False,
    block_mask: Sequence[Sequence[int]] | torch.Tensor | None = None,
    mask: Sequence[Sequence[bool]] | torch.Tensor | None = None,
) -> list[bool]:
    """Whether query `row` may attend each key, one answer for each key.

    Args:
        row: The query, counted from 0; one at or past `length_q` sees nothing.
        length_q, length_kv: Actual lengths of this sequence.
        columns: Number of answers; `length_kv` if not given (more when keys are padded).
        left_bound: L, counted from the diagonal: 1 leaves the diagonal itself and nothing before.
        right_bound: R; 0 is causal.
        bottom_right: The diagonal ends at the last query and the last key.
        block_mask: (rows of tiles, bytes) of this batch index and head.
        mask: (rows, columns) booleans of this batch index and head.
    """
    answers = []
    for col in range(length_kv if columns is None else columns):
        visible = row < length_q and col < length_kv
        # How many keys `col` lies to the right of the diagonal's key of this row.
        if bottom_right:
            rows_to_last = (length_q - 1) - row
            keys_to_last = (length_kv - 1) - col
            distance = rows_to_last - keys_to_last
        else:
            distance = col - row
        if left_bound is not None and distance <= -left_bound:
            visible = False
        if right_bound is not None and distance > right_bound:
            visible = False
        if visible and block_mask is not None:
            tile = col // BLOCK_MASK_TILE
            byte = int(block_mask[row // BLOCK_MASK_TILE][tile // 8])
            visible = (byte >> (tile % 8)) % 2 == 1
        if visible and mask is not None:
            visible = bool(mask[row][col])
        answers.append(visible)
    return answers


def visible_block(
    rows: torch.Tensor,
    columns: torch.Tensor,
    *,
    length_q: int,
    length_kv: int,
    left_bound: int | None = None,
    right_bound: int | None = None,
    bottom_right: bool = False,
    block_mask: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Boolean (len(rows), len(columns)): which of these queries may attend which of these keys.

    Args:
        rows, columns: int64 indices, one axis each.
        block_mask: uint8 (rows of tiles, bytes) of this batch index and head.
        mask: Booleans of exactly these rows and columns (or broadcasting to them).

    The other arguments are those of `visible_keys`.
    """
    row, col = rows[:, None], columns[None, :]
    visible = (row < length_q) & (col < length_kv)
    aligned = row + (length_kv - length_q) if bottom_right else row
    if left_bound is not None:
        visible = visible & (col > aligned - left_bound)
    if right_bound is not None:
        visible = visible & (col <= aligned + right_bound)
    if block_mask is not None:
        tile = col // BLOCK_MASK_TILE
        bits = block_mask[row // BLOCK_MASK_TILE, tile // 8].to(torch.int64) >> (tile % 8)
        visible = visible & ((bits & 1) == 1)
    if mask is not None:
        visible = visible & (mask != 0)
    return visible
