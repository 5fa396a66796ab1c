"""What the attention kernels pass around: the code's settings, the call's numbers, the memory.

Records of Gluon: their fields live in registers or are compile-time. (No postponed annotations
here: the compiler reads the types.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tilewright.engines.hopper.barriers import FIRST_FREE

# Rows of one warpgroup's product.
ROWS = gl.constexpr(64)
# How lengths come: not at all, as lengths, or as running sums.
NO_LENGTHS = gl.constexpr(0)
LENGTHS = gl.constexpr(1)
SUMS = gl.constexpr(2)
# How q lies: RAGGED_Q is one of these.
DENSE = gl.constexpr(0)
PACKED = gl.constexpr(1)
ORDERED = gl.constexpr(2)  # packed, and its tiles are walked as ``problem.order`` says
# What becomes of Q K^T before masks: nothing (a positive scale is folded into the exponent), it is
# scaled, or it is scaled and capped.
PLAIN = gl.constexpr(0)
SCALED = gl.constexpr(1)
CAPPED = gl.constexpr(2)


@aggregate
class Tiling:
    """How a tile is cut and made; see ``AttentionConfig`` in attention.py."""

    BLOCK_N: gl.constexpr
    DEPTH: gl.constexpr
    DEPTH_V: gl.constexpr
    SLABS: gl.constexpr
    WARPGROUPS: gl.constexpr
    STAGES: gl.constexpr
    Q_SLOTS: gl.constexpr
    TURNS: gl.constexpr
    BY_COST: gl.constexpr
    K_BOX: gl.constexpr
    V_BOX: gl.constexpr
    OUT_PARTS: gl.constexpr
    EARLY: gl.constexpr
    WORDS: gl.constexpr
    # Derived: a slab's columns; slabs from one tile of Q to the next, where O has room too; a
    # tile's rows; the barriers' numbers; and the threads that meet at a release.
    SLAB: gl.constexpr
    Q_PITCH: gl.constexpr
    BLOCK_M: gl.constexpr
    K_BARRIER: gl.constexpr
    V_BARRIER: gl.constexpr
    Q_BARRIER: gl.constexpr
    RELEASE: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        BLOCK_N,
        DEPTH,
        DEPTH_V,
        SLABS,
        WARPGROUPS,
        STAGES,
        Q_SLOTS,
        TURNS,
        BY_COST,
        K_BOX,
        V_BOX,
        OUT_PARTS,
        EARLY,
        WORDS,
    ):
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.DEPTH = gl.constexpr(DEPTH)
        self.DEPTH_V = gl.constexpr(DEPTH_V)
        self.SLABS = gl.constexpr(SLABS)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.STAGES = gl.constexpr(STAGES)
        self.Q_SLOTS = gl.constexpr(Q_SLOTS)
        self.TURNS = gl.constexpr(TURNS)
        self.BY_COST = gl.constexpr(BY_COST)
        self.K_BOX = gl.constexpr(K_BOX)
        self.V_BOX = gl.constexpr(V_BOX)
        self.OUT_PARTS = gl.constexpr(OUT_PARTS)
        self.EARLY = gl.constexpr(EARLY)
        self.SLAB = gl.constexpr(DEPTH // SLABS)
        self.Q_PITCH = gl.constexpr(SLABS if OUT_PARTS else max(SLABS, DEPTH_V * SLABS // DEPTH))
        self.BLOCK_M = gl.constexpr(64 * WARPGROUPS)
        self.K_BARRIER = gl.constexpr(FIRST_FREE + WARPGROUPS)
        self.V_BARRIER = gl.constexpr(FIRST_FREE + WARPGROUPS + STAGES)
        self.Q_BARRIER = gl.constexpr(FIRST_FREE + WARPGROUPS + 2 * STAGES)
        self.RELEASE = gl.constexpr(str(128 * WARPGROUPS + 32))
        self.WORDS = gl.constexpr(WORDS)


@aggregate
class Features:
    """What the declaration asks for."""

    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    BOTTOM_RIGHT: gl.constexpr
    RIGHT_LOOP: gl.constexpr
    FIRST_MASKED: gl.constexpr
    REPAIRS: gl.constexpr
    LENGTHS_Q: gl.constexpr
    LENGTHS_KV: gl.constexpr
    RAGGED_Q: gl.constexpr
    RAGGED_KV: gl.constexpr
    HAS_STATS: gl.constexpr
    STATS_LOG2: gl.constexpr
    HAS_SINK: gl.constexpr
    PAGED: gl.constexpr
    SCORES: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        HAS_LEFT,
        HAS_RIGHT,
        BOTTOM_RIGHT,
        RIGHT_LOOP,
        FIRST_MASKED,
        REPAIRS,
        LENGTHS_Q,
        LENGTHS_KV,
        RAGGED_Q,
        RAGGED_KV,
        HAS_STATS,
        STATS_LOG2,
        HAS_SINK,
        PAGED,
        SCORES,
    ):
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.BOTTOM_RIGHT = gl.constexpr(BOTTOM_RIGHT)
        self.RIGHT_LOOP = gl.constexpr(RIGHT_LOOP)
        self.FIRST_MASKED = gl.constexpr(FIRST_MASKED)
        self.REPAIRS = gl.constexpr(REPAIRS)
        self.LENGTHS_Q = gl.constexpr(LENGTHS_Q)
        self.LENGTHS_KV = gl.constexpr(LENGTHS_KV)
        self.RAGGED_Q = gl.constexpr(RAGGED_Q)
        self.RAGGED_KV = gl.constexpr(RAGGED_KV)
        self.HAS_STATS = gl.constexpr(HAS_STATS)
        self.STATS_LOG2 = gl.constexpr(STATS_LOG2)
        self.HAS_SINK = gl.constexpr(HAS_SINK)
        self.PAGED = gl.constexpr(PAGED)
        self.SCORES = gl.constexpr(SCORES)


@aggregate
class Operand:
    """An operand in global memory: pointer, steps in elements, and where sequences start.

    Sequence b of a ragged operand starts ``starts[b * starts_step] * unit`` rows behind the first
    (elements, for one that is read through its pointer alone).
    """

    pointer: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    starts: gl.tensor
    starts_step: gl.tensor
    unit: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        pointer,
        batch,
        head,
        row,
        starts,
        starts_step,
        unit,
    ):
        self.pointer = pointer
        self.batch = batch
        self.head = head
        self.row = row
        self.starts = starts
        self.starts_step = starts_step
        self.unit = unit


@aggregate
class Pages:
    """Where pages of keys or values are: entry i of batch entry b is the page of token i * rows.

    It is ``table[b * batch + i * entry]``.
    """

    table: gl.tensor
    batch: gl.tensor
    entry: gl.tensor
    rows: gl.tensor

    @gluon.constexpr_function
    def __init__(self, table, batch, entry, rows):
        self.table = table
        self.batch = batch
        self.entry = entry
        self.rows = rows


@aggregate
class Problem:
    """The call: extents, the band, the operands, and the lengths of sequences.

    ``scale`` is what scores are multiplied by in the exponent (of 2); ``gain`` and ``ceiling`` are
    ``shaped``'s, where features say that scores are scaled or capped.
    """

    rows: gl.tensor
    keys: gl.tensor
    depth: gl.tensor
    depth_v: gl.tensor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    tiles: gl.tensor
    heads: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    q: Operand
    k: Operand
    v: Operand
    o: Operand
    stats: Operand
    sink: gl.tensor
    lengths_q: gl.tensor
    lengths_q_step: gl.tensor
    lengths_kv: gl.tensor
    lengths_kv_step: gl.tensor
    k_pages: Pages
    v_pages: Pages
    gain: gl.tensor
    ceiling: gl.tensor
    order: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        rows,
        keys,
        depth,
        depth_v,
        left,
        right,
        scale,
        tiles,
        heads,
        heads_q,
        group,
        q,
        k,
        v,
        o,
        stats,
        sink,
        lengths_q,
        lengths_q_step,
        lengths_kv,
        lengths_kv_step,
        k_pages,
        v_pages,
        gain,
        ceiling,
        order,
    ):
        self.rows = rows
        self.keys = keys
        self.depth = depth
        self.depth_v = depth_v
        self.left = left
        self.right = right
        self.scale = scale
        self.tiles = tiles
        self.heads = heads
        self.heads_q = heads_q
        self.group = group
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.stats = stats
        self.sink = sink
        self.lengths_q = lengths_q
        self.lengths_q_step = lengths_q_step
        self.lengths_kv = lengths_kv
        self.lengths_kv_step = lengths_kv_step
        self.k_pages = k_pages
        self.v_pages = v_pages
        self.gain = gain
        self.ceiling = ceiling
        self.order = order


@gluon.jit
def moved(operand, zero):
    """The operand by other words: see ``apart``."""
    return Operand(
        operand.pointer + zero,
        operand.batch + zero,
        operand.head + zero,
        operand.row + zero,
        operand.starts + zero,
        operand.starts_step + zero,
        operand.unit + zero,
    )


@gluon.jit
def apart(problem, zero):
    """The problem again, of numbers that the compiler takes for others; ``zero`` is opaque."""
    return Problem(
        problem.rows + zero,
        problem.keys + zero,
        problem.depth + zero,
        problem.depth_v + zero,
        problem.left + zero,
        problem.right + zero,
        problem.scale,
        problem.tiles + zero,
        problem.heads + zero,
        problem.heads_q + zero,
        problem.group + zero,
        moved(problem.q, zero),
        moved(problem.k, zero),
        moved(problem.v, zero),
        moved(problem.o, zero),
        moved(problem.stats, zero),
        problem.sink + zero,
        problem.lengths_q + zero,
        problem.lengths_q_step + zero,
        problem.lengths_kv + zero,
        problem.lengths_kv_step + zero,
        Pages(
            problem.k_pages.table + zero,
            problem.k_pages.batch + zero,
            problem.k_pages.entry + zero,
            problem.k_pages.rows + zero,
        ),
        Pages(
            problem.v_pages.table + zero,
            problem.v_pages.batch + zero,
            problem.v_pages.entry + zero,
            problem.v_pages.rows + zero,
        ),
        problem.gain,
        problem.ceiling,
        problem.order + zero,
    )


@aggregate
class Sequence:
    """One batch entry: its extents and band, and the rows before it where it is ragged."""

    rows: gl.tensor
    keys: gl.tensor
    left: gl.tensor
    right: gl.tensor
    q_row: gl.tensor
    k_row: gl.tensor
    v_row: gl.tensor
    o_row: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        rows,
        keys,
        left,
        right,
        q_row,
        k_row,
        v_row,
        o_row,
    ):
        self.rows = rows
        self.keys = keys
        self.left = left
        self.right = right
        self.q_row = q_row
        self.k_row = k_row
        self.v_row = v_row
        self.o_row = o_row


@aggregate
class Memory:
    """Shared memory: the tiles of Q, K, V, "it is there" of each, and where O leaves through.

    O has room of its own, one part of its columns after another, or leaves through its Q's.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    spoiled: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        k,
        v,
        q_full,
        k_full,
        v_full,
        o,
        spoiled,
    ):
        self.q = q
        self.k = k
        self.v = v
        self.q_full = q_full
        self.k_full = k_full
        self.v_full = v_full
        self.o = o
        self.spoiled = spoiled


@aggregate
class Place:
    """Where a tile is: its batch entry, query head, first row, and blocks of keys."""

    batch: gl.tensor
    head: gl.tensor
    first: gl.tensor
    low: gl.tensor
    high: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        batch,
        head,
        first,
        low,
        high,
    ):
        self.batch = batch
        self.head = head
        self.first = first
        self.low = low
        self.high = high
