"""Attention backward on SM90, the device code: dQ alone, a block of 128 rows a program.

For a fixed order of dQ's sums, and for head sizes whose dK, dV and dQ do not fit one program. One
warp moves Q and dO of the rows, then blocks of BLOCK keys into rings of K and V; two consumers of
four warps own 64 rows each:

    S = Q K^T,   dP = dO V^T - Delta,   P = 2^(c S - Stats),   dS = P dP,   dQ += dS K.

The last product of a block is made beside the first two of the next, so that exponentials run
under products. Everything stays in registers, in an order that does not change.

Where keys are hidden, a block's NaN and infinities are replaced by 0 (a hidden key must not matter
times a 0), and P of a key that had one is NaN for the rows that see it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_backward_places import extent_of, fresh_zero, start_of
from tilewright.engines.hopper.attention_backward_query_parts import (
    BLOCK_ROWS,
    ROWS,
    Config,
    Memory,
    Problem,
    is_masked,
    key_blocks,
    open_blocks,
    visible_or_zero,
)
from tilewright.engines.hopper.attention_backward_records import Starts
from tilewright.engines.hopper.barriers import (
    FIRST_FREE,
    barrier_arrive,
    barrier_wait,
    partition_barrier,
)

LOG2E = gl.constexpr(1.4426950408889634)
# Named barriers: the consumers' own, then one a stage that the producer waits at.
CLEANED = gl.constexpr(FIRST_FREE)
RELEASE_K = gl.constexpr(FIRST_FREE + 1)
RELEASE_V = gl.constexpr(FIRST_FREE + 5)
CONSUMERS = gl.constexpr("256")
# Of so many blocks it is noted which keys had NaN: as far as one consumer may be ahead.
NOTES = gl.constexpr(4)
EVERYBODY = gl.constexpr("288")


@gluon.jit
def produce(q_map, k_map, v_map, d_o_map, memory, problem, config):
    """The producer warp: every copy into shared memory."""
    rows_full = memory.rows_full.index(0)
    mbarrier.expect(rows_full, BLOCK_ROWS * (config.DEPTH + config.DEPTH_V) * 2)
    for w in gl.static_range(2):
        row = problem.first_row + w * ROWS
        tma.async_copy_global_to_shared(
            q_map,
            [problem.batch_q, problem.head, problem.q_row + row, 0],
            rows_full,
            memory.q.index(w),
        )
        tma.async_copy_global_to_shared(
            d_o_map,
            [problem.batch_q, problem.head, problem.d_o_row + row, 0],
            rows_full,
            memory.d_o.index(w),
        )
    low, high = key_blocks(problem, config)
    steps = high - low
    for step in range(steps):
        key = (low + step) * config.BLOCK
        stage = step % config.STAGES
        if step >= config.STAGES:
            barrier_wait(RELEASE_K + stage, EVERYBODY)
        k_full = memory.k_full.index(stage)
        mbarrier.expect(k_full, config.BLOCK * config.DEPTH * 2)
        tma.async_copy_global_to_shared(
            k_map,
            [problem.batch_kv, problem.head_kv, problem.k_row + key, 0],
            k_full,
            memory.k.index(stage),
        )
        stage = step % config.STAGES_V
        if step >= config.STAGES_V:
            barrier_wait(RELEASE_V + stage, EVERYBODY)
        v_full = memory.v_full.index(stage)
        mbarrier.expect(v_full, config.BLOCK * config.DEPTH_V * 2)
        tma.async_copy_global_to_shared(
            v_map,
            [problem.batch_kv, problem.head_kv, problem.v_row + key, 0],
            v_full,
            memory.v.index(stage),
        )
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for left_over in range(max(steps - config.STAGES, 0), steps):
        barrier_wait(RELEASE_K + left_over % config.STAGES, EVERYBODY)
    for left_over in range(max(steps - config.STAGES_V, 0), steps):
        barrier_wait(RELEASE_V + left_over % config.STAGES_V, EVERYBODY)


@gluon.jit
def clean_block(k, notes, config, CONSUMER: gl.constexpr):
    """Put 0 for NaN and infinity in half of a block of K, and note the keys that had one."""
    PART: gl.constexpr = 16
    D: gl.constexpr = config.DEPTH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for i in gl.static_range(config.BLOCK // 2 // PART):
        part = k.slice(CONSUMER * (config.BLOCK // 2) + i * PART, PART, 0)
        held = part.load(layout)
        is_finite = gl.abs(held.to(gl.float32)) < float("inf")
        part.store(gl.where(is_finite, held, 0.0).to(held.dtype))
        note = notes.slice(CONSUMER * (config.BLOCK // 2) + i * PART, PART, 0)
        note.store(gl.max(gl.where(is_finite, 0, 1), axis=1))
    fence_async_shared()
    barrier_wait(CLEANED, CONSUMERS)


@gluon.jit
def start_scores(step, block, low_open, high_open, zero, memory, config,
                 CONSUMER: gl.constexpr):  # fmt: skip
    """Start Q K^T of a block when it is there."""
    stage = step % config.STAGES
    mbarrier.wait(memory.k_full.index(stage), (step // config.STAGES) & 1)
    k = memory.k.index(stage)
    if config.HIDES:
        if is_masked(block, low_open, high_open):
            clean_block(k, memory.spoiled.index(step % NOTES), config, CONSUMER)
    q = memory.q.index(CONSUMER + fresh_zero(step))
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_weights(step, zero, memory, config, CONSUMER: gl.constexpr):
    """Start dO V^T of a block when it is there."""
    stage = step % config.STAGES_V
    mbarrier.wait(memory.v_full.index(stage), (step // config.STAGES_V) & 1)
    v = memory.v.index(stage)
    d_o = memory.d_o.index(CONSUMER + fresh_zero(step))
    return warpgroup_mma(d_o, v.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def probabilities(scores, lse, row, step, block, low_open, high_open, memory, problem, config):
    """P of a block, 0 where a row does not see a key."""
    p = gl.exp2(scores * (problem.scale * LOG2E) - lse[:, None])
    if config.MASKS:
        if is_masked(block, low_open, high_open):
            if config.HIDES:
                keys: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
                p = gl.where(
                    (memory.spoiled.index(step % NOTES).load(keys) > 0)[None, :], float("nan"), p
                )
            p = visible_or_zero(p, row, block * config.BLOCK, problem, config)
    return p


@gluon.jit
def score_gradients(p, d_p, delta, row, block, low_open, high_open, problem, config,
                    dtype: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """A block's dS as an operand."""
    d_s = p * (d_p - delta[:, None])
    if config.MASKS:
        if is_masked(block, low_open, high_open):
            d_s = visible_or_zero(d_s, row, block * config.BLOCK, problem, config)
    return gl.convert_layout(d_s.to(dtype), layout)


