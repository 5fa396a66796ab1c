"""What surrounds ``attention_backward_kernel``: row statistics before it, dQ and dSink behind it.

A block of 64 rows of one head a program. The workspace holds, in float32,

    lse, delta  (B, Hq, padded rows): Stats in base 2, +inf where a row sees nothing; rowsum(dO * O)
    sums        (B, Hq, padded rows, D): dQ without the scale, blocks of 64 rows, each in the order
                (j, warp, lane, i, e) in which the threads of a product hold it: row
                16 warp + 8 i + lane // 4, column 8 j + 2 (lane % 4) + e.
    lse_parts, delta_parts
                (B, Hq, padded rows, 16): -Stats / c, c what scores are multiplied by, and -Delta
                as ``attention_backward_parts`` has them; they and the sums are there together.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_backward_parts import store_parts
from tilewright.engines.hopper.attention_places import length_of
from tilewright.engines.hopper.attention_records import NO_LENGTHS

LOG2E = gl.constexpr(1.4426950408889634)
BLOCK = gl.constexpr(64)
# Counts of arrivals that are cleared at once.
MOST_ARRIVALS = gl.constexpr(2048)


@gluon.jit
def row_block(lengths, lengths_step, rows, padded_rows, heads, KIND: gl.constexpr):
    """(line, batch entry, head, first row, rows of the batch entry) of a program."""
    blocks = padded_rows // BLOCK
    # From the last one: what the products read first is then the latest in L2, and what they added
    # up last is there still.
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    line = (program // blocks).to(gl.int64)
    batch = line // heads
    own = length_of(batch, lengths, lengths_step, rows, KIND)
    return line, batch, line % heads, program % blocks * BLOCK, own


@gluon.jit
def elements_before(batch, head, batch_step, head_step, starts, starts_step, unit,
                    RAGGED: gl.constexpr):  # fmt: skip
    """Elements of an operand before a head of a batch entry."""
    at = head * head_step
    if RAGGED:
        at += gl.load(starts + batch * starts_step).to(gl.int64) * unit
    else:
        at += batch * batch_step
    return at


@gluon.jit
def prepare_rows(
    o, d_o, stats, lse, delta, sums, lse_parts, delta_parts, scale, lengths_q, lengths_q_step,
    o_starts, o_starts_step, o_unit, d_o_starts, d_o_starts_step, d_o_unit,
    stats_starts, stats_starts_step, stats_unit, rows, padded_rows, heads,
    o_batch, o_head, o_row, d_o_batch, d_o_head, d_o_row, stats_batch, stats_head, stats_row,
    arrivals, arrivals_count,
    WIDTH: gl.constexpr, BLOCK_WIDTH: gl.constexpr, DEPTH: gl.constexpr,
    LENGTHS_Q: gl.constexpr, RAGGED_Q: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Row statistics; their parts and zeros in the sums where there are any: DEPTH is 0 without."""
    line, batch, head, first, own = row_block(
        lengths_q, lengths_q_step, rows, padded_rows, heads, LENGTHS_Q
    )
    if SHARES:
        if gl.program_id(0) == 0:
            counter = gl.arange(0, MOST_ARRIVALS, gl.BlockedLayout([4], [32], [4], [0]))
            gl.store(arrivals + counter, counter * 0, mask=counter < arrivals_count)
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_WIDTH, BLOCK_WIDTH // 8], [4, 1], [1, 0]
    )
    row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_WIDTH, gl.SliceLayout(0, layout))[None, :]
    token = row.to(gl.int64)
    live = (row < own)[:, None] & (column < WIDTH)
    o += elements_before(batch, head, o_batch, o_head, o_starts, o_starts_step, o_unit, RAGGED_Q)
    d_o += elements_before(
        batch, head, d_o_batch, d_o_head, d_o_starts, d_o_starts_step, d_o_unit, RAGGED_Q
    )
    stats += elements_before(
        batch, head, stats_batch, stats_head, stats_starts, stats_starts_step, stats_unit, RAGGED_Q
    )
    o_tile = gl.load(o + token[:, None] * o_row + column, mask=live, other=0.0)
    d_o_tile = gl.load(d_o + token[:, None] * d_o_row + column, mask=live, other=0.0)
    value = gl.load(stats + token * stats_row, mask=row < own, other=-float("inf")) * LOG2E
    at = line * padded_rows + token
    product = gl.sum(o_tile.to(gl.float32) * d_o_tile.to(gl.float32), axis=1)
    value = gl.where(value == -float("inf"), float("inf"), value)
    gl.store(delta + at, product)
    gl.store(lse + at, value)
    if DEPTH > 0:
        store_parts(lse_parts, value / (scale * -LOG2E), line * padded_rows + first)
        store_parts(delta_parts, -product, line * padded_rows + first)
        is_there = first < padded_rows
        if RAGGED_Q:
            is_there = first < own
        if is_there:
            flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
            along = gl.arange(0, BLOCK * DEPTH, flat)
            zeros = gl.zeros([BLOCK * DEPTH], gl.float32, flat)
            gl.store(sums + (line * padded_rows + first) * DEPTH + along, zeros)


