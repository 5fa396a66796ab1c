"""Where a sequence lies in its operands, as Triton functions that forward and backward share.

All steps and offsets are in elements and int64; so are the products of an index and a step.
"""

import triton
import triton.language as tl


@triton.jit
def sequence_length(lengths, batch, step, limit, GIVEN: tl.constexpr, IS_SUM: tl.constexpr):
    """The length of a sequence, int32 in [0, limit]; ``limit`` itself if no length is given."""
    if GIVEN:
        at = lengths + batch.to(tl.int64) * step
        count = tl.load(at).to(tl.int64)
        if IS_SUM:
            count = tl.load(at + step).to(tl.int64) - count
        return tl.minimum(tl.maximum(count, 0), limit).to(tl.int32)
    else:
        return limit


@triton.jit
def sequence_start(offsets, batch, offset_step, multiplier, batch_step, IS_RAGGED: tl.constexpr):
    """Elements from an operand's first to those of a sequence, int64."""
    if IS_RAGGED:
        return tl.load(offsets + batch.to(tl.int64) * offset_step).to(tl.int64) * multiplier
    else:
        return batch.to(tl.int64) * batch_step


@triton.jit
def row_offsets(
    row, offsets, batch, head, offset_step, multiplier, batch_step, head_step, row_step,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Elements from an operand's first to rows of (batch, head), int64; steps in UNIT elements."""
    start = sequence_start(offsets, batch, offset_step, multiplier, batch_step, offsets is not None)
    return (start + head.to(tl.int64) * head_step + row.to(tl.int64) * row_step) * UNIT


@triton.jit
def head_start(
    at, offsets, batch, head, offset_step, multiplier, batch_step, head_step,
    UNIT: tl.constexpr, IS_PAGED: tl.constexpr,
):  # fmt: skip
    """Where a head's keys or values start; where they are paged, in the first page."""
    if IS_PAGED:
        return at + head.to(tl.int64) * head_step * UNIT
    else:
        return at + row_offsets(
            batch * 0, offsets, batch, head, offset_step, multiplier, batch_step, head_step, 0, UNIT
        )


@triton.jit
def table_starts(
    k_table, v_table, k_offsets, v_offsets, batch, k_offset_step, v_offset_step,
    k_multiplier, v_multiplier, k_batch_step, v_batch_step,
):  # fmt: skip
    """Where the page numbers of a sequence start: those of its keys, and those of its values."""
    k_at = k_table + sequence_start(
        k_offsets, batch, k_offset_step, k_multiplier, k_batch_step, k_offsets is not None
    )
    v_at = v_table + sequence_start(
        v_offsets, batch, v_offset_step, v_multiplier, v_batch_step, v_offsets is not None
    )
    return k_at, v_at


@triton.jit
def quotient(number, factor, shift):
    """A number in [0, 2**31) over a divisor that the host knows: ``KernelArguments.divisor``.

    A division takes about a hundred clocks, and those of a tile's start wait for one another.
    """
    return ((number.to(tl.int64) * factor) >> shift).to(tl.int32)


@triton.jit
def tile_of(number, tiles, group_heads, all_heads, LAST_FIRST: tl.constexpr):
    """(tile, head of all batches) of a number: ``group_heads`` heads at a time.

    With LAST_FIRST the last tiles of all of them come first: under a causal mask they take longest.
    """
    unit = group_heads * tiles
    first_head = number // unit * group_heads
    within = number % unit
    some = tl.minimum(group_heads, all_heads - first_head)
    tile = within // some
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, first_head + within % some


@triton.jit
def tile_at(
    number, tiles, group_heads, all_heads,
    by_unit, unit_shift, by_some, some_shift, by_rest, rest_shift,
    LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """``tile_of``, without divisions: by the tiles of a group of heads, by its heads and by those
    of the last group."""
    unit = quotient(number, by_unit, unit_shift)
    first_head = unit * group_heads
    within = number - first_head * tiles
    left = all_heads - first_head
    factor = tl.where(left < group_heads, by_rest, by_some)
    shift = tl.where(left < group_heads, rest_shift, some_shift)
    tile = quotient(within, factor, shift)
    head = first_head + within - tile * tl.minimum(group_heads, left)
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, head
