"""Attention forward for a few queries over many keys: runs of keys, then a combination.

The queries of all heads that share a key head form one tile, so keys are read once; more than 64
are several tiles, whose programs lie side by side. Where that makes too few programs, keys are cut
into runs (``attention_runs``), and as many programs as the device holds share the runs that there
are; ``attention_combine`` joins the sums of a sequence. It is launched early: it starts, and works
out where its sums are, while the last programs run.
``attention_decode_direct`` makes the sums of plain scores where keys are not very many, and
``attention_decode_joined`` does all, where the runs of a key head can be a cluster's, and
``attention_decode_paired`` where those of two sequences can, which have lengths of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import triton
import triton.language as tl
from triton.language import core
from triton.language.extra.cuda import gdc_launch_dependents

from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel
from tilewright.engines.triton.attention_addresses import (
    head_start,
    row_offsets,
    sequence_length,
    table_starts,
)
from tilewright.engines.triton.attention_arguments import (
    KernelArguments,
    add_forward_operands,
    takes_tensor_maps,
)
from tilewright.engines.triton.attention_combine import attention_combine
from tilewright.engines.triton.attention_config import ForwardConfig, Sharing, cut, power_of_two
from tilewright.engines.triton.attention_decode_config import DIRECT_ROWS, query_tiles
from tilewright.engines.triton.attention_loop import (
    attend,
    is_spoilt,
    load_piece,
    scalar_value,
)
from tilewright.engines.triton.attention_mapped import attend_mapped
from tilewright.engines.triton.attention_masks import LOG2_E, alibi_slope, key_bounds
from tilewright.engines.triton.attention_output import join_sink, store_rows
from tilewright.engines.triton.attention_runs import deal, pick, sums_at
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.launch.tensor_maps import map_decline_reason
from tilewright.launch.workspace import plan_workspace

# Elements of sums, rows by width aside, that a combining program holds at a time.
_RUNS_AT_ONCE = 16
# One warp combines: nothing is exchanged, and its programs find room beside those that sum.
_COMBINE_WARPS = 1
# The kernels' names of what is in the workspace.
_PARTS = ("part_acc", "part_total", "part_top")


@triton.jit
def attention_decode(
    q, k, v, k_map, v_map, o, gate, stats, smax, ssum, bias, sink, part_acc, part_total, part_top,
    len_q, len_kv, k_table, v_table,
    q_offsets, k_offsets, v_offsets, k_table_offsets, v_table_offsets, o_offsets, gate_offsets,
    stats_offsets, smax_offsets, ssum_offsets,
    scale, cap_inner, cap_outer, given_0, given_1, given_2, given_3,
    q_batch, q_head, q_row, q_col,
    k_batch, k_head, k_row, k_col,
    v_batch, v_head, v_row, v_col,
    o_batch, o_head, o_row, o_col,
    gate_batch, gate_head, gate_row, gate_col,
    stats_batch, stats_head, stats_row,
    smax_batch, smax_head, smax_row,
    ssum_batch, ssum_head, ssum_row,
    bias_batch, bias_head, bias_row, bias_col,
    sink_head,
    len_q_step, len_kv_step,
    k_table_batch, k_table_row, v_table_batch, v_table_row,
    q_offset_step, k_offset_step, v_offset_step, k_table_offset_step, v_table_offset_step,
    o_offset_step, gate_offset_step, stats_offset_step, smax_offset_step, ssum_offset_step,
    q_multiplier, k_multiplier, v_multiplier, k_table_multiplier, v_table_multiplier,
    o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
    batches, rows, keys, heads_kv, group, left, right, run,
    LEN_Q_IS_SUM: tl.constexpr, LEN_KV_IS_SUM: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    D_BLOCK: tl.constexpr, D_BLOCK_2: tl.constexpr,
    DV_BLOCK: tl.constexpr, DV_BLOCK_2: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BATCH_BLOCK: tl.constexpr, TILES: tl.constexpr,
    UNIT: tl.constexpr, O_UNIT: tl.constexpr,
    GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
    K_PAGE: tl.constexpr, V_PAGE: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    ALIBI_SPLIT: tl.constexpr, CAP_DIVIDES: tl.constexpr, SCORE_PROGRAM: tl.constexpr,
    FOLDS_SCALE: tl.constexpr, STATS_LOG2: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    is_paged: tl.constexpr = k_table is not None
    has_bias: tl.constexpr = bias is not None
    has_alibi: tl.constexpr = ALIBI_SPLIT > 0
    has_soft_cap: tl.constexpr = CAP_DIVIDES is not None
    is_split: tl.constexpr = part_acc is not None

    program = tl.program_id(0)
    # Tiles of queries of a sequence.
    units: tl.constexpr = heads_kv * TILES
    slots = batches * units
    if is_split:
        index, runs, starts, counts_q, counts_kv = deal(
            len_q, len_kv, len_q_step, len_kv_step, batches, rows, keys, units, left, right, run,
            LEN_Q_IS_SUM, LEN_KV_IS_SUM, HAS_LEFT, HAS_RIGHT, BOTTOM_RIGHT, BLOCK_N, BATCH_BLOCK,
        )  # fmt: skip
        slots = tl.sum(runs, 0) * units
    if IS_EARLY:
        # Not before: the programs of the combination read the same lengths.
        gdc_launch_dependents()
    for slot in range(program, slots, tl.num_programs(0)):
        slot = core.to_tensor(slot)
        if is_split:
            # The last sequence with any run that starts at or before this slot.
            batch = tl.max(tl.where((starts <= slot) & (runs > 0), index, 0), 0)
            own = index == batch
            place = slot - pick(starts, own)
            unit, number = place % units, place // units
            count_q, count_kv = pick(counts_q, own), pick(counts_kv, own)
        else:
            unit, batch, number = slot % units, slot // units, 0
            count_q = sequence_length(
                len_q, batch, len_q_step, rows, len_q is not None, LEN_Q_IS_SUM
            )
            count_kv = sequence_length(
                len_kv, batch, len_kv_step, keys, len_kv is not None, LEN_KV_IS_SUM
            )
        key_head = unit // TILES
        place_in_tile = tl.arange(0, BLOCK_M)
        place_in_group = unit % TILES * BLOCK_M + place_in_tile
        row = place_in_group % rows
        member = place_in_group // rows
        head = key_head * group + member
        in_declared = member < group
        in_rows = in_declared & (row < count_q)
        shift = 0
        if BOTTOM_RIGHT:
            shift = count_kv - count_q

        q_at = row_offsets(
            row, q_offsets, batch, head, q_offset_step, q_multiplier, q_batch, q_head, q_row, UNIT
        )
        query = load_piece(q, q_at, in_rows, q_col, 0, D_BLOCK, D, False, True)
        query_2 = query
        if D_BLOCK_2 > 0:
            query_2 = load_piece(q, q_at, in_rows, q_col, D_BLOCK, D_BLOCK_2, D, False, True)
        k_at = head_start(
            k, k_offsets, batch, key_head, k_offset_step, k_multiplier, k_batch, k_head,
            UNIT, is_paged,
        )  # fmt: skip
        v_at = head_start(
            v, v_offsets, batch, key_head, v_offset_step, v_multiplier, v_batch, v_head,
            UNIT, is_paged,
        )  # fmt: skip
        k_pages, v_pages = None, None
        if is_paged:
            k_pages, v_pages = table_starts(
                k_table, v_table, k_table_offsets, v_table_offsets, batch,
                k_table_offset_step, v_table_offset_step, k_table_multiplier, v_table_multiplier,
                k_table_batch, v_table_batch,
            )  # fmt: skip
        bias_at, slope, inner, outer = None, None, None, None
        if has_bias:
            bias_at = bias + batch.to(tl.int64) * bias_batch
            bias_at += head.to(tl.int64)[:, None] * bias_head + row.to(tl.int64)[:, None] * bias_row
        if has_alibi:
            slope = alibi_slope(head, ALIBI_SPLIT)[:, None]
        if has_soft_cap:
            inner, outer = 1.0, 1.0
            if cap_inner is not None:
                inner = scalar_value(cap_inner).to(tl.float32)
            if cap_outer is not None:
                outer = scalar_value(cap_outer).to(tl.float32)
        number_0, number_1, number_2, number_3 = None, None, None, None
        if given_0 is not None:
            number_0 = scalar_value(given_0).to(tl.float32)
        if given_1 is not None:
            number_1 = scalar_value(given_1).to(tl.float32)
        if given_2 is not None:
            number_2 = scalar_value(given_2).to(tl.float32)
        if given_3 is not None:
            number_3 = scalar_value(given_3).to(tl.float32)
        factor = scalar_value(scale).to(tl.float32)
        if FOLDS_SCALE:
            factor = factor * LOG2_E

        first, end, _, _ = key_bounds(
            batch * 0, count_q - 1, count_kv, shift, left, right, HAS_LEFT, HAS_RIGHT
        )
        if count_q <= 0:
            end = first
        first = first // BLOCK_N * BLOCK_N
        if is_split:
            first = first + number * run * BLOCK_N
            end = tl.minimum(end, first + run * BLOCK_N)
        acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
        acc_2 = 0.0
        if DV_BLOCK_2 > 0:
            acc_2 = tl.zeros((BLOCK_M, DV_BLOCK_2), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        if k_map is not None:
            acc, total, top = attend_mapped(
                acc, total, top, query, k_map, v_map, v_at, v_row, v_col, k_pages, v_pages,
                k_table_row, v_table_row, v_batch, batch, key_head, first, end, factor,
                BLOCK_N, D_BLOCK, DV, DV_BLOCK, UNIT, K_PAGE, V_PAGE, is_paged,
            )  # fmt: skip
        else:
            # Masked throughout: bytes take the time here, and one loop is less code to fetch.
            acc, acc_2, total, top = attend(
                acc, acc_2, total, top, query, query_2, k_at, v_at, k_row, v_row, k_col, v_col,
                k_pages, v_pages, k_table_row, v_table_row, k_batch, v_batch,
                first, end, 0, row[:, None], count_kv, shift, left, right, factor,
                inner, outer, number_0, number_1, number_2, number_3, batch, head[:, None],
                bias_at, bias_col, slope, None, keys, None, None,
                None, 0, None, 0, 0, in_rows[:, None],
                D, DV, D_BLOCK, D_BLOCK_2, DV_BLOCK, DV_BLOCK_2, BLOCK_N, UNIT, K_PAGE, V_PAGE,
                is_paged, HAS_LEFT, HAS_RIGHT, has_bias, has_alibi, has_soft_cap,
                CAP_DIVIDES, SCORE_PROGRAM, False, False, 0, False, FOLDS_SCALE, True, False,
            )  # fmt: skip

        # Values that a row does not see do not exist, NaN and infinity included; they are rare.
        if HAS_LEFT or HAS_RIGHT or has_bias:
            if is_spoilt(acc, acc_2, DV_BLOCK_2 > 0):
                acc = tl.zeros((BLOCK_M, DV_BLOCK), tl.float32)
                if DV_BLOCK_2 > 0:
                    acc_2 = tl.zeros((BLOCK_M, DV_BLOCK_2), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
                top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
                acc, acc_2, total, top = attend(
                    acc, acc_2, total, top, query, query_2, k_at, v_at, k_row, v_row, k_col, v_col,
                    k_pages, v_pages, k_table_row, v_table_row, k_batch, v_batch,
                    first, end, 0, row[:, None], count_kv, shift, left, right, factor,
                    inner, outer, number_0, number_1, number_2, number_3, batch, head[:, None],
                    bias_at, bias_col, slope, None, keys, None, None,
                    None, 0, None, 0, 0, in_rows[:, None],
                    D, DV, D_BLOCK, D_BLOCK_2, DV_BLOCK, DV_BLOCK_2, BLOCK_N, UNIT, K_PAGE, V_PAGE,
                    is_paged, HAS_LEFT, HAS_RIGHT, has_bias, has_alibi, has_soft_cap,
                    CAP_DIVIDES, SCORE_PROGRAM, False, False, 0, False, FOLDS_SCALE, True, True,
                )  # fmt: skip

        if is_split:
            at = sums_at(slot, group, rows, TILES, BLOCK_M) + place_in_tile
            tl.store(part_total + at, total, mask=in_declared)
            tl.store(part_top + at, top, mask=in_declared)
            width: tl.constexpr = DV_BLOCK + DV_BLOCK_2
            to = part_acc + (at * width)[:, None]
            tl.store(to + tl.arange(0, DV_BLOCK)[None, :], acc, mask=in_declared[:, None])
            if DV_BLOCK_2 > 0:
                along = DV_BLOCK + tl.arange(0, DV_BLOCK_2)
                tl.store(to + along[None, :], acc_2, mask=in_declared[:, None])
        else:
            if sink is not None:
                level = tl.load(sink + head.to(tl.int64) * sink_head, mask=in_declared, other=0.0)
                acc, acc_2, total, top = join_sink(acc, acc_2, total, top, level, DV_BLOCK_2 > 0)
            store_rows(
                acc, acc_2, total, top, 1.0, batch, head, row, in_rows, in_declared,
                o, gate, stats, smax, ssum,
                o_offsets, gate_offsets, stats_offsets, smax_offsets, ssum_offsets,
                o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
                stats_batch, stats_head, stats_row,
                smax_batch, smax_head, smax_row, ssum_batch, ssum_head, ssum_row,
                o_offset_step, gate_offset_step,
                stats_offset_step, smax_offset_step, ssum_offset_step,
                o_multiplier, gate_multiplier, stats_multiplier, smax_multiplier, ssum_multiplier,
                DV, DV_BLOCK, DV_BLOCK_2, O_UNIT, GATE_UNIT, GATE_O, GATE_TYPE, STATS_LOG2,
            )  # fmt: skip


def decode_plan(
    spec: AttentionSpec, slots: Mapping[int, int], config: ForwardConfig, *, is_aligned: bool
) -> KernelPlan:
    """One kernel where each tile reads its keys in one program, else the split and the join."""
    tiles = query_tiles(spec, config.block_m)
    units = spec.batch * spec.heads_kv * tiles
    is_split = config.splits > 1
    sharing = config.sharing or Sharing(units)
    blocks = triton.cdiv(spec.keys, config.block_n)
    run = triton.cdiv(blocks, config.splits)
    runs = triton.cdiv(blocks, run)
    programs = min(units * runs, sharing.programs) if is_split else units
    # Sums of the rows of one slot.
    tile = spec.rows * spec.group if tiles == 1 else config.block_m
    block, block_v = cut(spec, config)
    width = sum(block_v)
    scratch = [
        ("sums of values", units * runs * tile * width * 4),
        ("sums of weights", units * runs * tile * 4),
        ("maxima", units * runs * tile * 4),
    ]
    pieces_at = [piece.offset_bytes for piece in plan_workspace(scratch).pieces]
    is_direct = is_split and is_aligned and config.is_direct
    # More runs than there is room for at once.
    is_shared = units * runs > sharing.programs
    is_mapped = is_split and is_aligned and sharing.has_maps and not is_direct
    is_mapped = is_mapped and not (block[1] or block_v[1])
    is_mapped = is_mapped and _moves_whole_blocks(spec, config.block_n)

    def arguments() -> KernelArguments:
        given = KernelArguments(slots)
        add_forward_operands(given, spec, is_aligned=is_aligned)
        # What a model fixes, and what is mostly 1, is part of the code: kernels divide by them.
        known = {"heads_kv": spec.heads_kv, "group": spec.group}
        known |= {"rows": 1} if spec.rows == 1 else {}
        for name in known:
            del given.types[name], given.values[name]
        given.constant(**known)
        for name, offset in zip(_PARTS, pieces_at, strict=True):
            given.scratch(name, "*fp32", offset if is_split else None)
        given.extent("run", run)
        given.extent("all_runs", runs)
        if is_mapped:
            for name, wide in (("k", block[0]), ("v", block_v[0])):
                box = (1, 1, config.block_n, wide)
                given.tensor_map(f"{name}_map", spec.ports[name], box)
        else:
            given.constant(k_map=None, v_map=None)
        rows = power_of_two(spec.rows)
        given.constant(
            D_BLOCK=block[0],
            D_BLOCK_2=block[1],
            DV_BLOCK=block_v[0],
            DV_BLOCK_2=block_v[1],
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BATCH_BLOCK=power_of_two(spec.batch) if is_split else 1,
            TILES=tiles,
            ROW_BLOCK=rows,
            RUN_BLOCK=max(1, _RUNS_AT_ONCE // rows),
            WIDTH_BLOCK=power_of_two(width),
            IS_EARLY=is_split and sharing.is_early,
            IS_DEALT=not is_direct,
            IS_SHARED=is_shared,
            IS_TRANSPOSED=is_direct,
            ROWS=DIRECT_ROWS if tile <= DIRECT_ROWS else config.block_m,
        )
        return given

    if is_direct and config.is_joined:
        return KernelPlan((_joined(arguments(), spec, config),))
    if config.is_joined:
        config = replace(config, warps=1)
    given, kernel, grid = arguments(), attention_decode, (programs, 1, 1)
    if is_direct:
        # Gluon's: not every version of Triton that the engine takes has what it needs.
        from tilewright.engines.triton.attention_decode_direct import attention_decode_direct

        given.number("scale", spec.scale * LOG2_E.value)
        kernel, grid = attention_decode_direct, (runs, spec.heads_kv, spec.batch)
        given.extent("programs", sharing.programs)
        if is_shared:
            grid = (programs, 1, 1)
        else:
            given.unused("batches", "run", "all_runs", "programs")
    first = given.planned(kernel, grid, config.warps, config.stages)
    first = replace(first, spec=replace(first.spec, max_registers=sharing.max_registers))
    if not is_split:
        return KernelPlan((first,))
    grid = (spec.batch * spec.heads_q, 1, 1)
    second = arguments().planned(attention_combine, grid, _COMBINE_WARPS, 1)
    return KernelPlan((first, replace(second, is_early=sharing.is_early)), tuple(scratch))


def _joined(given: KernelArguments, spec: AttentionSpec, config: ForwardConfig) -> PlannedKernel:
    """The one kernel whose programs join the sums of a key head."""
    # Gluon's: not every version of Triton that the engine takes has what they need.
    if config.is_paired:
        from tilewright.engines.triton.attention_decode_paired import attention_decode_paired

        kernel, clusters = attention_decode_paired, -(-spec.batch // 2)
    else:
        from tilewright.engines.triton.attention_decode_joined import attention_decode_joined

        kernel, clusters = attention_decode_joined, spec.batch
    given.number("scale", spec.scale * LOG2_E.value)
    kept = max(2, power_of_two(spec.rows * spec.group))
    given.constant(RUNS=config.splits, KEPT=kept, WARPS=config.warps)
    programs = config.splits // config.warps
    grid = (programs, spec.heads_kv, clusters)
    made = given.planned(kernel, grid, config.warps, config.stages)
    limited = replace(made.spec, max_registers=config.max_registers)
    return replace(made, spec=limited, cluster=programs)


def _moves_whole_blocks(spec: AttentionSpec, block_n: int) -> bool:
    """True if the copy engine can bring blocks of keys and values, for plain scores."""
    if spec.changes_scores or spec.is_banded or spec.scale is None or spec.scale <= 0.0:
        return False
    if not spec.is_paged:
        return takes_tensor_maps(spec)
    # Each page is a plane of its own, which a box must not leave.
    return all(
        spec.ports[port].dim[2] % block_n == 0 and map_decline_reason(spec.ports[port]) is None
        for port in ("k", "v")
    )