@gluon.constexpr_function
def rows_layout(depth):
    """(64, depth): 16 rows a warp, eight neighbours a thread, 32 columns of 8 rows at a time."""
    held = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, n] for n in (32, 64) if n < depth]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(held, lanes, [[16, 0], [32, 0]], [], [64, depth])


@gluon.jit
def finish_rows(
    sums, d_q, lengths_q, lengths_q_step, d_q_starts, d_q_starts_step, d_q_unit,
    scale, rows, padded_rows, heads, d_q_batch, d_q_head, d_q_row,
    DEPTH: gl.constexpr, WIDTH: gl.constexpr, LENGTHS_Q: gl.constexpr, RAGGED_Q: gl.constexpr,
):  # fmt: skip
    """dQ = scale * sums, in dQ's type.

    A warp loads its 16 rows as they lie, and turns them by itself into eight neighbours a thread.
    """
    line, batch, head, first, own = row_block(
        lengths_q, lengths_q_step, rows, padded_rows, heads, LENGTHS_Q
    )
    end = rows
    if RAGGED_Q:
        end = own
    if first < end:
        flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
        along = gl.arange(0, BLOCK * DEPTH, flat)
        held = gl.load(sums + (line * padded_rows + first) * DEPTH + along)
        value = (held * scale).to(d_q.dtype.element_ty)
        value = value.reshape([DEPTH // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
        layout: gl.constexpr = rows_layout(DEPTH)
        value = gl.convert_layout(value.reshape([BLOCK, DEPTH]), layout)
        row = first + gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
        column = gl.arange(0, DEPTH, gl.SliceLayout(0, layout))[None, :]
        d_q += elements_before(
            batch, head, d_q_batch, d_q_head, d_q_starts, d_q_starts_step, d_q_unit, RAGGED_Q
        )
        place = d_q + (row.to(gl.int64) * d_q_row)[:, None] + column
        mask = (row < end)[:, None] & (column < WIDTH)
        if LENGTHS_Q != NO_LENGTHS and not RAGGED_Q:
            # Rows of padding are 0, also where a key that is not finite made sums NaN.
            value = gl.where((row < own)[:, None], value, 0.0)
        gl.store(place, value, mask=mask)


@triton.jit
def finish_sinks(
    sink, lse, delta, d_sink, padded_rows, batches, heads, d_sink_head, ROWS: tl.constexpr
):
    """dSink of a head a program: -sum of exp(sink - Stats) Delta over its rows, in order."""
    head = tl.program_id(0).to(tl.int64)
    value = tl.load(sink + head).to(tl.float32) * 1.4426950408889634
    # Of a number, a number; and no product that a difference could be fused with.
    value = tl.minimum(tl.maximum(value, -3.4028234663852886e38), 3.4028234663852886e38)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for batch in range(batches):
        line = (batch * heads + head) * padded_rows
        for start in range(0, padded_rows, ROWS):
            row = start + tl.arange(0, ROWS)
            stats = tl.load(lse + line + row, mask=row < padded_rows, other=float("inf"))
            share = tl.load(delta + line + row, mask=row < padded_rows, other=0.0)
            # No weight is more than 1, as it would be where Stats are rounded far from 0.
            total += tl.exp2(tl.minimum(value - stats, 0.0)) * share
    tl.store(d_sink + head * d_sink_head, (-tl.sum(total)).to(d_sink.dtype.element_ty))
