"""What the kernels of attention's backward pass around: settings, the program's part, memory.

Records of Gluon: their fields live in registers or are compile-time. (No postponed annotations
here: the compiler reads the types.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor
from triton.language.core import _aggregate as aggregate
from triton.language.core import base_value

from tilewright.engines.hopper.barriers import FIRST_FREE

# Keys of one product.
KEYS = gl.constexpr(64)
# Rows of dQ that one product makes, and the float32 numbers of a line of the boxes in which it is
# added up.
PIECE = gl.constexpr(64)
LINE = gl.constexpr(32)
# Named barriers: for the consumers' release of a slot, one a slot that the producer waits at. Where
# dQ is made too, a carrier is the fourth partition, which takes one barrier for itself; both
# consumers' dS of a tile is stored, and is fenced; a piece's memory is free, and it is stored.
RELEASE_Q = gl.constexpr(FIRST_FREE + 4)
RELEASE_O = gl.constexpr(FIRST_FREE + 7)
D_S_STORED = gl.constexpr(FIRST_FREE + 1)
D_S_READY = gl.constexpr(FIRST_FREE + 2)
PIECE_FREE = gl.constexpr(FIRST_FREE + 3)
PIECE_FREE_STEP = gl.constexpr(3)
PIECE_STORED = gl.constexpr(FIRST_FREE + 9)
WITH_CARRIER = gl.constexpr("160")
CONSUMERS = gl.constexpr("256")
EVERYBODY = gl.constexpr("288")


@aggregate
class Config:
    """What the code specializes on; see ``attention_backward.py`` for how it is chosen.

    A program has BLOCK_KEYS keys, a tile ROWS rows. Head sizes of WIDTH and WIDTH_V columns are
    filled up to DEPTH and DEPTH_V with zeros. With SHARES several programs may have the same keys;
    with HAS_END a key may be seen by rows behind the sequence's end alone.
    """

    DEPTH: gl.constexpr
    DEPTH_V: gl.constexpr
    WIDTH: gl.constexpr
    WIDTH_V: gl.constexpr
    BLOCK_KEYS: gl.constexpr
    ROWS: gl.constexpr
    STAGES: gl.constexpr
    STAGES_O: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    BOTTOM_RIGHT: gl.constexpr
    HAS_TAIL: gl.constexpr
    MAKES_D_Q: gl.constexpr
    LENGTHS_Q: gl.constexpr
    LENGTHS_KV: gl.constexpr
    RAGGED_Q: gl.constexpr
    RAGGED_KV: gl.constexpr
    SHARES: gl.constexpr
    HAS_END: gl.constexpr
    # Derived: columns of dQ that a consumer makes, all of half of the rows where a tile has two
    # pieces; whether NaN and infinity in keys that some row does not see could get into dQ;
    # whether anything is masked; and whether dK and dV leave by the copy engine: in a packed tensor
    # other rows follow the last ones, and beside masks of long tiles addresses were spilled.
    COLUMNS: gl.constexpr
    HIDES: gl.constexpr
    MASKS: gl.constexpr
    COPIES_OUT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        DEPTH,
        DEPTH_V,
        WIDTH,
        WIDTH_V,
        BLOCK_KEYS,
        ROWS,
        STAGES,
        STAGES_O,
        HAS_LEFT,
        HAS_RIGHT,
        BOTTOM_RIGHT,
        HAS_TAIL,
        MAKES_D_Q,
        LENGTHS_Q,
        LENGTHS_KV,
        RAGGED_Q,
        RAGGED_KV,
        SHARES=False,
        HAS_END=False,
    ):
        self.DEPTH = gl.constexpr(DEPTH)
        self.DEPTH_V = gl.constexpr(DEPTH_V)
        self.WIDTH = gl.constexpr(WIDTH)
        self.WIDTH_V = gl.constexpr(WIDTH_V)
        self.BLOCK_KEYS = gl.constexpr(BLOCK_KEYS)
        self.ROWS = gl.constexpr(ROWS)
        self.STAGES = gl.constexpr(STAGES)
        self.STAGES_O = gl.constexpr(STAGES_O)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.BOTTOM_RIGHT = gl.constexpr(BOTTOM_RIGHT)
        self.HAS_TAIL = gl.constexpr(HAS_TAIL)
        self.MAKES_D_Q = gl.constexpr(MAKES_D_Q)
        self.LENGTHS_Q = gl.constexpr(LENGTHS_Q)
        self.LENGTHS_KV = gl.constexpr(LENGTHS_KV)
        self.RAGGED_Q = gl.constexpr(RAGGED_Q)
        self.RAGGED_KV = gl.constexpr(RAGGED_KV)
        self.SHARES = gl.constexpr(SHARES)
        self.HAS_END = gl.constexpr(HAS_END)
        self.COLUMNS = gl.constexpr(DEPTH if ROWS == 128 else DEPTH // 2)
        self.HIDES = gl.constexpr(MAKES_D_Q and (HAS_LEFT or HAS_RIGHT or LENGTHS_KV != 0))
        masks = HAS_LEFT or HAS_RIGHT or HAS_TAIL or HAS_END
        self.MASKS = gl.constexpr(masks)
        self.COPIES_OUT = gl.constexpr(not RAGGED_KV and not (masks and ROWS == 128))


@aggregate
class Starts:
    """Where sequences start: that of batch entry b is ``pointer[b * step] * unit`` rows in."""

    pointer: gl.tensor
    step: gl.tensor
    unit: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer, step, unit):
        self.pointer = pointer
        self.step = step
        self.unit = unit


@aggregate
class Gradient:
    """The dK or dV of the program's head and sequence: its first row, and a row's step."""

    at: gl.tensor
    row: gl.tensor

    @gluon.constexpr_function
    def __init__(self, at, row):
        self.at = at
        self.row = row


@aggregate
class Problem:
    """The program's part: BLOCK_KEYS keys of one head and sequence.

    ``rows`` and ``keys`` are the sequence's extents, ``end`` of the keys where dK and dV end;
    ``tiles`` and ``padded_rows`` are the same for all. ``batch_q`` and ``batch_kv`` are what tensor
    maps step by, ``q_row`` and the like the rows before a packed sequence. ``left`` and ``right``
    are the band in the sequence's rows: row i sees key j if i - left < j <= i + right. Of the rows
    that see the keys the program has share number ``share`` of ``shares``; ``first_share`` programs
    that share keys come before those that share these.
    """

    lse: gl.tensor
    delta: gl.tensor
    scale: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    end: gl.tensor
    padded_rows: gl.tensor
    left: gl.tensor
    right: gl.tensor
    heads_kv: gl.tensor
    group: gl.tensor
    first_key: gl.tensor
    head_kv: gl.tensor
    batch: gl.tensor
    batch_q: gl.tensor
    batch_kv: gl.tensor
    q_row: gl.tensor
    d_o_row: gl.tensor
    k_row: gl.tensor
    v_row: gl.tensor
    first_share: gl.tensor
    share: gl.tensor
    shares: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        lse,
        delta,
        scale,
        rows,
        keys,
        end,
        padded_rows,
        left,
        right,
        heads_kv,
        group,
        first_key,
        head_kv,
        batch,
        batch_q,
        batch_kv,
        q_row,
        d_o_row,
        k_row,
        v_row,
        first_share,
        share,
        shares,
    ):
        self.lse = lse
        self.delta = delta
        self.scale = scale
        self.rows = rows
        self.keys = keys
        self.end = end
        self.padded_rows = padded_rows
        self.left = left
        self.right = right
        self.heads_kv = heads_kv
        self.group = group
        self.first_key = first_key
        self.head_kv = head_kv
        self.batch = batch
        self.batch_q = batch_q
        self.batch_kv = batch_kv
        self.q_row = q_row
        self.d_o_row = d_o_row
        self.k_row = k_row
        self.v_row = v_row
        self.first_share = first_share
        self.share = share
        self.shares = shares


@aggregate
class Memory:
    """Shared memory: tiles, and "it is there" of each.

    ``lse`` and ``delta`` are parts of numbers where dQ is made too, and else numbers.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    d_o: gl.shared_memory_descriptor
    d_s: gl.shared_memory_descriptor
    pieces: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    d_o_full: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, d_o, d_s, pieces, lse, delta, q_full, d_o_full, keys_full):
        self.q = q
        self.k = k
        self.v = v
        self.d_o = d_o
        self.d_s = d_s
        self.pieces = pieces
        self.lse = lse
        self.delta = delta
        self.q_full = q_full
        self.d_o_full = d_o_full
        self.keys_full = keys_full


