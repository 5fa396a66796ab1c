"""What the kernel of dQ alone passes around, and which keys a program's rows see.

Records of Gluon: their fields live in registers or are compile-time. (No postponed annotations
here: the compiler reads the types.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

# Rows of a consumer, and of a program.
ROWS = gl.constexpr(64)
BLOCK_ROWS = gl.constexpr(128)


@aggregate
class Config:
    """What the code specializes on."""

    DEPTH: gl.constexpr
    DEPTH_V: gl.constexpr
    WIDTH: gl.constexpr
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    STAGES_V: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_TAIL: gl.constexpr
    RAGGED_Q: gl.constexpr
    EARLY: gl.constexpr
    HIDES: gl.constexpr
    MASKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        DEPTH,
        DEPTH_V,
        WIDTH,
        BLOCK,
        STAGES,
        STAGES_V,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_TAIL,
        LENGTHS_KV,
        RAGGED_Q,
    ):
        self.DEPTH = gl.constexpr(DEPTH)
        self.DEPTH_V = gl.constexpr(DEPTH_V)
        self.WIDTH = gl.constexpr(WIDTH)
        self.BLOCK = gl.constexpr(BLOCK)
        self.STAGES = gl.constexpr(STAGES)
        self.STAGES_V = gl.constexpr(STAGES_V)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_TAIL = gl.constexpr(HAS_TAIL)
        self.RAGGED_Q = gl.constexpr(RAGGED_Q)
        self.EARLY = gl.constexpr(DEPTH // 2 + BLOCK * 5 // 4 <= 208)
        self.HIDES = gl.constexpr(HAS_LEFT or HAS_RIGHT or LENGTHS_KV != 0)
        self.MASKS = gl.constexpr(HAS_LEFT or HAS_RIGHT or HAS_TAIL)


@aggregate
class Problem:
    """The program's part: 128 rows of one head and sequence; see the records of the other kernel.

    Blocks [low, high) of keys are seen by some row, [low_open, high_open) by all.
    """

    lse: gl.tensor
    delta: gl.tensor
    d_q: gl.tensor
    d_q_row: gl.tensor
    scale: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    end: gl.tensor
    left: gl.tensor
    right: gl.tensor
    first_row: gl.tensor
    head: gl.tensor
    head_kv: gl.tensor
    batch_q: gl.tensor
    batch_kv: gl.tensor
    q_row: gl.tensor
    d_o_row: gl.tensor
    k_row: gl.tensor
    v_row: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        lse,
        delta,
        d_q,
        d_q_row,
        scale,
        rows,
        keys,
        end,
        left,
        right,
        first_row,
        head,
        head_kv,
        batch_q,
        batch_kv,
        q_row,
        d_o_row,
        k_row,
        v_row,
    ):
        self.lse = lse
        self.delta = delta
        self.d_q = d_q
        self.d_q_row = d_q_row
        self.scale = scale
        self.rows = rows
        self.keys = keys
        self.end = end
        self.left = left
        self.right = right
        self.first_row = first_row
        self.head = head
        self.head_kv = head_kv
        self.batch_q = batch_q
        self.batch_kv = batch_kv
        self.q_row = q_row
        self.d_o_row = d_o_row
        self.k_row = k_row
        self.v_row = v_row


@aggregate
class Memory:
    """Shared memory: tiles, which keys of a block had NaN, and "it is there" of each."""

    q: gl.shared_memory_descriptor
    d_o: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    spoiled: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, d_o, k, v, spoiled, rows_full, k_full, v_full):
        self.q = q
        self.d_o = d_o
        self.k = k
        self.v = v
        self.spoiled = spoiled
        self.rows_full = rows_full
        self.k_full = k_full
        self.v_full = v_full


@gluon.jit
def key_blocks(problem, config):
    """Blocks [low, high) of keys that some row of the program sees; at least one."""
    last = problem.keys
    if config.HAS_RIGHT:
        last = min(problem.first_row + BLOCK_ROWS + problem.right, last)
    low = problem.first_row * 0
    high = max((last + config.BLOCK - 1) // config.BLOCK, 1)
    if config.HAS_LEFT:
        low = max(problem.first_row - problem.left + 1, 0) // config.BLOCK
        low = min(low, high - 1)
    return low, high


@gluon.jit
def open_blocks(low, high, problem, config):
    """Blocks [low_open, high_open) of those that all rows see whole."""
    low_open, high_open = low, high
    if config.HAS_RIGHT:
        high_open = max(problem.first_row + problem.right + 1, 0) // config.BLOCK
    if config.HAS_TAIL:
        high_open = min(high_open, problem.keys // config.BLOCK)
    if config.HAS_LEFT:
        hidden = max(problem.first_row + BLOCK_ROWS - problem.left, 0)
        low_open = (hidden + config.BLOCK - 1) // config.BLOCK
    return low_open, high_open


@gluon.jit
def visible_or_zero(values, row, first_key, problem, config):
    """Values of (rows, keys) with 0 where a row does not see a key."""
    key = first_key + gl.arange(0, config.BLOCK, gl.SliceLayout(0, values.type.layout))
    seen = (key < problem.keys)[None, :]
    if config.HAS_RIGHT:
        seen = seen & (key[None, :] <= (row + problem.right)[:, None])
    if config.HAS_LEFT:
        seen = seen & (key[None, :] > (row - problem.left)[:, None])
    return gl.where(seen, values, 0.0)


@gluon.jit
def is_masked(block, low_open, high_open):
    """True if some row does not see some key of a block."""
    return (block < low_open) | (block >= high_open)
