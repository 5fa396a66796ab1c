"""The order in which tiles of packed sequences are walked. Plain Triton.

Programs fetch items, one by one, from a counter. An item is a tile of a head: sequence by
sequence, those with the costliest tiles first; of a sequence, head by head; of a head, the last
tile first. So the programs at work share few heads' keys, and the last items are cheap ones.

A sequence's cost is what its last tile sees, in SCALE buckets. In the workspace, all int32: how
many tiles there are; the counter, which this kernel clears; the buckets' starts; the tiles of
sequences, ``sequence * tiles + tile``; and room for the programs of items (int16) and the starts of
sequences. The order within a bucket is any, and no result depends on it.
"""

import triton
import triton.language as tl

# Buckets of cost, threads that sort, and numbers before the buckets.
SCALE = 1024
SORT_WARPS = 32
HEADER = 2
_SCALE = tl.constexpr(SCALE)
# Tiles that are written down at a time.
_AT_ONCE = tl.constexpr(4 * SCALE)
_HEADER = tl.constexpr(HEADER)
_LENGTHS, _SUMS = tl.constexpr(1), tl.constexpr(2)


def order_bytes(batch: int, tiles: int, heads: int) -> int:
    """Bytes of the workspace for ``batch`` sequences of up to ``tiles`` tiles, ``heads`` each."""
    owners = -(-batch * tiles * heads // 2)
    return 4 * (HEADER + SCALE + batch * tiles + owners + batch)


@triton.jit
def _length(lengths, at, step, declared, mask, KIND: tl.constexpr):
    length = tl.zeros_like(at) + declared
    if KIND == _LENGTHS:
        found = tl.load(lengths + at.to(tl.int64) * step, mask=mask, other=0)
        length = tl.minimum(tl.maximum(found, 0), declared).to(tl.int32)
    if KIND == _SUMS:
        first = tl.load(lengths + at.to(tl.int64) * step, mask=mask, other=0)
        last = tl.load(lengths + (at + 1).to(tl.int64) * step, mask=mask, other=0)
        length = tl.minimum(tl.maximum(last - first, 0), declared).to(tl.int32)
    return length


@triton.jit
def _bucket(
    sequence, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left, right,
    batch, LENGTHS_Q: tl.constexpr, LENGTHS_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(bucket, tiles) of sequences; the first bucket is the costliest."""
    inside = sequence < batch
    length_q = _length(lengths_q, sequence, lengths_q_step, rows, inside, LENGTHS_Q)
    length_kv = _length(lengths_kv, sequence, lengths_kv_step, keys, inside, LENGTHS_KV)
    own = (length_q + BLOCK_M - 1) // BLOCK_M
    first = (own - 1) * BLOCK_M
    shift = tl.zeros_like(sequence)
    if BOTTOM_RIGHT:
        shift = length_kv - length_q
    end = length_kv
    if HAS_RIGHT:
        end = tl.minimum(end, first + BLOCK_M + right + shift)
    start = tl.zeros_like(sequence)
    if HAS_LEFT:
        start = tl.maximum(first - left + shift + 1, 0)
    seen = tl.minimum(tl.maximum(end - start, 0), keys)
    level = (seen.to(tl.int64) * (_SCALE - 1) // keys).to(tl.int32)
    return _SCALE - 1 - level, tl.where(inside, own, 0)


@triton.jit
def order_tiles(
    order, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left, right, tiles,
    batch, heads_q, LENGTHS_Q: tl.constexpr, LENGTHS_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Fill the order; one program."""
    lane = tl.arange(0, _SCALE)
    counts = order + _HEADER
    entries = batch * tiles
    starts = counts + _SCALE + entries + (entries.to(tl.int64) * heads_q + 1) // 2
    tl.store(counts + lane, tl.zeros_like(lane))
    tl.debug_barrier()
    for base in range(0, batch, _SCALE):
        bucket, own = _bucket(
            base + lane, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left,
            right, batch, LENGTHS_Q, LENGTHS_KV, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_M
        )  # fmt: skip
        tl.atomic_add(counts + bucket, own, mask=own > 0)
    tl.debug_barrier()
    # Past the first-level cache, which atomics do not write to.
    count = tl.load(counts + lane, cache_modifier=".cg")
    tl.store(order, tl.sum(count))
    tl.store(order + 1, 0)
    tl.debug_barrier()
    tl.store(counts + lane, tl.cumsum(count) - count)
    tl.debug_barrier()
    for base in range(0, batch, _SCALE):
        sequence = base + lane
        bucket, own = _bucket(
            sequence, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left,
            right, batch, LENGTHS_Q, LENGTHS_KV, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_M
        )  # fmt: skip
        place = tl.atomic_add(counts + bucket, own, mask=own > 0)
        tl.store(starts + sequence, place, mask=sequence < batch)
    tl.debug_barrier()
    wide = tl.arange(0, _AT_ONCE)
    for base in range(0, entries, _AT_ONCE):
        index = base + wide
        inside = index < entries
        sequence = index // tiles
        rows_of = _length(lengths_q, sequence, lengths_q_step, rows, inside, LENGTHS_Q)
        own = (rows_of + BLOCK_M - 1) // BLOCK_M
        start = tl.load(starts + sequence, mask=inside, other=0, cache_modifier=".cg")
        tile = index % tiles
        at = counts + _SCALE + start + own - 1 - tile
        tl.store(at, index, mask=inside & (tile < own))
