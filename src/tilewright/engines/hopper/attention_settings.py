"""The settings of attention forward's code: how a tile is cut, and what the declaration asks for.

Records of Gluon, all of it known at compile time. (No postponed annotations here: the compiler
reads the types.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tilewright.engines.hopper.barriers import FIRST_FREE


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
    PRESCALE: gl.constexpr
    LAZY: gl.constexpr
    AHEAD: gl.constexpr
    LATE: gl.constexpr
    # Derived: a slab's columns; slabs from one tile of Q to the next, where O has room too; a
    # tile's rows; the barriers' numbers; the threads that meet at a release; whether Q is released
    # as soon as a tile's last scores are made; and whether a warpgroup leaves out first blocks of
    # which its rows see nothing.
    SLAB: gl.constexpr
    Q_PITCH: gl.constexpr
    BLOCK_M: gl.constexpr
    K_BARRIER: gl.constexpr
    V_BARRIER: gl.constexpr
    Q_BARRIER: gl.constexpr
    RELEASE: gl.constexpr
    FREES_Q: gl.constexpr
    CUTS: gl.constexpr

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
        PRESCALE,
        LAZY,
        AHEAD,
        LATE,
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
        ahead_of_o = bool(Q_SLOTS == 1 and AHEAD and OUT_PARTS > 0)
        self.AHEAD = gl.constexpr(Q_SLOTS == 2 or ahead_of_o)
        self.FREES_Q = gl.constexpr(ahead_of_o)
        self.CUTS = gl.constexpr(ahead_of_o and BLOCK_N < 64 * WARPGROUPS)
        self.WORDS = gl.constexpr(WORDS)
        self.PRESCALE = gl.constexpr(PRESCALE)
        self.LAZY = gl.constexpr(LAZY)
        self.LATE = gl.constexpr(LATE)


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