@gluon.jit
def consume(memory, problem, config, CONSUMER: gl.constexpr):
    """A consumer: 64 rows against every block of keys."""
    D: gl.constexpr = config.DEPTH
    STAGES: gl.constexpr = config.STAGES
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.BLOCK, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    dtype: gl.constexpr = memory.q.dtype
    acc = gl.zeros([ROWS, D], gl.float32, out_layout)
    zero = gl.zeros([ROWS, config.BLOCK], gl.float32, score_layout)
    first = problem.first_row + CONSUMER * ROWS
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    lse = gl.load(problem.lse + row)
    delta = gl.load(problem.delta + row)
    low, high = key_blocks(problem, config)
    low_open, high_open = open_blocks(low, high, problem, config)
    mbarrier.wait(memory.rows_full.index(0), 0)
    scores_token = start_scores(low * 0, low, low_open, high_open, zero, memory, config, CONSUMER)
    d_p_token = start_weights(low * 0, zero, memory, config, CONSUMER)
    scores = warpgroup_mma_wait(1, deps=(scores_token,))
    p = probabilities(scores, lse, row, low * 0, low, low_open, high_open, memory, problem, config)
    d_p = warpgroup_mma_wait(0, deps=(d_p_token,))
    barrier_arrive(RELEASE_V, EVERYBODY)
    d_s = score_gradients(
        p, d_p, delta, row, low, low_open, high_open, problem, config, dtype, operand_layout
    )
    for step in range(1, high - low):
        block = low + step
        before = (step - 1) % STAGES
        scores_token = start_scores(
            step, block, low_open, high_open, zero, memory, config, CONSUMER
        )
        acc_token = warpgroup_mma(d_s, memory.k.index(before), acc, is_async=True)
        if config.EARLY:
            d_p_token = start_weights(step, zero, memory, config, CONSUMER)
        scores = warpgroup_mma_wait(2 if config.EARLY else 1, deps=(scores_token,))
        p = probabilities(
            scores, lse, row, step, block, low_open, high_open, memory, problem, config
        )
        acc, d_s = warpgroup_mma_wait(1 if config.EARLY else 0, deps=(acc_token, d_s))
        barrier_arrive(RELEASE_K + before, EVERYBODY)
        if not config.EARLY:
            # There are no registers for it beside dS.
            d_p_token = start_weights(step, zero, memory, config, CONSUMER)
        d_p = warpgroup_mma_wait(0, deps=(d_p_token,))
        barrier_arrive(RELEASE_V + step % config.STAGES_V, EVERYBODY)
        d_s = score_gradients(
            p, d_p, delta, row, block, low_open, high_open, problem, config, dtype, operand_layout
        )
    last = (high - low - 1) % STAGES
    acc_token = warpgroup_mma(d_s, memory.k.index(last), acc, is_async=True)
    acc, d_s = warpgroup_mma_wait(0, deps=(acc_token, d_s))
    barrier_arrive(RELEASE_K + last, EVERYBODY)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    out_row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    # Through the memory of Q, which nobody reads any more.
    q = memory.q.index(CONSUMER)
    q.store((acc * problem.scale).to(dtype))
    partition_barrier()
    pointers = problem.d_q + out_row.to(gl.int64)[:, None] * problem.d_q_row + column[None, :]
    mask = (out_row < problem.end)[:, None] & (column < config.WIDTH)[None, :]
    # Rows of padding are 0, whatever their Q and dO hold.
    live = (out_row < problem.rows)[:, None]
    gl.store(pointers, gl.where(live, q.load(layout), 0.0).to(dtype), mask=mask)


