"""Attention forward on SM90, the device code: O = softmax(scale * Q K^T + mask) V.

A program keeps one multiprocessor and walks its tiles of queries (``attention_tiles``). One warp
moves Q, K and V into shared memory by tensor maps, K and V through a ring of STAGES blocks of
BLOCK_N keys. WARPGROUPS consumers of four warps each own 64 rows of a tile. In a consumer the
product with K of the next block is under way while this block's probabilities multiply V, and the
consumers take turns on the tensor cores, so that one's exponentials run under another's products.
O leaves through the memory of its own Q.

Softmax in base 2 with the scale folded in; the running maximum m and the sum l of a row:
    m' = max(m, max s),  p = 2^(c s - c m'),  l' = 2^(c m - c m') l + sum p,  c = scale * log2(e).
With LAZY the accumulator is rescaled only where m' is more than RESCALE_ABOVE powers of two above
the maximum in use: l and O share whatever factor was left out, and float32 holds it.

Sources: Dao 2023; Shah et al. 2024 (turns, overlapped products); Milakov and Gimelshein 2018
(running maximum).
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

from tilewright.engines.hopper.attention_repair import (
    hides_infinities,
    is_spoiled,
    summed_again,
)
from tilewright.engines.hopper.attention_tiles import (
    count_causal,
    count_even,
    tile_causal,
    tile_even,
)
from tilewright.engines.hopper.barriers import FIRST_FREE, barrier_arrive, barrier_wait
from tilewright.engines.hopper.exponentials import exp2
from tilewright.engines.hopper.rescaling import rescale_if_needed

MINUS_INFINITY = gl.constexpr(float("-inf"))
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
RESCALE_ABOVE = gl.constexpr(8.0)
# Rows of a warpgroup's product, and the threads of a warpgroup and of a warp.
ROWS = gl.constexpr(64)


@aggregate
class Config:
    """What the code specializes on; see ``AttentionConfig`` in attention.py."""

    BLOCK_N: gl.constexpr
    DEPTH: gl.constexpr
    DEPTH_V: gl.constexpr
    WARPGROUPS: gl.constexpr
    STAGES: gl.constexpr
    Q_SLOTS: gl.constexpr
    TURNS: gl.constexpr
    LAZY: gl.constexpr
    Q_REGISTERS: gl.constexpr
    EMULATED: gl.constexpr
    BY_COST: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    RIGHT_LOOP: gl.constexpr
    FIRST_MASKED: gl.constexpr
    REPAIRS: gl.constexpr
    HAS_STATS: gl.constexpr
    STATS_LOG2: gl.constexpr
    HAS_SINK: gl.constexpr
    # Derived: a tile's rows, the barriers' numbers, and the threads that meet at a release.
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
        WARPGROUPS,
        STAGES,
        Q_SLOTS,
        TURNS,
        LAZY,
        Q_REGISTERS,
        EMULATED,
        BY_COST,
        HAS_LEFT,
        HAS_RIGHT,
        RIGHT_LOOP,
        FIRST_MASKED,
        REPAIRS,
        HAS_STATS,
        STATS_LOG2,
        HAS_SINK,
    ):
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.DEPTH = gl.constexpr(DEPTH)
        self.DEPTH_V = gl.constexpr(DEPTH_V)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.STAGES = gl.constexpr(STAGES)
        self.Q_SLOTS = gl.constexpr(Q_SLOTS)
        self.TURNS = gl.constexpr(TURNS)
        self.LAZY = gl.constexpr(LAZY)
        self.Q_REGISTERS = gl.constexpr(Q_REGISTERS)
        self.EMULATED = gl.constexpr(EMULATED)
        self.BY_COST = gl.constexpr(BY_COST)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.RIGHT_LOOP = gl.constexpr(RIGHT_LOOP)
        self.FIRST_MASKED = gl.constexpr(FIRST_MASKED)
        self.REPAIRS = gl.constexpr(REPAIRS)
        self.HAS_STATS = gl.constexpr(HAS_STATS)
        self.STATS_LOG2 = gl.constexpr(STATS_LOG2)
        self.HAS_SINK = gl.constexpr(HAS_SINK)
        self.BLOCK_M = gl.constexpr(64 * WARPGROUPS)
        self.K_BARRIER = gl.constexpr(FIRST_FREE + WARPGROUPS)
        self.V_BARRIER = gl.constexpr(FIRST_FREE + WARPGROUPS + STAGES)
        self.Q_BARRIER = gl.constexpr(FIRST_FREE + WARPGROUPS + 2 * STAGES)
        self.RELEASE = gl.constexpr(str(128 * WARPGROUPS + 32))


@aggregate
class Problem:
    """The call's numbers: extents, the band, and where Stats and sinks are."""

    rows: gl.tensor
    keys: gl.tensor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    tiles: gl.tensor
    heads: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    stats: gl.tensor
    stats_batch: gl.tensor
    stats_head: gl.tensor
    stats_row: gl.tensor
    sink: gl.tensor
    k: gl.tensor
    v: gl.tensor
    k_batch: gl.tensor
    k_head: gl.tensor
    k_row: gl.tensor
    v_batch: gl.tensor
    v_head: gl.tensor
    v_row: gl.tensor
    depth: gl.tensor
    depth_v: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        rows,
        keys,
        left,
        right,
        scale,
        tiles,
        heads,
        heads_q,
        group,
        stats,
        stats_batch,
        stats_head,
        stats_row,
        sink,
        k,
        v,
        k_batch,
        k_head,
        k_row,
        v_batch,
        v_head,
        v_row,
        depth,
        depth_v,
    ):
        self.rows = rows
        self.keys = keys
        self.left = left
        self.right = right
        self.scale = scale
        self.tiles = tiles
        self.heads = heads
        self.heads_q = heads_q
        self.group = group
        self.stats = stats
        self.stats_batch = stats_batch
        self.stats_head = stats_head
        self.stats_row = stats_row
        self.sink = sink
        self.k = k
        self.v = v
        self.k_batch = k_batch
        self.k_head = k_head
        self.k_row = k_row
        self.v_batch = v_batch
        self.v_head = v_head
        self.v_row = v_row
        self.depth = depth
        self.depth_v = depth_v


