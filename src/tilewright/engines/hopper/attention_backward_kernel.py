"""Attention backward on SM90, the device code: dK and dV, and dQ added up in memory, in one pass.

A program owns 128 keys of one key head. One warp moves Q and dO of the rows that see them into
shared memory, a ring of STAGES tiles of 64 rows; two consumers of four warps own 64 keys each:

    S^T = K Q^T,   dP^T = V dO^T,   P = 2^(c S - Stats),   dS = P (dP - Delta),
    dV += P^T dO,  dK += dS^T Q,    dQ += dS K.

P and dS stay in registers for dV and dK. For dQ, which sums over all keys, the consumers exchange
dS through shared memory and make half of dQ's columns each. These are added to float32 sums with
four numbers a thread and an operation, in the order in which threads hold them (``sums_at`` in
``attention_backward_rows``), while the next tile's products run. The order of the additions is not
fixed, so dQ repeats up to rounding.

Where keys are hidden, dQ is made from a copy of K without NaN and infinity: a hidden key must not
matter times a 0. Sources: Dao 2023; Shah et al. 2024.
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

from tilewright.engines.hopper.barriers import FIRST_FREE, barrier_arrive, barrier_wait

LOG2E = gl.constexpr(1.4426950408889634)
# Rows of a tile, keys of a consumer, and keys of a program.
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
BLOCK_KEYS = gl.constexpr(128)
# Named barriers: the consumers' own, then one a stage that the producer waits at.
EXCHANGE = gl.constexpr(FIRST_FREE)
RELEASE = gl.constexpr(FIRST_FREE + 1)
CONSUMERS = gl.constexpr("256")
EVERYBODY = gl.constexpr("288")


@aggregate
class Config:
    """What the code specializes on."""

    DEPTH: gl.constexpr
    DEPTH_V: gl.constexpr
    STAGES: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_TAIL: gl.constexpr
    HIDES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, DEPTH, DEPTH_V, STAGES, HAS_LEFT, HAS_RIGHT, HAS_TAIL):
        self.DEPTH = gl.constexpr(DEPTH)
        self.DEPTH_V = gl.constexpr(DEPTH_V)
        self.STAGES = gl.constexpr(STAGES)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_TAIL = gl.constexpr(HAS_TAIL)
        self.HIDES = gl.constexpr(HAS_LEFT or HAS_RIGHT)


@aggregate
class Problem:
    """The call's numbers, and what lies in memory beside the tensor maps."""

    lse: gl.tensor
    delta: gl.tensor
    sums: gl.tensor
    scale: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    padded_rows: gl.tensor
    left: gl.tensor
    right: gl.tensor
    heads_kv: gl.tensor
    group: gl.tensor
    first_key: gl.tensor
    head_kv: gl.tensor
    batch: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        lse,
        delta,
        sums,
        scale,
        rows,
        keys,
        padded_rows,
        left,
        right,
        heads_kv,
        group,
        first_key,
        head_kv,
        batch,
    ):
        self.lse = lse
        self.delta = delta
        self.sums = sums
        self.scale = scale
        self.rows = rows
        self.keys = keys
        self.padded_rows = padded_rows
        self.left = left
        self.right = right
        self.heads_kv = heads_kv
        self.group = group
        self.first_key = first_key
        self.head_kv = head_kv
        self.batch = batch


