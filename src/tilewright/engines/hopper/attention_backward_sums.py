"""The consumers of attention's backward that make dQ too: 64 keys each against tiles of 64 rows.

What lies between two waits is under way together:

    dK += dS^T Q | S'^T = K Q'^T       then P' = 2^(c S' - Stats') under what follows
    dP'^T = V dO'^T - Delta' | dQ's piece = dS K
    dV += P'^T dO'                     the piece is added to dQ's sums, dS' = P' dP'

dS goes to the other consumer through shared memory, and each makes half of a tile's columns of dQ.
Nothing is under way between steps: an accumulator that crosses a loop's edge would be waited for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_backward_consumer import (
    clear_rows,
    is_masked,
    probabilities,
    store_gradient,
)
from tilewright.engines.hopper.attention_backward_places import (
    open_tiles,
    row_tiles,
    visible_or_zero,
)
from tilewright.engines.hopper.attention_backward_records import (
    CONSUMERS,
    EVERYBODY,
    EXCHANGE,
    KEYS,
    PIECE,
    RELEASE_O,
    RELEASE_Q,
)
from tilewright.engines.hopper.barriers import barrier_arrive, barrier_wait, partition_barrier


@gluon.jit
def clean_keys(memory, config, score_layout: gl.constexpr, CONSUMER: gl.constexpr):
    """Put 0 for NaN and infinity in this consumer's keys: (1 for a key that had one, any).

    A hidden key must not matter times a 0 in dQ; for rows that see one, P is made NaN.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // config.DEPTH, config.DEPTH // 8], [4, 1], [1, 0]
    )
    keys = memory.k.index(CONSUMER)
    tile = keys.load(layout)
    is_finite = gl.abs(tile.to(gl.float32)) < float("inf")
    spoiled = gl.max(gl.where(is_finite, 0, 1), axis=1)
    any_spoiled = gl.max(spoiled, axis=0)
    if any_spoiled > 0:
        keys.store(gl.where(is_finite, tile, 0.0).to(tile.dtype))
        fence_async_shared()
    partition_barrier()
    return gl.convert_layout(spoiled, gl.SliceLayout(1, score_layout)), any_spoiled


@gluon.jit
def start_piece(place, nothing, memory, config, CONSUMER: gl.constexpr):
    """Start this consumer's half of the columns of a tile's dQ = dS K.

    ``place`` is the tile's first dS.
    """
    FIRST: gl.constexpr = CONSUMER * config.COLUMNS
    token = warpgroup_mma(
        memory.d_s.index(place).permute((1, 0)),
        memory.k.index(0).slice(FIRST, config.COLUMNS, 1),
        nothing,
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        memory.d_s.index(place + 1).permute((1, 0)),
        memory.k.index(1).slice(FIRST, config.COLUMNS, 1),
        token,
        is_async=True,
    )


