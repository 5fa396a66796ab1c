"""A consumer of attention forward: four warps that make 64 rows of every tile.

Its blocks of keys are in ``attention_blocks``. O leaves through shared memory of its own, or that
of its own Q.
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

from tilewright.engines.hopper.attention_blocks import (
    first_block,
    next_block,
    nothing_yet,
    pass_turn,
    phase_of,
    stage_of,
    start_scores,
    take_turn,
)
from tilewright.engines.hopper.attention_places import element
from tilewright.engines.hopper.attention_records import NO_LENGTHS, ROWS
from tilewright.engines.hopper.attention_repair import note_spoiled, watched
from tilewright.engines.hopper.attention_softmax import (
    clear_tail,
    finish,
    rescaled_lazily,
    thread_sums,
    unpacked,
)
from tilewright.engines.hopper.attention_words import told
from tilewright.engines.hopper.barriers import barrier_arrive, partition_barrier


@gluon.jit
def in_parts(out, tiling):
    """The columns of O in as many parts as leave one after another."""
    if tiling.OUT_PARTS == 2:
        half: gl.constexpr = out.shape[1] // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, half, 16]
        )
        low, high = gl.split(gl.permute(gl.reshape(out, [ROWS, 2, half]), [0, 2, 1]))
        low = gl.convert_layout(low, layout, assert_trivial=True)
        high = gl.convert_layout(high, layout, assert_trivial=True)
        parts = (low, high)
    else:
        parts = (out,)
    return parts


@gluon.jit
def leave(out, q, o_map, place, first, sequence, memory, problem, tiling, features,
          WARPGROUP: gl.constexpr):  # fmt: skip
    """O of a tile, through shared memory; the end of a packed sequence row by row."""
    WIDTH: gl.constexpr = tiling.DEPTH_V // max(tiling.OUT_PARTS, 1)
    parts = in_parts(out, tiling)
    room = q
    if tiling.OUT_PARTS > 0:
        room = memory.o.index(WARPGROUP)
    elif tiling.DEPTH_V != tiling.SLAB:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tiling.DEPTH_V], q.dtype)
        room = q._reinterpret(q.dtype, [ROWS, tiling.DEPTH_V], layout)
    batch = place.batch
    if features.RAGGED_Q:
        batch = place.batch * 0
    if not features.RAGGED_Q or first + ROWS <= sequence.rows:
        for i in gl.static_range(len(parts)):
            if tiling.OUT_PARTS > 0:
                # What left before has been read.
                tma.store_wait(0)
                partition_barrier()
            room.store(parts[i])
            fence_async_shared()
            tma.async_copy_shared_to_global(
                o_map, [batch, place.head, sequence.o_row + first, i * WIDTH], room
            )
    else:
        # What follows in memory belongs to another sequence.
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
        columns = gl.arange(0, tiling.DEPTH_V, gl.SliceLayout(0, out.type.layout))
        at = problem.o.pointer + element(problem.o, place.batch, place.head, sequence.o_row, True)
        gl.store(
            at + rows.to(gl.int64)[:, None] * problem.o.row + columns[None, :],
            out,
            mask=(rows < sequence.rows)[:, None] & (columns < problem.depth_v)[None, :],
        )


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
def middle_blocks(q_first, p, acc, top, total, place, first, block, sequence, memory, problem,
                  tiling, features, WARPGROUP: gl.constexpr):  # fmt: skip
    """All blocks of a tile but the first: (p, acc, top, total, block)."""
    BN: gl.constexpr = tiling.BLOCK_N
    column = (place.high - 1) * BN
    factor = gl.full([ROWS], 1.0, gl.float32, top.type.layout)
    free, edge, n = ends_of_masks(place, first, sequence, tiling, features)
    if features.RIGHT_LOOP:
        for j in range(1, free):
            p, acc, top, total, factor = next_block(
                q_first, p, acc, top, total, factor, first, column - j * BN, block, sequence,
                memory, problem, tiling, features, True, WARPGROUP,
            )  # fmt: skip
            block += 1
    for _ in range(free, edge):
        p, acc, top, total, factor = next_block(
            q_first, p, acc, top, total, factor, first, 0, block, sequence, memory,
            problem, tiling, features, False, WARPGROUP,
        )  # fmt: skip
        block += 1
    if features.HAS_LEFT:
        for j in range(edge, n):
            p, acc, top, total, factor = next_block(
                q_first, p, acc, top, total, factor, first, column - j * BN, block, sequence,
                memory, problem, tiling, features, True, WARPGROUP,
            )  # fmt: skip
            block += 1
    return p, acc, top, total, factor, block


@gluon.jit
def tail_cleared(stage, phase, place, sequence, memory, tiling, features):
    """See ``clear_tail``, for a tile's first block."""
    if features.PAGED or features.LENGTHS_KV != NO_LENGTHS:
        mbarrier.wait(memory.v_full.index(stage), phase)
        column = (place.high - 1) * tiling.BLOCK_N
        clear_tail(memory.v.index(stage), sequence.keys - column, tiling)


