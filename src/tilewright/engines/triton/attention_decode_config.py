"""Tiles of the kernels for few queries: runs of keys, and programs that share them."""

from __future__ import annotations

from dataclasses import replace

from tilewright.artifact.environment import installed_version
from tilewright.dtypes import DataType
from tilewright.engines.triton.attention_config import (
    DIRECT_BLOCK,
    JOINED_REGISTERS,
    MIN_BLOCK,
    PAIRED_REGISTERS,
    SM90_MULTIPROCESSORS,
    SM100_MULTIPROCESSORS,
    SMALL_PROGRAM_REGISTERS,
    ForwardConfig,
    Sharing,
    blocks,
    pieces,
    power_of_two,
    shared_bytes_of,
)
from tilewright.engines.triton.attention_spec import AttentionSpec

# Few queries: at most this many. With all heads of a key head they are one tile, or several where
# they are more than this.
MAX_DECODE_ROWS = 16
MAX_TILE_ROWS = 64
# Programs that share a multiprocessor where keys are split, and where their tiles are small.
PROGRAMS_A_MULTIPROCESSOR = 2
SMALL_PROGRAMS_A_MULTIPROCESSOR = 3
# Queries of a program of ``attention_decode_direct``: 8 at most, or 16.
DIRECT_ROWS, MAX_DIRECT_ROWS = 8, 16
# Programs of one warp that share a multiprocessor, and registers of a thread, so that programs of
# the combination find room beside them: where they did not, a call took a fifth longer.
DIRECT_PROGRAMS_A_MULTIPROCESSOR = {DIRECT_ROWS: 8, MAX_DIRECT_ROWS: 6}
DIRECT_REGISTERS = {DIRECT_ROWS: 216, MAX_DIRECT_ROWS: 255}
MIN_DIRECT_RUN_BLOCKS, MAX_DIRECT_RUNS = 4, 32
# Of ``attention_decode_joined``, beside whose warps there are no others: of 232 registers, or 255,
# eight share a multiprocessor. The runs of a key head are those of a cluster, of 4 programs at
# least and 16 at most; a program has two warps, but one where there are 16 queries.
JOINED_PROGRAMS_A_MULTIPROCESSOR = 8
WIDE_JOINED_REGISTERS = 255
MIN_JOINED_RUNS, MAX_JOINED_RUNS = 4, 16
JOINED_WARPS = 2
# Of ``attention_decode_paired``. Clusters of 32 warps would lie on four multiprocessors: an H200
# had room for 30 of 32, and calls began 3 microseconds later.
MIN_PAIRED_PROGRAMS, MAX_PAIRED_RUNS = 8, 16
# Paged sequences are of any length: twice the runs, if they are not shorter than this.
MIN_PAGED_RUN_BLOCKS = 8
# Less to read is read sooner without a split, and more sooner by the copy engine.
MIN_DIRECT_BYTES, MAX_DIRECT_BYTES = 2**26, 3 * 2**26
# With fewer programs than this share of those that there is room for, too little is asked for.
MIN_DIRECT_SHARE = 0.75
# Of a grid's third axis.
MAX_DIRECT_BATCH = 65535
# Versions of Triton that have what it is written in as it is written there.
DIRECT_VERSIONS = ("3.6.", "3.7.")
# Runs of keys: at most so long, unless that made more of them than this; no shorter than this.
MAX_RUN_KEYS = 2048
MAX_RUNS_A_MULTIPROCESSOR = 16
MIN_RUN_BLOCKS = 2
# What beginning and ending a run takes, in blocks of keys.
RUN_EXTRA_BLOCKS = 1
# Shared memory beside what is loaded ahead: barriers, and of each row a bias whose layout changes.
REST_BYTES, BIAS_REST_BYTES_A_ROW = 1024, 384
# Each program reads the lengths of all sequences where keys are split.
MAX_DEALT_BATCH = 1024


