"""What the FP8 attention kernels pass around; ``attention_places`` reads some of it by name."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from tilewright.engines.hopper.attention_records import Operand
from tilewright.engines.hopper.barriers import FIRST_FREE

# Columns of V that are transposed at a time, and a copy's width.
SLAB = gl.constexpr(64)
# Stages of V as it comes; the producer frees them itself.
V_STAGES = gl.constexpr(2)
# Probabilities are multiplied by 2 to this before they are rounded: 256 of E4M3's 448.
P_EXPONENT = gl.constexpr(8.0)
P_UNIT = gl.constexpr(2.0**-8)


@aggregate
class Tiling:
    """How a tile is cut and made; see ``AttentionConfig`` in attention_fp8.py."""

    BLOCK_N: gl.constexpr
    DEPTH: gl.constexpr
    DEPTH_V: gl.constexpr
    WARPGROUPS: gl.constexpr
    STAGES: gl.constexpr
    Q_SLOTS: gl.constexpr
    BY_COST: gl.constexpr
    # Derived: V's slabs, a tile's rows, the barriers' numbers, the threads that meet at a release,
    # and the first barrier of turns.
    SLABS_V: gl.constexpr
    BLOCK_M: gl.constexpr
    K_BARRIER: gl.constexpr
    V_BARRIER: gl.constexpr
    Q_BARRIER: gl.constexpr
    RELEASE: gl.constexpr
    T_BARRIER: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        BLOCK_N,
        DEPTH,
        DEPTH_V,
        WARPGROUPS,
        STAGES,
        Q_SLOTS,
        BY_COST,
    ):
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.DEPTH = gl.constexpr(DEPTH)
        self.DEPTH_V = gl.constexpr(DEPTH_V)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.STAGES = gl.constexpr(STAGES)
        self.Q_SLOTS = gl.constexpr(Q_SLOTS)
        self.BY_COST = gl.constexpr(BY_COST)
        self.SLABS_V = gl.constexpr(DEPTH_V // 64)
        self.BLOCK_M = gl.constexpr(64 * WARPGROUPS)
        self.K_BARRIER = gl.constexpr(FIRST_FREE)
        self.V_BARRIER = gl.constexpr(FIRST_FREE + STAGES)
        self.Q_BARRIER = gl.constexpr(FIRST_FREE + 2 * STAGES)
        self.T_BARRIER = gl.constexpr(FIRST_FREE + 2 * STAGES + Q_SLOTS)
        self.RELEASE = gl.constexpr(str(128 * WARPGROUPS + 128))


@aggregate
class Memory:
    """Shared memory: Q, K, V, V transposed, room for O, "it is there" of each, and what two
    consumers note at their end."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    vt: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    vt_full: gl.shared_memory_descriptor
    spoiled: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        k,
        v,
        vt,
        o,
        q_full,
        k_full,
        v_full,
        vt_full,
        spoiled,
    ):
        self.q = q
        self.k = k
        self.v = v
        self.vt = vt
        self.o = o
        self.q_full = q_full
        self.k_full = k_full
        self.v_full = v_full
        self.vt_full = vt_full
        self.spoiled = spoiled


@aggregate
class Features:
    """What the declaration asks for. No operand is ragged, and no bound is on the left."""

    HAS_RIGHT: gl.constexpr
    BOTTOM_RIGHT: gl.constexpr
    RIGHT_LOOP: gl.constexpr
    FIRST_MASKED: gl.constexpr
    REPAIRS: gl.constexpr
    LENGTHS_Q: gl.constexpr
    LENGTHS_KV: gl.constexpr
    HAS_STATS: gl.constexpr
    STATS_LOG2: gl.constexpr
    HAS_SINK: gl.constexpr
    HAS_AMAX_S: gl.constexpr
    HAS_AMAX_O: gl.constexpr
    HAS_LEFT: gl.constexpr
    RAGGED_Q: gl.constexpr
    RAGGED_KV: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        HAS_RIGHT,
        BOTTOM_RIGHT,
        RIGHT_LOOP,
        FIRST_MASKED,
        REPAIRS,
        LENGTHS_Q,
        LENGTHS_KV,
        HAS_STATS,
        STATS_LOG2,
        HAS_SINK,
        HAS_AMAX_S,
        HAS_AMAX_O,
    ):
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.BOTTOM_RIGHT = gl.constexpr(BOTTOM_RIGHT)
        self.RIGHT_LOOP = gl.constexpr(RIGHT_LOOP)
        self.FIRST_MASKED = gl.constexpr(FIRST_MASKED)
        self.REPAIRS = gl.constexpr(REPAIRS)
        self.LENGTHS_Q = gl.constexpr(LENGTHS_Q)
        self.LENGTHS_KV = gl.constexpr(LENGTHS_KV)
        self.HAS_STATS = gl.constexpr(HAS_STATS)
        self.STATS_LOG2 = gl.constexpr(STATS_LOG2)
        self.HAS_SINK = gl.constexpr(HAS_SINK)
        self.HAS_AMAX_S = gl.constexpr(HAS_AMAX_S)
        self.HAS_AMAX_O = gl.constexpr(HAS_AMAX_O)
        self.HAS_LEFT = gl.constexpr(False)
        self.RAGGED_Q = gl.constexpr(False)
        self.RAGGED_KV = gl.constexpr(False)


@aggregate
class Problem:
    """The call: extents, the band, the operands, lengths of sequences, and the scalars' pointers.

    ``scale`` is what scores are multiplied by in the exponent of 2, descales included.
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
    descale_v: gl.tensor
    descale_s: gl.tensor
    scale_s: gl.tensor
    scale_o: gl.tensor
    amax_s: gl.tensor
    amax_o: gl.tensor

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
        descale_v,
        descale_s,
        scale_s,
        scale_o,
        amax_s,
        amax_o,
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
        self.descale_v = descale_v
        self.descale_s = descale_s
        self.scale_s = scale_s
        self.scale_o = scale_o
        self.amax_s = amax_s
        self.amax_o = amax_o
