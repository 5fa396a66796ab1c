"""A consumer of attention forward: four warps that make 64 rows of every tile.

Its blocks of keys are in ``attention_blocks``, how O leaves in ``attention_leaving``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
    scaled,
    stage_of,
    start_scores,
    take_turn,
)
from tilewright.engines.hopper.attention_leaving import leave
from tilewright.engines.hopper.attention_records import NO_LENGTHS, ROWS, Place, product_layout
from tilewright.engines.hopper.attention_repair import note_spoiled, watched
from tilewright.engines.hopper.attention_softmax import (
    clear_tail,
    finish,
    thread_sums,
    unpacked,
)
from tilewright.engines.hopper.attention_words import told
from tilewright.engines.hopper.barriers import barrier_arrive, barrier_arrive_if


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
def middle_blocks(q_first, p, acc, top, total, place, first, block, sequence, slot, memory,
                  problem, tiling, features, WARPGROUP: gl.constexpr):  # fmt: skip
    """All blocks of a tile but the first: (p, acc, top, total, block)."""
    BN: gl.constexpr = tiling.BLOCK_N
    column = (place.high - 1) * BN
    factor = gl.full(top.shape, 1.0, gl.float32, top.type.layout)
    free, edge, n = ends_of_masks(place, first, sequence, tiling, features)
    if features.RIGHT_LOOP:
        for j in range(1, free):
            p, acc, top, total, factor = next_block(
                q_first, p, acc, top, total, factor, first, column - j * BN, block, sequence,
                memory, problem, tiling, features, slot, j == n - 1, True, WARPGROUP,
            )  # fmt: skip
            block += 1
    for j in range(free, edge):
        p, acc, top, total, factor = next_block(
            q_first, p, acc, top, total, factor, first, 0, block, sequence, memory,
            problem, tiling, features, slot, j == n - 1, False, WARPGROUP,
        )  # fmt: skip
        block += 1
    if features.HAS_LEFT:
        for j in range(edge, n):
            p, acc, top, total, factor = next_block(
                q_first, p, acc, top, total, factor, first, column - j * BN, block, sequence,
                memory, problem, tiling, features, slot, j == n - 1, True, WARPGROUP,
            )  # fmt: skip
            block += 1
    return p, acc, top, total, factor, block


@gluon.jit
def tail_cleared(stage, phase, place, sequence, memory, tiling, features):
    """See ``clear_tail``, for a tile's first block."""
    if features.PAGED or features.LENGTHS_KV != NO_LENGTHS:
        valid = sequence.keys - (place.high - 1) * tiling.BLOCK_N
        if valid < tiling.BLOCK_N:
            mbarrier.wait(memory.v_full.index(stage), phase)
            clear_tail(memory.v.index(stage), valid, tiling)


@gluon.jit
def cut(some, place, sequence, block, memory, tiling, features, WARPGROUP: gl.constexpr):
    """(place, block, skips): 1, and both go on by one, if no row here sees any of the first block.

    So it is for the upper rows of a tile of more rows than a block has keys, under a causal mask.
    """
    skips = block * 0
    if features.HAS_RIGHT:
        end = place.first + (WARPGROUP + 1) * ROWS + sequence.right
        unseen = (place.high - 1) * tiling.BLOCK_N >= end
        skips = (some & unseen & (place.high - place.low > 1)).to(gl.int32)
        stage = stage_of(block, tiling)
        # It is waited for all the same: whoever misses a phase takes the next one for it.
        mbarrier.wait(memory.k_full.index(stage), phase_of(block, tiling), pred=skips != 0)
        barrier_arrive_if(skips, tiling.K_BARRIER + stage, tiling.RELEASE)
        place = Place(place.batch, place.head, place.first, place.low, place.high - skips)
        block += skips
    return place, block, skips


@gluon.jit
def cut_values(skips, block, memory, tiling):
    """Pass by the block of V that goes with one that was left out, the one before ``block``."""
    before = block - skips
    stage = stage_of(before, tiling)
    mbarrier.wait(memory.v_full.index(stage), phase_of(before, tiling), pred=skips != 0)
    barrier_arrive_if(skips, tiling.V_BARRIER + stage, tiling.RELEASE)