@aggregate
class Memory:
    """Shared memory: tiles, and "it is there" of each. ``k_clean`` is ``k`` if nothing hides."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_clean: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    d_o: gl.shared_memory_descriptor
    d_s: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    d_o_full: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, k_clean, v, d_o, d_s, lse, delta, q_full, d_o_full, keys_full):
        self.q = q
        self.k = k
        self.k_clean = k_clean
        self.v = v
        self.d_o = d_o
        self.d_s = d_s
        self.lse = lse
        self.delta = delta
        self.q_full = q_full
        self.d_o_full = d_o_full
        self.keys_full = keys_full


@gluon.jit
def row_tiles(problem, config):
    """Tiles [low, high) of rows that see some key of the block: i - left < j <= i + right."""
    low = problem.first_key * 0
    end = problem.rows
    if config.HAS_RIGHT:
        low = max(problem.first_key - problem.right, 0) // ROWS
    if config.HAS_LEFT:
        last = min(problem.first_key + BLOCK_KEYS, problem.keys) - 1
        end = min(end, max(last + problem.left, 0))
    high = (end + ROWS - 1) // ROWS
    return low, max(high, low)


@gluon.jit
def open_tiles(low, high, problem, config):
    """Tiles [low_open, high_open) of those whose rows all see all keys of the block."""
    low_open, high_open = low, high
    if config.HAS_RIGHT:
        first = problem.first_key + BLOCK_KEYS - 1 - problem.right
        low_open = max(first + ROWS - 1, 0) // ROWS
    if config.HAS_LEFT:
        end = problem.first_key + problem.left
        high_open = max(end, 0) // ROWS
    if config.HAS_TAIL:
        if problem.first_key + BLOCK_KEYS > problem.keys:
            low_open = high
    low_open = min(max(low_open, low), high)
    high_open = min(max(high_open, low_open), high)
    return low_open, high_open


@gluon.jit
def produce(q_map, k_map, v_map, d_o_map, memory, problem, config):
    """The producer warp: every copy into shared memory."""
    batch, head_kv = problem.batch, problem.head_kv
    keys_full = memory.keys_full.index(0)
    mbarrier.expect(keys_full, BLOCK_KEYS * (config.DEPTH + config.DEPTH_V) * 2)
    for w in gl.static_range(2):
        column = problem.first_key + w * KEYS
        tma.async_copy_global_to_shared(
            k_map, [batch, head_kv, column, 0], keys_full, memory.k.index(w)
        )
        tma.async_copy_global_to_shared(
            v_map, [batch, head_kv, column, 0], keys_full, memory.v.index(w)
        )
    low, high = row_tiles(problem, config)
    heads = problem.heads_kv * problem.group
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    row = gl.arange(0, ROWS, layout)
    step = low * 0
    for member in range(problem.group):
        head = head_kv * problem.group + member
        line = (batch * heads + head).to(gl.int64) * problem.padded_rows
        for tile in range(low, high):
            stage = step % config.STAGES
            lse = gl.load(problem.lse + line + tile * ROWS + row)
            delta = gl.load(problem.delta + line + tile * ROWS + row)
            if step >= config.STAGES:
                barrier_wait(RELEASE + stage, EVERYBODY)
            q_full = memory.q_full.index(stage)
            mbarrier.expect(q_full, ROWS * config.DEPTH * 2)
            tma.async_copy_global_to_shared(
                q_map, [batch, head, tile * ROWS, 0], q_full, memory.q.index(stage)
            )
            d_o_full = memory.d_o_full.index(stage)
            mbarrier.expect(d_o_full, ROWS * config.DEPTH_V * 2)
            tma.async_copy_global_to_shared(
                d_o_map, [batch, head, tile * ROWS, 0], d_o_full, memory.d_o.index(stage)
            )
            memory.lse.index(stage).store(lse)
            memory.delta.index(stage).store(delta)
            mbarrier.arrive(q_full, count=1)
            step += 1
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for left_over in range(max(step - config.STAGES, 0), step):
        barrier_wait(RELEASE + left_over % config.STAGES, EVERYBODY)


@gluon.jit
def add_to_sums(share, at):
    """Add a product of 64 rows to the sums at ``at``, four numbers a thread and an operation.

    A thread of a product's layout holds columns 8 j + 2 t and the next of rows g and g + 8 of its
    warp: those four are neighbours in the sums, then come the warp's lanes, the warps, and j.
    """
    blocks: gl.constexpr = share.shape[1] // 8
    ordered = share.reshape([4, 2, 8, blocks, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    ordered = gl.convert_layout(ordered.reshape([blocks * 128, 4]), layout, assert_trivial=True)
    first = gl.arange(0, blocks * 128, gl.SliceLayout(1, layout))
    second = gl.arange(0, 4, gl.SliceLayout(0, layout))
    gl.atomic_add(at + first[:, None] * 4 + second[None, :], ordered, sem="relaxed")


@gluon.jit
def clean_keys(memory, config, CONSUMER: gl.constexpr):
    """Copy this consumer's keys, with 0 for NaN and infinity."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // config.DEPTH, config.DEPTH // 8], [4, 1], [1, 0]
    )
    tile = memory.k.index(CONSUMER).load(layout)
    is_finite = gl.abs(tile.to(gl.float32)) < float("inf")
    memory.k_clean.index(CONSUMER).store(gl.where(is_finite, tile, 0.0).to(tile.dtype))
    fence_async_shared()
    barrier_wait(EXCHANGE, CONSUMERS)


