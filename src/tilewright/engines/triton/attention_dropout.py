"""The draws of attention's dropout, stored: 1 where a probability is kept, 0 where it is not."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import PlannedKernel
from tilewright.engines.triton.attention_arguments import KernelArguments
from tilewright.engines.triton.attention_loop import scalar_value
from tilewright.engines.triton.attention_masks import philox_keep
from tilewright.engines.triton.attention_spec import AttentionSpec

_LINES, _KEYS, _WARPS = 16, 128, 4


@triton.jit
def attention_draws(
    dump, seed, offset,
    dump_batch, dump_head, dump_row, dump_col,
    rows, keys, heads, lines,
    LINES: tl.constexpr, BLOCK_N: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    row, head, batch = line % rows, line // rows % heads, line // rows // heads
    at = dump + batch * dump_batch + head * dump_head + row * dump_row
    seed_value = scalar_value(seed).to(tl.int64)
    offset_value = scalar_value(offset).to(tl.int64)
    for first in range(0, keys, BLOCK_N):
        col = first + tl.arange(0, BLOCK_N)
        kept = philox_keep(line[:, None], col[None, :], keys, seed_value, offset_value, THRESHOLD)
        inside = (line < lines)[:, None] & (col < keys)[None, :]
        pointers = at[:, None] + col.to(tl.int64)[None, :] * dump_col
        # By float32: interpreted, bfloat16 made of a truth value would be its bits.
        kept = kept.to(tl.float32).to(dump.dtype.element_ty)
        tl.store(pointers, kept, mask=inside)


def draws_kernel(spec: AttentionSpec, slots: Mapping[int, int]) -> PlannedKernel:
    """The launch that fills the port rng_dump (B, Hq, Sq, Skv)."""
    arguments = KernelArguments(slots)
    dump = spec.ports["rng_dump"]
    arguments.pointer("dump", dump)
    arguments.steps("dump", dump)
    arguments.scalar("seed", spec.ports["dropout_seed"], "i64")
    arguments.scalar("offset", spec.ports["dropout_offset"], "i64")
    lines = spec.batch * spec.heads_q * spec.rows
    for name, value in (("rows", spec.rows), ("keys", spec.keys), ("heads", spec.heads_q)):
        arguments.extent(name, value)
    arguments.integer("lines", lines)
    arguments.constant(LINES=_LINES, BLOCK_N=_KEYS, THRESHOLD=int(spec.drop_probability * 2.0**32))
    return arguments.planned(attention_draws, (triton.cdiv(lines, _LINES), 1, 1), _WARPS, 1)
