"""Tiles of attention kernels: how a head size is cut, and which tile a declaration gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.artifact.environment import installed_version
from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.graph.enums import knob_type

# A matrix product takes at least this many of each axis.
MIN_BLOCK = 16
# Multiprocessors of the parts of SM90 and SM100; no other part that the engine takes has these.
_SM90_MULTIPROCESSORS = frozenset({78, 114, 132})
_SM100_MULTIPROCESSORS = frozenset({148, 160})
# What the engine says where kernels are interpreted.
INTERPRETED_SM_COUNT = 4
# Few queries: at most this many, and so many with all heads of a key head.
MAX_DECODE_ROWS = 16
MAX_PACKED_ROWS = 64
# A warp group of SM90, and the rows that it multiplies at a time.
GROUP_WARPS, GROUP_ROWS = 4, 64
# With more stages the compiler's deal gave wrong results on an H200 (Triton 3.6).
MAX_DEALT_STAGES = 2
# Shared memory of a multiprocessor of SM90.
DEALT_SHARED_BYTES = 227 * 1024
# Keys and values of heads that are worked on side by side: half of SM90's second-level cache.
CACHED_BYTES = 24 * 2**20
# Tiles of a head that are worked on at once see so many keys between them beyond the window of one.
WINDOW_EXTRA_KEYS = 1024
# Visible keys a row from which on warp groups leave a gate to a kernel of its own: with a gate at
# its end their loop takes 5 to 9 % longer.
MOST_KEYS_BEFORE_GATE = 1792
# A band of at most so many keys is masked throughout, where a wider one is at its edges only.
NARROW_BAND = 2048
# Programs that share a multiprocessor where keys are split, and where their tiles are small.
PROGRAMS_A_MULTIPROCESSOR = 2
SMALL_PROGRAMS_A_MULTIPROCESSOR = 3
# As many as let three programs of four warps share a multiprocessor's registers.
SMALL_PROGRAM_REGISTERS = 168
# The kernel that loads keys into registers (``attention_decode_direct``): keys of a block, and
# queries of a program, which are 8 at most or 16.
DIRECT_BLOCK = 16
DIRECT_ROWS, MAX_DIRECT_ROWS = 8, 16
# Programs of one warp that share a multiprocessor, and registers of a thread, so that programs of
# the combination find room beside them: where they did not, a call took a fifth longer.
DIRECT_PROGRAMS_A_MULTIPROCESSOR = {DIRECT_ROWS: 8, MAX_DIRECT_ROWS: 6}
DIRECT_REGISTERS = {DIRECT_ROWS: 216, MAX_DIRECT_ROWS: 255}
MIN_DIRECT_RUN_BLOCKS, MAX_DIRECT_RUNS = 4, 32
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
# Each program reads the lengths of all sequences where keys are split.
MAX_DEALT_BATCH = 1024


@dataclass(frozen=True)
class Sharing:
    """How the kernel for few queries is launched where keys are split; see ``attention_runs``.

    At most ``programs`` share the runs of all keys. ``is_early``: the combination may start before
    they have ended. ``has_maps``: the copy engine brings keys and values of plain scores.
    """

    programs: int
    is_early: bool = False
    has_maps: bool = False
    max_registers: int | None = None


@dataclass(frozen=True)
class ForwardConfig:
    """``block_m`` queries by ``block_n`` keys a step, ``warps`` warps, ``stages`` of loads.

    ``splits`` is the number of runs that the longest sequence's keys are cut into; 1 is no cut, and
    no combination behind it, and 0 is the kernel that does not pack queries of several heads.
    ``is_ahead``: a block's product is begun before the softmax of the one before it, which pays
    where products run beside exponentials. ``has_maps``: the copy engine brings keys and values.
    ``programs``: multiprocessors for the kernel whose warp groups load or compute; 0 is another.
    ``max_registers`` limits a thread's. ``is_direct``: keys and values of few queries go straight
    into registers.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int = 0
    is_ahead: bool = False
    is_in_order: bool = False
    has_maps: bool = False
    programs: int = 0
    max_registers: int | None = None
    sharing: Sharing | None = None
    is_direct: bool = False

    @property
    def is_specialized(self) -> bool:
        """True if a warp group loads and two compute (``attention_specialized.py``)."""
        return self.programs > 0

    def knobs(self) -> Knobs:
        """The same as knobs."""
        knobs = (
            (knob_type.TILE_M, self.block_m),
            (knob_type.TILE_N, self.block_n),
            (knob_type.WARPS, self.warps),
            (knob_type.STAGES, self.stages),
        )
        if self.programs:
            # Rows of a warp group that computes.
            return (*knobs, (knob_type.ROW_BLOCK, GROUP_ROWS))
        return (*knobs, (knob_type.SPLIT_K, self.splits)) if self.splits else knobs

    def with_knobs(self, knobs: Mapping[knob_type, int]) -> ForwardConfig:
        """This config with what the knobs say."""
        made = replace(
            self,
            block_m=knobs.get(knob_type.TILE_M, self.block_m),
            block_n=knobs.get(knob_type.TILE_N, self.block_n),
            warps=knobs.get(knob_type.WARPS, self.warps),
            stages=knobs.get(knob_type.STAGES, self.stages),
            splits=knobs.get(knob_type.SPLIT_K, self.splits),
        )
        if made.is_direct and (made.block_n, made.warps) != (DIRECT_BLOCK, 1):
            made = replace(made, is_direct=False)
        is_tile = made.warps == GROUP_WARPS and made.block_m == 2 * GROUP_ROWS
        is_dealt = is_tile and self.programs > 0 and made.stages <= MAX_DEALT_STAGES
        if not made.has_maps or (is_dealt and (knob_type.ROW_BLOCK in knobs or not knobs)):
            return made
        # Few warps hold a whole tile: several programs share a multiprocessor.
        limit = self.max_registers if is_tile else None
        made = replace(made, is_in_order=is_tile, is_ahead=not is_tile)
        return replace(made, programs=0, max_registers=limit)


