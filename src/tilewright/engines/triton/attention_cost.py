"""What a tile of attention forward would cost, in microseconds: a small model for ranking. Pure.

A program goes through blocks of keys in turns. A turn takes as long as its loads take to arrive, or
as its scores take to be made, whichever is longer: a score is its share of two products, and an
exponential. Programs that share a multiprocessor share its units. A call takes

    many queries: launch + rounds of programs * (start + turns * turn), or the longest program, or
                  start + the reading of all keys and values
    few queries:  launch + start + the longer one of the turns and the reading of all keys and
                  values, and the launch and the turns of the combination

Every fact is in ``DEVICE_FACTS``. Those of SM90 were fitted to 34 declarations on an H200: of the
tiles proposed then, the model was within a factor of 1.7 of what was measured, and the one that it
put first took 0.5 % longer than the quickest on average, 6 % at most. Starts of warp groups, masks
and combinations were fitted again since, to 86 declarations: 0.5 % on average, 7 % at most.
``benchmark/attention_plans.py`` sets the model beside the times of all plans. The rates of other
parts are their makers' figures, scaled alike. Autotuning measures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilewright.dtypes import DataType
from tilewright.engines.triton.attention_config import (
    ForwardConfig,
    choose_config,
    goes_in_pairs,
    power_of_two,
    takes_many_tiles,
)
from tilewright.engines.triton.attention_decode_config import (
    JOINED_PROGRAMS_A_MULTIPROCESSOR,
    choose_decode_config,
    direct_programs,
    query_tiles,
)
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.graph.enums import knob_type


@dataclass(frozen=True)
class DeviceFacts:
    """What the model knows of a part, and of the kernels there. Times are in microseconds.

    ``matrix_tflop_s`` is what products of 16-bit operands sustain on the whole device,
    ``exponentials_a_us`` what one multiprocessor makes, ``copy_tb_s`` the rate of a copy, and
    ``cache_factor`` how much faster keys come that other programs have read. A turn waits for
    ``turn_us + wait_us / stages``. A program of few warps starts in ``start_us``, one of eight in
    ``start_of_eight_us``, and a tile of a program that takes many in ``start_of_dealt_us``. Scores
    of a tile of fewer than 128 rows cost ``small_tile_factor`` more, and the first ``ramp_us`` of
    reading twice, but not straight into registers. Masking a block costs as much as the block, or
    ``hiding`` of it where all blocks are in one loop. A gate at a tile's end takes ``gate_us``. A
    combination takes ``combine_us``, unless it begins beside the runs, and ``combine_run_us`` a
    run. Where warp groups take turns, scores cost ``dealt_factor`` of that, and a gate takes
    ``gate_of_dealt_us``; of packed sequences the kernels in front and behind take ``order_us``.
    """

    name: str
    multiprocessors: int
    shared_kib: int
    matrix_tflop_s: float
    exponentials_a_us: float
    copy_tb_s: float
    launch_us: float = 5.0
    start_us: float = 3.5
    start_of_eight_us: float = 6.0
    start_of_dealt_us: float = 1.5
    turn_us: float = 0.35
    wait_us: float = 1.8
    small_tile_factor: float = 1.3
    cache_factor: float = 2.0
    ramp_us: float = 4.0
    dealt_factor: float = 0.8
    hiding: float = 0.25
    gate_us: float = 4.0
    gate_of_dealt_us: float = 1.0
    order_us: float = 7.0
    combine_us: float = 4.2
    combine_run_us: float = 0.2
    join_us: float = 1.5


DEVICE_FACTS: tuple[DeviceFacts, ...] = (
    DeviceFacts("A100", 108, 163, 270.0, 22_500.0, 1.6),
    DeviceFacts("H100 PCIe", 114, 227, 600.0, 26_000.0, 1.8),
    DeviceFacts("H100, H200", 132, 227, 790.0, 27_000.0, 4.1),
    DeviceFacts("B200", 148, 227, 1600.0, 29_000.0, 6.5),
    DeviceFacts("RTX PRO 6000", 188, 99, 380.0, 38_000.0, 1.5),
)
# Of a part that is not listed: the rates of this one, a multiprocessor.
_GENERAL = DEVICE_FACTS[0]
# Registers of a multiprocessor serve so many warps of kernels that use most of a thread's.
_WARPS_AT_ONCE = 8
# And so many of kernels whose threads are limited to SMALL_PROGRAM_REGISTERS.
_LIMITED_WARPS_AT_ONCE = 12
# Tiles of rows that are looked at for how much of them a band lets through.
_SAMPLED_TILES = 32
# Products of float32 operands go without tensor cores.
_FLOAT32_FACTOR = 10.0


def facts_of(sm_count: int) -> DeviceFacts:
    """The facts of the part with so many multiprocessors, or scaled ones of an unknown part."""
    for facts in DEVICE_FACTS:
        if facts.multiprocessors == sm_count:
            return facts
    share = sm_count / _GENERAL.multiprocessors
    return DeviceFacts(
        f"{sm_count} multiprocessors",
        sm_count,
        99,
        _GENERAL.matrix_tflop_s * share,
        _GENERAL.exponentials_a_us,
        _GENERAL.copy_tb_s * share,
    )


def cost_us(spec: AttentionSpec, config: ForwardConfig, facts: DeviceFacts) -> float:
    """Microseconds of one call of a declaration with this config."""
    if not spec.batch or not spec.rows:
        return 0.0
    if config.splits:
        return _few_queries(spec, config, facts)
    return _many_queries(spec, config, facts)


def _many_queries(spec: AttentionSpec, config: ForwardConfig, facts: DeviceFacts) -> float:
    tiles = -(-spec.rows // config.block_m)
    in_pairs = goes_in_pairs(spec, config)
    programs = (-(-tiles // 2) if in_pairs else tiles) * spec.batch * spec.heads_q
    mean, longest = turns_of(spec, config)
    masked = _masked_turns(spec, config)
    masked *= facts.hiding if config.is_specialized or config.is_in_order else 1.0
    mean, longest = mean + masked, longest + masked
    at_once = min(_programs_at_once(spec, config, facts), -(-programs // facts.multiprocessors))
    # A program that takes tile after tile loads for the next one early.
    if takes_many_tiles(spec, config):
        start = facts.start_of_dealt_us
    elif config.warps >= 8 or config.is_specialized:
        start = facts.start_of_eight_us
    else:
        start = facts.start_us
    if spec.has_gate:
        start += facts.gate_of_dealt_us if config.is_specialized else facts.gate_us
    turn = _turn_us(spec, config, facts, at_once)
    rounds = -(-programs // (facts.multiprocessors * at_once)) * (2 if in_pairs else 1)
    work = max(rounds * (start + mean * turn), start + longest * turn)
    once = spec.batch * spec.heads_kv * mean * config.block_n * _bytes_a_key(spec)
    read_us = _read_us(once * tiles * spec.group, facts) / facts.cache_factor
    if config.is_specialized and spec.is_ragged("q"):
        work += facts.order_us
    return facts.launch_us + max(work, start + _read_us(once, facts), read_us)


def _few_queries(spec: AttentionSpec, config: ForwardConfig, facts: DeviceFacts) -> float:
    read_once = spec.batch * spec.heads_kv
    units = read_once * query_tiles(spec, config.block_m)
    turns = -(-(turns_of(spec, config)[0] + _masked_turns(spec, config)) // config.splits)
    at_once = _programs_at_once(spec, config, facts)
    rounds = -(-units * config.splits // (facts.multiprocessors * at_once))
    read = read_once * min(spec.keys, turns * config.splits * config.block_n) * _bytes_a_key(spec)
    total = facts.launch_us + facts.start_us
    read_us = _read_us(read, facts, ramps=not config.is_direct)
    total += max(rounds * turns * _turn_us(spec, config, facts, 1), read_us)
    if config.is_joined:
        total += facts.join_us
    elif config.splits > 1:
        is_early = config.sharing is not None and config.sharing.is_early
        total += 0.0 if is_early else facts.combine_us
        total += facts.combine_run_us * config.splits
    return total


def turns_of(spec: AttentionSpec, config: ForwardConfig) -> tuple[float, float]:
    """Blocks of keys that a tile goes through, on average and at most; lengths as declared."""
    if spec.left is None and spec.right is None:
        blocks = float(-(-spec.keys // config.block_n))
        return blocks, blocks
    shift = spec.keys - spec.rows if spec.bottom_right else 0
    tiles = -(-spec.rows // config.block_m)
    step = max(1, tiles // _SAMPLED_TILES)
    counts = []
    # The last tile, which sees most under a causal mask, is among them.
    for tile in range((tiles - 1) % step, tiles, step):
        first = tile * config.block_m + shift
        last = min(first + config.block_m, spec.rows + shift) - 1
        start = 0 if spec.left is None else max(0, first - spec.left + 1)
        end = spec.keys if spec.right is None else min(spec.keys, last + spec.right + 1)
        start = start // config.block_n * config.block_n
        counts.append(max(0, -(-(end - start) // config.block_n)))
    return sum(counts) / len(counts), float(max(counts))


def _masked_turns(spec: AttentionSpec, config: ForwardConfig) -> int:
    """Blocks of a tile that are masked: at each edge as many as its rows are long."""
    edges = (spec.left is not None) + (spec.right is not None)
    return edges * max(1, config.block_m // config.block_n)


def _turn_us(spec: AttentionSpec, config: ForwardConfig, facts: DeviceFacts, at_once: int) -> float:
    """A block of keys: the wait for its loads, or the scores of the programs that share a part."""
    flop = 2.0 * (power_of_two(spec.depth) + power_of_two(spec.depth_v))
    if spec.data_type is DataType.FLOAT:
        flop *= _FLOAT32_FACTOR
    score_us = flop / (facts.matrix_tflop_s * 1e6 / facts.multiprocessors)
    score_us += 1.0 / facts.exponentials_a_us
    if config.block_m < 128:
        score_us *= facts.small_tile_factor
    if config.is_specialized:
        score_us *= facts.dealt_factor
    waits = facts.turn_us + facts.wait_us / config.stages
    return max(waits, config.block_m * config.block_n * score_us * at_once)


def _read_us(bytes_: float, facts: DeviceFacts, *, ramps: bool = True) -> float:
    whole = bytes_ * 1e-6 / facts.copy_tb_s
    return whole + (min(whole, facts.ramp_us) if ramps else 0.0)


def _programs_at_once(spec: AttentionSpec, config: ForwardConfig, facts: DeviceFacts) -> int:
    """Programs that share a multiprocessor: by registers, and by shared memory."""
    element = spec.data_type.bits // 8
    used = element * config.block_m * power_of_two(spec.depth)
    used += config.block_n * _bytes_a_key(spec) * max(config.stages - 1, 1)
    if config.is_specialized:
        return 1
    if config.is_joined:
        return JOINED_PROGRAMS_A_MULTIPROCESSOR
    if config.is_direct:
        return direct_programs(spec, 1)
    by_memory = facts.shared_kib * 1024 // max(used, 1)
    warps = _WARPS_AT_ONCE if config.max_registers is None else _LIMITED_WARPS_AT_ONCE
    return max(1, min(by_memory, warps // config.warps))


def _bytes_a_key(spec: AttentionSpec) -> int:
    return (spec.depth + spec.depth_v) * spec.data_type.bits // 8


def ranked_configs(
    spec: AttentionSpec, sm_count: int, *, deals_warps: bool = False
) -> list[ForwardConfig]:
    """Configs for a declaration, the best guess first; autotuning times them all."""
    decode = choose_decode_config(spec, sm_count)
    whole_loop = choose_config(spec, sm_count, deals_warps=deals_warps)
    ranked = [whole_loop]
    if decode is not None:
        ranked = [decode, whole_loop]
        if decode.splits > 1:
            # Where lengths are more or less even than guessed: clusters of one sequence in place of
            # two, or else twice as many runs, and none.
            if decode.is_paired:
                ranked.append(decode.with_knobs({knob_type.SPLIT_K: decode.splits // 2}))
            else:
                more = replace(decode, splits=2 * decode.splits, is_joined=False)
                ranked.append(replace(more, warps=1) if decode.is_direct else more)
            ranked += [] if decode.is_direct else [replace(decode, splits=1)]
    elif whole_loop.is_specialized:
        ranked.append(choose_config(spec, sm_count))
    elif whole_loop.block_m == 128:
        fewer = {knob_type.STAGES: max(whole_loop.stages - 1, 2)}
        smaller = {knob_type.TILE_M: 64, knob_type.WARPS: 4, knob_type.STAGES: 2}
        ranked += [whole_loop.with_knobs({**dict(whole_loop.knobs()), **fewer})]
        ranked += [whole_loop.with_knobs(smaller)]
    return list(dict.fromkeys(ranked))
