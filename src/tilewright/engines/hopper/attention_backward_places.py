"""Which keys a program of attention's backward owns, and which rows see them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_backward_records import Gradient, Problem
from tilewright.engines.hopper.attention_places import length_of


@gluon.jit
def fresh_zero(step):
    """A 0 of which the compiler does not know that it is the same in every step.

    What is addressed with it is addressed anew in each: addresses that are kept through the loop
    take registers from the sums, and one that is spilled comes back from L2.
    """
    return gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0;", "=r,r", [gl.to_tensor(step)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def share_of(whole, shares, config):
    """(block of keys, how many blocks, programs before that share, share, of how many).

    Blocks from number ``whole`` on have ``shares`` programs, each with a share of the rows.
    """
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    first_share, share, count = block * 0, block * 0, block * 0 + 1
    if config.SHARES:
        behind = max(block - whole, 0)
        if block >= whole:
            count = shares
        blocks = whole + (blocks - whole) // shares
        block = min(block, whole) + behind // shares
        share = behind % shares
        first_share = behind - share
    return block, blocks, first_share, share, count


@gluon.jit
def block_of(block, all_blocks, keys, heads_kv, together, config):
    """(first key, head, batch entry) of a block.

    Early keys see most rows under a causal mask: they come first, those of ``together`` heads, as
    many as L2 holds, next to one another.
    """
    blocks = (keys + config.BLOCK_KEYS - 1) // config.BLOCK_KEYS
    lines = all_blocks // blocks
    first_line = block // (blocks * together) * together
    place = block - first_line * blocks
    width = min(together, lines - first_line)
    line = first_line + place % width
    return (place // width) * config.BLOCK_KEYS, line % heads_kv, line // heads_kv


@gluon.jit
def extent_of(batch, lengths, step, declared, KIND: gl.constexpr):
    """The rows or keys of a batch entry."""
    return gl.to_tensor(length_of(batch, lengths, step, declared, KIND))


@gluon.jit
def start_of(batch, starts, RAGGED: gl.constexpr):
    """Rows before a batch entry of a packed operand; 0 for a dense one."""
    row = batch * 0
    if RAGGED:
        start = gl.load(starts.pointer + batch.to(gl.int64) * starts.step)
        row = (start.to(gl.int64) * starts.unit).to(gl.int32)
    return row


@gluon.jit
def problem_of(
    lse, delta, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step,
    q_starts, d_o_starts, k_starts, v_starts,
    scale, rows, keys, padded_rows, left, right, heads_kv, group, together, config,
    whole=0, shares=1,
):  # fmt: skip
    """The part of this program."""
    block, blocks, first_share, share, shares = share_of(whole, shares, config)
    first_key, head_kv, batch = block_of(block, blocks, keys, heads_kv, together, config)
    own_rows = extent_of(batch, lengths_q, lengths_q_step, rows, config.LENGTHS_Q)
    own_keys = extent_of(batch, lengths_kv, lengths_kv_step, keys, config.LENGTHS_KV)
    end = keys
    batch_q, batch_kv = batch, batch
    if config.RAGGED_Q:
        batch_q = batch * 0
    if config.RAGGED_KV:
        batch_kv = batch * 0
        end = own_keys
    if config.BOTTOM_RIGHT:
        left = left - (own_keys - own_rows)
        right = right + (own_keys - own_rows)
    return Problem(
        lse, delta, scale, own_rows, own_keys, end, padded_rows, left, right, heads_kv,
        group, first_key, head_kv, batch, batch_q, batch_kv,
        start_of(batch, q_starts, config.RAGGED_Q),
        start_of(batch, d_o_starts, config.RAGGED_Q),
        start_of(batch, k_starts, config.RAGGED_KV),
        start_of(batch, v_starts, config.RAGGED_KV),
        first_share, share, shares,
    )  # fmt: skip


@gluon.jit
def gradient_of(pointer, starts, batch_step, head_step, row_step, problem, config):
    """The dK or dV of the program's head and sequence."""
    at = pointer + problem.head_kv.to(gl.int64) * head_step
    if config.RAGGED_KV:
        at += start_of(problem.batch, starts, True).to(gl.int64) * row_step
    else:
        at += problem.batch.to(gl.int64) * batch_step
    return Gradient(at, row_step)


@gluon.jit
def works(problem, config):
    """False for a program behind the end of a packed sequence: nothing is there to be written."""
    is_there = problem.keys >= 0
    if config.RAGGED_KV:
        is_there = problem.first_key < problem.keys
    return is_there


@gluon.jit
def row_tiles(problem, config):
    """Tiles [low, high) of rows that see some key of the block: i - left < j <= i + right.

    Keys that no row sees get one tile all the same, in which everything is hidden.
    """
    low = problem.first_key * 0
    end = problem.rows
    if config.HAS_RIGHT:
        low = max(problem.first_key - problem.right, 0) // config.ROWS
    if config.HAS_LEFT:
        last = min(problem.first_key + config.BLOCK_KEYS, problem.keys) - 1
        end = min(end, max(last + problem.left, 0))
    high = (end + config.ROWS - 1) // config.ROWS
    low = min(low, problem.padded_rows // config.ROWS - 1)
    high = max(high, low + 1)
    if config.SHARES:
        count = high - low
        high = low + count * (problem.share + 1) // problem.shares
        low = low + count * problem.share // problem.shares
    return low, high


@gluon.jit
def turned(tile, low, high, config):
    """The tile that is walked in place of ``tile``: under a causal mask the last one first.

    All keys have those, so that programs of a head that run together walk the same rows.
    """
    if config.HAS_RIGHT and not config.HAS_LEFT:
        tile = low + high - 1 - tile
    return tile


@gluon.jit
def open_tiles(low, high, problem, config):
    """Tiles [low_open, high_open) of those whose rows all see all keys of the block."""
    low_open, high_open = low, high
    if config.HAS_RIGHT:
        first = problem.first_key + config.BLOCK_KEYS - 1 - problem.right
        low_open = max(first + config.ROWS - 1, 0) // config.ROWS
    if config.HAS_LEFT:
        end = problem.first_key + problem.left
        high_open = max(end, 0) // config.ROWS
    if config.HAS_TAIL:
        if problem.first_key + config.BLOCK_KEYS > problem.keys:
            low_open = high
    if config.HAS_END:
        if problem.rows <= low * config.ROWS:
            low_open = high
    low_open = min(max(low_open, low), high)
    high_open = min(max(high_open, low_open), high)
    return low_open, high_open


@gluon.jit
def visible_or_zero(values, key, first_row, problem, config):
    """Values of (keys, rows) with 0 where a row does not see a key."""
    row = first_row + gl.arange(0, config.ROWS, gl.SliceLayout(0, values.type.layout))
    seen = (key < problem.keys)[:, None]
    if config.HAS_RIGHT:
        seen = seen & (key[:, None] <= (row + problem.right)[None, :])
    if config.HAS_LEFT:
        seen = seen & (key[:, None] > (row - problem.left)[None, :])
    if config.HAS_END:
        # Their P is 0, and 0 times NaN is NaN.
        seen = seen & (row < problem.rows)[None, :]
    return gl.where(seen, values, 0.0)