def power_of_two(value: int) -> int:
    """The least power of two that is at least ``value``."""
    return 1 << max(value - 1, 0).bit_length()


def pieces(size: int) -> tuple[int, int]:
    """A head size as one or two powers of two that cover it; the second may be 0.

    48 is 32 + 16, 96 is 64 + 32, 192 is 128 + 64; 80 is 64 + 16, and 100 is 128.
    ``sharing`` is there in configs of the kernel for few queries.
    """
    whole = max(power_of_two(size), MIN_BLOCK)
    half = whole // 2
    if size <= half or half < MIN_BLOCK:
        return whole, 0
    rest = max(power_of_two(size - half), MIN_BLOCK)
    return (half, rest) if rest < half else (whole, 0)


def cut(size: int, config: ForwardConfig) -> tuple[int, int]:
    """``pieces``, or one power of two on SM90, whose products in two parts wait for one another."""
    return (whole(size), 0) if config.has_maps else pieces(size)


def whole(size: int) -> int:
    """A head size as one power of two."""
    return max(power_of_two(size), MIN_BLOCK)


def is_plain(spec: AttentionSpec) -> bool:
    """True for plain scores of whole dense sequences, whose rows ``attention_repair`` can make."""
    if spec.changes_scores or spec.has_philox or spec.has_drop_mask or spec.has_block_mask:
        return False
    if spec.is_paged or spec.len_q is not None or spec.len_kv is not None:
        return False
    if any(spec.is_ragged(port) for port in spec.ports) or spec.data_type is DataType.FLOAT:
        return False
    # Only a positive factor may be taken out of the maximum.
    return spec.scale is not None and spec.scale > 0.0


def takes_warp_groups(spec: AttentionSpec) -> bool:
    """True if the kernel of warp groups serves the declaration, and pays."""
    # A warp group's rows lie all within the operand, or all beyond it.
    has_rows = spec.rows > GROUP_ROWS and spec.rows % GROUP_ROWS == 0
    return is_plain(spec) and has_rows and min(whole(spec.depth), whole(spec.depth_v)) >= 128


def takes_many_tiles(spec: AttentionSpec, config: ForwardConfig) -> bool:
    """True if a program of warp groups goes from tile to tile: there is room to load the next."""
    block, block_v = whole(spec.depth), whole(spec.depth_v)
    # Stages of everything that is loaded, and a tile of O on its way out.
    step = config.block_m * block + config.block_n * (block + block_v)
    elements = config.stages * step + config.block_m * block_v
    return config.is_specialized and elements * spec.data_type.bits // 8 <= DEALT_SHARED_BYTES


