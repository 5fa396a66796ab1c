"""dK with dV, and dQ, where tensor maps bring every tile and no more than a diagonal hides keys.

What is beyond an operand's rows or head size arrives as zeros; no thread holds an address in the
loops, which leaves its registers to the sums: what bounds these kernels on SM90. The general ones
are ``attention_backward_keys`` and ``attention_backward_rows``; names are as in
``attention_backward_tiles``. ``reach`` is right bound plus alignment: a row sees keys up to
row + reach.
"""

import triton
import triton.language as tl

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.triton.attention_backward_tiles import finite_or_zero
from tilewright.engines.triton.attention_loop import scalar_value
from tilewright.engines.triton.attention_masks import LOG2_E

# Row statistics of a head are padded to whole tiles of so many rows.
PADDED_TO = tl.constexpr(128)


@triton.jit
def attention_backward_plain_keys(
    q_map,
    k_map,
    v_map,
    d_o_map,
    lse,
    delta,
    d_k,
    d_v,
    scale,
    rows,
    keys,
    line_tiles,
    reach,
    d_k_batch,
    d_k_head,
    d_k_row,
    d_k_col,
    d_v_batch,
    d_v_head,
    d_v_row,
    d_v_col,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_V: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_DEPTH_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D_K_UNIT: tl.constexpr,
    D_V_UNIT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BRANCHES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dK and dV of a block of keys, whose rows start at a multiple of ROWS.

    All rows of all heads of the group are one loop: with another around it the assembler would
    wait after each product. Statistics are loaded where they are used, which spares registers while
    products are made. BRANCHES: with Triton 3.7 the assembler waits as well where no branch parts
    the loop, so that the one for tiles on the diagonal stays though it is never taken.
    """
    # Early blocks see most rows under a causal mask: they start first.
    blocks = tl.cdiv(keys, KEYS)
    program = tl.program_id(0)
    first_key = (program % blocks) * KEYS
    head_kv = (program // blocks) % HEADS_KV
    batch = program // (blocks * HEADS_KV)
    k_tile = tl.reshape(k_map.load([batch, head_kv, first_key, 0]), (KEYS, BLOCK_DEPTH))
    if d_k is not None:
        v_tile = tl.reshape(v_map.load([batch, head_kv, first_key, 0]), (KEYS, BLOCK_DEPTH_V))
    key = first_key + tl.arange(0, KEYS)[:, None]
    scale = scalar_value(scale).to(tl.float32)
    first = first_key * 0
    if HAS_RIGHT:
        first = tl.maximum(first_key - reach, 0)
    tiles = tl.maximum(tl.cdiv(rows - first, ROWS), 0)
    acc_k = tl.zeros((KEYS, BLOCK_DEPTH), dtype=tl.float32)
    acc_v = tl.zeros((KEYS, BLOCK_DEPTH_V), dtype=tl.float32)
    for tile in tl.range(0, tiles * GROUP, num_stages=STAGES):
        head_q, start = head_kv, first + tile * ROWS
        if GROUP > 1:
            head_q, start = head_kv * GROUP + tile // tiles, first + tile % tiles * ROWS
        line = (batch * (HEADS_KV * GROUP) + head_q).to(tl.int64) * line_tiles * PADDED_TO
        row = tl.multiple_of(start, ROWS) + tl.arange(0, ROWS)
        q_tile = tl.reshape(q_map.load([batch, head_q, start, 0]), (ROWS, BLOCK_DEPTH))
        d_o_tile = tl.reshape(d_o_map.load([batch, head_q, start, 0]), (ROWS, BLOCK_DEPTH_V))
        nothing = tl.zeros((KEYS, ROWS), dtype=tl.float32)
        products = dot(k_tile, tl.trans(q_tile), nothing)
        lse_of_rows = tl.load(lse + tl.multiple_of(line, PADDED_TO) + row)[None, :]
        if d_k is not None:
            d_p = dot(v_tile, tl.trans(d_o_tile), nothing)
        # Beyond the last row P is multiplied by zeros, and beyond the last key nothing is stored.
        p = tl.exp2(products * (scale * LOG2_E) - lse_of_rows)
        if d_k is not None:
            delta_of_rows = tl.load(delta + tl.multiple_of(line, PADDED_TO) + row)[None, :]
        if HAS_RIGHT or BRANCHES:
            if start + reach < first_key + KEYS - 1:
                p = tl.where(key <= row[None, :] + reach, p, 0.0)
        if d_v is not None:
            acc_v = dot(p.to(d_o_tile.dtype), d_o_tile, acc_v)
        if d_k is not None:
            d_s = (p * (d_p - delta_of_rows)).to(q_tile.dtype)
            acc_k = dot(d_s, q_tile, acc_k)
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    depth_v = tl.arange(0, BLOCK_DEPTH_V)[None, :]
    batch, head, token = batch.to(tl.int64), head_kv.to(tl.int64), key.to(tl.int64)
    if HAS_RIGHT:
        # A key that no row sees may hold anything, and a zero of P times that is none.
        is_seen = key < rows + reach
        acc_k, acc_v = tl.where(is_seen, acc_k, 0.0), tl.where(is_seen, acc_v, 0.0)
    if d_k is not None:
        d_k += (batch * d_k_batch + head * d_k_head + token * d_k_row) * D_K_UNIT + depth * d_k_col
        acc_k = (acc_k * scale).to(d_k.dtype.element_ty)
        tl.store(d_k, acc_k, mask=(key < keys) & (depth < DEPTH))
    if d_v is not None:
        d_v += (
            batch * d_v_batch + head * d_v_head + token * d_v_row
        ) * D_V_UNIT + depth_v * d_v_col
        tl.store(d_v, acc_v.to(d_v.dtype.element_ty), mask=(key < keys) & (depth_v < DEPTH_V))


@triton.jit
def attention_backward_plain_rows(
    q_map,
    k_map,
    v_map,
    d_o_map,
    lse,
    delta,
    d_q,
    scale,
    rows,
    keys,
    line_tiles,
    reach,
    d_q_batch,
    d_q_head,
    d_q_row,
    d_q_col,
    HEADS_KV: tl.constexpr,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_DEPTH_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D_Q_UNIT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dQ of a block of rows: the keys that all of them see, then the tiles that need masks.

    HAS_TAIL: the number of keys is no multiple of KEYS.
    """
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    block = program % blocks
    if HAS_RIGHT:
        # The last rows see most keys: they start first.
        block = blocks - 1 - block
    first_row = block * ROWS
    head_q = (program // blocks) % (HEADS_KV * GROUP)
    batch = program // (blocks * (HEADS_KV * GROUP))
    head_kv = head_q // GROUP
    q_tile = tl.reshape(q_map.load([batch, head_q, first_row, 0]), (ROWS, BLOCK_DEPTH))
    d_o_tile = tl.reshape(d_o_map.load([batch, head_q, first_row, 0]), (ROWS, BLOCK_DEPTH_V))
    row = first_row + tl.arange(0, ROWS)
    line = (batch * (HEADS_KV * GROUP) + head_q).to(tl.int64) * line_tiles * PADDED_TO
    lse_of_rows = tl.load(lse + line + row)[:, None]
    delta_of_rows = tl.load(delta + line + row)[:, None]
    row = row[:, None]
    scale = scalar_value(scale).to(tl.float32)
    end, end_open = keys, keys // KEYS * KEYS
    if HAS_RIGHT:
        end = tl.maximum(tl.minimum(tl.minimum(first_row + ROWS, rows) + reach, keys), 0)
        end_open = tl.maximum(tl.minimum(first_row + reach + 1, keys), 0) // KEYS * KEYS
    nothing = tl.zeros((ROWS, KEYS), dtype=tl.float32)
    acc_q = tl.zeros((ROWS, BLOCK_DEPTH), dtype=tl.float32)
    for start in tl.range(0, end_open, KEYS, num_stages=STAGES):
        k_tile = tl.reshape(k_map.load([batch, head_kv, start, 0]), (KEYS, BLOCK_DEPTH))
        v_tile = tl.reshape(v_map.load([batch, head_kv, start, 0]), (KEYS, BLOCK_DEPTH_V))
        products = dot(q_tile, tl.trans(k_tile), nothing)
        # dP - Delta is summed as such: one step less between the product and the next.
        d_p = dot(d_o_tile, tl.trans(v_tile), nothing - delta_of_rows)
        p = tl.exp2(products * (scale * LOG2_E) - lse_of_rows)
        acc_q = dot((p * d_p).to(k_tile.dtype), k_tile, acc_q)
    if HAS_RIGHT or HAS_TAIL:
        for start in tl.range(end_open, end, KEYS, num_stages=1):
            key = start + tl.arange(0, KEYS)[None, :]
            k_tile = tl.reshape(k_map.load([batch, head_kv, start, 0]), (KEYS, BLOCK_DEPTH))
            v_tile = tl.reshape(v_map.load([batch, head_kv, start, 0]), (KEYS, BLOCK_DEPTH_V))
            products = dot(q_tile, tl.trans(k_tile), nothing)
            d_p = dot(d_o_tile, tl.trans(v_tile), nothing)
            p = tl.exp2(products * (scale * LOG2_E) - lse_of_rows)
            seen = key < keys
            if HAS_RIGHT:
                seen = seen & (key <= row + reach)
                # A hidden key may hold anything, and would be multiplied by a zero.
                k_tile = finite_or_zero(k_tile)
            d_s = tl.where(seen, p * (d_p - delta_of_rows), 0.0)
            acc_q = dot(d_s.to(k_tile.dtype), k_tile, acc_q)
    depth = tl.arange(0, BLOCK_DEPTH)[None, :]
    batch, head, token = batch.to(tl.int64), head_q.to(tl.int64), row.to(tl.int64)
    d_q += (batch * d_q_batch + head * d_q_head + token * d_q_row) * D_Q_UNIT + depth * d_q_col
    tl.store(d_q, (acc_q * scale).to(d_q.dtype.element_ty), mask=(row < rows) & (depth < DEPTH))