@gluon.jit
def consume_tile(number, place, sequence, p, top, total, block, spoiled, nothing, o_map, memory,
                 problem, tiling, features, WARPGROUP: gl.constexpr):  # fmt: skip
    """A tile, and the first block of the next one."""
    p_layout: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=nothing.type.layout, k_width=2
    )
    SLOTS: gl.constexpr = tiling.Q_SLOTS
    AHEAD: gl.constexpr = tiling.AHEAD
    CUTS: gl.constexpr = tiling.CUTS and WARPGROUP < tiling.WARPGROUPS - 1
    PARTS: gl.constexpr = max(tiling.OUT_PARTS, 1)
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
    if tiling.FREES_Q:
        barrier_arrive_if(place.high - place.low == 1, tiling.Q_BARRIER + slot, tiling.RELEASE)
    p, acc, top, total, factor, block = middle_blocks(
        q_first, p, nothing, top, total, place, first, block, sequence, slot, memory, problem,
        tiling, features, WARPGROUP,
    )  # fmt: skip
    last, last_phase = stage_of(block, tiling), phase_of(block, tiling)
    block += 1
    if tiling.OUT_PARTS > 0 and not tiling.FREES_Q:
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
            acc = scaled(acc, factor, tiling)
        acc_token = warpgroup_mma(p, memory.v.index(last), acc, is_async=True)
        pass_turn(tiling, WARPGROUP)
    else:
        mbarrier.wait(memory.v_full.index(last), last_phase)
        take_turn(tiling, WARPGROUP)
        p = unpacked(p, p_layout, DTYPE, tiling.WORDS)
        if tiling.PRESCALE:
            acc = scaled(acc, factor, tiling)
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
    out = finish(acc, top, total, place, first, sequence, problem, features, tiling.LATE)
    if features.REPAIRS:
        spoiled = watched(out, spoiled)
    out = out.to(DTYPE)
    if AHEAD and SLOTS == 1:
        stage, phase = stage_of(block, tiling), phase_of(block, tiling)
        mbarrier.wait(memory.q_full.index(0), (number + 1) & 1)
        more, next_place, next_sequence = told(0, memory, problem, features)
        if CUTS:
            next_place, block, skips = cut(
                more, next_place, next_sequence, block, memory, tiling, features, WARPGROUP
            )
            stage, phase = stage_of(block, tiling), phase_of(block, tiling)
        mbarrier.wait(memory.k_full.index(stage), phase, pred=more)
        take_turn(tiling, WARPGROUP)
        token = start_scores(q_first, stage, memory, tiling)
        pass_turn(tiling, WARPGROUP)
    # A part that has to wait for the one before leaves later.
    SOON: gl.constexpr = 1 if AHEAD else PARTS
    leave(
        out, q_slot, o_map, place, first, sequence, memory, problem, tiling, features, WARPGROUP,
        0, SOON,
    )  # fmt: skip
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
        if CUTS:
            cut_values(skips, block, memory, tiling)
        if SOON < PARTS:
            leave(
                out, q_slot, o_map, place, first, sequence, memory, problem, tiling, features,
                WARPGROUP, SOON, PARTS,
            )  # fmt: skip
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
    out_layout: gl.constexpr = product_layout(tiling.DEPTH_V, 16)
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
    CUTS: gl.constexpr = tiling.CUTS and WARPGROUP < tiling.WARPGROUPS - 1
    if CUTS:
        block = gl.to_tensor(0)
        place, block, skips = cut(some, place, sequence, block, memory, tiling, features, WARPGROUP)
    if tiling.AHEAD:
        mbarrier.wait(memory.k_full.index(block), 0, pred=some)
        take_turn(tiling, WARPGROUP)
        token = start_scores(WARPGROUP * tiling.Q_PITCH, block, memory, tiling)
        pass_turn(tiling, WARPGROUP)
        scores = warpgroup_mma_wait(0, deps=(token,))
        if some:
            barrier_arrive(tiling.K_BARRIER + block, tiling.RELEASE)
        first = place.first + WARPGROUP * ROWS
        p, top, total = first_block(
            scores, place, first, sequence, problem, tiling, features, p_layout, DTYPE
        )
        if CUTS:
            cut_values(skips, block, memory, tiling)
        if some:
            tail_cleared(block, 0, place, sequence, memory, tiling, features)
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
