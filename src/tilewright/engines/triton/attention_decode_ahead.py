"""Blocks asked for in the second-level cache before a warp's loop loads them into registers.

A warp has one block under way. While all sequences are read, all warps together have as much under
way as the memory gives. Once the short ones are done it is the longest ones' warps that take the
time: these ask for a block more. What is asked for leaves the cache first, so that it pushes out
little that was written before; nothing that is computed depends on it.

Source: PTX ISA, cp.async.bulk.prefetch (SM90 and newer), whose bytes follow one another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.triton.attention_decode_side import N, length_of

# Sequences whose lengths are looked at, one a thread.
LENGTHS = gl.constexpr(32)


@gluon.constexpr_function
def one_a_thread(warps):
    """Of LENGTHS numbers, which all warps have."""
    return gl.DistributedLinearLayout(
        reg_bases=[], lane_bases=[[1], [2], [4], [8], [16]],
        warp_bases=[[0] for _ in range(warps.bit_length() - 1)], block_bases=[], shape=[32],
    )  # fmt: skip


@gluon.jit
def ahead_from(
    count, len_kv, batches, len_kv_step, keys, IS_SUM: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Keys of a sequence of ``count`` after which a block more is asked for, 0 or more.

    max(0, 2 m - n) of n keys, where m is the mean of the first 32 sequences: n, so never, where
    lengths are equal, and 0, so from the start, where it is twice as long as the mean.
    """
    index = gl.arange(0, LENGTHS, layout=one_a_thread(WARPS))
    counts = length_of(len_kv, gl.minimum(index, batches - 1), len_kv_step, keys, IS_SUM)
    total = gl.sum(gl.where(index < batches, counts.to(gl.float32), 0.0), 0)
    mean = total / gl.minimum(batches, LENGTHS).to(gl.float32)
    return gl.maximum(2.0 * mean - count.to(gl.float32), 0.0).to(gl.int32)


@gluon.jit
def follow(side):
    """True if the keys of a block follow one another in memory."""
    return side.row_step == side.WORDS


@gluon.jit
def ask(side, key, end, page, WARPS: gl.constexpr):
    """Ask for the 16 keys from ``key``, as far as they are before ``end``; they ``follow``."""
    index = gl.arange(0, LENGTHS, layout=one_a_thread(WARPS))
    count = gl.where(index == 0, gl.minimum(end - key, N), 0)
    if side.PAGE == 0:
        row = key.to(gl.int64) * side.row_step
    else:
        row = (key.to(gl.uint32) % side.PAGE).to(gl.int64) * side.row_step
        row += page.to(gl.int64) * side.page_step
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b64 o; createpolicy.fractional.L2::evict_first.b64 o, 1.0;"
        " setp.gt.s32 p, $2, 0;"
        " @p cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, o; mov.b32 $0, 0; }",
        "=r,l,r,~{memory}", [side.first + row, count * side.WORDS * 4],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
