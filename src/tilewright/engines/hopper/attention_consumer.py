"""A consumer of attention forward: four warps that make 64 rows of every tile.

While the product with K of the next block is under way, this block's probabilities multiply V, and
the consumers take turns on the tensor cores, so that one's exponentials run under another's
products. O leaves through the memory of its own Q.
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

from tilewright.engines.hopper.attention_places import (
    count_tiles,
    element,
    next_step,
    place_of,
)
from tilewright.engines.hopper.attention_records import NO_LENGTHS, ROWS
from tilewright.engines.hopper.attention_repair import repair, watched
from tilewright.engines.hopper.attention_softmax import (
    MINUS_INFINITY,
    clear_tail,
    finish,
    masked,
    rescaled,
    shaped,
    softmax_block,
    thread_sums,
)
from tilewright.engines.hopper.barriers import (
    FIRST_FREE,
    barrier_arrive,
    barrier_wait,
    stores_done,
)


@gluon.jit
def take_turn(tiling, WARPGROUP: gl.constexpr):
    """Wait for this warpgroup's turn on the tensor cores."""
    if tiling.TURNS:
        barrier_wait(FIRST_FREE + WARPGROUP, "256")


@gluon.jit
def pass_turn(tiling, WARPGROUP: gl.constexpr):
    """Give the turn to the next warpgroup."""
    if tiling.TURNS:
        barrier_arrive(FIRST_FREE + (WARPGROUP + 1) % tiling.WARPGROUPS, "256")