@gluon.jit
def row_tile_step(
    acc_k, acc_v, share, share_at, zero, no_share, key, first_row, step, memory, problem, config,
    MASKED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """One tile of rows: (dK, dV, this tile's share of dQ). The share before is added on the way."""
    score_layout: gl.constexpr = zero.type.layout
    rows_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_v.type.layout, 2)
    d_s_layout: gl.constexpr = gl.DotOperandLayout(0, acc_k.type.layout, 2)
    HALF: gl.constexpr = config.DEPTH // 2
    dtype: gl.constexpr = memory.q.dtype
    stage = step % config.STAGES
    phase = (step // config.STAGES) & 1
    k, v = memory.k.index(CONSUMER), memory.v.index(CONSUMER)
    q, d_o = memory.q.index(stage), memory.d_o.index(stage)
    mbarrier.wait(memory.q_full.index(stage), phase)
    scores_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    add_to_sums(share, share_at)
    mbarrier.wait(memory.d_o_full.index(stage), phase)
    d_p_token = warpgroup_mma(v, d_o.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = memory.lse.index(stage).load(rows_layout)
    scores = warpgroup_mma_wait(1, deps=(scores_token,))
    p = gl.exp2(scores * (problem.scale * LOG2E) - lse[None, :])
    row = first_row + gl.arange(0, ROWS, rows_layout)
    if MASKED:
        p = visible_or_zero(p, key, row, problem, config)
    p_operand = gl.convert_layout(p.to(dtype), p_layout)
    v_token = warpgroup_mma(p_operand, d_o, acc_v, is_async=True)
    delta = memory.delta.index(stage).load(rows_layout)
    d_p = warpgroup_mma_wait(1, deps=(d_p_token,))
    d_s = p * (d_p - delta[None, :])
    if MASKED:
        d_s = visible_or_zero(d_s, key, row, problem, config)
    narrow = d_s.to(dtype)
    place = (step % 2) * 2
    memory.d_s.index(place + CONSUMER).store(narrow)
    d_s_operand = gl.convert_layout(narrow, d_s_layout)
    k_token = warpgroup_mma(d_s_operand, q, acc_k, is_async=True)
    fence_async_shared()
    barrier_wait(EXCHANGE, CONSUMERS)
    share_token = warpgroup_mma(
        memory.d_s.index(place).permute((1, 0)),
        memory.k_clean.index(0).slice(CONSUMER * HALF, HALF, 1),
        no_share,
        use_acc=False,
        is_async=True,
    )
    share_token = warpgroup_mma(
        memory.d_s.index(place + 1).permute((1, 0)),
        memory.k_clean.index(1).slice(CONSUMER * HALF, HALF, 1),
        share_token,
        is_async=True,
    )
    acc_v, acc_k, p_operand, d_s_operand = warpgroup_mma_wait(
        1, deps=(v_token, k_token, p_operand, d_s_operand)
    )
    barrier_arrive(RELEASE + stage, EVERYBODY)
    share = warpgroup_mma_wait(0, deps=(share_token,))
    return acc_k, acc_v, share


@gluon.jit
def consume(memory, problem, config, d_k_at, d_v_at, d_k_row, d_v_row, depth, depth_v,
            CONSUMER: gl.constexpr):  # fmt: skip
    """A consumer: 64 keys against every tile of rows."""
    D: gl.constexpr = config.DEPTH
    HALF: gl.constexpr = D // 2
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.DEPTH_V, 16])
    share_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dtype: gl.constexpr = memory.q.dtype
    acc_k = gl.zeros([KEYS, D], gl.float32, key_layout)
    acc_v = gl.zeros([KEYS, config.DEPTH_V], gl.float32, value_layout)
    zero = gl.zeros([KEYS, ROWS], gl.float32, score_layout)
    no_share = gl.zeros([ROWS, HALF], gl.float32, share_layout)
    first_own = problem.first_key + CONSUMER * KEYS
    key = first_own + gl.arange(0, KEYS, gl.SliceLayout(1, score_layout))
    low, high = row_tiles(problem, config)
    low_open, high_open = open_tiles(low, high, problem, config)
    mbarrier.wait(memory.keys_full.index(0), 0)
    if config.HIDES:
        clean_keys(memory, config, CONSUMER)
    step = low * 0
    share = gl.zeros([ROWS, HALF], gl.float32, share_layout)
    line = (problem.batch * problem.heads_kv + problem.head_kv) * problem.group
    sums_at = problem.sums + line.to(gl.int64) * problem.padded_rows * D + CONSUMER * ROWS * HALF
    # The share of a tile is added in the next step; the first one adds zeros.
    share_at = sums_at + low.to(gl.int64) * (ROWS * D)
    for member in range(problem.group):
        if config.HAS_RIGHT or config.HAS_TAIL:
            for tile in range(low, low_open):
                acc_k, acc_v, share = row_tile_step(
                    acc_k, acc_v, share, share_at, zero, no_share, key, tile * ROWS, step,
                    memory, problem, config, True, CONSUMER,
                )  # fmt: skip
                share_at = sums_at + tile.to(gl.int64) * (ROWS * D)
                step += 1
        for tile in range(low_open, high_open):
            acc_k, acc_v, share = row_tile_step(
                acc_k, acc_v, share, share_at, zero, no_share, key, tile * ROWS, step,
                memory, problem, config, False, CONSUMER,
            )  # fmt: skip
            share_at = sums_at + tile.to(gl.int64) * (ROWS * D)
            step += 1
        if config.HAS_LEFT:
            for tile in range(high_open, high):
                acc_k, acc_v, share = row_tile_step(
                    acc_k, acc_v, share, share_at, zero, no_share, key, tile * ROWS, step,
                    memory, problem, config, True, CONSUMER,
                )  # fmt: skip
                share_at = sums_at + tile.to(gl.int64) * (ROWS * D)
                step += 1
        sums_at += problem.padded_rows.to(gl.int64) * D
    if high > low:
        add_to_sums(share, share_at)
    store_gradient(acc_k * problem.scale, d_k_at, d_k_row, first_own, depth, problem, dtype)
    store_gradient(acc_v, d_v_at, d_v_row, first_own, depth_v, problem, dtype)


