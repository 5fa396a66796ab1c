"""Attention backward on SM90, the device code for wide heads: dK and dV.

Their sums fill the registers of two consumers, so that a program owns 64 keys and each consumer
makes one of the two, from a product of its own:

    values:  S^T = K Q^T,           P = 2^(c S - Stats),   dV += P^T dO;
    keys:    dP^T = V dO^T - Delta, dS = P dP,             dK += dS^T Q.

P goes from the first to the second through shared memory. In both the first product of the next
tile of rows is made beside the last one of this tile. dQ has a kernel of its own
(``attention_backward_query``).
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
from triton.language.core import _aggregate as aggregate

from tilewright.engines.hopper.attention_backward_consumer import LOG2E, clear_rows, is_masked
from tilewright.engines.hopper.attention_backward_places import (
    gradient_of,
    open_tiles,
    problem_of,
    row_tiles,
    visible_or_zero,
    works,
)
from tilewright.engines.hopper.attention_backward_records import (
    KEYS,
    Config,
    Starts,
)
from tilewright.engines.hopper.barriers import (
    FIRST_FREE,
    barrier_arrive,
    barrier_wait,
    partition_barrier,
)

# Which sums a consumer makes.
VALUES = gl.constexpr(0)
OF_KEYS = gl.constexpr(1)
# Named barriers, two of each: "P is there", "P was read", and a tile's release.
P_FULL = gl.constexpr(FIRST_FREE)
P_FREE = gl.constexpr(FIRST_FREE + 2)
RELEASE_Q = gl.constexpr(FIRST_FREE + 4)
RELEASE_O = gl.constexpr(FIRST_FREE + 6)
CONSUMERS = gl.constexpr("256")
EVERYBODY = gl.constexpr("288")
STAGES = gl.constexpr(2)


@aggregate
class Memory:
    """Shared memory: tiles, row statistics, P, and "it is there" of what is copied."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    d_o: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    d_o_full: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, d_o, p, lse, delta, q_full, d_o_full, keys_full):
        self.q = q
        self.k = k
        self.v = v
        self.d_o = d_o
        self.p = p
        self.lse = lse
        self.delta = delta
        self.q_full = q_full
        self.d_o_full = d_o_full
        self.keys_full = keys_full


@gluon.jit
def copy_tile(tensor, place, full, tile, statistic, at, bytes: gl.constexpr):
    """A tile of rows and its row statistics, which arrive together."""
    mbarrier.expect(full, bytes)
    tma.async_copy_global_to_shared(tensor, place, full, tile)
    at.store(statistic)
    mbarrier.arrive(full, count=1)


@gluon.jit
def produce(q_map, k_map, v_map, d_o_map, memory, problem, config):
    """The producer warp: every copy into shared memory."""
    ROWS: gl.constexpr = config.ROWS
    batch_kv, head_kv = problem.batch_kv, problem.head_kv
    k_full, v_full = memory.keys_full.index(0), memory.keys_full.index(1)
    mbarrier.expect(k_full, KEYS * config.DEPTH * 2)
    tma.async_copy_global_to_shared(
        k_map, [batch_kv, head_kv, problem.k_row + problem.first_key, 0], k_full, memory.k
    )
    mbarrier.expect(v_full, KEYS * config.DEPTH_V * 2)
    tma.async_copy_global_to_shared(
        v_map, [batch_kv, head_kv, problem.v_row + problem.first_key, 0], v_full, memory.v
    )
    low, high = row_tiles(problem, config)
    heads = problem.heads_kv * problem.group
    row = gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
    step = low * 0
    for member in range(problem.group):
        head = head_kv * problem.group + member
        line = (problem.batch * heads + head).to(gl.int64) * problem.padded_rows
        for tile in range(low, high):
            first = tile * ROWS
            stage = step % STAGES
            lse = gl.load(problem.lse + line + first + row)
            delta = gl.load(problem.delta + line + first + row)
            if step >= STAGES:
                barrier_wait(RELEASE_Q + stage, EVERYBODY)
            copy_tile(
                q_map, [problem.batch_q, head, problem.q_row + first, 0],
                memory.q_full.index(stage), memory.q.index(stage),
                lse, memory.lse.index(stage), ROWS * config.DEPTH * 2,
            )  # fmt: skip
            if step >= STAGES:
                barrier_wait(RELEASE_O + stage, EVERYBODY)
            # The sums of dP start from -Delta.
            copy_tile(
                d_o_map, [problem.batch_q, head, problem.d_o_row + first, 0],
                memory.d_o_full.index(stage), memory.d_o.index(stage),
                -delta, memory.delta.index(stage), ROWS * config.DEPTH_V * 2,
            )  # fmt: skip
            step += 1
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for left_over in range(max(step - STAGES, 0), step):
        barrier_wait(RELEASE_Q + left_over % STAGES, EVERYBODY)
        barrier_wait(RELEASE_O + left_over % STAGES, EVERYBODY)


