"""Attention as a Triton kernel, right and with one bug planted in each, as in `planted`.

Without a GPU it runs in Triton's interpreter:

    TRITON_INTERPRET=1 tilewright verify attention \\
        --target examples.verify.planted_triton:attention_unmasked_tail
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

BLOCK_ROWS, BLOCK_KEYS = 16, 16


@triton.jit
def attention_kernel(
    q,
    k,
    v,
    o,
    stats,
    scale,
    heads,
    kv_heads,
    rows,
    keys,
    stored,
    q_b,
    q_h,
    q_s,
    q_d,
    k_b,
    k_h,
    k_s,
    k_d,
    v_b,
    v_h,
    v_s,
    v_d,
    o_b,
    o_h,
    o_s,
    o_d,
    s_b,
    s_h,
    s_s,
    CAUSAL: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BUG: tl.constexpr,
):
    """O and Stats of BLOCK_M rows of one head, a block of keys after another."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if BUG == "missed_head":
        kv_head = head % kv_heads
    else:
        kv_head = head // (heads // kv_heads)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    depth = tl.arange(0, BLOCK_D).to(tl.int64)
    depth_v = tl.arange(0, BLOCK_V).to(tl.int64)
    q_at = batch * q_b + head * q_h + row[:, None] * q_s + depth[None, :] * q_d
    if BUG == "narrow_stride":
        q_at = q_at.to(tl.int32)
    in_q = (row < rows)[:, None] & (depth < DEPTH)[None, :]
    queries = tl.load(q + q_at, mask=in_q, other=0.0).to(tl.float32)
    factor = tl.load(scale)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    for first in range(0, keys, BLOCK_N):
        column = first + tl.arange(0, BLOCK_N).to(tl.int64)
        k_at = batch * k_b + kv_head * k_h + column[:, None] * k_s + depth[None, :] * k_d
        v_at = batch * v_b + kv_head * v_h + column[:, None] * v_s + depth_v[None, :] * v_d
        if BUG == "narrow_stride":
            k_at = k_at.to(tl.int32)
            v_at = v_at.to(tl.int32)
        in_k = (column < keys)[:, None] & (depth < DEPTH)[None, :]
        in_v = (column < keys)[:, None] & (depth_v < DEPTH_V)[None, :]
        key = tl.load(k + k_at, mask=in_k, other=0.0).to(tl.float32)
        value = tl.load(v + v_at, mask=in_v, other=0.0).to(tl.float32)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * factor
        if BUG != "unmasked_tail":
            scores = tl.where((column < keys)[None, :], scores, float("-inf"))
        if CAUSAL:
            scores = tl.where(column[None, :] <= row[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None] + tl.dot(weights, value, input_precision="ieee")
        top = higher
    o_at = batch * o_b + head * o_h + row[:, None] * o_s + depth_v[None, :] * o_d
    in_o = (row < stored)[:, None] & (depth_v < DEPTH_V)[None, :]
    tl.store(o + o_at, (sums / total[:, None]).to(o.dtype.element_ty), mask=in_o)
    log = tl.log(total) + top
    if BUG == "wrong_log":
        log = log * 1.4426950408889634
    tl.store(stats + batch * s_b + head * s_h + row * s_s, log, mask=row < rows)


# The bug of stale_scale: a scale is read once for each tensor, which is kept with its address.
_SCALES = {}


def _attention(bug, q, k, v, *, causal=False, scale=None, return_stats=False, out=None):
    """See examples.verify.planted: the same arguments."""
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected one type")
    batch, heads, rows, depth = q.shape
    keys = k.shape[2]
    if k.shape[3] != depth or k.shape[:3] != v.shape[:3] or batch != k.shape[0]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit")
    if heads % k.shape[1]:
        raise ValueError(f"{heads} query heads over {k.shape[1]} KV heads")
    if out is None:
        o = torch.empty(batch, heads, rows, v.shape[3], dtype=q.dtype, device=q.device)
        stats = torch.empty(batch, heads, rows, 1, device=q.device)
    elif isinstance(out, tuple):
        o, stats = out
    else:
        o, stats = out, torch.empty(batch, heads, rows, 1, device=q.device)
    for written in (o, stats):
        _check_overlap(written, (q, k, v, *((stats,) if written is o else ())))
    if not isinstance(scale, torch.Tensor):
        factor = torch.tensor([depth**-0.5 if scale is None else scale], device=q.device)
    elif bug == "stale_scale":
        factor = _SCALES.setdefault(scale.data_ptr(), (scale, scale.clone()))[1]
    else:
        factor = scale
    stored = rows - rows % 4 if bug == "unwritten_rows" else rows
    grid = (batch * heads, triton.cdiv(rows, BLOCK_ROWS))
    attention_kernel[grid](
        q,
        k,
        v,
        o,
        stats,
        factor,
        heads,
        k.shape[1],
        rows,
        keys,
        stored,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *o.stride(),
        *stats.stride()[:3],
        CAUSAL=causal,
        DEPTH=depth,
        DEPTH_V=v.shape[3],
        BLOCK_D=max(16, triton.next_power_of_2(depth)),
        BLOCK_V=max(16, triton.next_power_of_2(v.shape[3])),
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_KEYS,
        BUG=bug,
    )
    return (o, stats) if return_stats else o


def _check_overlap(written, others):
    def span(x):
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    start, stop = span(written)
    for other in others:
        first, last = span(other)
        if first < stop and start < last:
            raise ValueError("out overlaps another operand")


def _named(bug):
    found = functools.partial(_attention, bug)
    found.__name__ = "attention" + (f"_{bug}" if bug else "")
    found.verify_notes = {"ALLOCATES_TEMPORARIES"}
    return found


attention = _named("")
attention_narrow_stride = _named("narrow_stride")
attention_unmasked_tail = _named("unmasked_tail")
attention_missed_head = _named("missed_head")
attention_wrong_log = _named("wrong_log")
attention_stale_scale = _named("stale_scale")
attention_unwritten_rows = _named("unwritten_rows")