def choose_decode_config(spec: AttentionSpec, sm_count: int) -> ForwardConfig | None:
    """The tile of the kernel for few queries, or None where the declaration is none for it."""
    if spec.rows > MAX_DECODE_ROWS:
        return None
    if spec.batch < 1 or spec.keys < 1:
        return None
    if spec.has_philox or spec.has_drop_mask or spec.has_block_mask:
        return None
    if takes_registers(spec, sm_count) and pays_in_registers(spec, sm_count):
        return _direct_config(spec, sm_count)
    width = max(sum(pieces(spec.depth)), sum(pieces(spec.depth_v)))
    if spec.data_type is DataType.FLOAT:
        width *= 2
    block_n = 128 if width <= 64 else 64 if width <= 128 else 32
    if width > 256:
        block_n = 16
    has_room = sm_count in SM90_MULTIPROCESSORS | SM100_MULTIPROCESSORS
    block_m = min(max(MIN_BLOCK, power_of_two(spec.rows * spec.group)), MAX_TILE_ROWS)
    warps = 4
    if sm_count in SM90_MULTIPROCESSORS and spec.hides_values:
        # A second loop, for values that are hidden, left up to 3 KB of a thread's registers in
        # memory: tiles of 64 rows were two to seven times as slow, smaller ones up to 1.7 times.
        if width <= 128:
            block_n //= 2
        elif block_m == MAX_TILE_ROWS:
            warps = 8
    stages = 4 if has_room else 3
    while _shared_bytes(spec, block_m, block_n, stages) > shared_bytes_of(sm_count):
        if stages > 2:
            stages -= 1
        elif block_n > MIN_BLOCK:
            block_n //= 2
        else:
            return None
    # Three programs with three stages share 227 KiB, or two with four; the parts of SM120 have 99.
    is_small = has_room and block_m == MIN_BLOCK and width <= 128
    count = SMALL_PROGRAMS_A_MULTIPROCESSOR if is_small else PROGRAMS_A_MULTIPROCESSOR
    sharing = Sharing(
        programs=count * sm_count,
        is_early=has_room,
        has_maps=sm_count in SM90_MULTIPROCESSORS,
        max_registers=SMALL_PROGRAM_REGISTERS if is_small else None,
    )
    units = spec.batch * spec.heads_kv * query_tiles(spec, block_m)
    splits = _splits(spec, units, block_n, sm_count, sharing.programs)
    if is_small and splits > 1:
        stages = min(stages, 3)
    return ForwardConfig(block_m, block_n, warps, stages, splits, sharing=sharing)