@gluon.jit
def start_scores(q_first, stage, memory, tiling):
    """Start Q K^T for a stage, slab by slab of the tile whose first one is ``q_first``."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tiling.BLOCK_N, 16]
    )
    zero = gl.zeros([ROWS, tiling.BLOCK_N], gl.float32, layout)
    k = memory.k.index(stage * tiling.SLABS).permute((1, 0))
    scores = warpgroup_mma(memory.q.index(q_first), k, zero, use_acc=False, is_async=True)
    for s in gl.static_range(1, tiling.SLABS):
        k = memory.k.index(stage * tiling.SLABS + s).permute((1, 0))
        scores = warpgroup_mma(memory.q.index(q_first + s), k, scores, is_async=True)
    return scores


@gluon.jit
def next_block(
    q_first,
    p,
    acc,
    top,
    total,
    first,
    column,
    block,
    sequence,
    memory,
    problem,
    tiling,
    features,
    MASKED: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Scores of block ``block + 1`` beside the second product of ``block``."""
    before = block % tiling.STAGES
    stage = (block + 1) % tiling.STAGES
    phase = ((block + 1) // tiling.STAGES) & 1
    mbarrier.wait(memory.k_full.index(stage), phase)
    take_turn(tiling, WARPGROUP)
    scores = start_scores(q_first, stage, memory, tiling)
    acc_after = warpgroup_mma(p, memory.v.index(before), acc, is_async=True)
    pass_turn(tiling, WARPGROUP)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    scores = shaped(scores, problem, features)
    if MASKED:
        scores = masked(scores, first, column, sequence, tiling, features)
    p_next, factor, top, total = softmax_block(scores, top, total, problem.scale, MASKED)
    # Waiting here, before the product's end, keeps the assembler from moving that wait above the
    # exponentials: a loop lies between.
    mbarrier.wait(memory.v_full.index(stage), phase)
    acc, p = warpgroup_mma_wait(0, deps=(acc_after, p))
    barrier_arrive(tiling.V_BARRIER + before, tiling.RELEASE)
    acc = rescaled(acc, factor)
    p = gl.convert_layout(p_next.to(memory.v.dtype), p.type.layout)
    return p, acc, top, total


@gluon.jit
def leave(out, q, o_map, place, first, sequence, problem, tiling, features):
    """O of a tile, through the memory of its Q; the end of a packed sequence row by row."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tiling.DEPTH_V], q.dtype)
    room = q
    if tiling.DEPTH_V != tiling.SLAB:
        room = q._reinterpret(q.dtype, [ROWS, tiling.DEPTH_V], layout)
    out = out.to(q.dtype)
    if features.RAGGED_Q:
        if first + ROWS <= sequence.rows:
            room.store(out)
            fence_async_shared()
            zero = place.batch * 0
            tma.async_copy_shared_to_global(
                o_map, [zero, place.head, sequence.o_row + first, 0], room
            )
        else:
            # What follows in memory belongs to another sequence.
            rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
            columns = gl.arange(0, tiling.DEPTH_V, gl.SliceLayout(0, out.type.layout))
            at = problem.o.pointer + element(
                problem.o, place.batch, place.head, sequence.o_row, True
            )
            gl.store(
                at + rows.to(gl.int64)[:, None] * problem.o.row + columns[None, :],
                out,
                mask=(rows < sequence.rows)[:, None] & (columns < problem.depth_v)[None, :],
            )
    else:
        room.store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(o_map, [place.batch, place.head, first, 0], room)


@gluon.jit
def ends_of_masks(place, first, sequence, tiling, features):
    """(free, edge, n): blocks 1 to free - 1 of n are masked on the right, from edge on on the left.

    Block 0 is the last one of the keys, and masked if anything is.
    """
    BN: gl.constexpr = tiling.BLOCK_N
    n = place.high - place.low
    free = n * 0 + 1
    if features.RIGHT_LOOP:
        open_to = max(first + sequence.right + 1, 0) // BN
        free = max(min(place.high - open_to, n), 1)
    edge = n
    if features.HAS_LEFT:
        hidden = max(first + ROWS - sequence.left, 0)
        edge = max(min(place.high - (hidden + BN - 1) // BN, n), free)
    return free, edge, n


@gluon.jit
def consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, WARPGROUP: gl.constexpr):
    """A consumer: 64 rows of every tile."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tiling.BLOCK_N, 16]
    )
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tiling.DEPTH_V, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    BN: gl.constexpr = tiling.BLOCK_N
    STAGES: gl.constexpr = tiling.STAGES
    SLOTS: gl.constexpr = tiling.Q_SLOTS
    zero = gl.zeros([ROWS, BN], gl.float32, score_layout)
    nothing = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, out_layout)
    if WARPGROUP == tiling.WARPGROUPS - 1:
        pass_turn(tiling, WARPGROUP)
    block = 0
    count = count_tiles(problem, tiling, features)
    # With two slots of Q, the first scores of a tile are made beside the last product before.
    scores = zero
    if SLOTS == 2:
        some = count > 0
        mbarrier.wait(memory.q_full.index(0), 0, pred=some)
        mbarrier.wait(memory.k_full.index(0), 0, pred=some)
        take_turn(tiling, WARPGROUP)
        token = start_scores(WARPGROUP * tiling.Q_PITCH, 0, memory, tiling)
        pass_turn(tiling, WARPGROUP)
        scores = warpgroup_mma_wait(0, deps=(token,))
        if some:
            barrier_arrive(tiling.K_BARRIER, tiling.RELEASE)
    spoiled = thread_sums(nothing)
    step = next_step(0, problem, tiling, features)
    place, sequence = place_of(step, problem, tiling, features)
    for number in range(count):
        first = place.first + WARPGROUP * ROWS
        slot = number % SLOTS
        q_first = (slot * tiling.WARPGROUPS + WARPGROUP) * tiling.Q_PITCH
        q_slot = memory.q.index(q_first)
        stage = block % STAGES
        phase = (block // STAGES) & 1
        more = number + 1 < count
        if SLOTS == 1:
            mbarrier.wait(memory.q_full.index(slot), number & 1)
            mbarrier.wait(memory.k_full.index(stage), phase)
            take_turn(tiling, WARPGROUP)
            token = start_scores(q_first, stage, memory, tiling)
            pass_turn(tiling, WARPGROUP)
            scores = warpgroup_mma_wait(0, deps=(token,))
            barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
        column = (place.high - 1) * BN
        scores = shaped(scores, problem, features)
        if features.FIRST_MASKED:
            scores = masked(scores, first, column, sequence, tiling, features)
        top = gl.full([ROWS], MINUS_INFINITY, gl.float32, gl.SliceLayout(1, score_layout))
        p_first, _, top, total = softmax_block(
            scores, top, 0.0, problem.scale, features.FIRST_MASKED
        )
        p = gl.convert_layout(p_first.to(memory.v.dtype), p_layout)
        acc = nothing
        if SLOTS == 2:
            # The tile before has left its slot by now.
            tma.store_wait(0)
            if (number > 0) & more:
                barrier_arrive(tiling.Q_BARRIER + (number - 1) % SLOTS, tiling.RELEASE)
        mbarrier.wait(memory.v_full.index(stage), phase)
        if features.PAGED or features.LENGTHS_KV != NO_LENGTHS:
            clear_tail(memory.v.index(stage), sequence.keys - column, tiling)
        free, edge, n = ends_of_masks(place, first, sequence, tiling, features)
        if features.RIGHT_LOOP:
            for j in range(1, free):
                p, acc, top, total = next_block(
                    q_first,
                    p,
                    acc,
                    top,
                    total,
                    first,
                    column - j * BN,
                    block,
                    sequence,
                    memory,
                    problem,
                    tiling,
                    features,
                    True,
                    WARPGROUP,
                )
                block += 1
        for _ in range(free, edge):
            p, acc, top, total = next_block(
                q_first,
                p,
                acc,
                top,
                total,
                first,
                0,
                block,
                sequence,
                memory,
                problem,
                tiling,
                features,
                False,
                WARPGROUP,
            )
            block += 1
        if features.HAS_LEFT:
            for j in range(edge, n):
                p, acc, top, total = next_block(
                    q_first,
                    p,
                    acc,
                    top,
                    total,
                    first,
                    column - j * BN,
                    block,
                    sequence,
                    memory,
                    problem,
                    tiling,
                    features,
                    True,
                    WARPGROUP,
                )
                block += 1
        last = block % STAGES
        block += 1
        if SLOTS == 2:
            # Scores of the next tile; without one, of whatever is there, and nobody looks.
            next_slot = (number + 1) % SLOTS
            stage = block % STAGES
            mbarrier.wait(memory.q_full.index(next_slot), ((number + 1) // SLOTS) & 1, pred=more)
            next_first = (next_slot * tiling.WARPGROUPS + WARPGROUP) * tiling.Q_PITCH
            mbarrier.wait(memory.k_full.index(stage), (block // STAGES) & 1, pred=more)
            take_turn(tiling, WARPGROUP)
            token = start_scores(next_first, stage, memory, tiling)
            acc_token = warpgroup_mma(p, memory.v.index(last), acc, is_async=True)
            pass_turn(tiling, WARPGROUP)
        else:
            acc_token = warpgroup_mma(p, memory.v.index(last), acc, is_async=True)
        # Found while the products run.
        step = next_step(step + 1, problem, tiling, features)
        next_place, next_sequence = place_of(step, problem, tiling, features)
        if SLOTS == 2:
            scores, acc = warpgroup_mma_wait(0, deps=(token, acc_token))
            if more:
                barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
        else:
            acc = warpgroup_mma_wait(0, deps=(acc_token,))
        barrier_arrive(tiling.V_BARRIER + last, tiling.RELEASE)
        out = finish(acc, top, total, place, first, sequence, problem, features)
        if features.REPAIRS:
            spoiled = watched(out, spoiled)
        leave(out, q_slot, o_map, place, first, sequence, problem, tiling, features)
        if SLOTS == 1:
            tma.store_wait(0)
            if more:
                barrier_arrive(tiling.Q_BARRIER, tiling.RELEASE)
        place, sequence = next_place, next_sequence
    tma.store_wait(0)
    if features.REPAIRS:
        # Looked at once, when all is done, so that it costs the tiles nothing.
        if gl.max(gl.max((spoiled != 0.0).to(gl.int32), 1), 0) != 0:
            stores_done()
            step = next_step(0, problem, tiling, features)
            for number in range(count):
                place, sequence = place_of(step, problem, tiling, features)
                first = place.first + WARPGROUP * ROWS
                repair(place, first, sequence, problem, tiling, features)
                step = next_step(step + 1, problem, tiling, features)
    if WARPGROUP == 0:
        take_turn(tiling, WARPGROUP)


@gluon.jit
def consume_0(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 0)


@gluon.jit
def consume_1(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 1)


@gluon.jit
def consume_2(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 2)