@gluon.jit
def start_first(own, step, tile, zero, memory, problem, config, ROLE: gl.constexpr):
    """Start S^T or dP^T of a tile when it is there: (token, Stats of its rows)."""
    rows_layout: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    if ROLE == VALUES:
        mbarrier.wait(memory.q_full.index(stage), phase)
        other = memory.q.index(stage)
        clear_rows(other, tile * config.ROWS, problem.rows, config)
        token = warpgroup_mma(own, other.permute((1, 0)), zero, use_acc=False, is_async=True)
        statistic = memory.lse.index(stage).load(rows_layout)
    else:
        mbarrier.wait(memory.d_o_full.index(stage), phase)
        other = memory.d_o.index(stage)
        clear_rows(other, tile * config.ROWS, problem.rows, config)
        statistic = memory.delta.index(stage).load(rows_layout)
        start = gl.zeros_like(zero) + statistic[None, :]
        token = warpgroup_mma(own, other.permute((1, 0)), start, is_async=True)
    return token, statistic


@gluon.jit
def start_second(weights, acc, step, tile, memory, problem, config, ROLE: gl.constexpr):
    """Start a tile's part of dV or dK."""
    stage = step % STAGES
    phase = (step // STAGES) & 1
    if ROLE == VALUES:
        mbarrier.wait(memory.d_o_full.index(stage), phase)
        other = memory.d_o.index(stage)
    else:
        mbarrier.wait(memory.q_full.index(stage), phase)
        other = memory.q.index(stage)
    clear_rows(other, tile * config.ROWS, problem.rows, config)
    return warpgroup_mma(weights, other, acc, is_async=True)


@gluon.jit
def make_weights(
    made, statistic, key, tile, low_open, high_open, step, memory, problem, config,
    layout: gl.constexpr, ROLE: gl.constexpr,
):  # fmt: skip
    """P or dS of a tile, 0 where a row does not see a key, as an operand."""
    slot = step % 2
    room = memory.p.index(slot)
    if ROLE == VALUES:
        weights = gl.exp2(made * (problem.scale * LOG2E) - statistic[None, :])
    else:
        barrier_wait(P_FULL + slot, CONSUMERS)
        weights = room.load(made.type.layout).to(gl.float32) * made
        barrier_arrive(P_FREE + slot, CONSUMERS)
    if config.MASKS:
        if is_masked(tile, low_open, high_open):
            weights = visible_or_zero(weights, key, tile * config.ROWS, problem, config)
    if ROLE == VALUES:
        if step >= 2:
            barrier_wait(P_FREE + slot, CONSUMERS)
        room.store(weights.to(room.dtype))
        barrier_arrive(P_FULL + slot, CONSUMERS)
    return gl.convert_layout(weights.to(memory.q.dtype), layout)


@gluon.jit
def consume(memory, problem, config, gradient, WIDTH: gl.constexpr, D: gl.constexpr,
            ROLE: gl.constexpr):  # fmt: skip
    """The consumer that makes dV or dK of 64 keys."""
    ROWS: gl.constexpr = config.ROWS
    first_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    dtype: gl.constexpr = memory.q.dtype
    own = memory.k if ROLE == VALUES else memory.v
    acc = gl.zeros([KEYS, D], gl.float32, sum_layout)
    zero = gl.zeros([KEYS, ROWS], gl.float32, first_layout)
    key = problem.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, first_layout))
    low, high = row_tiles(problem, config)
    low_open, high_open = open_tiles(low, high, problem, config)
    steps = (high - low) * problem.group
    RELEASE_FIRST: gl.constexpr = RELEASE_Q if ROLE == VALUES else RELEASE_O
    RELEASE_SECOND: gl.constexpr = RELEASE_O if ROLE == VALUES else RELEASE_Q
    mbarrier.wait(memory.keys_full.index(ROLE), 0)
    tile = low
    token, statistic = start_first(own, 0, tile, zero, memory, problem, config, ROLE)
    made = warpgroup_mma_wait(0, deps=(token,))
    barrier_arrive(RELEASE_FIRST, EVERYBODY)
    weights = make_weights(
        made, statistic, key, tile, low_open, high_open, 0, memory, problem, config,
        operand_layout, ROLE,
    )  # fmt: skip
    for step in range(steps - 1):
        following = tile + 1
        if following == high:
            following = low
        token, statistic = start_first(
            own, step + 1, following, zero, memory, problem, config, ROLE
        )
        acc_token = start_second(weights, acc, step, tile, memory, problem, config, ROLE)
        tile = following
        made = warpgroup_mma_wait(1, deps=(token,))
        barrier_arrive(RELEASE_FIRST + (step + 1) % STAGES, EVERYBODY)
        next_weights = make_weights(
            made, statistic, key, tile, low_open, high_open, step + 1, memory, problem, config,
            operand_layout, ROLE,
        )  # fmt: skip
        acc, weights = warpgroup_mma_wait(0, deps=(acc_token, weights))
        barrier_arrive(RELEASE_SECOND + step % STAGES, EVERYBODY)
        weights = next_weights
    acc_token = start_second(weights, acc, steps - 1, tile, memory, problem, config, ROLE)
    acc, weights = warpgroup_mma_wait(0, deps=(acc_token, weights))
    barrier_arrive(RELEASE_SECOND + (steps - 1) % STAGES, EVERYBODY)
    if ROLE == VALUES:
        # Meet what the other consumer said of the last slots, so that no barrier is left half
        # joined.
        for left_over in range(max(steps - 2, 0), steps):
            barrier_wait(P_FREE + left_over % 2, CONSUMERS)
    if ROLE == OF_KEYS:
        acc = acc * problem.scale
    # Through the memory of the consumer's own operand, which nobody reads any more.
    own.store(acc.to(dtype))
    partition_barrier()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    key = problem.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = gradient.at + key.to(gl.int64)[:, None] * gradient.row + column[None, :]
    mask = (key < problem.end)[:, None] & (column < WIDTH)[None, :]
    gl.store(pointers, own.load(layout), mask=mask)


