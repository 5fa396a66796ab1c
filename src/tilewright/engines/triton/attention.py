"""Attention forward in Triton: which kernel and which tile a declaration gets, and its launch.

``attention_kernel`` is the kernel, for any scores; few queries go to ``attention_decode`` and
plain scores of large heads on SM90 to ``attention_specialized``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import triton

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel, slot_numbers
from tilewright.engines.triton.attention_arguments import (
    KernelArguments,
    add_forward_operands,
    steps_in_vectors,
    takes_tensor_maps,
)
from tilewright.engines.triton.attention_config import (
    INTERPRETED_SM_COUNT,
    NARROW_BAND,
    ForwardConfig,
    choose_config,
    cut,
    general_config,
    heads_at_a_time,
    is_plain,
    is_plain_packed,
    keeps_level,
    power_of_two,
)
from tilewright.engines.triton.attention_cost import cost_us, facts_of, ranked_configs
from tilewright.engines.triton.attention_decode import decode_plan
from tilewright.engines.triton.attention_decode_config import MAX_DEALT_BATCH, choose_decode_config
from tilewright.engines.triton.attention_dropout import draws_kernel
from tilewright.engines.triton.attention_gate import read_graph
from tilewright.engines.triton.attention_kernel import attention_forward
from tilewright.engines.triton.attention_packed import packed_plan
from tilewright.engines.triton.attention_repair import notes_of, repair_kernel
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.engines.triton.attention_specialized import is_dealt, specialized_plan
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.graph.graph import DeclaredGraph
from tilewright.launch.tensor_maps import map_decline_reason
from tilewright.launch.workspace import plan_workspace


def propose(graph: DeclaredGraph, sm_count: int) -> list[Proposal]:
    """Tiles as knobs, the least cost first; of equal ones the better guess."""
    spec = read_graph(graph)
    notes, facts = frozenset({behavior_note.RUNTIME_COMPILATION}), facts_of(sm_count)
    configs = ranked_configs(spec, sm_count, deals_warps=is_dealt(spec))
    costs = [cost_us(spec, config, facts) for config in configs]
    if sm_count == INTERPRETED_SM_COUNT:
        # No device: tests there are of the plans that are guessed first.
        costs = [float(index) for index, _ in enumerate(configs)]
    ranked = sorted(zip(costs, configs, strict=True), key=lambda pair: pair[0])
    return [Proposal(config.knobs(), cost, notes) for cost, config in ranked]


def plan(graph: DeclaredGraph, knobs: Knobs, sm_count: int) -> KernelPlan:
    """The kernels of a graph; aligned operands get wide loads, with a general plan behind them."""
    spec = read_graph(graph)
    slots = slot_numbers(graph)
    if not (spec.batch and spec.rows):
        return KernelPlan(())
    if "rng_dump" in spec.ports:
        made = _plan(spec, slots, knobs, sm_count)
        return _with_draws(made, draws_kernel(spec, slots))
    return _plan(spec, slots, knobs, sm_count)


def _plan(spec: AttentionSpec, slots: Mapping[int, int], knobs: Knobs, sm_count: int) -> KernelPlan:
    chosen = dict(knobs)
    decode = choose_decode_config(spec, sm_count)
    if decode is not None and (knob_type.SPLIT_K in chosen or not knobs):
        config, make = decode.with_knobs(chosen), decode_plan
    else:
        config, make = choose_config(spec, sm_count, deals_warps=is_dealt(spec)), _forward
        config = config.with_knobs(chosen)
    ports = ("q", "k", "v", "O")
    if not steps_in_vectors(spec, ports):
        return make(spec, slots, config, is_aligned=False)
    # What is there for a pointer that happens to be odd need not be quick to run.
    plain = general_config(spec, sm_count) if config.has_maps else config
    general = make(spec, slots, plain, is_aligned=False)
    if config.is_specialized:
        make = packed_plan if is_plain_packed(spec) else specialized_plan
    aligned = make(spec, slots, config, is_aligned=True)
    if spec.has_gate and steps_in_vectors(spec, ("gate",)):
        ports = (*ports, "gate")
    # A call may come to the plan behind, which may need more.
    scratch = max(aligned.scratch, general.scratch, key=_workspace_bytes)
    return replace(
        aligned,
        scratch=scratch,
        needs_aligned=tuple(slots[spec.ports[port].uid] for port in ports),
        fallback=general,
    )


def _workspace_bytes(scratch: tuple[tuple[str, int], ...]) -> int:
    return plan_workspace(list(scratch)).size_bytes


def _forward(
    spec: AttentionSpec, slots: Mapping[int, int], config: ForwardConfig, *, is_aligned: bool
) -> KernelPlan:
    arguments = KernelArguments(slots)
    add_forward_operands(arguments, spec, is_aligned=is_aligned)
    slots_a_head = _packed_slots(spec, config.block_m)
    block, block_v = cut(spec, config)
    has_own_loop = not (spec.changes_scores or spec.has_philox or spec.has_drop_mask)
    has_own_loop = has_own_loop and not (spec.has_block_mask or spec.is_paged)
    has_own_loop = has_own_loop and arguments.constants["FOLDS_SCALE"]
    has_own_loop = has_own_loop and spec.data_type is not DataType.FLOAT
    has_own_loop = has_own_loop and (config.is_ahead or config.is_in_order)
    arguments.constant(
        D_BLOCK=block[0],
        D_BLOCK_2=block[1],
        DV_BLOCK=block_v[0],
        DV_BLOCK_2=block_v[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        LAST_FIRST=spec.right is not None,
        IS_AHEAD=has_own_loop and config.is_ahead,
        IN_ORDER=has_own_loop and config.is_in_order,
        BATCH_BLOCK=0 if slots_a_head is None else power_of_two(spec.batch),
    )
    is_narrow = spec.left is not None and spec.right is not None
    is_narrow = is_narrow and spec.left + spec.right <= NARROW_BAND
    # Sums that have settled leave registers to one program more.
    arguments.constant(SETTLES=config.max_registers is not None)
    # Where no loop asks, numbers of keys are no two kernels.
    has_end = spec.len_kv is not None or spec.keys % config.block_n != 0
    arguments.constant(MASKS_END=has_own_loop and config.is_in_order and has_end)
    arguments.constant(MASKS_ALL=is_narrow and has_own_loop and not config.is_in_order)
    is_mapped = is_aligned and config.has_maps and has_own_loop
    if is_mapped and takes_tensor_maps(spec):
        arguments.tensor_map("k_map", spec.ports["k"], (1, 1, config.block_n, block[0]))
        arguments.tensor_map("v_map", spec.ports["v"], (1, 1, config.block_n, block_v[0]))
    else:
        arguments.constant(k_map=None, v_map=None)
    is_mapped = is_mapped and config.is_in_order and not spec.is_ragged("q")
    if is_mapped and map_decline_reason(spec.ports["q"]) is None:
        arguments.tensor_map("q_map", spec.ports["q"], (1, 1, config.block_m, block[0]))
    else:
        arguments.constant(q_map=None)
    tiles = triton.cdiv(spec.rows, config.block_m)
    if slots_a_head is None:
        arguments.extent("slots", tiles)
        grid = (tiles * spec.heads_q * spec.batch, 1, 1)
    else:
        arguments.extent("slots", slots_a_head)
        grid = (slots_a_head * spec.heads_q, 1, 1)
    arguments.extent("group_heads", heads_at_a_time(spec))
    keeps = has_own_loop and config.is_in_order and keeps_level(spec, config)
    arguments.constant(KEEPS_LEVEL=keeps)
    notes = notes_of(spec, tiles * config.block_m, keeps_level=keeps)
    is_noted = has_own_loop and bool(notes) and is_plain(spec) and not block_v[1]
    arguments.scratch("spoilt", "*i32", 0 if is_noted else None)
    kernel = arguments.planned(attention_forward, grid, config.warps, config.stages)
    kernel = replace(kernel, spec=replace(kernel.spec, max_registers=config.max_registers))
    if not is_noted:
        return KernelPlan((kernel,))
    repair = repair_kernel(spec, slots, config, tiles * config.block_m, is_aligned=is_aligned)
    return KernelPlan((kernel, repair), notes)


def _with_draws(made: KernelPlan, draws: PlannedKernel) -> KernelPlan:
    """The plan and the plan behind it, each with the kernel that stores dropout's draws."""
    fallback = None if made.fallback is None else _with_draws(made.fallback, draws)
    return replace(made, kernels=(*made.kernels, draws), fallback=fallback)


def _packed_slots(spec: AttentionSpec, block_m: int) -> int | None:
    """Tiles of queries that packed sequences can have, where the declaration bounds their tokens.

    None where the grid is better made of the declared extents: no bound is given, a dense output
    has padded rows to be written, or each program would have to read too many lengths.
    """
    outputs = ("O", "Stats", "score_max", "score_sum_exp")
    if spec.total_q is None or spec.len_q is None or spec.batch > MAX_DEALT_BATCH:
        return None
    if any(port in spec.ports and not spec.is_ragged(port) for port in outputs):
        return None
    # Every sequence's last tile may be partly empty.
    packed = spec.total_q // block_m + spec.batch
    return packed if packed < spec.batch * triton.cdiv(spec.rows, block_m) else None