@aggregate
class Memory:
    """Shared memory: the tiles of Q (O leaves through them), K, V, and "it is there" of each."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, q_full, k_full, v_full):
        self.q = q
        self.k = k
        self.v = v
        self.q_full = q_full
        self.k_full = k_full
        self.v_full = v_full


@gluon.jit
def count_tiles(problem, config):
    """How many tiles this program walks."""
    if config.BY_COST:
        count = count_causal(gl.program_id(0), problem.tiles, problem.heads, gl.num_programs(0))
    else:
        count = count_even(gl.program_id(0), problem.tiles, problem.heads, gl.num_programs(0))
    return count


@gluon.jit
def tile_of(step, problem, config):
    """(tile, head) of this program's ``step``."""
    if config.BY_COST:
        tile, head = tile_causal(
            step, gl.program_id(0), problem.tiles, problem.heads, gl.num_programs(0)
        )
    else:
        tile, head = tile_even(step, gl.program_id(0), problem.tiles, gl.num_programs(0))
    return tile, head


@gluon.jit
def key_blocks(first, problem, config):
    """Blocks [low, high) of keys that a tile of rows from ``first`` on sees; at least one.

    Row i sees columns i - left < j <= i + right. Rows that see nothing get a block all the same,
    in which everything is masked.
    """
    last = problem.keys
    if config.HAS_RIGHT:
        last = min(first + config.BLOCK_M + problem.right, problem.keys)
        last = max(last, 1)
    high = (last + config.BLOCK_N - 1) // config.BLOCK_N
    low = 0
    if config.HAS_LEFT:
        low = max(first - problem.left + 1, 0) // config.BLOCK_N
        low = min(low, high - 1)
    return low, high


