"""Tiles of attention kernels: how a head size is cut, and which tile a declaration gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.graph.enums import knob_type

# A matrix product takes at least this many of each axis.
MIN_BLOCK = 16
# A line of shared memory, the most that a matrix product's operand is swizzled in.
LINE_BYTES = 128
# Multiprocessors of the parts of SM90 and SM100; no other part that the engine takes has these.
SM90_MULTIPROCESSORS = frozenset({78, 114, 132})
SM100_MULTIPROCESSORS = frozenset({148, 160})
# What the engine says where kernels are interpreted.
INTERPRETED_SM_COUNT = 4
# An SM80 that is known by its multiprocessors.
SM80_MULTIPROCESSORS = frozenset({108})
# Shared memory that a program of SM120 may have, which is the least.
LEAST_SHARED_BYTES = 99 * 1024
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
# Tiles of all packed sequences at most, and the square of a sequence's times heads.
MAX_PACKED_TILES = 2**30
# Keys from which on a level is kept where no mask hides any.
MIN_KEYS_AT_A_LEVEL = 1024
# As many as let three programs of four warps share a multiprocessor's registers.
SMALL_PROGRAM_REGISTERS = 168
# Keys of a block of the kernel that loads them into registers (``attention_decode_direct``).
DIRECT_BLOCK = 16
# Registers of a thread of 8 queries, of clusters of one sequence and of two.
JOINED_REGISTERS, PAIRED_REGISTERS = 232, 255


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
    into registers. ``is_joined``: so they do, and the programs of a key head join their sums;
    ``is_paired``: those of a key head of two sequences do, each of ``splits`` runs.
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
    is_joined: bool = False
    is_paired: bool = False

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
        if made.is_direct:
            is_joined = self.is_joined and (made.block_n, made.warps) == (DIRECT_BLOCK, self.warps)
            is_paired = is_joined and self.is_paired and made.splits == self.splits
            # Of one sequence, half as many runs are a cluster.
            alone = self.splits // 2 if self.is_paired else self.splits
            is_joined = is_paired or (is_joined and made.splits == alone)
            is_direct = is_joined or (made.block_n, made.warps) == (DIRECT_BLOCK, 1)
            made = replace(made, is_direct=is_direct, is_joined=is_joined, is_paired=is_paired)
            if self.is_paired and not is_paired:
                made = replace(made, max_registers=JOINED_REGISTERS)
        is_tile = made.warps == GROUP_WARPS and made.block_m == 2 * GROUP_ROWS
        is_dealt = is_tile and self.programs > 0 and made.stages <= MAX_DEALT_STAGES
        if not made.has_maps or (is_dealt and (knob_type.ROW_BLOCK in knobs or not knobs)):
            return made
        # Few warps hold a whole tile: several programs share a multiprocessor.
        limit = self.max_registers if is_tile else None
        made = replace(made, is_in_order=is_tile, is_ahead=not is_tile)
        return replace(made, programs=0, max_registers=limit)


def shared_bytes_of(sm_count: int) -> int:
    """Shared memory that a program may have, the least if unknown; where it is interpreted, any."""
    if sm_count in SM90_MULTIPROCESSORS | SM100_MULTIPROCESSORS:
        return 227 * 1024
    if sm_count in SM80_MULTIPROCESSORS or sm_count == INTERPRETED_SM_COUNT:
        return 163 * 1024
    return LEAST_SHARED_BYTES


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


def cut(spec: AttentionSpec, config: ForwardConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """``pieces`` of both head sizes, or ``blocks`` on SM90, where parts wait for one another.

    Tiles of few queries that are less than a warp group's do not multiply as one, and keep pieces.
    """
    sharing = config.sharing
    is_group_of_few = sharing is not None and sharing.has_maps and config.block_m >= GROUP_ROWS
    if not (config.has_maps or is_group_of_few):
        return pieces(spec.depth), pieces(spec.depth_v)
    block, block_v = blocks(spec)
    return (block, 0), (block_v, 0)


def blocks(spec: AttentionSpec) -> tuple[int, int]:
    """The head size of Q and K, and that of V, each as one power of two.

    Of 16-bit operands the narrower one is as wide as the other, or fills a line of shared memory:
    with tiles of two swizzles in one kernel the assembler of CUDA 12.8 takes a wrong register for
    where the narrower ones lie (benchmark/attention_backward.md).
    """
    block, block_v = whole(spec.depth), whole(spec.depth_v)
    if spec.data_type is DataType.FLOAT:
        return block, block_v
    least = min(max(block, block_v), LINE_BYTES // 2)
    return max(block, least), max(block_v, least)


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
    is_wide = min(whole(spec.depth), whole(spec.depth_v)) >= 128
    return is_plain(spec) and has_rows and is_wide and _has_narrow_output(spec)


def is_plain_packed(spec: AttentionSpec) -> bool:
    """True for plain scores of packed sequences, all of whose operands start at whole rows."""
    if spec.changes_scores or spec.has_philox or spec.has_drop_mask or spec.has_block_mask:
        return False
    if spec.is_paged or spec.len_q is None or spec.len_kv is None:
        return False
    if spec.data_type is DataType.FLOAT or spec.scale is None or spec.scale <= 0.0:
        return False
    # A dense output has padded rows to be written.
    ports = ("q", "k", "v", "O", "Stats", "score_max", "score_sum_exp")
    if not all(spec.is_ragged(port) for port in ports if port in spec.ports):
        return False
    for port in ("q", "k", "v"):
        tensor = spec.ports[port]
        if tensor.stride[2] < 1 or tensor.ragged_offset_multiplier % tensor.stride[2]:
            return False
    return True


def _has_narrow_output(spec: AttentionSpec) -> bool:
    """True if O is as wide as the operands: on its way out, in float32, it has no room."""
    return spec.ports["O"].data_type.bits <= spec.data_type.bits


def takes_packed_groups(spec: AttentionSpec) -> bool:
    """True if the kernel of warp groups serves packed sequences of the declaration, and pays."""
    q = spec.ports["q"]
    # Rows of Q are read as one, of which a head is a part.
    has_heads = spec.depth == whole(spec.depth)
    has_heads = has_heads and 0 <= q.stride[1] * (spec.heads_q - 1) <= q.stride[2] - spec.depth
    is_wide = has_heads and min(spec.depth, whole(spec.depth_v)) >= 128
    # Tiles are counted in 32 bits, and divided by what a head has (``attention_packed_order``).
    tiles = -(-spec.rows // (2 * GROUP_ROWS))
    is_counted = tiles * spec.heads_q * max(tiles, 2 * spec.batch) < MAX_PACKED_TILES
    is_wide = is_wide and is_counted and _has_narrow_output(spec)
    return is_wide and is_plain_packed(spec) and spec.rows > GROUP_ROWS


def takes_many_tiles(spec: AttentionSpec, config: ForwardConfig) -> bool:
    """True if a program of warp groups goes from tile to tile: there is room to load the next."""
    block, block_v = whole(spec.depth), whole(spec.depth_v)
    # Stages of everything that is loaded, and a tile of O on its way out.
    step = config.block_m * block + config.block_n * (block + block_v)
    elements = config.stages * step + config.block_m * block_v
    return config.is_specialized and elements * spec.data_type.bits // 8 <= DEALT_SHARED_BYTES


def goes_in_pairs(spec: AttentionSpec, config: ForwardConfig) -> bool:
    """True if programs take a long and a short tile of a head in turn, under a causal mask."""
    is_triangle = spec.right is not None and spec.left is None
    return is_triangle and spec.rows > config.block_m and takes_many_tiles(spec, config)


def has_even_edges(spec: AttentionSpec, config: ForwardConfig) -> bool:
    """True if both edges of a window are diagonals of blocks, which are as long as tiles."""
    block = config.block_n
    if spec.left is None or spec.right is None or config.block_m != block or block != 128:
        return False
    shift = spec.keys - spec.rows if spec.bottom_right else 0
    if shift + spec.right < 0:
        # Tiles that see nothing have a block all the same, and no edge in it.
        return False
    return not any(end % block for end in (spec.keys, shift + spec.right, shift - spec.left))


def keeps_level(spec: AttentionSpec, config: ForwardConfig) -> bool:
    """True if programs of few registers make a row's weights at one level (``attention_level``)."""
    if config.max_registers is None or config.block_n not in (64, 128) or not is_plain(spec):
        return False
    # float16 ends at 2**16; who asks for the greatest score gets it, and sums are given beside it.
    asks = any(port in spec.ports for port in ("score_max", "score_sum_exp"))
    if spec.data_type is not DataType.BFLOAT16 or asks:
        return False
    # What looks for rows that were noted takes as long as some blocks, and is there under a band.
    return spec.is_banded or spec.keys >= MIN_KEYS_AT_A_LEVEL


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
    if sm_count in SM90_MULTIPROCESSORS:
        width = max(whole(spec.depth), whole(spec.depth_v))
        if deals_warps and (takes_warp_groups(spec) or takes_packed_groups(spec)):
            tile = ForwardConfig(2 * GROUP_ROWS, 128 if width <= 128 else 64, GROUP_WARPS, 2)
            return replace(tile, is_ahead=True, has_maps=True, programs=sm_count)
        if is_plain(spec) and spec.rows > 64 and width <= 128:
            # Programs of four warps share a multiprocessor, of which one multiplies beside the
            # others' softmax: two of them, or three where sums leave registers.
            tile = ForwardConfig(128, 64, 4, 2, is_in_order=True, has_maps=True)
            if width <= 64:
                tile = replace(tile, stages=3, max_registers=SMALL_PROGRAM_REGISTERS)
            return tile
        tile = _sm90_tile(spec)
        if is_plain(spec) and spec.rows > 64:
            # Hidden values are marked by a kernel of its own: sums have room.
            tile = replace(tile, block_m=128)
        return replace(tile, is_ahead=True, has_maps=True)
    if sm_count == INTERPRETED_SM_COUNT:
        # So that the same loop is tested without a GPU.
        return replace(_tile(spec, has_room=False), is_ahead=True)
    return _tile(spec, has_room=sm_count in SM100_MULTIPROCESSORS)


def general_config(spec: AttentionSpec, sm_count: int) -> ForwardConfig:
    """The tile for what takes no tensor map, as pointers that happen to be odd: any loop."""
    if sm_count in SM90_MULTIPROCESSORS:
        return replace(_sm90_tile(spec), has_maps=True)
    return choose_config(spec, sm_count)


def _sm90_tile(spec: AttentionSpec) -> ForwardConfig:
    """Twice the warps where 64 rows of wide sums are beside a bias or draws.

    Four warps had 2 to 3 KB of a thread's registers in memory, and some had too few to compile; not
    so beside draws where nothing is hidden.
    """
    tile = _tile(spec, has_room=True)
    is_crowded = spec.has_bias or spec.has_drop_mask or (spec.has_philox and spec.hides_values)
    if is_crowded and spec.depth_v > 128 and tile.block_m == GROUP_ROWS:
        tile = replace(tile, warps=2 * GROUP_WARPS)
    return tile


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
