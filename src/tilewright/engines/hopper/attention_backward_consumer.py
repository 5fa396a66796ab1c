"""The consumers of attention's backward: 64 keys each against every tile of rows that sees them.

What lies between two waits is under way together. A step makes the gradients of one tile and the
probabilities of the next:

    dP^T = V dO^T - Delta | dV += P^T dO       dS = P dP while dV is made
    dK += dS^T Q          | S'^T = K Q'^T      dS goes to the other consumer through shared memory
    dQ's piece = dS K                          P' = 2^(c S' - Stats') while it is made

and the piece is added to dQ's sums at the start of the next step. Nothing is under way between
steps: an accumulator that crosses a loop's edge would be waited for.
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
    CONSUMERS,
    EVERYBODY,
    EXCHANGE,
    KEYS,
    PIECE,
    RELEASE_O,
    RELEASE_Q,
)
from tilewright.engines.hopper.attention_records import NO_LENGTHS
from tilewright.engines.hopper.barriers import barrier_arrive, barrier_wait, partition_barrier

LOG2E = gl.constexpr(1.4426950408889634)


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
def clear_rows(tile, first_row, rows, config):
    """Zero what a tile has of rows behind the sequence: a P of 0 times NaN would be NaN.

    Both consumers do so; they write the same.
    """
    if config.LENGTHS_Q != NO_LENGTHS:
        if first_row + config.ROWS > rows:
            D: gl.constexpr = tile.shape[1]
            layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
            row = first_row + gl.arange(0, config.ROWS, gl.SliceLayout(1, layout))
            held = tile.load(layout)
            tile.store(gl.where((row < rows)[:, None], held, 0.0).to(tile.dtype))
            fence_async_shared()
            partition_barrier()


@gluon.jit
def start_piece(place, nothing, memory, config, CONSUMER: gl.constexpr):
    """Start this consumer's piece of a tile's dQ = dS K; ``place`` is the tile's first dS.

    Of a tile of 64 rows a consumer makes half the columns, of one of 128 half the rows.
    """
    FIRST: gl.constexpr = CONSUMER * config.COLUMNS
    first, second = memory.d_s.index(place), memory.d_s.index(place + 1)
    zero = fresh_zero(place, config.MASKS)
    first_keys, second_keys = memory.k.index(zero), memory.k.index(zero + 1)
    if config.ROWS == PIECE:
        token = warpgroup_mma(
            first.permute((1, 0)),
            first_keys.slice(FIRST, config.COLUMNS, 1),
            nothing,
            use_acc=False,
            is_async=True,
        )
        token = warpgroup_mma(
            second.permute((1, 0)),
            second_keys.slice(FIRST, config.COLUMNS, 1),
            token,
            is_async=True,
        )
    else:
        token = warpgroup_mma(
            first.slice(CONSUMER * PIECE, PIECE, 1).permute((1, 0)),
            first_keys,
            nothing,
            use_acc=False,
            is_async=True,
        )
        token = warpgroup_mma(
            second.slice(CONSUMER * PIECE, PIECE, 1).permute((1, 0)),
            second_keys,
            token,
            is_async=True,
        )
    return token


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
def is_masked(tile, low_open, high_open):
    """True if some row of a tile does not see some key."""
    return (tile < low_open) | (tile >= high_open)


@gluon.jit
def probabilities(scores, lse, key, spoiled, any_spoiled, tile, low_open, high_open, problem,
                  config):  # fmt: skip
    """P^T of a tile, 0 where a row does not see a key."""
    p = gl.exp2(scores * (problem.scale * LOG2E) - lse[None, :])
    if config.HIDES:
        if any_spoiled > 0:
            p = gl.where((spoiled > 0)[:, None], float("nan"), p)
    if config.MASKS:
        if is_masked(tile, low_open, high_open):
            p = visible_or_zero(p, key, tile * config.ROWS, problem, config)
    return p


@gluon.jit
def start_gradients(
    p, acc_k, acc_v, zero, key, tile, low_open, high_open, step, memory, problem, config,
    d_s_layout: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """DV of a tile, dS, and the start of its dK: (the token of dK, dV, dS as an operand)."""
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
        memory.v.index(CONSUMER + fresh_zero(step, config.MASKS)),
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
    narrow = d_s.to(dtype)
    if config.MAKES_D_Q:
        memory.d_s.index((step % 2) * 2 + CONSUMER).store(narrow)
    d_s_operand = gl.convert_layout(narrow, d_s_layout)
    k_token = warpgroup_mma(d_s_operand, memory.q.index(stage), acc_k, is_async=True)
    if config.MAKES_D_Q:
        fence_async_shared()
        barrier_arrive(EXCHANGE + (step % 2) * 2 + CONSUMER, CONSUMERS)
    acc_v, p_operand = warpgroup_mma_wait(1, deps=(v_token, p_operand))
    barrier_arrive(RELEASE_O + stage_o, EVERYBODY)
    return k_token, acc_v, d_s_operand


@gluon.jit
def consume(memory, problem, config, d_k, d_v, CONSUMER: gl.constexpr):
    """A consumer: 64 keys against every tile of rows."""
    D: gl.constexpr = config.DEPTH
    ROWS: gl.constexpr = config.ROWS
    STAGES: gl.constexpr = config.STAGES
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    rows_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.DEPTH_V, 16])
    piece_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.COLUMNS, 16])
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
    piece_at = sums_at
    piece = nothing
    tile = low
    mbarrier.wait(memory.q_full.index(0), 0)
    q = memory.q.index(0)
    clear_rows(q, tile * ROWS, problem.rows, config)
    token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = memory.lse.index(0).load(rows_layout)
    scores = warpgroup_mma_wait(0, deps=(token,))
    p = probabilities(
        scores, lse, key, spoiled, any_spoiled, tile, low_open, high_open, problem, config
    )
    steps = (high - low) * problem.group
    for step in range(steps - 1):
        if config.MAKES_D_Q:
            if step > 0:
                add_to_sums(piece, piece_at)
        k_token, acc_v, d_s_operand = start_gradients(
            p, acc_k, acc_v, zero, key, tile, low_open, high_open, step, memory, problem, config,
            d_s_layout, CONSUMER,
        )  # fmt: skip
        piece_at = sums_at + tile.to(gl.int64) * (ROWS * D)
        tile += 1
        if tile == high:
            tile = low
            sums_at += problem.padded_rows.to(gl.int64) * D
        stage = (step + 1) % STAGES
        mbarrier.wait(memory.q_full.index(stage), ((step + 1) // STAGES) & 1)
        q = memory.q.index(stage)
        clear_rows(q, tile * ROWS, problem.rows, config)
        k = memory.k.index(CONSUMER + fresh_zero(step, config.MASKS))
        token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        if config.MAKES_D_Q:
            barrier_wait(EXCHANGE + (step % 2) * 2 + 1 - CONSUMER, CONSUMERS)
            piece_token = start_piece((step % 2) * 2, nothing, memory, config, CONSUMER)
        lse = memory.lse.index(stage).load(rows_layout)
        # A piece is two products.
        scores, acc_k, d_s_operand = warpgroup_mma_wait(
            2 if config.MAKES_D_Q else 0, deps=(token, k_token, d_s_operand)
        )
        barrier_arrive(RELEASE_Q + step % STAGES, EVERYBODY)
        p = probabilities(
            scores, lse, key, spoiled, any_spoiled, tile, low_open, high_open, problem, config
        )
        if config.MAKES_D_Q:
            piece = warpgroup_mma_wait(0, deps=(piece_token,))
    if config.MAKES_D_Q:
        if steps > 1:
            add_to_sums(piece, piece_at)
    step = steps - 1
    k_token, acc_v, d_s_operand = start_gradients(
        p, acc_k, acc_v, zero, key, tile, low_open, high_open, step, memory, problem, config,
        d_s_layout, CONSUMER,
    )  # fmt: skip
    if config.MAKES_D_Q:
        barrier_wait(EXCHANGE + (step % 2) * 2 + 1 - CONSUMER, CONSUMERS)
        piece_token = start_piece((step % 2) * 2, nothing, memory, config, CONSUMER)
        piece = warpgroup_mma_wait(0, deps=(piece_token,))
        add_to_sums(piece, sums_at + tile.to(gl.int64) * (ROWS * D))
    acc_k, d_s_operand = warpgroup_mma_wait(0, deps=(k_token, d_s_operand))
    barrier_arrive(RELEASE_Q + step % STAGES, EVERYBODY)
    store_gradient(acc_k * problem.scale, d_k, first_own, problem, config.WIDTH, dtype)
    store_gradient(acc_v, d_v, first_own, problem, config.WIDTH_V, dtype)


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