@gluon.jit
def produce(q_map, k_map, v_map, o_map, memory, problem, config):
    """The producer warp: every copy into shared memory."""
    block = 0
    for step in range(count_tiles(problem, config)):
        tile, head = tile_of(step, problem, config)
        batch = head // problem.heads_q
        head_q = head % problem.heads_q
        head_kv = head_q // problem.group
        first = tile * config.BLOCK_M
        low, high = key_blocks(first, problem, config)
        slot = step % config.Q_SLOTS
        if step >= config.Q_SLOTS:
            barrier_wait(config.Q_BARRIER + slot, config.RELEASE)
        q_full = memory.q_full.index(slot)
        mbarrier.expect(q_full, config.BLOCK_M * config.DEPTH * 2)
        for w in gl.static_range(config.WARPGROUPS):
            tma.async_copy_global_to_shared(
                q_map,
                [batch, head_q, first + w * ROWS, 0],
                q_full,
                memory.q.index(slot * config.WARPGROUPS + w),
            )
        for j in range(high - low):
            stage = block % config.STAGES
            column = (high - 1 - j) * config.BLOCK_N
            if block >= config.STAGES:
                barrier_wait(config.K_BARRIER + stage, config.RELEASE)
            k_full = memory.k_full.index(stage)
            mbarrier.expect(k_full, config.BLOCK_N * config.DEPTH * 2)
            tma.async_copy_global_to_shared(
                k_map, [batch, head_kv, column, 0], k_full, memory.k.index(stage)
            )
            if block >= config.STAGES:
                barrier_wait(config.V_BARRIER + stage, config.RELEASE)
            v_full = memory.v_full.index(stage)
            mbarrier.expect(v_full, config.BLOCK_N * config.DEPTH_V * 2)
            tma.async_copy_global_to_shared(
                v_map, [batch, head_kv, column, 0], v_full, memory.v.index(stage)
            )
            block += 1
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for j in range(max(block - config.STAGES, 0), block):
        barrier_wait(config.K_BARRIER + j % config.STAGES, config.RELEASE)
        barrier_wait(config.V_BARRIER + j % config.STAGES, config.RELEASE)


@gluon.jit
def take_turn(config, WARPGROUP: gl.constexpr):
    """Wait for this warpgroup's turn on the tensor cores."""
    if config.TURNS:
        barrier_wait(FIRST_FREE + WARPGROUP, "256")


@gluon.jit
def pass_turn(config, WARPGROUP: gl.constexpr):
    """Give the turn to the next warpgroup."""
    if config.TURNS:
        barrier_arrive(FIRST_FREE + (WARPGROUP + 1) % config.WARPGROUPS, "256")


@gluon.jit
def masked(scores, first, column, problem, config):
    """Scores with -inf where row ``first + i`` does not see key ``column + j``."""
    layout: gl.constexpr = scores.type.layout
    columns = column + gl.arange(0, config.BLOCK_N, gl.SliceLayout(0, layout))
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if config.HAS_RIGHT:
        end = gl.minimum(rows + problem.right + 1, problem.keys)
        seen = columns[None, :] < end[:, None]
    else:
        seen = (columns < problem.keys)[None, :]
    if config.HAS_LEFT:
        seen = seen & (columns[None, :] > (rows - problem.left)[:, None])
    return gl.where(seen, scores, MINUS_INFINITY)


@gluon.jit
def thread_sums(p):
    """Row sums of the columns that one thread holds: (rows, 4), added up when a tile ends."""
    parts: gl.constexpr = p.shape[1] // 8
    return gl.sum(gl.sum(p.reshape([p.shape[0], parts, 4, 2]), 3), 1)


@gluon.jit
def softmax_block(scores, top, total, scale, config, MASKED: gl.constexpr):
    """(p, factor of what came before, the new maximum, the new sums) of one block of scores."""
    new_top = gl.maximum(top, gl.max(scores, 1))
    if config.LAZY:
        new_top = gl.where((new_top - top) * scale > RESCALE_ABOVE, new_top, top)
    shift = new_top * scale
    if MASKED:
        shift = gl.where(new_top == MINUS_INFINITY, 0.0, shift)
        p = gl.exp2(scores * scale - shift[:, None])
    else:
        p = exp2(scores * scale - shift[:, None], config.EMULATED)
    factor = gl.exp2(top * scale - shift)
    sums = thread_sums(p)
    spread = gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, factor, new_top, total * spread[:, None] + sums