@gluon.jit
def visible_or_zero(values, key, row, problem, config):
    """Values of (keys, rows) with 0 where a row does not see a key."""
    seen = (key < problem.keys)[:, None]
    if config.HAS_RIGHT:
        seen = seen & (key[:, None] <= (row + problem.right)[None, :])
    if config.HAS_LEFT:
        seen = seen & (key[:, None] > (row - problem.left)[None, :])
    return gl.where(seen, values, 0.0)


@gluon.jit
def store_gradient(values, at, row_step, first_key, width, problem, dtype: gl.constexpr):
    """Store a consumer's (64, D) rows of dK or dV, up to the last key and ``width`` columns."""
    D: gl.constexpr = values.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    key = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    pointers = at + key.to(gl.int64)[:, None] * row_step + column[None, :]
    mask = (key < problem.keys)[:, None] & (column < width)[None, :]
    gl.store(pointers, gl.convert_layout(values.to(dtype), layout), mask=mask)


@gluon.jit
def consume_0(q_map, k_map, v_map, d_o_map, memory, problem, config,
              d_k, d_v, d_k_row, d_v_row, depth, depth_v):  # fmt: skip
    consume(memory, problem, config, d_k, d_v, d_k_row, d_v_row, depth, depth_v, 0)


@gluon.jit
def consume_1(q_map, k_map, v_map, d_o_map, memory, problem, config,
              d_k, d_v, d_k_row, d_v_row, depth, depth_v):  # fmt: skip
    consume(memory, problem, config, d_k, d_v, d_k_row, d_v_row, depth, depth_v, 1)