@gluon.jit
def consume_values(q_map, k_map, v_map, d_o_map, memory, problem, config, d_k, d_v):
    if works(problem, config):
        consume(memory, problem, config, d_v, config.WIDTH_V, config.DEPTH_V, VALUES)


@gluon.jit
def consume_keys(q_map, k_map, v_map, d_o_map, memory, problem, config, d_k, d_v):
    if works(problem, config):
        consume(memory, problem, config, d_k, config.WIDTH, config.DEPTH, OF_KEYS)


@gluon.jit
def produce_for(q_map, k_map, v_map, d_o_map, memory, problem, config, d_k, d_v):
    if works(problem, config):
        produce(q_map, k_map, v_map, d_o_map, memory, problem, config)


@gluon.jit
def attention_backward_wide(
    q_map, k_map, v_map, d_o_map, d_k, d_v, lse, delta,
    lengths_q, lengths_q_step, lengths_kv, lengths_kv_step,
    q_starts, q_starts_step, q_unit, d_o_starts, d_o_starts_step, d_o_unit,
    k_starts, k_starts_step, k_unit, v_starts, v_starts_step, v_unit,
    d_k_starts, d_k_starts_step, d_k_unit, d_v_starts, d_v_starts_step, d_v_unit,
    scale, rows, keys, padded_rows, left, right, heads_kv, group, together,
    d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row,
    DEPTH: gl.constexpr, DEPTH_V: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr,
    ROWS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, HAS_TAIL: gl.constexpr, LENGTHS_Q: gl.constexpr,
    LENGTHS_KV: gl.constexpr, RAGGED_Q: gl.constexpr, RAGGED_KV: gl.constexpr,
    HAS_END: gl.constexpr,
):  # fmt: skip
    config = Config(
        DEPTH, DEPTH_V, WIDTH, WIDTH_V, KEYS, ROWS, STAGES, STAGES, HAS_LEFT, HAS_RIGHT,
        BOTTOM_RIGHT, HAS_TAIL, False, LENGTHS_Q, LENGTHS_KV, RAGGED_Q, RAGGED_KV,
        False, HAS_END,
    )  # fmt: skip
    problem = problem_of(
        lse, delta, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step,
        Starts(q_starts, q_starts_step, q_unit), Starts(d_o_starts, d_o_starts_step, d_o_unit),
        Starts(k_starts, k_starts_step, k_unit), Starts(v_starts, v_starts_step, v_unit),
        scale, rows, keys, padded_rows, left, right, heads_kv, group, together, config,
    )  # fmt: skip
    d_k_starts = Starts(d_k_starts, d_k_starts_step, d_k_unit)
    d_v_starts = Starts(d_v_starts, d_v_starts_step, d_v_unit)
    dtype: gl.constexpr = q_map.dtype
    depth_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH], dtype)
    depth_v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH_V], dtype)
    # Exact enough for dS's own rounding, whatever the type of dS.
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], gl.float16)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    memory = Memory(
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], depth_layout),
        gl.allocate_shared_memory(dtype, [KEYS, DEPTH], depth_layout),
        gl.allocate_shared_memory(dtype, [KEYS, DEPTH_V], depth_v_layout),
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH_V], depth_v_layout),
        gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], p_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [2, 1], one),
    )
    for i in gl.static_range(STAGES):
        # The copy's arrival, and that of the row statistics.
        mbarrier.init(memory.q_full.index(i), count=2)
        mbarrier.init(memory.d_o_full.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(memory.keys_full.index(i), count=1)
    fence_async_shared()
    arguments = (
        q_map, k_map, v_map, d_o_map, memory, problem, config,
        gradient_of(d_k, d_k_starts, d_k_batch, d_k_head, d_k_row, problem, config),
        gradient_of(d_v, d_v_starts, d_v_batch, d_v_head, d_v_row, problem, config),
    )  # fmt: skip
    gl.warp_specialize(
        [(consume_values, arguments), (consume_keys, arguments), (produce_for, arguments)],
        [4, 1],
        [240, 24],
    )
