"""The order in which tiles of packed sequences are walked: the costliest first. Plain Triton.

Of the tiles of ``batches`` sequences of up to ``tiles`` blocks of rows, those that have a row of
their sequence are sorted by the blocks of keys that they see, into SCALE buckets. In the workspace,
all int32: how many there are; the buckets' starts; then the tiles, ``sequence * tiles + tile``. The
order within a bucket is any, and no result depends on it.
"""

import triton
import triton.language as tl

# Buckets of cost, and threads that sort.
SCALE = 1024
SORT_WARPS = 32
_SCALE = tl.constexpr(SCALE)
_LENGTHS, _SUMS = tl.constexpr(1), tl.constexpr(2)


def order_bytes(entries: int) -> int:
    """Bytes of the workspace for ``entries`` tiles."""
    return 4 * (1 + SCALE + entries)


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
    index, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left, right, tiles,
    entries, LENGTHS_Q: tl.constexpr, LENGTHS_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(bucket, exists) of tiles; the first bucket is the costliest."""
    inside = index < entries
    sequence = index // tiles
    first = index % tiles * BLOCK_M
    length_q = _length(lengths_q, sequence, lengths_q_step, rows, inside, LENGTHS_Q)
    length_kv = _length(lengths_kv, sequence, lengths_kv_step, keys, inside, LENGTHS_KV)
    shift = tl.zeros_like(index)
    if BOTTOM_RIGHT:
        shift = length_kv - length_q
    end = length_kv
    if HAS_RIGHT:
        end = tl.minimum(end, first + BLOCK_M + right + shift)
    start = tl.zeros_like(index)
    if HAS_LEFT:
        start = tl.maximum(first - left + shift + 1, 0)
    seen = tl.minimum(tl.maximum(end - start, 0), keys)
    level = (seen.to(tl.int64) * (_SCALE - 1) // keys).to(tl.int32)
    return _SCALE - 1 - level, inside & (first < length_q)


@triton.jit
def order_tiles(
    order, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left, right, tiles,
    entries, LENGTHS_Q: tl.constexpr, LENGTHS_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Fill the order; one program."""
    lane = tl.arange(0, _SCALE)
    counts = order + 1
    tl.store(counts + lane, tl.zeros_like(lane))
    tl.debug_barrier()
    for start in range(0, entries, _SCALE):
        bucket, exists = _bucket(
            start + lane, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left,
            right, tiles, entries, LENGTHS_Q, LENGTHS_KV, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_M
        )  # fmt: skip
        tl.atomic_add(counts + bucket, 1, mask=exists)
    tl.debug_barrier()
    # Past the first-level cache, which atomics do not write to.
    count = tl.load(counts + lane, cache_modifier=".cg")
    tl.store(order, tl.sum(count))
    tl.debug_barrier()
    tl.store(counts + lane, tl.cumsum(count) - count)
    tl.debug_barrier()
    for start in range(0, entries, _SCALE):
        index = start + lane
        bucket, exists = _bucket(
            index, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step, rows, keys, left,
            right, tiles, entries, LENGTHS_Q, LENGTHS_KV, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_M
        )  # fmt: skip
        place = tl.atomic_add(counts + bucket, 1, mask=exists)
        tl.store(order + 1 + _SCALE + place, index, mask=exists)