@gluon.jit
def produce_for(q_map, k_map, v_map, d_o_map, memory, problem, config,
                d_k, d_v, d_k_row, d_v_row, depth, depth_v):  # fmt: skip
    produce(q_map, k_map, v_map, d_o_map, memory, problem, config)


@gluon.jit
def attention_backward(
    q_map, k_map, v_map, d_o_map, d_k, d_v, lse, delta, sums,
    scale, rows, keys, padded_rows, left, right, heads_kv, group, depth, depth_v,
    d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row,
    DEPTH: gl.constexpr, DEPTH_V: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HAS_TAIL: gl.constexpr,
):  # fmt: skip
    config = Config(DEPTH, DEPTH_V, STAGES, HAS_LEFT, HAS_RIGHT, HAS_TAIL)
    # Early keys see most rows under a causal mask: they start first.
    blocks = (keys + BLOCK_KEYS - 1) // BLOCK_KEYS
    program = gl.program_id(0)
    first_key = (program % blocks) * BLOCK_KEYS
    head_kv = program // blocks % heads_kv
    batch = program // (blocks * heads_kv)
    problem = Problem(
        lse, delta, sums, scale, rows, keys, padded_rows, left, right, heads_kv, group,
        first_key, head_kv, batch,
    )  # fmt: skip
    dtype: gl.constexpr = q_map.dtype
    depth_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH], dtype)
    depth_v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH_V], dtype)
    d_s_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    k_memory = gl.allocate_shared_memory(dtype, [2, KEYS, DEPTH], depth_layout)
    k_clean = k_memory
    if config.HIDES:
        k_clean = gl.allocate_shared_memory(dtype, [2, KEYS, DEPTH], depth_layout)
    memory = Memory(
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], depth_layout),
        k_memory,
        k_clean,
        gl.allocate_shared_memory(dtype, [2, KEYS, DEPTH_V], depth_v_layout),
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH_V], depth_v_layout),
        gl.allocate_shared_memory(dtype, [4, KEYS, ROWS], d_s_layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [1, 1], one),
    )
    mbarrier.init(memory.keys_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        # The copy's arrival, and that of the row statistics.
        mbarrier.init(memory.q_full.index(i), count=2)
        mbarrier.init(memory.d_o_full.index(i), count=1)
    fence_async_shared()
    d_k_at = d_k + batch.to(gl.int64) * d_k_batch + head_kv.to(gl.int64) * d_k_head
    d_v_at = d_v + batch.to(gl.int64) * d_v_batch + head_kv.to(gl.int64) * d_v_head
    arguments = (
        q_map, k_map, v_map, d_o_map, memory, problem, config,
        d_k_at, d_v_at, d_k_row, d_v_row, depth, depth_v,
    )  # fmt: skip
    gl.warp_specialize(
        [(consume_0, arguments), (consume_1, arguments), (produce_for, arguments)],
        [4, 1],
        [240, 24],
    )