@gluon.jit
def rescaled(acc, factor, config):
    """The accumulator times a factor a row."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    factor = gl.convert_layout(factor, layout, assert_trivial=True)
    if config.LAZY:
        acc = rescale_if_needed(acc, factor[:, None], acc.shape[0] * acc.shape[1] // 128)
    else:
        acc = acc * factor[:, None]
    return acc


@gluon.jit
def next_block(
    q,
    p,
    acc,
    top,
    total,
    first,
    column,
    block,
    memory,
    problem,
    config,
    MASKED: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Scores of block ``block + 1`` beside the second product of ``block``."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, config.BLOCK_N, 16]
    )
    before = block % config.STAGES
    stage = (block + 1) % config.STAGES
    phase = ((block + 1) // config.STAGES) & 1
    zero = gl.zeros([ROWS, config.BLOCK_N], gl.float32, layout)
    mbarrier.wait(memory.k_full.index(stage), phase)
    take_turn(config, WARPGROUP)
    scores = warpgroup_mma(
        q, memory.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    acc_after = warpgroup_mma(p, memory.v.index(before), acc, is_async=True)
    pass_turn(config, WARPGROUP)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    barrier_arrive(config.K_BARRIER + stage, config.RELEASE)
    if MASKED:
        scores = masked(scores, first, column, problem, config)
    p_next, factor, top, total = softmax_block(scores, top, total, problem.scale, config, MASKED)
    # Waiting here, before the product's end, keeps the assembler from moving that wait above the
    # exponentials: a loop lies between.
    mbarrier.wait(memory.v_full.index(stage), phase)
    acc, p = warpgroup_mma_wait(0, deps=(acc_after, p))
    barrier_arrive(config.V_BARRIER + before, config.RELEASE)
    acc = rescaled(acc, factor, config)
    p = gl.convert_layout(p_next.to(memory.v.dtype), p.type.layout)
    return p, acc, top, total


@gluon.jit
def finish(acc, top, total, batch, head, first, problem, config):
    """(normalized accumulator, exponent's shift and factor of its rows); Stats are stored."""
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    total = gl.convert_layout(gl.sum(total, 1), layout)
    shift = gl.convert_layout(top, layout) * problem.scale
    scaled = 1.0
    if config.HAS_SINK:
        sink = gl.load(problem.sink + head).to(gl.float32) * LOG2E
        new_shift = gl.maximum(shift, sink)
        scaled = gl.exp2(shift - new_shift)
        total = total * scaled + gl.exp2(sink - new_shift)
        shift = new_shift
    empty = total == 0.0
    if config.HAS_STATS:
        stats = shift + gl.log2(total)
        if not config.STATS_LOG2:
            stats = stats * LN2
        rows = first + gl.arange(0, ROWS, layout)
        at = batch.to(gl.int64) * problem.stats_batch + head.to(gl.int64) * problem.stats_head
        gl.store(
            problem.stats + at + rows.to(gl.int64) * problem.stats_row,
            gl.where(empty, MINUS_INFINITY, stats),
            mask=rows < problem.rows,
        )
    inverse = gl.where(empty, 0.0, scaled / total)
    return acc * inverse[:, None], shift, gl.where(empty, 0.0, 1.0 / total)


@gluon.jit
def repaired(out, q, shift, inverse, batch, head_q, first, low, high, problem, config):
    """The tile, summed again if hidden values spoiled it."""
    layout: gl.constexpr = out.type.layout
    low_key = low * config.BLOCK_N
    high_key = min(high * config.BLOCK_N, problem.keys)
    head = (head_q // problem.group).to(gl.int64)
    k_place = batch.to(gl.int64) * problem.k_batch + head * problem.k_head
    v_place = batch.to(gl.int64) * problem.v_batch + head * problem.v_head
    values: gl.constexpr = gl.SliceLayout(0, layout)
    if hides_infinities(first, low_key, high_key, v_place, problem, config, values) != 0:
        out = summed_again(
            q, shift, inverse, first, low_key, high_key, k_place, v_place, problem, config, layout
        )
    return out


@gluon.jit
def consume(q_map, k_map, v_map, o_map, memory, problem, config, WARPGROUP: gl.constexpr):
    """A consumer: 64 rows of every tile."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, config.BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, config.DEPTH_V, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    place_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
        [ROWS, config.DEPTH_V], memory.q.dtype
    )
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=score_layout, k_width=2)
    BN: gl.constexpr = config.BLOCK_N
    STAGES: gl.constexpr = config.STAGES
    SLOTS: gl.constexpr = config.Q_SLOTS
    zero = gl.zeros([ROWS, BN], gl.float32, score_layout)
    nothing = gl.zeros([ROWS, config.DEPTH_V], gl.float32, out_layout)
    if WARPGROUP == config.WARPGROUPS - 1:
        pass_turn(config, WARPGROUP)
    block = 0
    count = count_tiles(problem, config)
    # With two slots of Q, the first scores of a tile are made beside the last product before.
    if SLOTS == 2:
        mbarrier.wait(memory.q_full.index(0), 0)
        held = memory.q.index(WARPGROUP)
        if config.Q_REGISTERS:
            q_held = held.load(q_layout)
        mbarrier.wait(memory.k_full.index(0), 0)
        take_turn(config, WARPGROUP)
        scores = warpgroup_mma(
            q_held if config.Q_REGISTERS else held,
            memory.k.index(0).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        pass_turn(config, WARPGROUP)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        barrier_arrive(config.K_BARRIER, config.RELEASE)
    else:
        scores = zero
    for step in range(count):
        tile, head = tile_of(step, problem, config)
        batch = head // problem.heads_q
        head_q = head % problem.heads_q
        low, high = key_blocks(tile * config.BLOCK_M, problem, config)
        first = tile * config.BLOCK_M + WARPGROUP * ROWS
        slot = step % SLOTS
        q_slot = memory.q.index(slot * config.WARPGROUPS + WARPGROUP)
        if config.Q_REGISTERS:
            q = q_held
        else:
            q = q_slot
        stage = block % STAGES
        phase = (block // STAGES) & 1
        more = step + 1 < count
        if SLOTS == 1:
            mbarrier.wait(memory.q_full.index(slot), step & 1)
            mbarrier.wait(memory.k_full.index(stage), phase)
            take_turn(config, WARPGROUP)
            token = warpgroup_mma(
                q, memory.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            pass_turn(config, WARPGROUP)
            scores = warpgroup_mma_wait(0, deps=(token,))
            barrier_arrive(config.K_BARRIER + stage, config.RELEASE)
        if config.FIRST_MASKED:
            scores = masked(scores, first, (high - 1) * BN, problem, config)
        top = gl.full([ROWS], MINUS_INFINITY, gl.float32, gl.SliceLayout(1, score_layout))
        p_first, _, top, total = softmax_block(
            scores, top, 0.0, problem.scale, config, config.FIRST_MASKED
        )
        p = gl.convert_layout(p_first.to(memory.v.dtype), p_layout)
        acc = nothing
        if SLOTS == 2:
            # The tile before has left its slot by now.
            tma.store_wait(0)
            if (step > 0) & more:
                barrier_arrive(config.Q_BARRIER + (step - 1) % SLOTS, config.RELEASE)
        mbarrier.wait(memory.v_full.index(stage), phase)
        # Blocks 1 to free - 1 are masked on the right, from edge on on the left.
        n = high - low
        free = 1
        if config.RIGHT_LOOP:
            free = max(min(high - max(first + problem.right + 1, 0) // BN, n), 1)
            for j in range(1, free):
                p, acc, top, total = next_block(
                    q,
                    p,
                    acc,
                    top,
                    total,
                    first,
                    (high - 1 - j) * BN,
                    block,
                    memory,
                    problem,
                    config,
                    True,
                    WARPGROUP,
                )
                block += 1
        edge = n
        if config.HAS_LEFT:
            hidden = max(first + ROWS - problem.left, 0)
            edge = max(min(high - (hidden + BN - 1) // BN, n), free)
        for j in range(free, edge):
            p, acc, top, total = next_block(
                q, p, acc, top, total, first, 0, block, memory, problem, config, False, WARPGROUP
            )
            block += 1
        if config.HAS_LEFT:
            for j in range(edge, n):
                p, acc, top, total = next_block(
                    q,
                    p,
                    acc,
                    top,
                    total,
                    first,
                    (high - 1 - j) * BN,
                    block,
                    memory,
                    problem,
                    config,
                    True,
                    WARPGROUP,
                )
                block += 1
        last = block % STAGES
        block += 1
        if SLOTS == 2:
            # Scores of the next tile; without one, of whatever is there, and nobody looks.
            next_slot = (step + 1) % SLOTS
            stage = block % STAGES
            mbarrier.wait(memory.q_full.index(next_slot), ((step + 1) // SLOTS) & 1, pred=more)
            held = memory.q.index(next_slot * config.WARPGROUPS + WARPGROUP)
            if config.Q_REGISTERS:
                q_held = held.load(q_layout)
            mbarrier.wait(memory.k_full.index(stage), (block // STAGES) & 1, pred=more)
            take_turn(config, WARPGROUP)
            token = warpgroup_mma(
                q_held if config.Q_REGISTERS else held,
                memory.k.index(stage).permute((1, 0)),
                zero,
                use_acc=False,
                is_async=True,
            )
            acc_token = warpgroup_mma(p, memory.v.index(last), acc, is_async=True)
            pass_turn(config, WARPGROUP)
            scores, acc = warpgroup_mma_wait(0, deps=(token, acc_token))
            if more:
                barrier_arrive(config.K_BARRIER + stage, config.RELEASE)
        else:
            acc_token = warpgroup_mma(p, memory.v.index(last), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
        barrier_arrive(config.V_BARRIER + last, config.RELEASE)
        out, shift, inverse = finish(acc, top, total, batch, head_q, first, problem, config)
        if config.REPAIRS:
            if is_spoiled(out) != 0:
                out = repaired(
                    out, q_slot, shift, inverse, batch, head_q, first, low, high, problem, config
                )
        place = q_slot
        if config.DEPTH_V != config.DEPTH:
            place = q_slot._reinterpret(q_slot.dtype, [ROWS, config.DEPTH_V], place_layout)
        place.store(out.to(memory.q.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_map, [batch, head_q, first, 0], place)
        if SLOTS == 1:
            tma.store_wait(0)
            if more:
                barrier_arrive(config.Q_BARRIER, config.RELEASE)
    tma.store_wait(0)
    if WARPGROUP == 0:
        take_turn(config, WARPGROUP)


@gluon.jit
def consume_0(q_map, k_map, v_map, o_map, memory, problem, config):
    consume(q_map, k_map, v_map, o_map, memory, problem, config, 0)


@gluon.jit
def consume_1(q_map, k_map, v_map, o_map, memory, problem, config):
    consume(q_map, k_map, v_map, o_map, memory, problem, config, 1)


@gluon.jit
def consume_2(q_map, k_map, v_map, o_map, memory, problem, config):
    consume(q_map, k_map, v_map, o_map, memory, problem, config, 2)


@gluon.jit
def attention_forward(
    q_map,
    k_map,
    v_map,
    o_map,
    stats,
    sink,
    k,
    v,
    scale,
    rows,
    keys,
    left,
    right,
    tiles,
    heads,
    heads_q,
    group,
    depth,
    depth_v,
    stats_batch,
    stats_head,
    stats_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    DEPTH_V: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    TURNS: gl.constexpr,
    LAZY: gl.constexpr,
    Q_REGISTERS: gl.constexpr,
    EMULATED: gl.constexpr,
    BY_COST: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    RIGHT_LOOP: gl.constexpr,
    FIRST_MASKED: gl.constexpr,
    REPAIRS: gl.constexpr,
    HAS_STATS: gl.constexpr,
    STATS_LOG2: gl.constexpr,
    HAS_SINK: gl.constexpr,
):
    config = Config(
        BLOCK_N,
        DEPTH,
        DEPTH_V,
        WARPGROUPS,
        STAGES,
        Q_SLOTS,
        TURNS,
        LAZY,
        Q_REGISTERS,
        EMULATED,
        BY_COST,
        HAS_LEFT,
        HAS_RIGHT,
        RIGHT_LOOP,
        FIRST_MASKED,
        REPAIRS,
        HAS_STATS,
        STATS_LOG2,
        HAS_SINK,
    )
    problem = Problem(
        rows,
        keys,
        left,
        right,
        scale * LOG2E,
        tiles,
        heads,
        heads_q,
        group,
        stats,
        stats_batch,
        stats_head,
        stats_row,
        sink,
        k,
        v,
        k_batch,
        k_head,
        k_row,
        v_batch,
        v_head,
        v_row,
        depth,
        depth_v,
    )
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], q_map.dtype)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DEPTH], q_map.dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DEPTH_V], q_map.dtype)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    memory = Memory(
        gl.allocate_shared_memory(q_map.dtype, [Q_SLOTS * WARPGROUPS, ROWS, DEPTH], q_layout),
        gl.allocate_shared_memory(q_map.dtype, [STAGES, BLOCK_N, DEPTH], k_layout),
        gl.allocate_shared_memory(q_map.dtype, [STAGES, BLOCK_N, DEPTH_V], v_layout),
        gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
    )
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(memory.q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.k_full.index(i), count=1)
        mbarrier.init(memory.v_full.index(i), count=1)
    fence_async_shared()
    arguments = (q_map, k_map, v_map, o_map, memory, problem, config)
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (consume_0, arguments),
                (consume_1, arguments),
                (consume_2, arguments),
                (produce, arguments),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [(consume_0, arguments), (consume_1, arguments), (produce, arguments)],
            [4, 1],
            [240, 24],
        )