@gluon.jit
def add_to_sums(piece, at):
    """Add a piece to the sums at ``at``, four numbers a thread and an operation.

    A thread of a product's layout holds columns 8 j + 2 t and the next of rows g and g + 8 of its
    warp: those four are neighbours in the sums, then come the warp's lanes, the warps, and j.
    """
    blocks: gl.constexpr = piece.shape[1] // 8
    ordered = piece.reshape([4, 2, 8, blocks, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    ordered = gl.convert_layout(ordered.reshape([blocks * 128, 4]), layout, assert_trivial=True)
    first = gl.arange(0, blocks * 128, gl.SliceLayout(1, layout))
    second = gl.arange(0, 4, gl.SliceLayout(0, layout))
    gl.atomic_add(at + first[:, None] * 4 + second[None, :], ordered, sem="relaxed")


@gluon.jit
def watched_probabilities(
    scores, lse, key, spoiled, any_spoiled, tile, low_open, high_open, problem, config
):
    """``probabilities``, and NaN for the rows that see a key that was cleaned."""
    if config.HIDES:
        if any_spoiled > 0:
            scores = gl.where((spoiled > 0)[:, None], float("nan"), scores)
    return probabilities(scores, lse, key, tile, low_open, high_open, problem, config)


@gluon.jit
def finish_scores(p, d_p, key, tile, low_open, high_open, step, memory, problem, config,
                  layout: gl.constexpr, CONSUMER: gl.constexpr):  # fmt: skip
    """DS of a tile as an operand; the other consumer is told that it is in shared memory."""
    d_s = p * d_p
    if config.MASKS:
        if is_masked(tile, low_open, high_open):
            d_s = visible_or_zero(d_s, key, tile * config.ROWS, problem, config)
    narrow = d_s.to(memory.q.dtype)
    memory.d_s.index((step % 2) * 2 + CONSUMER).store(narrow)
    operand = gl.convert_layout(narrow, layout)
    fence_async_shared()
    barrier_arrive(EXCHANGE + (step % 2) * 2 + CONSUMER, CONSUMERS)
    return operand


@gluon.jit
def start_score_gradients(zero, tile, step, memory, problem, config, CONSUMER: gl.constexpr):
    """Start dP of a tile when its dO is there: (the token, dO)."""
    rows_layout: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
    start = (
        gl.zeros_like(zero) + memory.delta.index(step % config.STAGES).load(rows_layout)[None, :]
    )
    stage = step % config.STAGES_O
    d_o = memory.d_o.index(stage)
    mbarrier.wait(memory.d_o_full.index(stage), (step // config.STAGES_O) & 1)
    clear_rows(d_o, tile * config.ROWS, problem.rows, config)
    token = warpgroup_mma(memory.v.index(CONSUMER), d_o.permute((1, 0)), start, is_async=True)
    return token, d_o


@gluon.jit
def consume_with_sums(memory, problem, config, d_k, d_v, CONSUMER: gl.constexpr):
    """A consumer that makes its share of dQ too: 64 keys against every tile of 64 rows."""
    D: gl.constexpr = config.DEPTH
    ROWS: gl.constexpr = config.ROWS
    STAGES: gl.constexpr = config.STAGES
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.DEPTH_V, 16])
    piece_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.COLUMNS, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, value_layout, 2)
    d_s_layout: gl.constexpr = gl.DotOperandLayout(0, key_layout, 2)
    dtype: gl.constexpr = memory.q.dtype
    acc_k = gl.zeros([KEYS, D], gl.float32, key_layout)
    acc_v = gl.zeros([KEYS, config.DEPTH_V], gl.float32, value_layout)
    zero = gl.zeros([KEYS, ROWS], gl.float32, score_layout)
    nothing = gl.zeros([PIECE, config.COLUMNS], gl.float32, piece_layout)
    first_own = problem.first_key + CONSUMER * KEYS
    key = first_own + gl.arange(0, KEYS, gl.SliceLayout(1, score_layout))
    low, high = row_tiles(problem, config)
    low_open, high_open = open_tiles(low, high, problem, config)
    k = memory.k.index(CONSUMER)
    mbarrier.wait(memory.keys_full.index(0), 0)
    spoiled = key * 0
    any_spoiled = low * 0
    if config.HIDES:
        spoiled, any_spoiled = clean_keys(memory, config, score_layout, CONSUMER)
    line = (problem.batch * problem.heads_kv + problem.head_kv) * problem.group
    sums_at = problem.sums + line.to(gl.int64) * problem.padded_rows * D
    sums_at += CONSUMER * PIECE * config.COLUMNS
    tile = low
    mbarrier.wait(memory.q_full.index(0), 0)
    q = memory.q.index(0)
    clear_rows(q, tile * ROWS, problem.rows, config)
    token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    d_p_token, d_o = start_score_gradients(zero, tile, low * 0, memory, problem, config, CONSUMER)
    lse = memory.lse.index(0).load(rows_layout)
    scores = warpgroup_mma_wait(1, deps=(token,))
    p = watched_probabilities(
        scores, lse, key, spoiled, any_spoiled, tile, low_open, high_open, problem, config
    )
    p_operand = gl.convert_layout(p.to(dtype), p_layout)
    v_token = warpgroup_mma(p_operand, d_o, acc_v, is_async=True)
    d_p = warpgroup_mma_wait(1, deps=(d_p_token,))
    d_s = finish_scores(
        p, d_p, key, tile, low_open, high_open, low * 0, memory, problem, config, d_s_layout,
        CONSUMER,
    )  # fmt: skip
    acc_v, p_operand = warpgroup_mma_wait(0, deps=(v_token, p_operand))
    barrier_arrive(RELEASE_O, EVERYBODY)
    steps = (high - low) * problem.group
    for step in range(steps - 1):
        k_token = warpgroup_mma(d_s, memory.q.index(step % STAGES), acc_k, is_async=True)
        piece_at = sums_at + tile.to(gl.int64) * (ROWS * D)
        tile += 1
        if tile == high:
            tile = low
            sums_at += problem.padded_rows.to(gl.int64) * D
        stage = (step + 1) % STAGES
        mbarrier.wait(memory.q_full.index(stage), ((step + 1) // STAGES) & 1)
        q = memory.q.index(stage)
        clear_rows(q, tile * ROWS, problem.rows, config)
        token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        d_p_token, d_o = start_score_gradients(
            zero, tile, step + 1, memory, problem, config, CONSUMER
        )
        barrier_wait(EXCHANGE + (step % 2) * 2 + 1 - CONSUMER, CONSUMERS)
        piece_token = start_piece((step % 2) * 2, nothing, memory, config, CONSUMER)
        lse = memory.lse.index(stage).load(rows_layout)
        # dP and the two products of a piece go on.
        scores, acc_k, d_s = warpgroup_mma_wait(3, deps=(token, k_token, d_s))
        barrier_arrive(RELEASE_Q + step % STAGES, EVERYBODY)
        p = watched_probabilities(
            scores, lse, key, spoiled, any_spoiled, tile, low_open, high_open, problem, config
        )
        p_operand = gl.convert_layout(p.to(dtype), p_layout)
        v_token = warpgroup_mma(p_operand, d_o, acc_v, is_async=True)
        piece, d_p = warpgroup_mma_wait(1, deps=(piece_token, d_p_token))
        add_to_sums(piece, piece_at)
        d_s = finish_scores(
            p, d_p, key, tile, low_open, high_open, step + 1, memory, problem, config, d_s_layout,
            CONSUMER,
        )  # fmt: skip
        acc_v, p_operand = warpgroup_mma_wait(0, deps=(v_token, p_operand))
        barrier_arrive(RELEASE_O + (step + 1) % config.STAGES_O, EVERYBODY)
    step = steps - 1
    k_token = warpgroup_mma(d_s, memory.q.index(step % STAGES), acc_k, is_async=True)
    barrier_wait(EXCHANGE + (step % 2) * 2 + 1 - CONSUMER, CONSUMERS)
    piece_token = start_piece((step % 2) * 2, nothing, memory, config, CONSUMER)
    acc_k, d_s, piece = warpgroup_mma_wait(0, deps=(k_token, d_s, piece_token))
    barrier_arrive(RELEASE_Q + step % STAGES, EVERYBODY)
    add_to_sums(piece, sums_at + tile.to(gl.int64) * (ROWS * D))
    store_gradient(acc_k * problem.scale, d_k, first_own, problem, config.WIDTH, dtype)
    store_gradient(acc_v, d_v, first_own, problem, config.WIDTH_V, dtype)
