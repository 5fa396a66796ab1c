"""Attention forward of packed sequences on SM90: the warp groups of ``attention_specialized``.

Operands are read through maps that have one axis of rows for all sequences. What a copy brings from
behind a sequence's end is the next one's: its scores are hidden, and where its values are not
finite a unit is noted and made again (``attention_packed_repair``). Which tiles there are, the
device alone knows: a kernel in front of this one puts them in an order (``attention_packed_order``)
in which programs, as many as multiprocessors, take them in turn, every other time backwards.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton.attention_addresses import quotient
from tilewright.engines.triton.attention_arguments import KernelArguments, add_forward_operands
from tilewright.engines.triton.attention_config import (
    ForwardConfig,
    goes_in_pairs,
    takes_many_tiles,
    whole,
)
from tilewright.engines.triton.attention_loop import scalar_value
from tilewright.engines.triton.attention_masks import LOG2_E
from tilewright.engines.triton.attention_packed_order import (
    AT_ONCE,
    HEADER,
    OWN,
    WORDS,
    dealt_count,
    order_packed,
    unit_at,
)
from tilewright.engines.triton.attention_packed_repair import attention_packed_repair
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.engines.triton.attention_specialized import attend_tile

_WORD_BYTES = 4
# Units that a program of the repair looks through at a time, and rows that it makes.
_NOTES, _ROWS = 1024, 64


@triton.jit
def attention_forward_packed(
    q, k, v, q_map, k_map, v_map, o, gate, stats, smax, ssum, sink, order, flags,
    o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
    scale,
    q_head, q_row, q_col,
    k_head, k_row, k_col,
    v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    heads, left, right, zero, by_heads, heads_shift, by_group, group_shift,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STATS_LOG2: tl.constexpr, IS_PERSISTENT: tl.constexpr, IN_PAIRS: tl.constexpr,
):  # fmt: skip
    factor = scalar_value(scale).to(tl.float32) * LOG2_E
    programs = tl.num_programs(0)
    own = tl.program_id(0)
    count = tl.load(order) * heads
    # A loop of one turn is none.
    steps, twice = 1, 0
    if IS_PERSISTENT:
        steps = dealt_count(count, own, programs)
        if IN_PAIRS:
            twice = dealt_count(tl.load(order + 1) * heads, own, programs)
            steps += twice
    for step in tl.range(0, steps):
        if IS_PERSISTENT:
            turn = step
            if IN_PAIRS:
                turn = tl.where(step < 2 * twice, step // 2, step - twice)
            number = turn * programs + tl.where(turn % 2 == 0, own, programs - 1 - own)
            known = number
        else:
            number = own
            is_there = number < count
            known = tl.maximum(tl.minimum(number, count - 1), 0)
        sequence, head, place, rows, keys, q_first, k_first, v_first = unit_at(
            order, known, heads, by_heads, heads_shift, IN_PAIRS, BLOCK_M
        )
        tile = tl.cdiv(rows, BLOCK_M) - 1 - place
        if IN_PAIRS:
            is_second = (step < 2 * twice) & (step % 2 == 1)
            # An odd one in the middle has no second: one beyond the rows.
            other = tl.where(place == tile, tile + place + 1, place)
            tile = tl.where(is_second, other, tile)
        if not IS_PERSISTENT:
            # Where no sequence has a row no unit was written down.
            sequence, head = tl.where(is_there, sequence, 0), tl.where(is_there, head, 0)
            rows, keys = tl.where(is_there, rows, 0), tl.where(is_there, keys, 0)
        shift = 0
        if BOTTOM_RIGHT:
            shift = keys - rows
        attend_tile(
            tile, number, sequence, head, quotient(head, by_group, group_shift),
            q, k, v, q_map, k_map, v_map, o, gate, stats, smax, ssum, sink, flags,
            0, q_head, q_row, q_col, 0, k_head, k_row, k_col, 0, v_head, v_row, v_col,
            o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
            stats_batch, stats_head, stats_row, smax_batch, smax_head, smax_row,
            ssum_batch, ssum_head, ssum_row, sink_head,
            factor, rows, keys, left, right, shift, 0, zero,
            D, DV, D_BLOCK, DV_BLOCK, BLOCK_M, BLOCK_N, UNIT, O_UNIT,
            GATE_UNIT, GATE_O, GATE_TYPE, HAS_LEFT, HAS_RIGHT, STATS_LOG2,
            True, False, True,
            q_first, k_first, v_first,
            o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
            o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step,
            ssum_offset_step, o_multiplier, gate_multiplier, stats_multiplier,
            smax_multiplier, ssum_multiplier,
        )  # fmt: skip


def packed_units(spec: AttentionSpec, block_m: int, *, in_pairs: bool) -> int:
    """Units a head that sequences can have at most."""
    tiles = triton.cdiv(spec.rows, block_m)
    most = spec.batch * (triton.cdiv(tiles, 2) if in_pairs else tiles)
    if spec.total_q is not None:
        # Every sequence's last tile may be partly empty.
        most = min(most, spec.total_q // block_m + spec.batch)
    return most


def packed_plan(
    spec: AttentionSpec, slots: Mapping[int, int], config: ForwardConfig, *, is_aligned: bool
) -> KernelPlan:
    """The order, the kernel, and the one that makes noted units again."""
    is_persistent = takes_many_tiles(spec, config)
    in_pairs = goes_in_pairs(spec, config)
    units = packed_units(spec, config.block_m, in_pairs=in_pairs)
    flags_at = _WORD_BYTES * (HEADER.value + WORDS.value * units)
    scratch = flags_at + _WORD_BYTES * units * spec.heads_q
    block, block_v = whole(spec.depth), whole(spec.depth_v)

    def arguments_of() -> KernelArguments:
        arguments = KernelArguments(slots)
        add_forward_operands(arguments, spec, is_aligned=is_aligned)
        arguments.scratch("order", "*i32", 0)
        arguments.scratch("flags", "*i32", flags_at)
        arguments.divisor("heads", spec.heads_q)
        arguments.divisor("group", spec.group)
        arguments.extent("zero", 0)
        arguments.constant(
            D_BLOCK=block,
            DV_BLOCK=block_v,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            IN_PAIRS=in_pairs,
            IS_PERSISTENT=is_persistent,
        )
        return arguments

    order = arguments_of()
    order.constant(OWN=OWN, AT_ONCE=AT_ONCE)
    order.extent("most_units", units)
    for name in ("q", "k", "v"):
        tensor = spec.ports[name]
        order.integer(f"{name}_rows", tensor.ragged_offset_multiplier // tensor.stride[2])
    first = order.planned(order_packed, (triton.cdiv(spec.batch, OWN), 1, 1), 8, 1)
    forward = arguments_of()
    if is_aligned:
        box = (1, 1, config.block_n)
        forward.tensor_map("k_map", spec.ports["k"], (*box, block))
        forward.tensor_map("v_map", spec.ports["v"], (*box, block_v))
        forward.packed_row_map("q_map", spec.ports["q"], config.block_m)
    else:
        forward.constant(q_map=None, k_map=None, v_map=None)
    programs = units * spec.heads_q
    if is_persistent:
        programs = min(config.programs, programs)
    second = forward.planned(
        attention_forward_packed, (programs, 1, 1), config.warps, config.stages
    )
    repair = arguments_of()
    repair.constant(
        NOTES=_NOTES,
        BLOCK_M=min(_ROWS, config.block_m),
        BLOCK_N=min(32 if block_v > 128 else 64, config.block_n),
        TILE=config.block_m,
    )
    looks = min(triton.cdiv(units * spec.heads_q, _NOTES), config.programs)
    third = repair.planned(attention_packed_repair, (looks, 1, 1), 8 if block_v > 128 else 4, 1)
    named = ("order of tiles, and those that are not finite", scratch)
    return KernelPlan((first, second, third), (named,))
