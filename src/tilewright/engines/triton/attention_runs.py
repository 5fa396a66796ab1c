"""Where keys are split: runs of blocks of keys, and how they are dealt out to programs.

A run is so many blocks of the keys that a sequence's queries see; the declaration fixes how many,
so that no result depends on the sequences beside it. A unit is a tile of queries that share a key
head, and its run a slot: slots are numbered sequence by sequence, in it run by run, unit by unit.
How many there are follows from the lengths, which the device alone knows: each program works it out
for itself.
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import sequence_length
from tilewright.engines.triton.attention_masks import key_bounds


@triton.jit
def deal(
    len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, units, left, right, run,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr,
):  # fmt: skip
    """(batch indices, runs, first slots, lengths of queries and of keys), of BATCH_BLOCK each."""
    index = tl.arange(0, BATCH_BLOCK)
    known = tl.minimum(index, batches - 1)
    count_q = index * 0 + sequence_length(
        len_q, known, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM
    )
    count_kv = index * 0 + sequence_length(
        len_kv, known, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM
    )
    shift = 0
    if BOTTOM_RIGHT:
        shift = count_kv - count_q
    first, end, _, _ = key_bounds(
        index * 0, count_q - 1, count_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
    )
    blocks = tl.cdiv(tl.maximum(end - first // BLOCK_N * BLOCK_N, 0), BLOCK_N)
    runs = tl.where((index < batches) & (count_q > 0), tl.cdiv(blocks, run), 0)
    slots = runs * units
    return index, runs, tl.cumsum(slots, 0) - slots, count_q, count_kv


@triton.jit
def sums_at(slot, group, rows, TILES: tl.constexpr, TILE_ROWS: tl.constexpr):
    """The first row of sums of a slot: a slot has the rows of a key head, or a whole tile."""
    if TILES == 1:
        return slot.to(tl.int64) * (group * rows)
    return slot.to(tl.int64) * TILE_ROWS


@triton.jit
def pick(values, own):
    """The one value of a vector that is ``own``."""
    return tl.sum(tl.where(own, values, 0), 0)