def query_tiles(spec: AttentionSpec, block_m: int) -> int:
    """Tiles of the queries of all heads that share a key head."""
    return -(-spec.rows * spec.group // block_m)


def _shared_bytes(spec: AttentionSpec, block_m: int, block_n: int, stages: int) -> int:
    """Shared memory of a program, at most: queries, loads ahead, and weights between products."""
    item_bytes = spec.data_type.bits // 8
    bias_bytes = spec.ports["bias"].data_type.bits // 8 if spec.has_bias else 0
    # Whole, as tiles of a warp group's rows have them; others have less.
    width, width_v = blocks(spec)
    ahead = block_n * ((width + width_v) * item_bytes + block_m * bias_bytes)
    used = block_m * (width + block_n) * item_bytes + (stages - 1) * ahead
    return used + REST_BYTES + (block_m * BIAS_REST_BYTES_A_ROW if spec.has_bias else 0)


def takes_registers(spec: AttentionSpec, sm_count: int) -> bool:
    """True if ``attention_decode_direct`` serves the declaration on the device."""
    if sm_count not in SM90_MULTIPROCESSORS:
        return False
    if not installed_version("triton").startswith(DIRECT_VERSIONS):
        return False
    if spec.rows * spec.group > MAX_DIRECT_ROWS or spec.data_type is DataType.FLOAT:
        return False
    if spec.changes_scores or spec.is_banded or spec.scale is None or spec.scale <= 0.0:
        return False
    if spec.is_ragged("k") or spec.is_ragged("v") or spec.batch > MAX_DIRECT_BATCH:
        return False
    return {spec.depth, spec.depth_v} <= {64, 128} and _direct_splits(spec, sm_count) > 1


def pays_in_registers(spec: AttentionSpec, sm_count: int) -> bool:
    """True if so much is to be read that registers are the quickest way."""
    units = spec.batch * spec.heads_kv
    bytes_ = units * spec.keys * (spec.depth + spec.depth_v) * spec.data_type.bits // 8
    programs = units * _direct_splits(spec, sm_count)
    is_full = programs >= MIN_DIRECT_SHARE * direct_programs(spec, sm_count)
    return is_full and MIN_DIRECT_BYTES <= bytes_ <= MAX_DIRECT_BYTES


def direct_programs(spec: AttentionSpec, sm_count: int) -> int:
    """Programs of ``attention_decode_direct`` that the device holds, the combination's beside."""
    return DIRECT_PROGRAMS_A_MULTIPROCESSOR[_direct_rows(spec)] * sm_count


def _direct_rows(spec: AttentionSpec) -> int:
    return DIRECT_ROWS if spec.rows * spec.group <= DIRECT_ROWS else MAX_DIRECT_ROWS


def _direct_splits(spec: AttentionSpec, sm_count: int) -> int:
    """Runs of a sequence: as many as there is room for at once, or, of pages, twice as many.

    Each run is a program's where all have room: equal lengths are read the soonest so. Twice as
    many, as long as the declared keys make them, are shared by the programs that there is room for:
    a long sequence has more of these than a short one.
    """
    blocks = -(-spec.keys // DIRECT_BLOCK)
    most = direct_programs(spec, sm_count) // max(spec.batch * spec.heads_kv, 1)
    most = min(most, MAX_DIRECT_RUNS, blocks // MIN_DIRECT_RUN_BLOCKS)
    if spec.is_paged and 1 < 2 * most <= MAX_DIRECT_RUNS:
        most *= 2 if blocks >= 2 * most * MIN_PAGED_RUN_BLOCKS else 1
    return -(-blocks // -(-blocks // most)) if most > 1 else 1


def _joined_runs(spec: AttentionSpec, sm_count: int) -> int:
    """Runs of a key head that are one cluster; 1 where they had better be joined by a kernel.

    They are a power of two, as are the dimensions that each joins. There must be room for all of
    them at once, and too few are not as quick.
    """
    units = max(spec.batch * spec.heads_kv, 1)
    places = JOINED_PROGRAMS_A_MULTIPROCESSOR * sm_count
    blocks = -(-spec.keys // DIRECT_BLOCK)
    most = min(places // units, MAX_JOINED_RUNS, blocks // MIN_DIRECT_RUN_BLOCKS)
    runs = 1 << max(most.bit_length() - 1, 0)
    return runs if runs >= MIN_JOINED_RUNS and units * runs >= MIN_DIRECT_SHARE * places else 1


def _direct_config(spec: AttentionSpec, sm_count: int) -> ForwardConfig:
    registers = DIRECT_REGISTERS[_direct_rows(spec)]
    sharing = Sharing(direct_programs(spec, sm_count), is_early=True, max_registers=registers)
    splits = _direct_splits(spec, sm_count)
    made = ForwardConfig(MIN_BLOCK, DIRECT_BLOCK, 1, 2, splits, sharing=sharing, is_direct=True)
    runs = _joined_runs(spec, sm_count)
    if runs == 1:
        return made
    is_narrow = _direct_rows(spec) == DIRECT_ROWS
    registers = JOINED_REGISTERS if is_narrow else WIDE_JOINED_REGISTERS
    # ``sum_layout``: one warp has 16 queries. And a cluster is of four programs at least.
    warps = min(JOINED_WARPS, runs // 4) if is_narrow else 1
    made = replace(made, splits=runs, warps=warps, max_registers=registers, is_joined=True)
    if not _pairs(spec, runs, warps, sm_count):
        return made
    return replace(made, splits=2 * runs, max_registers=PAIRED_REGISTERS, is_paired=True)


def _pairs(spec: AttentionSpec, runs: int, warps: int, sm_count: int) -> bool:
    """True if two sequences had better share a cluster of ``2 * runs`` warps, runs half as long.

    That is where lengths may differ: a long one is read by more warps than it would have alone.
    """
    if spec.len_kv is None or spec.batch < 2 or _direct_rows(spec) != DIRECT_ROWS:
        return False
    if 2 * runs > MAX_PAIRED_RUNS or 2 * runs // warps < MIN_PAIRED_PROGRAMS:
        return False
    # An odd sequence takes as much room as two.
    clusters = -(-spec.batch // 2) * spec.heads_kv
    return clusters * 2 * runs <= JOINED_PROGRAMS_A_MULTIPROCESSOR * sm_count


def _splits(spec: AttentionSpec, units: int, block_n: int, sm_count: int, programs: int) -> int:
    """Runs of the longest sequence, so that programs are done with their shares the soonest.

    ``units``: tiles of queries of all key heads and sequences.

    A program takes one run after another, so the number of all runs should be a little less than a
    multiple of the number of programs. Runs are short enough that uneven lengths fill the device,
    and not so many that their sums would count.
    """
    if units >= programs or spec.keys <= 2 * block_n or spec.batch > MAX_DEALT_BATCH:
        return 1
    blocks = -(-spec.keys // block_n)
    most = max(programs // units, MAX_RUNS_A_MULTIPROCESSOR * sm_count // units)
    most = max(1, min(most, -(-blocks // MIN_RUN_BLOCKS)))
    least = min(-(-spec.keys // MAX_RUN_KEYS), most)

    def turns(splits: int) -> int:
        rounds = -(-units * splits // programs)
        return rounds * (-(-blocks // splits) + RUN_EXTRA_BLOCKS)

    return min(range(least, most + 1), key=turns)
