"""Attention forward on SM90 with a warp group that loads and two that compute.

The same sums as ``attention.py``, for plain scores of dense operands. The compiler deals the kernel
to warp groups: one issues the copies of keys and values, two have half of a tile's rows each. They
meet at no barrier, so that one multiplies while the other takes exponentials. It does so for one
loop over keys a tile and for no branches, hence:

- scores are hidden by one operation of every block, which passes by those that need it not
  (``attention_assembly``);
- values that a row must not see are not looked for here. Each row notes if its sums are not finite,
  and where masks hide keys ``attention_repair`` makes the tiles of such rows again;
- the rows of Q come through a map that has them on two axes, since the compiler moves the second
  half of the rows along the first axis.

Programs are as many as multiprocessors where shared memory has room for the next tile's queries. A
window goes from its last keys to its first, so that of a head's tiles that run side by side one
after the other meets keys that none has read, and not all of them in their first block.
Source: FlashAttention-3 (Shah et al. 2024) for warp groups that alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import triton
import triton.language as tl
from triton.language import core

from tilewright.engines.compiled.bf16 import dot
from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton.attention_addresses import quotient, row_offsets, tile_at
from tilewright.engines.triton.attention_arguments import KernelArguments, add_forward_operands
from tilewright.engines.triton.attention_assembly import (
    hide_after,
    hide_before,
    hide_edge,
    with_noted,
    with_stored,
)
from tilewright.engines.triton.attention_config import (
    ForwardConfig,
    gates_apart,
    goes_in_pairs,
    has_even_edges,
    heads_at_a_time,
    takes_many_tiles,
    whole,
)
from tilewright.engines.triton.attention_gate import without_gate
from tilewright.engines.triton.attention_gate_rows import gate_kernel
from tilewright.engines.triton.attention_loop import (
    load_piece,
    note_rows,
    rows_to_note,
    scalar_value,
    weigh,
)
from tilewright.engines.triton.attention_masks import LOG2_E
from tilewright.engines.triton.attention_output import join_sink, store_rows
from tilewright.engines.triton.attention_repair import notes_of, repair_kernel
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.launch.tensor_maps import map_decline_reason

# Compilers whose deal of warps is known to be right and quick; later ones refuse the map of Q.
_COMPILERS = ("3.6.",)
_MANY = 2**31 - 1


@triton.jit
def attend_tile(
    tile, both, batch, head, key_head,
    q, k, v, q_map, k_map, v_map, o, gate, stats, smax, ssum, sink, spoilt,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    factor, rows, keys, left, right, shift, tiles, zero,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, STATS_LOG2: tl.constexpr,
    IS_COUNTED: tl.constexpr, HAS_EVEN_EDGES: tl.constexpr, IS_PACKED: tl.constexpr = False,
    q_first=0, k_first=0, v_first=0,
    o_offsets=None, gate_offsets=None, stats_offsets=None, smax_offsets=None, ssum_offsets=None,
    o_offset_step=0, gate_offset_step=0, stats_offset_step=0, smax_offset_step=0,
    ssum_offset_step=0,
    o_multiplier=1, gate_multiplier=1, stats_multiplier=1, smax_multiplier=1, ssum_multiplier=1,
):  # fmt: skip
    sequence = batch
    if IS_PACKED:
        # Operands have one axis of rows for all sequences.
        batch = batch * 0
    first_row = tile * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    in_rows = row < rows
    if IS_PACKED and q_map is not None:
        query = q_map.load([q_first + first_row + zero, (head * q_head * UNIT).to(tl.int32)])
    elif q_map is not None:
        # A number of its own: the compiler moves what it is given, for all uses of that number.
        query = tl.reshape(q_map.load([first_row + zero, batch, head, 0, 0]), (BLOCK_M, D_BLOCK))
    else:
        line = row + q_first if IS_PACKED else row
        at = row_offsets(line, None, batch, head, 0, 1, q_batch, q_head, q_row, UNIT)
        query = load_piece(q, at, in_rows, q_col, 0, D_BLOCK, D, False, True)
    # Keys that a row sees, those that some row of the tile sees, and those that all of them see.
    start, open_start = 0, 0
    end, open_end = keys, keys
    low, high = row[:, None] * 0, row[:, None] * 0 + keys - 1
    if HAS_RIGHT:
        end = tl.minimum(keys, first_row + BLOCK_M + shift + right)
        if IS_PACKED:
            # A sequence of an odd number of tiles has an empty one.
            end = tl.where(first_row < rows, end, 0)
        open_end = tl.minimum(keys, first_row + shift + right + 1)
        high = tl.minimum(row + (shift + right), keys - 1)[:, None]
    if HAS_LEFT:
        start = tl.maximum(first_row + shift - left + 1, 0) // BLOCK_N * BLOCK_N
        open_start = first_row + BLOCK_M + shift - left
        low = (row + (shift - left + 1))[:, None]
    within = tl.arange(0, BLOCK_N)
    if k_map is None:
        k_at = k + row_offsets(tile * 0, None, batch, key_head, 0, 1, k_batch, k_head, 0, UNIT)
        v_at = v + row_offsets(tile * 0, None, batch, key_head, 0, 1, v_batch, v_head, 0, UNIT)

    acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    step = BLOCK_N
    if IS_COUNTED:
        # Where a tile sees no key, one block is hidden: no code for a loop that is not entered.
        blocks = tl.cdiv(end - start, BLOCK_N)
        if k_map is not None:
            blocks = tl.maximum(blocks, 1)
        origin = start
        start, end, step = 0, blocks, 1
    for first in tl.range(start, end, step, warp_specialize=k_map is not None):
        first = core.to_tensor(first)
        if IS_COUNTED:
            if HAS_LEFT:
                # From the right.
                first = blocks - 1 - first
            first = origin + first * BLOCK_N
        if k_map is not None:
            k_place = first + k_first if IS_PACKED else first
            block = tl.reshape(k_map.load([batch, key_head, k_place, 0]), (BLOCK_N, D_BLOCK)).T
        else:
            key = first + within
            at = (key + k_first if IS_PACKED else key).to(tl.int64) * k_row * UNIT
            block = load_piece(k_at, at, key < keys, k_col, 0, D_BLOCK, D, True, True)
        score = dot(query, block, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
        # Where nothing is hidden, too: with a branch behind the product the assembler orders what
        # follows so that a block takes 8 % less.
        if HAS_EVEN_EDGES:
            col, place = within[None, :], row[:, None]
            score = hide_edge(score, col, place, first + BLOCK_N <= open_end, True)
            score = hide_edge(score, col, place, first >= open_start, False)
        else:
            score = hide_after(score, first, within[None, :], high, first + BLOCK_N <= open_end)
        if HAS_LEFT and not HAS_EVEN_EDGES:
            score = hide_before(score, first, within[None, :], low, first >= open_start)
        hides: tl.constexpr = HAS_LEFT or HAS_RIGHT or IS_PACKED
        weights, fade, total, top = weigh(score, top, total, factor, hides)
        acc = acc * fade[:, None]
        weights = weights.to(query.dtype)
        if v_map is not None:
            v_place = first + v_first if IS_PACKED else first
            values = tl.reshape(v_map.load([batch, key_head, v_place, 0]), (BLOCK_N, DV_BLOCK))
        else:
            at = within.to(tl.int64) * v_row * UNIT + first.to(tl.int64) * v_row * UNIT
            if IS_PACKED:
                at += v_first.to(tl.int64) * v_row * UNIT
            values = load_piece(
                v_at, at, first + within < keys, v_col, 0, DV_BLOCK, DV, False, True
            )
        acc = dot(weights, values, acc)

    if IS_PACKED:
        total = with_noted(total, spoilt + both + row * 0, rows_to_note(acc, in_rows))
    elif spoilt is not None:
        place = both.to(tl.int64) * (tiles * BLOCK_M) + row
        if IS_COUNTED:
            total = with_stored(total, spoilt + place, rows_to_note(acc, in_rows))
        else:
            note_rows(spoilt, acc, place, in_rows)
    if sink is not None:
        level = tl.load(sink + head.to(tl.int64) * sink_head)
        acc, _, total, top = join_sink(acc, 0.0, total, top, level, False)
    store_rows(
        acc, 0.0, total, top, 1.0, sequence, head, row, in_rows, in_rows,
        o, gate, stats, smax, ssum,
        o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
        o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
        stats_batch, stats_head, stats_row,
        smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row,
        o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
        o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
        DV, DV_BLOCK, 0, O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE, STATS_LOG2, True,
    )  # fmt: skip


@triton.jit
def heads_of(both, heads, by_heads, heads_shift, by_group, group_shift):
    """(batch, head, key head) of a head of all batches."""
    batch = quotient(both, by_heads, heads_shift)
    head = both - batch * heads
    return batch, head, quotient(head, by_group, group_shift)


@triton.jit
def dealt(
    step, own, programs, tiles, group_heads, all_heads, heads,
    by_heads, heads_shift, by_group, group_shift,
    by_unit, unit_shift, by_some, some_shift, by_rest, rest_shift,
    LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """(tile, head of all batches, batch, head, key head) of a program's step."""
    # Every other round of tiles is dealt backwards, as they become shorter.
    number = step * programs + tl.where(step % 2 == 0, own, programs - 1 - own)
    tile, both = tile_at(
        number, tiles, group_heads, all_heads,
        by_unit, unit_shift, by_some, some_shift, by_rest, rest_shift, LAST_FIRST,
    )  # fmt: skip
    batch, head, key_head = heads_of(both, heads, by_heads, heads_shift, by_group, group_shift)
    return tile, both, batch, head, key_head


