"""The consumers of attention's backward: 64 keys each against every tile of rows that sees them.

What lies between two waits is under way together. A step makes the gradients of one tile and the
probabilities of the next:

    dP^T = V dO^T - Delta | dV += P^T dO       dS = P dP while dV is made
    dK += dS^T Q          | S'^T = K Q'^T      P' = 2^(c S' - Stats')

Nothing is under way between steps: an accumulator that crosses a loop's edge would be waited for.
Where dQ is made too, the consumers are those of ``attention_backward_sums``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_backward_places import (
    fresh_zero,
    open_tiles,
    row_tiles,
    visible_or_zero,
)
from tilewright.engines.hopper.attention_backward_records import (
    EVERYBODY,
    KEYS,
    RELEASE_O,
    RELEASE_Q,
)
from tilewright.engines.hopper.attention_records import NO_LENGTHS
from tilewright.engines.hopper.barriers import barrier_arrive, partition_barrier

LOG2E = gl.constexpr(1.4426950408889634)
# Columns of a wide tile that are cleared at a time: all of them would take registers of the loop.
NARROW = gl.constexpr(64)


@gluon.jit
def clear_rows(tile, first_row, rows, config):
    """Zero what a tile has of rows behind the sequence: a P of 0 times NaN would be NaN.

    Both consumers do so; they write the same.
    """
    if config.LENGTHS_Q != NO_LENGTHS:
        if first_row + config.ROWS > rows:
            WIDTH: gl.constexpr = tile.shape[1]
            PART: gl.constexpr = WIDTH if WIDTH <= 2 * NARROW else NARROW
            layout: gl.constexpr = gl.BlockedLayout(
                [1, 8], [256 // PART, PART // 8], [4, 1], [1, 0]
            )
            row = first_row + gl.arange(0, config.ROWS, gl.SliceLayout(1, layout))
            for first in gl.static_range(0, WIDTH, PART):
                part = tile
                if PART < WIDTH:
                    part = tile.slice(first, PART, 1)
                held = part.load(layout)
                part.store(gl.where((row < rows)[:, None], held, 0.0).to(tile.dtype))
            fence_async_shared()
            partition_barrier()


@gluon.jit
def is_masked(tile, low_open, high_open):
    """True if some row of a tile does not see some key."""
    return (tile < low_open) | (tile >= high_open)


@gluon.jit
def probabilities(scores, lse, key, tile, low_open, high_open, problem, config):
    """P^T of a tile, 0 where a row does not see a key."""
    p = gl.exp2(scores * (problem.scale * LOG2E) - lse[None, :])
    if config.MASKS:
        if is_masked(tile, low_open, high_open):
            p = visible_or_zero(p, key, tile * config.ROWS, problem, config)
    return p


@gluon.jit
def start_gradients(
    p, acc_k, acc_v, zero, key, tile, low_open, high_open, step, memory, problem, config,
    d_s_layout: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A tile's dV, its dS, and the start of its dK: (the token of dK, dV, dS as an operand)."""
    rows_layout: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_v.type.layout, 2)
    dtype: gl.constexpr = memory.q.dtype
    stage = step % config.STAGES
    stage_o = step % config.STAGES_O
    d_o = memory.d_o.index(stage_o)
    mbarrier.wait(memory.d_o_full.index(stage_o), (step // config.STAGES_O) & 1)
    clear_rows(d_o, tile * config.ROWS, problem.rows, config)
    start = gl.zeros_like(zero) + memory.delta.index(stage).load(rows_layout)[None, :]
    d_p_token = warpgroup_mma(
        memory.v.index(CONSUMER + fresh_zero(step)),
        d_o.permute((1, 0)),
        start,
        is_async=True,
    )
    p_operand = gl.convert_layout(p.to(dtype), p_layout)
    v_token = warpgroup_mma(p_operand, d_o, acc_v, is_async=True)
    d_s = p * warpgroup_mma_wait(1, deps=(d_p_token,))
    if config.MASKS:
        if is_masked(tile, low_open, high_open):
            d_s = visible_or_zero(d_s, key, tile * config.ROWS, problem, config)
    d_s_operand = gl.convert_layout(d_s.to(dtype), d_s_layout)
    k_token = warpgroup_mma(d_s_operand, memory.q.index(stage), acc_k, is_async=True)
    acc_v, p_operand = warpgroup_mma_wait(1, deps=(v_token, p_operand))
    barrier_arrive(RELEASE_O + stage_o, EVERYBODY)
    return k_token, acc_v, d_s_operand


@gluon.jit
def consume(given, CONSUMER: gl.constexpr):
    """A consumer: 64 keys against every tile of rows."""
    memory, problem, config = given.memory, given.problem, given.config
    D: gl.constexpr = config.DEPTH
    ROWS: gl.constexpr = config.ROWS
    STAGES: gl.constexpr = config.STAGES
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.DEPTH_V, 16])
    d_s_layout: gl.constexpr = gl.DotOperandLayout(0, key_layout, 2)
    dtype: gl.constexpr = memory.q.dtype
    acc_k = gl.zeros([KEYS, D], gl.float32, key_layout)
    acc_v = gl.zeros([KEYS, config.DEPTH_V], gl.float32, value_layout)
    zero = gl.zeros([KEYS, ROWS], gl.float32, score_layout)
    first_own = problem.first_key + CONSUMER * KEYS
    key = first_own + gl.arange(0, KEYS, gl.SliceLayout(1, score_layout))
    low, high = row_tiles(problem, config)
    low_open, high_open = open_tiles(low, high, problem, config)
    k = memory.k.index(CONSUMER)
    mbarrier.wait(memory.keys_full.index(0), 0)
    tile = low
    mbarrier.wait(memory.q_full.index(0), 0)
    q = memory.q.index(0)
    clear_rows(q, tile * ROWS, problem.rows, config)
    token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = memory.lse.index(0).load(rows_layout)
    scores = warpgroup_mma_wait(0, deps=(token,))
    p = probabilities(scores, lse, key, tile, low_open, high_open, problem, config)
    steps = (high - low) * problem.group
    for step in range(steps - 1):
        k_token, acc_v, d_s_operand = start_gradients(
            p, acc_k, acc_v, zero, key, tile, low_open, high_open, step, memory, problem, config,
            d_s_layout, CONSUMER,
        )  # fmt: skip
        tile += 1
        if tile == high:
            tile = low
        stage = (step + 1) % STAGES
        mbarrier.wait(memory.q_full.index(stage), ((step + 1) // STAGES) & 1)
        q = memory.q.index(stage)
        clear_rows(q, tile * ROWS, problem.rows, config)
        k = memory.k.index(CONSUMER + fresh_zero(step))
        token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = memory.lse.index(stage).load(rows_layout)
        scores, acc_k, d_s_operand = warpgroup_mma_wait(0, deps=(token, k_token, d_s_operand))
        barrier_arrive(RELEASE_Q + step % STAGES, EVERYBODY)
        p = probabilities(scores, lse, key, tile, low_open, high_open, problem, config)
    step = steps - 1
    k_token, acc_v, d_s_operand = start_gradients(
        p, acc_k, acc_v, zero, key, tile, low_open, high_open, step, memory, problem, config,
        d_s_layout, CONSUMER,
    )  # fmt: skip
    acc_k, d_s_operand = warpgroup_mma_wait(0, deps=(k_token, d_s_operand))
    barrier_arrive(RELEASE_Q + step % STAGES, EVERYBODY)
    store_gradient(acc_k * problem.scale, given.d_k, first_own, problem, config.WIDTH, dtype)
    store_gradient(acc_v, given.d_v, first_own, problem, config.WIDTH_V, dtype)


@gluon.jit
def store_gradient(values, gradient, first_key, problem, WIDTH: gl.constexpr, dtype: gl.constexpr):
    """Store WIDTH columns of a consumer's (64, D) rows of dK or dV, up to the last key."""
    D: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = gradient.at + key.to(gl.int64)[:, None] * gradient.row + column[None, :]
    mask = (key < problem.end)[:, None] & (column < WIDTH)[None, :]
    gl.store(pointers, gl.convert_layout(values.to(dtype), layout), mask=mask)
