"""What surrounds ``attention_backward_kernel``: row statistics before it, dQ and dSink behind it.

Plain Triton, a block of rows of one head a program. The workspace holds, in float32,

    lse, delta  (B, Hq, padded rows): Stats in base 2, +inf where a row sees nothing; rowsum(dO * O)
    sums        (B, Hq, padded rows, D): dQ without the scale, in tiles of 64 rows of half of the
                columns, each in the order (j, warp, lane, i, e) in which the threads of a product
                hold it: row 16 warp + 8 i + lane // 4, column 8 j + 2 (lane % 4) + e.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_rows(
    o, d_o, stats, lse, delta, sums, rows, padded_rows, heads,
    o_batch, o_head, o_row, d_o_batch, d_o_head, d_o_row, stats_batch, stats_head, stats_row,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row statistics, and zeros in the sums."""
    tiles = padded_rows // ROWS
    program = tl.program_id(0)
    line = (program // tiles).to(tl.int64)
    row = program % tiles * ROWS + tl.arange(0, ROWS)
    batch, head, token = line // heads, line % heads, row.to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    live = (row < rows)[:, None] & (column < WIDTH)
    o_at = o + batch * o_batch + head * o_head + token[:, None] * o_row + column
    d_o_at = d_o + batch * d_o_batch + head * d_o_head + token[:, None] * d_o_row + column
    o_tile = tl.load(o_at, mask=live, other=0.0).to(tl.float32)
    d_o_tile = tl.load(d_o_at, mask=live, other=0.0).to(tl.float32)
    at = line * padded_rows + token
    tl.store(delta + at, tl.sum(o_tile * d_o_tile, axis=1))
    stats_at = stats + batch * stats_batch + head * stats_head + token * stats_row
    value = tl.load(stats_at, mask=row < rows, other=-float("inf")) * LOG2E
    tl.store(lse + at, tl.where(value == -float("inf"), float("inf"), value))
    along = tl.arange(0, ROWS * DEPTH)
    first = (line * padded_rows + program % tiles * ROWS) * DEPTH
    tl.store(sums + first + along, tl.zeros((ROWS * DEPTH,), dtype=tl.float32))


@triton.jit
def finish_rows(
    sums, d_q, scale, rows, padded_rows, heads, width, d_q_batch, d_q_head, d_q_row,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """dQ = scale * sums, in dQ's type: half of the columns of 64 rows a program."""
    HALF: tl.constexpr = DEPTH // 2
    tiles = padded_rows // 64
    program = tl.program_id(0)
    half, tile = program % 2, program // 2 % tiles
    line = (program // 2 // tiles).to(tl.int64)
    first = (line * padded_rows + tile * 64) * DEPTH + half * (64 * HALF)
    held = tl.load(sums + first + tl.arange(0, 64 * HALF))
    held = tl.reshape(held, (HALF // 8, 4, 8, 4, 2, 2))
    value = tl.reshape(tl.permute(held, (1, 4, 2, 0, 3, 5)), (64, HALF)) * scale
    row = tile * 64 + tl.arange(0, 64)
    column = half * HALF + tl.arange(0, HALF)[None, :]
    at = d_q + line // heads * d_q_batch + line % heads * d_q_head
    at += row.to(tl.int64)[:, None] * d_q_row + column
    mask = (row < rows)[:, None] & (column < width)
    tl.store(at, value.to(d_q.dtype.element_ty), mask=mask)


@triton.jit
def finish_sinks(
    sink, lse, delta, d_sink, padded_rows, batches, heads, d_sink_head, ROWS: tl.constexpr
):
    """dSink of a head a program: -sum of exp(sink - Stats) Delta over its rows, in order."""
    head = tl.program_id(0).to(tl.int64)
    value = tl.load(sink + head).to(tl.float32) * LOG2E
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for batch in range(batches):
        line = (batch * heads + head) * padded_rows
        for start in range(0, padded_rows, ROWS):
            row = start + tl.arange(0, ROWS)
            stats = tl.load(lse + line + row, mask=row < padded_rows, other=float("inf"))
            share = tl.load(delta + line + row, mask=row < padded_rows, other=0.0)
            total += tl.exp2(value - stats) * share
    tl.store(d_sink + head * d_sink_head, (-tl.sum(total)).to(d_sink.dtype.element_ty))
