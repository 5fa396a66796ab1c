"""A block of keys in a consumer of attention forward.

While the product with K of the next block is under way, this block's probabilities multiply V, and
the consumers take turns on the tensor cores, so that one's exponentials run under another's
products. The wait for the product with V is left to the assembler to place: its registers are soon
free then, and the accumulator's rescaling mixes with the exponentials.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_late import begun_late, rescaled_late, softmax_late
from tilewright.engines.hopper.attention_records import ROWS, product_layout
from tilewright.engines.hopper.attention_softmax import (
    MINUS_INFINITY,
    masked,
    packed,
    rescaled_lazily,
    shaped,
    softmax_block,
    thread_sums,
    unpacked,
)
from tilewright.engines.hopper.barriers import (
    FIRST_FREE,
    barrier_arrive,
    barrier_arrive_if,
    barrier_wait,
    unmoved,
)


@gluon.jit
def stage_of(block, tiling):
    """The place of a block in the ring; ``block`` is not negative."""
    if tiling.STAGES == 2:
        stage = block & 1
    elif tiling.STAGES == 4:
        stage = block & 3
    else:
        stage = block % tiling.STAGES
    return stage


@gluon.jit
def phase_of(block, tiling):
    """The parity of the block's turn around the ring."""
    if tiling.STAGES == 2:
        phase = (block >> 1) & 1
    elif tiling.STAGES == 4:
        phase = (block >> 2) & 1
    else:
        phase = (block // tiling.STAGES) & 1
    return phase


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
    layout: gl.constexpr = product_layout(tiling.BLOCK_N, 16)
    zero = gl.zeros([ROWS, tiling.BLOCK_N], gl.float32, layout)
    k = memory.k.index(stage * tiling.SLABS).permute((1, 0))
    scores = warpgroup_mma(memory.q.index(q_first), k, zero, use_acc=False, is_async=True)
    for s in gl.static_range(1, tiling.SLABS):
        k = memory.k.index(stage * tiling.SLABS + s).permute((1, 0))
        scores = warpgroup_mma(memory.q.index(q_first + s), k, scores, is_async=True)
    return scores


@gluon.jit
def scaled(acc, factor, tiling):
    """The accumulator times what the blocks so far are to be scaled by."""
    if tiling.LATE:
        acc = rescaled_late(acc, factor)
    else:
        acc = rescaled_lazily(acc, factor, tiling.LAZY)
    return acc


@gluon.jit
def next_block(
    q_first,
    p,
    acc,
    top,
    total,
    factor,
    first,
    column,
    block,
    sequence,
    memory,
    problem,
    tiling,
    features,
    slot,
    is_last,
    MASKED: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """Scores of block ``block + 1`` beside the second product of ``block``.

    ``is_last``: the tile's Q, in ``slot``, is not needed any more then.
    """
    before = stage_of(block, tiling)
    stage, phase = stage_of(block + 1, tiling), phase_of(block + 1, tiling)
    mbarrier.wait(memory.k_full.index(stage), phase)
    take_turn(tiling, WARPGROUP)
    scores = start_scores(q_first, stage, memory, tiling)
    mbarrier.wait(memory.v_full.index(before), phase_of(block, tiling))
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    p = unpacked(p, layout, memory.v.dtype, tiling.WORDS)
    if tiling.PRESCALE:
        # Here, under the product with K, and not at the end of the step before.
        acc = scaled(acc, unmoved(factor), tiling)
    acc_after = warpgroup_mma(p, memory.v.index(before), acc, is_async=True)
    pass_turn(tiling, WARPGROUP)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    if tiling.FREES_Q:
        barrier_arrive_if(is_last, tiling.Q_BARRIER + slot, tiling.RELEASE)
    scores = shaped(scores, problem, features)
    if MASKED:
        scores = masked(scores, first, column, sequence, tiling, features, True)
    if tiling.LATE:
        p_next, factor, top, total = softmax_late(
            scores, top, total, problem.scale, features.RIGHT_LOOP or features.HAS_LEFT
        )
    else:
        p_next, factor, top, total = softmax_block(
            scores, top, total, problem.scale, MASKED, tiling.LAZY
        )
    if features.RAGGED_Q and not tiling.LATE:
        # It is there. The assembler puts no wait for the product before this one, as it does
        # without: then no exponential runs under the product.
        mbarrier.wait(memory.v_full.index(before), phase_of(block, tiling))
    acc, p = warpgroup_mma_wait(0, deps=(acc_after, p))
    barrier_arrive(tiling.V_BARRIER + before, tiling.RELEASE)
    if not tiling.PRESCALE:
        acc = scaled(acc, factor, tiling)
    p = packed(p_next, layout, memory.v.dtype, tiling.WORDS)
    return p, acc, top, total, factor


@gluon.jit
def first_block(scores, place, first, sequence, problem, tiling, features,
                P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):  # fmt: skip
    """(p, top, total) of a tile's first block of scores."""
    scores = shaped(scores, problem, features)
    if features.FIRST_MASKED:
        column = (place.high - 1) * tiling.BLOCK_N
        scores = masked(scores, first, column, sequence, tiling, features, True)
    top = gl.full([ROWS], MINUS_INFINITY, gl.float32, gl.SliceLayout(1, scores.type.layout))
    p, _, top, total = softmax_block(scores, top, 0.0, problem.scale, features.FIRST_MASKED, False)
    if tiling.LATE:
        top, total = begun_late(top, total, problem.scale)
    return packed(p, P_LAYOUT, DTYPE, tiling.WORDS), top, total


@gluon.jit
def nothing_yet(tiling, P_LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    """(p, top, total) of the types that ``first_block`` makes."""
    layout: gl.constexpr = product_layout(tiling.BLOCK_N, 16)
    zeros = gl.zeros([ROWS, tiling.BLOCK_N], gl.float32, layout)
    top = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    total = thread_sums(zeros)
    if tiling.LATE:
        top = total
    return packed(zeros, P_LAYOUT, DTYPE, tiling.WORDS), top, total
