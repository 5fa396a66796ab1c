"""The order in which tiles of packed sequences are walked, worked out on the device.

What a program takes at a time is a unit: a tile of a head, or two of them, so that a long and a
short one under a causal mask cost as much as the next two. Units are numbered sequence by sequence,
those with the costliest tiles first; of a sequence, head by head, so that the programs at work
share few heads' keys. A sequence's cost is what its last tile sees; those of a single tile come
behind all that have pairs.

In the workspace, all int32: HEADER words, of which the first has the number of units a head and the
second how many of them are of sequences with pairs; then WORDS for each unit of a head; then a word
for each unit, which is cleared here and set where a row's sums are not finite.
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import quotient, sequence_length, sequence_start

HEADER = tl.constexpr(8)
# Of a unit: its sequence, the sequence's first unit, extents, first rows, and what divides by its
# units a head.
WORDS = tl.constexpr(8)
# Sequences that a program places, and that it looks at at a time; of one of its own, units that it
# writes down and flags that it clears at a time.
OWN, AT_ONCE = 8, 512
_UNITS, _FLAGS = tl.constexpr(32), tl.constexpr(128)
# Above any cost.
_PAIRED = tl.constexpr(2**30)
# Quotients of a sequence's units are exact for numbers below 2**DIVISOR_BITS / units.
DIVISOR_BITS = 30
_BITS, _ONE = tl.constexpr(DIVISOR_BITS), tl.constexpr(1 << DIVISOR_BITS)


@triton.jit
def _extents(
    sequence, len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, left, right,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    IN_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(cost, units, rows, keys) of sequences; one that is not there has no unit."""
    known = tl.minimum(sequence, batches - 1)
    count_q = sequence_length(len_q, known, len_q_step, rows, True, LEN_Q_IS_SUM)
    count_kv = sequence_length(len_kv, known, len_kv_step, keys, True, LEN_KV_IS_SUM)
    tiles = tl.where(sequence < batches, tl.cdiv(count_q, BLOCK_M), 0)
    first = (tiles - 1) * BLOCK_M
    shift = sequence * 0
    if BOTTOM_RIGHT:
        shift = count_kv - count_q
    start, end = sequence * 0, count_kv
    if HAS_RIGHT:
        end = tl.minimum(end, first + BLOCK_M + shift + right)
    if HAS_LEFT:
        start = tl.maximum(first + shift - left + 1, 0)
    cost = tl.cdiv(tl.maximum(end - start, 0), BLOCK_N)
    units = tiles
    if IN_PAIRS:
        units = tl.cdiv(tiles, 2)
        cost += tl.where(tiles > 1, _PAIRED, 0)
    return cost, units, count_q, count_kv


@triton.jit
def _first_row(offsets, sequence, step, rows, IS_RAGGED: tl.constexpr):
    """Rows in front of a sequence, where a step of its offset is ``rows``."""
    return sequence_start(offsets, sequence, step, rows, 0, IS_RAGGED).to(tl.int32)


@triton.jit
def order_packed(
    order, flags, len_q, len_kv, q_offsets, k_offsets, v_offsets,
    len_q_step, len_kv_step, q_offset_step, k_offset_step, v_offset_step,
    q_rows, k_rows, v_rows,
    batches, rows, keys, heads, left, right, most_units,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    IN_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    OWN: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Place OWN sequences among all; there is room for ``most_units`` units a head."""
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    cost, units, count_q, count_kv = _extents(
        own, len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, left, right,
        LEN_Q_IS_SUM, LEN_KV_IS_SUM, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, IN_PAIRS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    before = tl.zeros((OWN,), tl.int32)
    total, paired = 0, 0
    for base in range(0, batches, AT_ONCE):
        other = base + tl.arange(0, AT_ONCE)
        its_cost, its_units, _, _ = _extents(
            other, len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, left, right,
            LEN_Q_IS_SUM, LEN_KV_IS_SUM, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, IN_PAIRS,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip
        is_same = its_cost[None, :] == cost[:, None]
        is_before = its_cost[None, :] > cost[:, None]
        is_before = is_before | (is_same & (other[None, :] < own[:, None]))
        before += tl.sum(tl.where(is_before, its_units[None, :], 0), 1)
        total += tl.sum(its_units, 0)
        paired += tl.sum(tl.where(its_cost >= _PAIRED, its_units, 0), 0)
    if tl.program_id(0) == 0:
        tl.store(order, tl.minimum(total, most_units))
        tl.store(order + 1, tl.minimum(paired, most_units))
    known = tl.minimum(own, batches - 1)
    q_first = _first_row(q_offsets, known, q_offset_step, q_rows, q_offsets is not None)
    k_first = _first_row(k_offsets, known, k_offset_step, k_rows, k_offsets is not None)
    v_first = _first_row(v_offsets, known, v_offset_step, v_rows, v_offsets is not None)
    # Lengths that pass the declared bound leave out rows, and have no room in the workspace.
    room = tl.minimum(units, most_units - before)
    by_units = tl.cdiv(_ONE, tl.maximum(units, 1))
    most = tl.max(units, 0)
    for unit in range(0, most, _UNITS):
        along = unit + tl.arange(0, _UNITS)
        mask = along[None, :] < room[:, None]
        at = order + HEADER + (before[:, None] + along[None, :]).to(tl.int64) * WORDS
        tl.store(at, tl.broadcast_to(own[:, None], mask.shape), mask=mask)
        tl.store(at + 1, tl.broadcast_to(before[:, None], mask.shape), mask=mask)
        tl.store(at + 2, tl.broadcast_to(count_q[:, None], mask.shape), mask=mask)
        tl.store(at + 3, tl.broadcast_to(count_kv[:, None], mask.shape), mask=mask)
        tl.store(at + 4, tl.broadcast_to(q_first[:, None], mask.shape), mask=mask)
        tl.store(at + 5, tl.broadcast_to(k_first[:, None], mask.shape), mask=mask)
        tl.store(at + 6, tl.broadcast_to(v_first[:, None], mask.shape), mask=mask)
        tl.store(at + 7, tl.broadcast_to(by_units[:, None], mask.shape), mask=mask)
    first_flag = before.to(tl.int64) * heads
    for flag in range(0, most * heads, _FLAGS):
        along = flag + tl.arange(0, _FLAGS)
        mask = along[None, :] < (room * heads)[:, None]
        at = flags + first_flag[:, None] + along[None, :]
        tl.store(at, tl.zeros((OWN, _FLAGS), tl.int32), mask=mask)


@triton.jit
def unit_at(
    order, number, heads, by_heads, heads_shift, IN_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(sequence, head, place among the head's units, rows, keys, first rows of q, k and v)."""
    at = order + HEADER + quotient(number, by_heads, heads_shift).to(tl.int64) * WORDS
    sequence, first_unit, rows, keys = (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    )  # fmt: skip
    q_first, k_first, v_first = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)
    within = number - first_unit * heads
    head = quotient(within, tl.load(at + 7), _BITS)
    units = tl.cdiv(rows, BLOCK_M)
    if IN_PAIRS:
        units = tl.cdiv(units, 2)
    return sequence, head, within - head * units, rows, keys, q_first, k_first, v_first


@triton.jit
def dealt_count(count, own, programs):
    """How many of ``count`` a program has if they are dealt back and forth."""
    rounds = count // programs
    last = tl.where(rounds % 2 == 0, own, programs - 1 - own)
    return rounds + (last < count % programs).to(tl.int32)