def gates_apart(spec: AttentionSpec) -> bool:
    """True if a gate behind warp groups is quicker as a kernel of its own."""
    if not spec.has_gate or whole(spec.depth_v) > 128:
        return False
    keys = spec.keys if spec.left is None else min(spec.keys, spec.left + (spec.right or 0))
    # Of a triangle's keys a row sees half, on average.
    visible = keys // 2 if spec.right is not None and spec.left is None else keys
    return visible > MOST_KEYS_BEFORE_GATE


def heads_at_a_time(spec: AttentionSpec) -> int:
    """Query heads of which tiles are worked on side by side, before those of the next heads.

    Under a causal mask, whose tiles of one head take different times, as many as have keys and
    values that stay in the second-level cache together; of a window, those within it.
    """
    if spec.right is None:
        return 1
    width = whole(spec.depth) + whole(spec.depth_v)
    keys = max(spec.keys, 1)
    if spec.left is not None:
        keys = min(keys, spec.left + spec.right + WINDOW_EXTRA_KEYS)
    head_bytes = keys * width * spec.data_type.bits // 8
    heads = max(1, CACHED_BYTES // head_bytes) * spec.group
    return min(heads, spec.batch * spec.heads_q)


def choose_config(
    spec: AttentionSpec, sm_count: int, *, deals_warps: bool = False
) -> ForwardConfig:
    """The tile for a declaration, by head size and by what the device is known to hold.

    ``deals_warps``: the compiler deals loops to warp groups, and tensor maps take the operands.
    """
    if sm_count in _SM90_MULTIPROCESSORS:
        width = max(whole(spec.depth), whole(spec.depth_v))
        if deals_warps and takes_warp_groups(spec):
            tile = ForwardConfig(2 * GROUP_ROWS, 128 if width <= 128 else 64, GROUP_WARPS, 2)
            return replace(tile, is_ahead=True, has_maps=True, programs=sm_count)
        if is_plain(spec) and spec.rows > 64 and width <= 128:
            # Programs of four warps share a multiprocessor, of which one multiplies beside the
            # others' softmax: two of them, or three where sums leave registers.
            tile = ForwardConfig(128, 64, 4, 2, is_in_order=True, has_maps=True)
            if width <= 64:
                tile = replace(tile, stages=3, max_registers=SMALL_PROGRAM_REGISTERS)
            return tile
        tile = _tile(spec, has_room=True)
        if is_plain(spec) and spec.rows > 64:
            # Hidden values are marked by a kernel of its own: sums have room.
            tile = replace(tile, block_m=128)
        return replace(tile, is_ahead=True, has_maps=True)
    if sm_count == INTERPRETED_SM_COUNT:
        # So that the same loop is tested without a GPU.
        return replace(_tile(spec, has_room=False), is_ahead=True)
    return _tile(spec, has_room=sm_count in _SM100_MULTIPROCESSORS)


def general_config(spec: AttentionSpec, sm_count: int) -> ForwardConfig:
    """The tile for what takes no tensor map, as pointers that happen to be odd: any loop."""
    if sm_count in _SM90_MULTIPROCESSORS:
        return replace(_tile(spec, has_room=True), has_maps=True)
    return choose_config(spec, sm_count)


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
            # Twice as many runs, and none, where lengths are more or less even than guessed.
            ranked.append(replace(decode, splits=2 * decode.splits))
            ranked += [] if decode.is_direct else [replace(decode, splits=1)]
    elif whole_loop.is_specialized:
        ranked.append(choose_config(spec, sm_count))
    elif whole_loop.block_m == 128:
        fewer = {knob_type.STAGES: max(whole_loop.stages - 1, 2)}
        smaller = {knob_type.TILE_M: 64, knob_type.WARPS: 4, knob_type.STAGES: 2}
        ranked += [whole_loop.with_knobs({**dict(whole_loop.knobs()), **fewer})]
        ranked += [whole_loop.with_knobs(smaller)]
    return list(dict.fromkeys(ranked))


def _tile(spec: AttentionSpec, *, has_room: bool) -> ForwardConfig:
    """``has_room``: 227 KiB of shared memory a multiprocessor, else 99 KiB."""
    width = max(sum(pieces(spec.depth)), sum(pieces(spec.depth_v)))
    if spec.data_type is DataType.FLOAT:
        if width <= 64:
            return ForwardConfig(64, 32, 4, 2)
        return ForwardConfig(32, 32, 4, 1) if width <= 128 else ForwardConfig(16, 16, 4, 1)
    if spec.rows <= 16:
        return ForwardConfig(16, 64 if width <= 128 else 32, 4, 2)
    if spec.rows <= 64 or spec.has_philox or spec.has_bias or spec.has_drop_mask or not has_room:
        return ForwardConfig(64, 64 if width <= 128 else 32, 4, 2)
    if width <= 64:
        return ForwardConfig(128, 128, 8, 3)
    if width <= 128:
        return ForwardConfig(128, 64, 8, 4)
    if spec.depth_v > 128 and spec.hides_values:
        # Where hidden values may have to be marked, sums of 128 rows would not fit beside marks.
        return ForwardConfig(64, 64, 8, 2)
    return ForwardConfig(128, 64, 8, 2)


def choose_decode_config(spec: AttentionSpec, sm_count: int) -> ForwardConfig | None:
    """The tile of the kernel for few queries, or None where the declaration is none for it."""
    packed = spec.rows * spec.group
    if spec.rows > MAX_DECODE_ROWS or packed > MAX_PACKED_ROWS:
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
    has_room = sm_count in _SM90_MULTIPROCESSORS | _SM100_MULTIPROCESSORS
    block_m = max(MIN_BLOCK, power_of_two(packed))
    # Three programs with three stages share 227 KiB, or two with four; the parts of SM120 have 99.
    is_small = has_room and block_m == MIN_BLOCK and width <= 128
    count = SMALL_PROGRAMS_A_MULTIPROCESSOR if is_small else PROGRAMS_A_MULTIPROCESSOR
    sharing = Sharing(
        programs=count * sm_count,
        is_early=has_room,
        has_maps=sm_count in _SM90_MULTIPROCESSORS,
        max_registers=SMALL_PROGRAM_REGISTERS if is_small else None,
    )
    splits = _splits(spec, block_n, sm_count, sharing.programs)
    stages = 4 if has_room and not (is_small and splits > 1) else 3
    return ForwardConfig(block_m, block_n, 4, stages, splits, sharing=sharing)


def takes_registers(spec: AttentionSpec, sm_count: int) -> bool:
    """True if ``attention_decode_direct`` serves the declaration on the device."""
    if sm_count not in _SM90_MULTIPROCESSORS:
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
    """Runs of the declared keys: as many as there is room for at once, or twice as many.

    Equal lengths are read the soonest where each run is a program's; where lengths differ, the
    longest one's runs outlast the others.
    """
    blocks = -(-spec.keys // DIRECT_BLOCK)
    most = direct_programs(spec, sm_count) // max(spec.batch * spec.heads_kv, 1)
    most = min(most, MAX_DIRECT_RUNS, blocks // MIN_DIRECT_RUN_BLOCKS)
    if spec.is_paged and 1 < 2 * most <= MAX_DIRECT_RUNS:
        most *= 2 if blocks >= 2 * most * MIN_PAGED_RUN_BLOCKS else 1
    return -(-blocks // -(-blocks // most)) if most > 1 else 1


def _direct_config(spec: AttentionSpec, sm_count: int) -> ForwardConfig:
    registers = DIRECT_REGISTERS[_direct_rows(spec)]
    sharing = Sharing(direct_programs(spec, sm_count), is_early=True, max_registers=registers)
    splits = _direct_splits(spec, sm_count)
    return ForwardConfig(MIN_BLOCK, DIRECT_BLOCK, 1, 2, splits, sharing=sharing, is_direct=True)


def _splits(spec: AttentionSpec, block_n: int, sm_count: int, programs: int) -> int:
    """Runs of the longest sequence, so that programs are done with their shares the soonest.

    A program takes one run after another, so the number of all runs should be a little less than a
    multiple of the number of programs. Runs are short enough that uneven lengths fill the device,
    and not so many that their sums would count.
    """
    units = spec.batch * spec.heads_kv
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