@gluon.jit
def consume_tile(number, place, sequence, p, top, total, block, spoiled, nothing, o_map, memory,
                 problem, tiling, features, WARPGROUP: gl.constexpr):  # fmt: skip
    """A tile, and the first block of the next one."""
    p_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=nothing.type.layout, k_width=2
    )
    SLOTS: gl.constexpr = tiling.Q_SLOTS
    AHEAD: gl.constexpr = tiling.AHEAD
    DTYPE: gl.constexpr = memory.v.dtype
    first = place.first + WARPGROUP * ROWS
    slot = number % SLOTS
    q_first = (slot * tiling.WARPGROUPS + WARPGROUP) * tiling.Q_PITCH
    q_slot = memory.q.index(q_first)
    if not AHEAD:
        # Made anew by every tile.
        same = (p, top, total)
        stage, phase = stage_of(block, tiling), phase_of(block, tiling)
        mbarrier.wait(memory.q_full.index(slot), number & 1)
        mbarrier.wait(memory.k_full.index(stage), phase)
        take_turn(tiling, WARPGROUP)
        token = start_scores(q_first, stage, memory, tiling)
        pass_turn(tiling, WARPGROUP)
        scores = warpgroup_mma_wait(0, deps=(token,))
        barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
        p, top, total = first_block(
            scores, place, first, sequence, problem, tiling, features, p_layout, DTYPE
        )
        tail_cleared(stage, phase, place, sequence, memory, tiling, features)
    p, acc, top, total, factor, block = middle_blocks(
        q_first, p, nothing, top, total, place, first, block, sequence, memory, problem,
        tiling, features, WARPGROUP,
    )  # fmt: skip
    last, last_phase = stage_of(block, tiling), phase_of(block, tiling)
    block += 1
    if tiling.OUT_PARTS > 0:
        # All scores of the tile are made.
        barrier_arrive(tiling.Q_BARRIER + slot, tiling.RELEASE)
    if SLOTS == 2:
        # Scores of the next tile; without one, of whatever is there, and nobody looks.
        next_slot = (number + 1) % SLOTS
        stage, phase = stage_of(block, tiling), phase_of(block, tiling)
        next_phase = ((number + 1) // SLOTS) & 1
        mbarrier.wait(memory.q_full.index(next_slot), next_phase)
        more, next_place, next_sequence = told(next_slot, memory, problem, features)
        next_first = (next_slot * tiling.WARPGROUPS + WARPGROUP) * tiling.Q_PITCH
        mbarrier.wait(memory.k_full.index(stage), phase, pred=more)
        take_turn(tiling, WARPGROUP)
        token = start_scores(next_first, stage, memory, tiling)
        mbarrier.wait(memory.v_full.index(last), last_phase)
        p = unpacked(p, p_layout, DTYPE, tiling.WORDS)
        if tiling.PRESCALE:
            acc = rescaled_lazily(acc, factor, tiling.LAZY)
        acc_token = warpgroup_mma(p, memory.v.index(last), acc, is_async=True)
        pass_turn(tiling, WARPGROUP)
    else:
        mbarrier.wait(memory.v_full.index(last), last_phase)
        take_turn(tiling, WARPGROUP)
        p = unpacked(p, p_layout, DTYPE, tiling.WORDS)
        if tiling.PRESCALE:
            acc = rescaled_lazily(acc, factor, tiling.LAZY)
        acc_token = warpgroup_mma(p, memory.v.index(last), acc, is_async=True)
        pass_turn(tiling, WARPGROUP)
    if tiling.EARLY:
        scores = warpgroup_mma_wait(1, deps=(token,))
        if more:
            barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
        p_next, next_top, next_total = first_block(
            scores, next_place, next_place.first + WARPGROUP * ROWS, next_sequence, problem,
            tiling, features, p_layout, DTYPE,
        )  # fmt: skip
        acc, p = warpgroup_mma_wait(0, deps=(acc_token, p))
    elif SLOTS == 2:
        scores, acc = warpgroup_mma_wait(0, deps=(token, acc_token))
        if more:
            barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    else:
        acc = warpgroup_mma_wait(0, deps=(acc_token,))
    barrier_arrive(tiling.V_BARRIER + last, tiling.RELEASE)
    out = finish(acc, top, total, place, first, sequence, problem, features)
    if features.REPAIRS:
        spoiled = watched(out, spoiled)
    out = out.to(DTYPE)
    if AHEAD and SLOTS == 1:
        stage, phase = stage_of(block, tiling), phase_of(block, tiling)
        mbarrier.wait(memory.q_full.index(0), (number + 1) & 1)
        more, next_place, next_sequence = told(0, memory, problem, features)
        mbarrier.wait(memory.k_full.index(stage), phase, pred=more)
        take_turn(tiling, WARPGROUP)
        token = start_scores(q_first, stage, memory, tiling)
        pass_turn(tiling, WARPGROUP)
    leave(out, q_slot, o_map, place, first, sequence, memory, problem, tiling, features, WARPGROUP)
    if tiling.OUT_PARTS == 0:
        tma.store_wait(0)
        barrier_arrive(tiling.Q_BARRIER + slot, tiling.RELEASE)
    if AHEAD:
        if SLOTS == 1:
            scores = warpgroup_mma_wait(0, deps=(token,))
            if more:
                barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
        if not tiling.EARLY:
            p_next, next_top, next_total = first_block(
                scores, next_place, next_place.first + WARPGROUP * ROWS, next_sequence, problem,
                tiling, features, p_layout, DTYPE,
            )  # fmt: skip
        p, top, total = p_next, next_top, next_total
        if more:
            tail_cleared(stage, phase, next_place, next_sequence, memory, tiling, features)
    else:
        mbarrier.wait(memory.q_full.index(0), (number + 1) & 1)
        more, next_place, next_sequence = told(0, memory, problem, features)
        p, top, total = same
    return more, next_place, next_sequence, p, top, total, block, spoiled


@gluon.jit
def consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, WARPGROUP: gl.constexpr):
    """A consumer: 64 rows of every tile."""
    out_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tiling.DEPTH_V, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=out_layout, k_width=2)
    DTYPE: gl.constexpr = memory.v.dtype
    nothing = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, out_layout)
    if WARPGROUP == tiling.WARPGROUPS - 1:
        pass_turn(tiling, WARPGROUP)
    block = 0
    mbarrier.wait(memory.q_full.index(0), 0)
    some, place, sequence = told(0, memory, problem, features)
    # A tile's first scores are made beside the last product of the tile before, if Q has two slots,
    # or before O leaves, if that is not through Q's memory.
    if tiling.AHEAD:
        mbarrier.wait(memory.k_full.index(0), 0, pred=some)
        take_turn(tiling, WARPGROUP)
        token = start_scores(WARPGROUP * tiling.Q_PITCH, 0, memory, tiling)
        pass_turn(tiling, WARPGROUP)
        scores = warpgroup_mma_wait(0, deps=(token,))
        if some:
            barrier_arrive(tiling.K_BARRIER, tiling.RELEASE)
        first = place.first + WARPGROUP * ROWS
        p, top, total = first_block(
            scores, place, first, sequence, problem, tiling, features, p_layout, DTYPE
        )
        if some:
            tail_cleared(0, 0, place, sequence, memory, tiling, features)
    else:
        # Made anew by every tile.
        p, top, total = nothing_yet(tiling, p_layout, DTYPE)
    spoiled = thread_sums(nothing)
    number = gl.to_tensor(0)
    while some:
        some, place, sequence, p, top, total, block, spoiled = consume_tile(
            number, place, sequence, p, top, total, block, spoiled, nothing, o_map, memory, problem,
            tiling, features, WARPGROUP,
        )  # fmt: skip
        number += 1
    tma.store_wait(0)
    if features.REPAIRS:
        note_spoiled(spoiled, memory.spoiled.index(WARPGROUP))
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