@gluon.jit
def works(problem, config):
    """False for a program behind the end of a packed sequence: nothing is there to be written."""
    is_there = problem.rows >= 0
    if config.RAGGED_Q:
        is_there = problem.first_row < problem.rows
    return is_there


@gluon.jit
def consume_0(q_map, k_map, v_map, d_o_map, memory, problem, config):
    if works(problem, config):
        consume(memory, problem, config, 0)


@gluon.jit
def consume_1(q_map, k_map, v_map, d_o_map, memory, problem, config):
    if works(problem, config):
        consume(memory, problem, config, 1)


@gluon.jit
def produce_for(q_map, k_map, v_map, d_o_map, memory, problem, config):
    if works(problem, config):
        produce(q_map, k_map, v_map, d_o_map, memory, problem, config)


@gluon.jit
def attention_backward_query(
    q_map, k_map, v_map, d_o_map, d_q, lse, delta,
    lengths_q, lengths_q_step, lengths_kv, lengths_kv_step,
    q_starts, q_starts_step, q_unit, d_o_starts, d_o_starts_step, d_o_unit,
    k_starts, k_starts_step, k_unit, v_starts, v_starts_step, v_unit,
    d_q_starts, d_q_starts_step, d_q_unit,
    scale, rows, keys, padded_rows, left, right, heads_kv, group, together,
    d_q_batch, d_q_head, d_q_row,
    DEPTH: gl.constexpr, DEPTH_V: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, STAGES_V: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, HAS_TAIL: gl.constexpr, LENGTHS_Q: gl.constexpr,
    LENGTHS_KV: gl.constexpr, RAGGED_Q: gl.constexpr, RAGGED_KV: gl.constexpr,
):  # fmt: skip
    config = Config(
        DEPTH, DEPTH_V, WIDTH, BLOCK, STAGES, STAGES_V, HAS_LEFT, HAS_RIGHT, HAS_TAIL, LENGTHS_KV,
        RAGGED_Q,
    )  # fmt: skip
    # Late rows see most keys under a causal mask: they come first, those of ``together`` heads,
    # whose keys L2 holds, next to one another.
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    heads = heads_kv * group
    program = gl.program_id(0)
    first_line = program // (blocks * together) * together
    place = program - first_line * blocks
    width = min(together, gl.num_programs(0) // blocks - first_line)
    line = first_line + place % width
    first_row = (blocks - 1 - place // width) * BLOCK_ROWS
    head, batch = line % heads, line // heads
    own_rows = extent_of(batch, lengths_q, lengths_q_step, rows, LENGTHS_Q)
    own_keys = extent_of(batch, lengths_kv, lengths_kv_step, keys, LENGTHS_KV)
    end = rows
    batch_q, batch_kv = batch, batch
    d_q += head.to(gl.int64) * d_q_head
    if RAGGED_Q:
        batch_q = batch * 0
        end = own_rows
        first = start_of(batch, Starts(d_q_starts, d_q_starts_step, d_q_unit), True)
        d_q += first.to(gl.int64) * d_q_row
    else:
        d_q += batch.to(gl.int64) * d_q_batch
    if RAGGED_KV:
        batch_kv = batch * 0
    if BOTTOM_RIGHT:
        left = left - (own_keys - own_rows)
        right = right + (own_keys - own_rows)
    statistics = line.to(gl.int64) * padded_rows
    problem = Problem(
        lse + statistics, delta + statistics, d_q, d_q_row, scale, own_rows, own_keys, end, left,
        right, first_row, head, head // group, batch_q, batch_kv,
        start_of(batch, Starts(q_starts, q_starts_step, q_unit), RAGGED_Q),
        start_of(batch, Starts(d_o_starts, d_o_starts_step, d_o_unit), RAGGED_Q),
        start_of(batch, Starts(k_starts, k_starts_step, k_unit), RAGGED_KV),
        start_of(batch, Starts(v_starts, v_starts_step, v_unit), RAGGED_KV),
    )  # fmt: skip
    dtype: gl.constexpr = q_map.dtype
    depth_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH], dtype)
    depth_v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH_V], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    memory = Memory(
        gl.allocate_shared_memory(dtype, [2, ROWS, DEPTH], depth_layout),
        gl.allocate_shared_memory(dtype, [2, ROWS, DEPTH_V], depth_v_layout),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DEPTH], depth_layout),
        gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK, DEPTH_V], depth_v_layout),
        gl.allocate_shared_memory(gl.int32, [NOTES, BLOCK], plain),
        gl.allocate_shared_memory(gl.int64, [1, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES_V, 1], one),
    )
    mbarrier.init(memory.rows_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.k_full.index(i), count=1)
    for i in gl.static_range(STAGES_V):
        mbarrier.init(memory.v_full.index(i), count=1)
    fence_async_shared()
    arguments = (q_map, k_map, v_map, d_o_map, memory, problem, config)
    gl.warp_specialize(
        [(consume_0, arguments), (consume_1, arguments), (produce_for, arguments)],
        [4, 1],
        [240, 24],
    )