@aggregate
class RowMaps:
    """Tensor maps of what comes a tile of rows at a time.

    The parts of row statistics are maps where dQ is made too, and else nothing.
    """

    q: tensor_descriptor
    d_o: tensor_descriptor
    lse_parts: base_value
    delta_parts: base_value

    @gluon.constexpr_function
    def __init__(self, q, d_o, lse_parts, delta_parts):
        self.q = q
        self.d_o = d_o
        self.lse_parts = lse_parts
        self.delta_parts = delta_parts


@aggregate
class Given:
    """What all warps of a program are given: its part, where that comes from and where it goes.

    ``sums`` is a tensor map where dQ is made too, and else nothing.
    """

    rows: RowMaps
    sums: base_value
    memory: Memory
    problem: Problem
    config: Config
    d_k: Gradient
    d_v: Gradient
    d_k_map: tensor_descriptor
    d_v_map: tensor_descriptor
    held_shares: gl.tensor
    arrivals: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        rows,
        sums,
        memory,
        problem,
        config,
        d_k,
        d_v,
        d_k_map,
        d_v_map,
        held_shares,
        arrivals,
    ):
        self.rows = rows
        self.sums = sums
        self.memory = memory
        self.problem = problem
        self.config = config
        self.d_k = d_k
        self.d_v = d_v
        self.d_k_map = d_k_map
        self.d_v_map = d_v_map
        self.held_shares = held_shares
        self.arrivals = arrivals
