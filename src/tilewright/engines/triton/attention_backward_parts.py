"""What surrounds the products of attention's backward: row statistics, and dSink.

Both run over rows of (b, h); the statistics lie in the workspace as (B, Hq, padded rows), float32.
"""

import triton
import triton.language as tl

from tilewright.engines.triton.attention_addresses import row_offsets, sequence_length
from tilewright.engines.triton.attention_masks import LOG2_E, in_range


@triton.jit
def attention_backward_prepare(
    o,
    d_o,
    stats,
    lse,
    delta,
    len_q,
    o_offsets,
    d_o_offsets,
    stats_offsets,
    rows,
    padded_rows,
    o_batch,
    o_head,
    o_row,
    o_col,
    d_o_batch,
    d_o_head,
    d_o_row,
    d_o_col,
    stats_batch,
    stats_head,
    stats_row,
    len_q_step,
    o_offset_step,
    o_multiplier,
    d_o_offset_step,
    d_o_multiplier,
    stats_offset_step,
    stats_multiplier,
    HEADS: tl.constexpr,
    DEPTH_V: tl.constexpr,
    BLOCK_DEPTH_V: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    O_UNIT: tl.constexpr,
    LEN_Q_IS_SUM: tl.constexpr,
):
    """Delta = rowsum(dO * O), and Stats in base 2, +inf where a row sees nothing."""
    blocks = tl.cdiv(padded_rows, ROWS)
    program = tl.program_id(0)
    row = (program % blocks) * ROWS + tl.arange(0, ROWS)
    head = ((program // blocks) % HEADS).to(tl.int64)
    batch = program // (blocks * HEADS)
    count = sequence_length(len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM)
    inside = row < count
    token = row.to(tl.int64)
    depth_v = tl.arange(0, BLOCK_DEPTH_V)[None, :]
    live = inside[:, None] & (depth_v < DEPTH_V)
    o_at = o + row_offsets(
        row[:, None], o_offsets, batch, head, o_offset_step, o_multiplier, o_batch,
        o_head, o_row, O_UNIT,
    )  # fmt: skip
    o_at += depth_v * o_col
    d_o_at = d_o + row_offsets(
        row[:, None], d_o_offsets, batch, head, d_o_offset_step, d_o_multiplier, d_o_batch,
        d_o_head, d_o_row, UNIT,
    )  # fmt: skip
    d_o_at += depth_v * d_o_col
    o_tile = tl.load(o_at, mask=live, other=0.0).to(tl.float32)
    d_o_tile = tl.load(d_o_at, mask=live, other=0.0).to(tl.float32)
    # A row that sees nothing has O = 0, and its dO may hold anything.
    product = tl.where(o_tile == 0.0, 0.0, o_tile * d_o_tile)
    at = (batch.to(tl.int64) * HEADS + head) * padded_rows + token
    written = row < padded_rows
    tl.store(delta + at, tl.sum(product, axis=1), mask=written)
    stats_at = stats + row_offsets(
        row, stats_offsets, batch, head, stats_offset_step, stats_multiplier, stats_batch,
        stats_head, stats_row, 1,
    )  # fmt: skip
    value = tl.load(stats_at, mask=inside, other=-float("inf")).to(tl.float32) * LOG2_E
    value = tl.where(value == -float("inf"), float("inf"), value)
    tl.store(lse + at, value, mask=written)


@triton.jit
def attention_backward_sink(
    sink,
    lse,
    delta,
    d_sink,
    padded_rows,
    sink_head,
    d_sink_head,
    BATCH: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """dSink of a head a program: -sum of exp(sink - Stats) Delta over its rows, in order."""
    head = tl.program_id(0).to(tl.int64)
    value = in_range(tl.load(sink + head * sink_head).to(tl.float32)) * LOG2_E
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for batch in range(BATCH):
        line = (batch * HEADS + head) * padded_rows
        for start in range(0, padded_rows, ROWS):
            row = start + tl.arange(0, ROWS)
            live = row < padded_rows
            stats = tl.load(lse + line + row, mask=live, other=float("inf"))
            share = tl.load(delta + line + row, mask=live, other=0.0)
            # No weight is more than 1; of large numbers the difference, as one operation with the
            # product, would be what rounding took from one of them.
            total += tl.exp2(tl.minimum(value - stats, 0.0)) * share
    tl.store(d_sink + head * d_sink_head, (-tl.sum(total)).to(d_sink.dtype.element_ty))
