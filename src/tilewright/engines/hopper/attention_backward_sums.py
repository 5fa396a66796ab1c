"""The consumers of attention's backward that make dQ too: 64 keys each against tiles of rows.

A step takes a tile whose scores are there. What lies between two waits is under way together:

    dP^T = V dO^T - Delta                     P = 2^(c S)
    dV += P^T dO                              dS = P dP, which goes to shared memory
    dK += dS^T Q                              until the other consumer's dS is there
    a piece of dQ = dS K | S'^T = K Q'^T - Stats' / c       the piece goes to shared memory

Each consumer makes one piece: half of a tile's columns of dQ, or all columns of half of its rows.
What is stored for the tensor cores or the copy engine needs a fence, and a fence waits for what its
warp has under way. So it is left to the carrier, a warp with no products, which also has the pieces
added to dQ's sums. Nothing is under way between steps: an accumulator that crosses a loop's edge
would be waited for.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_backward_consumer import (
    LOG2E,
    clear_rows,
    is_masked,
)
from tilewright.engines.hopper.attention_backward_leaving import leave
from tilewright.engines.hopper.attention_backward_parts import start_with_parts, units_of
from tilewright.engines.hopper.attention_backward_places import (
    fresh_zero,
    open_tiles,
    row_tiles,
    turned,
    visible_or_zero,
)
from tilewright.engines.hopper.attention_backward_records import (
    D_S_READY,
    D_S_STORED,
    EVERYBODY,
    KEYS,
    LINE,
    PIECE,
    PIECE_FREE,
    PIECE_FREE_STEP,
    PIECE_STORED,
    RELEASE_O,
    RELEASE_Q,
    WITH_CARRIER,
)
from tilewright.engines.hopper.attention_backward_shares import add_share
from tilewright.engines.hopper.barriers import barrier_arrive, barrier_wait, partition_barrier


@builtin
def reduce_tile(tensor_map, coord, tile, _semantic=None):
    """Have the copy engine add a tile in shared memory to what a tensor map describes."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_map.handle, coord, tile.handle
    )


@gluon.jit
def load_keys(memory, config, CONSUMER: gl.constexpr):
    """This consumer's keys, and where they are numbers that are finite."""
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // config.DEPTH, config.DEPTH // 8], [4, 1], [1, 0]
    )
    keys = memory.k.index(CONSUMER).load(layout)
    return keys, gl.abs(keys.to(gl.float32)) < float("inf")


@gluon.jit
def spoiled_keys(memory, config, score_layout: gl.constexpr, CONSUMER: gl.constexpr):
    """(1 for a key of this consumer that has NaN or infinity, any)."""
    _, is_finite = load_keys(memory, config, CONSUMER)
    spoiled = gl.max(gl.where(is_finite, 0, 1), axis=1)
    return gl.convert_layout(spoiled, gl.SliceLayout(1, score_layout)), gl.max(spoiled, axis=0)


@gluon.jit
def clean_keys(any_spoiled, memory, config, CONSUMER: gl.constexpr):
    """Put 0 for NaN and infinity in this consumer's keys.

    A hidden key must not matter times a 0 in dQ; for rows that see one, P is made NaN. Scores of
    other keys do not depend on it, so that the first ones are made before.
    """
    if any_spoiled > 0:
        keys, is_finite = load_keys(memory, config, CONSUMER)
        memory.k.index(CONSUMER).store(gl.where(is_finite, keys, 0.0).to(keys.dtype))
        fence_async_shared()
        partition_barrier()


@gluon.jit
def start_piece(place, nothing, memory, config, CONSUMER: gl.constexpr):
    """Start this consumer's part of a tile's dQ = dS K: half of the rows or of the columns.

    ``place`` is the tile's first dS.
    """
    COLUMNS: gl.constexpr = config.COLUMNS
    FIRST: gl.constexpr = CONSUMER * COLUMNS if COLUMNS < config.DEPTH else 0
    first = memory.d_s.index(place)
    second = memory.d_s.index(place + 1)
    if config.ROWS > PIECE:
        first = first.slice(CONSUMER * PIECE, PIECE, 1)
        second = second.slice(CONSUMER * PIECE, PIECE, 1)
    token = warpgroup_mma(
        first.permute((1, 0)),
        memory.k.index(0).slice(FIRST, COLUMNS, 1),
        nothing,
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        second.permute((1, 0)), memory.k.index(1).slice(FIRST, COLUMNS, 1), token, is_async=True
    )