@triton.jit
def attention_forward_specialized(
    q, k, v, q_map, k_map, v_map, o, gate, stats, smax, ssum, sink, spoilt,
    scale,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    sink_head,
    rows, keys, heads, group, left, right, tiles, group_heads, all_heads, zero,
    by_heads, heads_shift, by_group, group_shift,
    by_unit, unit_shift, by_some, some_shift, by_rest, rest_shift,
    D: tl.constexpr, DV: tl.constexpr, D_BLOCK: tl.constexpr, DV_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    STATS_LOG2: tl.constexpr, LAST_FIRST: tl.constexpr,
    IS_PERSISTENT: tl.constexpr, IN_PAIRS: tl.constexpr, HAS_EVEN_EDGES: tl.constexpr,
):  # fmt: skip
    factor = scalar_value(scale).to(tl.float32) * LOG2_E
    shift = 0
    if BOTTOM_RIGHT:
        shift = keys - rows
    # A loop of one turn is none.
    steps = 1
    if IS_PERSISTENT:
        programs = tl.num_programs(0)
        own = tl.program_id(0)
        count = tiles * all_heads
        if IN_PAIRS:
            # The tiles of a head in pairs of a long and a short one.
            units = tl.cdiv(tiles, 2)
            steps = tl.cdiv(units * all_heads - own, programs) * 2
        else:
            last_own = tl.where(count // programs % 2 == 0, own, programs - 1 - own)
            steps = count // programs + (last_own < count % programs).to(tl.int32)
            tile, both, batch, head, key_head = dealt(
                0, own, programs, tiles, group_heads, all_heads, heads,
                by_heads, heads_shift, by_group, group_shift,
                by_unit, unit_shift, by_some, some_shift, by_rest, rest_shift, LAST_FIRST,
            )  # fmt: skip
    else:
        tile, both = tile_at(
            tl.program_id(0), tiles, group_heads, all_heads,
            by_unit, unit_shift, by_some, some_shift, by_rest, rest_shift, LAST_FIRST,
        )  # fmt: skip
        batch, head, key_head = heads_of(both, heads, by_heads, heads_shift, by_group, group_shift)
    for step in tl.range(0, steps):
        if IN_PAIRS:
            unit = own + step // 2 * programs
            tile = tl.where(step % 2 == 0, tiles - 1 - unit % units, unit % units)
            both = unit // units
            head, batch = both % heads, both // heads
            key_head = head // group
        attend_tile(
            tile, both, batch, head, key_head,
            q, k, v, q_map, k_map, v_map, o, gate, stats, smax, ssum, sink, spoilt,
            q_batch, q_head, q_row, q_col, k_batch, k_head, k_row, k_col,
            v_batch, v_head, v_row, v_col, o_batch, o_head, o_row, o_col,
            gate_batch, gate_head, gate_row, gate_col,
            stats_batch, stats_head, stats_row, smax_batch, smax_head, smax_row,
            ssum_batch, ssum_head, ssum_row, sink_head,
            factor, rows, keys, left, right, shift, tiles, zero,
            D, DV, D_BLOCK, DV_BLOCK, BLOCK_M, BLOCK_N, UNIT, O_UNIT,
            GATE_UNIT, GATE_O, GATE_TYPE, HAS_LEFT, HAS_RIGHT, STATS_LOG2,
            not IN_PAIRS, HAS_EVEN_EDGES,
        )  # fmt: skip
        if IS_PERSISTENT and not IN_PAIRS:
            # Behind the end of a tile, in which it finds room.
            tile, both, batch, head, key_head = dealt(
                step + 1, own, programs, tiles, group_heads, all_heads, heads,
                by_heads, heads_shift, by_group, group_shift,
                by_unit, unit_shift, by_some, some_shift, by_rest, rest_shift, LAST_FIRST,
            )  # fmt: skip


def is_dealt(spec: AttentionSpec) -> bool:
    """True if this compiler deals the kernel to warp groups, and maps take the operands."""
    if not triton.__version__.startswith(_COMPILERS):
        return False
    ports = (spec.ports[port] for port in ("q", "k", "v"))
    return all(
        map_decline_reason(port, is_flat=port.ragged_offset is not None) is None for port in ports
    )


def specialized_plan(
    spec: AttentionSpec, slots: Mapping[int, int], config: ForwardConfig, *, is_aligned: bool
) -> KernelPlan:
    """The kernel, where masks hide keys the one that looks through its notes, and a gate's."""
    if gates_apart(spec):
        alone = specialized_plan(without_gate(spec), slots, config, is_aligned=is_aligned)
        behind = gate_kernel(spec, slots, is_aligned=is_aligned)
        return replace(alone, kernels=(*alone.kernels, behind))
    arguments = KernelArguments(slots)
    add_forward_operands(arguments, spec, is_aligned=is_aligned)
    tiles = triton.cdiv(spec.rows, config.block_m)
    all_heads = spec.batch * spec.heads_q
    block, block_v = whole(spec.depth), whole(spec.depth_v)
    is_persistent = takes_many_tiles(spec, config)
    arguments.extent("tiles", tiles)
    group_heads = heads_at_a_time(spec)
    arguments.extent("group_heads", group_heads)
    arguments.extent("all_heads", all_heads)
    arguments.extent("zero", 0)
    for name, divisor in {
        "heads": spec.heads_q,
        "group": spec.group,
        "unit": tiles * group_heads,
        "some": group_heads,
        # Heads of the last group, if they are fewer.
        "rest": all_heads % group_heads or group_heads,
    }.items():
        arguments.divisor(name, divisor)
    arguments.constant(
        D_BLOCK=block,
        DV_BLOCK=block_v,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        LAST_FIRST=spec.right is not None,
        IS_PERSISTENT=is_persistent,
        HAS_EVEN_EDGES=has_even_edges(spec, config),
        IN_PAIRS=goes_in_pairs(spec, config),
    )
    if is_aligned:
        box = (1, 1, config.block_n)
        arguments.tensor_map("k_map", spec.ports["k"], (*box, block))
        arguments.tensor_map("v_map", spec.ports["v"], (*box, block_v))
        arguments.row_map("q_map", spec.ports["q"], config.block_m, block)
    else:
        arguments.constant(q_map=None, k_map=None, v_map=None)
    noted_rows = tiles * config.block_m
    notes = notes_of(spec, noted_rows)
    arguments.scratch("spoilt", "*i32", 0 if notes else None)
    programs = min(config.programs if is_persistent else _MANY, tiles * all_heads)
    forward = arguments.planned(
        attention_forward_specialized, (programs, 1, 1), config.warps, config.stages
    )
    if not notes:
        return KernelPlan((forward,))
    repair = repair_kernel(spec, slots, config, noted_rows, is_aligned=is_aligned)
    return KernelPlan((forward, repair), notes)