@gluon.jit
def store_piece(piece, memory, CONSUMER: gl.constexpr):
    """Store a piece for the carrier, which has it added to the sums.

    A thread of a product's layout holds columns 8 j + 2 t and the next of rows g and g + 8 of its
    warp: those four are neighbours in the sums, then come the warp's lanes, the warps, and j.
    """
    blocks: gl.constexpr = piece.shape[1] // 8
    ordered = piece.reshape([4, 2, 8, blocks, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ordered = gl.convert_layout(
        ordered.reshape([blocks * 512 // LINE, LINE]), layout, assert_trivial=True
    )
    barrier_wait(PIECE_FREE + PIECE_FREE_STEP * CONSUMER, WITH_CARRIER)
    memory.pieces.index(CONSUMER).store(ordered)
    barrier_arrive(PIECE_STORED + CONSUMER, WITH_CARRIER)


@gluon.jit
def watched_probabilities(
    scores, key, spoiled, any_spoiled, tile, low_open, high_open, problem, config
):
    """P^T of a tile, 0 where a row does not see a key, NaN for the rows that see a cleaned one."""
    if config.HIDES:
        if any_spoiled > 0:
            scores = gl.where((spoiled > 0)[:, None], float("nan"), scores)
    p = gl.exp2(scores * (problem.scale * LOG2E))
    if config.MASKS:
        if is_masked(tile, low_open, high_open):
            p = visible_or_zero(p, key, tile * config.ROWS, problem, config)
    return p


@gluon.jit
def step_with_sums(
    scores, acc_k, acc_v, zero, nothing, units, key, spoiled, any_spoiled, tile, next_tile,
    low_open, high_open, step, memory, problem, config,
    CONSUMER: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """One tile from its scores: (the next tile's scores, dK, dV)."""
    STAGES: gl.constexpr = config.STAGES
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_v.type.layout, 2)
    d_s_layout: gl.constexpr = gl.DotOperandLayout(0, acc_k.type.layout, 2)
    dtype: gl.constexpr = memory.q.dtype
    stage = step % STAGES
    stage_o = step % config.STAGES_O
    place = (step % 2) * 2
    fresh = fresh_zero(step)
    d_o = memory.d_o.index(stage_o)
    mbarrier.wait(memory.d_o_full.index(stage_o), (step // config.STAGES_O) & 1)
    clear_rows(d_o, tile * config.ROWS, problem.rows, config)
    d_p_token = start_with_parts(
        memory.v.index(CONSUMER + fresh), d_o, memory.delta.index(stage_o), units, zero
    )
    p = watched_probabilities(
        scores, key, spoiled, any_spoiled, tile, low_open, high_open, problem, config
    )
    p_operand = gl.convert_layout(p.to(dtype), p_layout)
    v_token = warpgroup_mma(p_operand, d_o, acc_v, is_async=True)
    d_p = warpgroup_mma_wait(1, deps=(d_p_token,))
    d_s = p * d_p
    if config.MASKS:
        if is_masked(tile, low_open, high_open):
            d_s = visible_or_zero(d_s, key, tile * config.ROWS, problem, config)
    narrow = d_s.to(dtype)
    memory.d_s.index(place + CONSUMER).store(narrow)
    barrier_arrive(D_S_STORED, EVERYBODY)
    d_s_operand = gl.convert_layout(narrow, d_s_layout)
    k_token = warpgroup_mma(d_s_operand, memory.q.index(stage), acc_k, is_async=True)
    acc_v, p_operand = warpgroup_mma_wait(1, deps=(v_token, p_operand))
    barrier_arrive(RELEASE_O + stage_o, EVERYBODY)
    barrier_wait(D_S_READY, EVERYBODY)
    piece_token = start_piece(place, nothing, memory, config, CONSUMER)
    if LAST:
        piece, acc_k, d_s_operand = warpgroup_mma_wait(0, deps=(piece_token, k_token, d_s_operand))
        barrier_arrive(RELEASE_Q + stage, EVERYBODY)
        store_piece(piece, memory, CONSUMER)
        scores = zero
    else:
        stage_next = (step + 1) % STAGES
        mbarrier.wait(memory.q_full.index(stage_next), ((step + 1) // STAGES) & 1)
        q = memory.q.index(stage_next)
        clear_rows(q, next_tile * config.ROWS, problem.rows, config)
        token = start_with_parts(
            memory.k.index(CONSUMER + fresh), q, memory.lse.index(stage_next), units, zero
        )
        # The two products of the scores go on.
        piece, acc_k, d_s_operand = warpgroup_mma_wait(2, deps=(piece_token, k_token, d_s_operand))
        barrier_arrive(RELEASE_Q + stage, EVERYBODY)
        store_piece(piece, memory, CONSUMER)
        scores = warpgroup_mma_wait(0, deps=(token,))
    return scores, acc_k, acc_v


@gluon.jit
def consume_with_sums(given, CONSUMER: gl.constexpr):
    """A consumer that makes its share of dQ too: 64 keys against every tile of rows."""
    memory, problem, config = given.memory, given.problem, given.config
    D: gl.constexpr = config.DEPTH
    ROWS: gl.constexpr = config.ROWS
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    key_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    value_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.DEPTH_V, 16])
    piece_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, config.COLUMNS, 16])
    dtype: gl.constexpr = memory.q.dtype
    acc_k = gl.zeros([KEYS, D], gl.float32, key_layout)
    acc_v = gl.zeros([KEYS, config.DEPTH_V], gl.float32, value_layout)
    zero = gl.zeros([KEYS, ROWS], gl.float32, score_layout)
    nothing = gl.zeros([PIECE, config.COLUMNS], gl.float32, piece_layout)
    first_own = problem.first_key + CONSUMER * KEYS
    key = first_own + gl.arange(0, KEYS, gl.SliceLayout(1, score_layout))
    low, high = row_tiles(problem, config)
    low_open, high_open = open_tiles(low, high, problem, config)
    mbarrier.wait(memory.keys_full.index(0), 0)
    tile = low
    mbarrier.wait(memory.q_full.index(0), 0)
    q = memory.q.index(0)
    clear_rows(q, turned(tile, low, high, config) * ROWS, problem.rows, config)
    units = units_of(KEYS, score_layout, dtype)
    token = start_with_parts(memory.k.index(CONSUMER), q, memory.lse.index(0), units, zero)
    spoiled = key * 0
    any_spoiled = low * 0
    if config.HIDES:
        spoiled, any_spoiled = spoiled_keys(memory, config, score_layout, CONSUMER)
    scores = warpgroup_mma_wait(0, deps=(token,))
    if config.HIDES:
        clean_keys(any_spoiled, memory, config, CONSUMER)
    steps = (high - low) * problem.group
    for step in range(steps - 1):
        next_tile = tile + 1
        if next_tile == high:
            next_tile = low
        scores, acc_k, acc_v = step_with_sums(
            scores, acc_k, acc_v, zero, nothing, units, key, spoiled, any_spoiled,
            turned(tile, low, high, config), turned(next_tile, low, high, config),
            low_open, high_open, step, memory, problem, config, CONSUMER, False,
        )  # fmt: skip
        tile = next_tile
    scores, acc_k, acc_v = step_with_sums(
        scores, acc_k, acc_v, zero, nothing, units, key, spoiled, any_spoiled,
        turned(tile, low, high, config), tile, low_open, high_open, steps - 1, memory, problem,
        config, CONSUMER, True,
    )  # fmt: skip
    if config.SHARES:
        if problem.shares > 1:
            add_share(acc_k, acc_v, first_own, given, dtype, CONSUMER)
        else:
            leave(acc_k, acc_v, first_own, given, dtype, CONSUMER)
    else:
        leave(acc_k, acc_v, first_own, given, dtype, CONSUMER)


@gluon.jit
def carry(given):
    """The carrier: one warp that fences what consumers store and has pieces added to the sums."""
    memory, problem, config = given.memory, given.problem, given.config
    # Lines of the sums a row, and a piece.
    UNIT: gl.constexpr = config.DEPTH // LINE
    LINES: gl.constexpr = PIECE * config.COLUMNS // LINE
    low, high = row_tiles(problem, config)
    line = (problem.batch * problem.heads_kv + problem.head_kv) * problem.group
    for member in range(problem.group):
        at = (line + member) * problem.padded_rows * UNIT
        for tile in range(low, high):
            barrier_wait(D_S_STORED, EVERYBODY)
            fence_async_shared()
            barrier_arrive(D_S_READY, EVERYBODY)
            # The pieces of the tile before have left.
            tma.store_wait(0)
            for w in gl.static_range(2):
                barrier_arrive(PIECE_FREE + PIECE_FREE_STEP * w, WITH_CARRIER)
            for w in gl.static_range(2):
                barrier_wait(PIECE_STORED + w, WITH_CARRIER)
                fence_async_shared()
                box = at + turned(tile, low, high, config) * (config.ROWS * UNIT) + w * LINES
                reduce_tile(given.sums, [box, 0], memory.pieces.index(w))
    tma.store_wait(0)
