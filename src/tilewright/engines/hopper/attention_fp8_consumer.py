"""A consumer of FP8 attention: four warps that make 64 rows of every tile.

Block by block it multiplies keys with Q, makes probabilities, and multiplies values with them.
Three consumers do so at their own pace, and one's exponentials run beside the others' products. (To
overlap the two products of one consumer, as ``attention_consumer`` does, takes registers that three
do not have.)

Probabilities, times 2^8, are rounded to E4M3 in registers. A row's sum is only known when its last
block is done, so what is rounded is 2^(s - m) for the maximum m so far, and not the normalized
probability; both have the same three bits of mantissa. Sums of a row are of the unrounded ones, and
blocks are added up in float32: within a block the tensor cores keep fewer bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.engines.hopper.attention_consumer import ends_of_masks
from tilewright.engines.hopper.attention_fp8_leaving import (
    give_maxima,
    hand_over,
    row_ends,
    without_padding,
)
from tilewright.engines.hopper.attention_fp8_products import as_operand, scores_of, summed
from tilewright.engines.hopper.attention_fp8_records import P_EXPONENT, P_UNIT
from tilewright.engines.hopper.attention_fp8_repair import INFINITY_BITS, repair
from tilewright.engines.hopper.attention_places import (
    count_tiles,
    next_step,
    place_of,
)
from tilewright.engines.hopper.attention_records import ROWS, product_layout
from tilewright.engines.hopper.attention_softmax import (
    MINUS_INFINITY,
    masked,
    thread_sums,
)
from tilewright.engines.hopper.barriers import barrier_arrive, stores_done


@gluon.jit
def softmax_block(scores, top, total, scale, MASKED: gl.constexpr):
    """(p times 2^8, factor of what came before, the new maximum, the new sums) of one block."""
    new_top = gl.maximum(top, gl.max(scores, 1))
    shift = new_top * scale - P_EXPONENT
    if MASKED:
        shift = gl.where(new_top == MINUS_INFINITY, 0.0, shift)
    p = gl.exp2(scores * scale - shift[:, None])
    factor = gl.exp2((top * scale - P_EXPONENT) - shift)
    sums = thread_sums(p)
    spread = gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, factor, new_top, total * spread[:, None] + sums


@gluon.jit
def next_block(
    q,
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
):
    """Both products of a block, and what lies between them."""
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=4)
    stage = block % tiling.STAGES
    phase = (block // tiling.STAGES) & 1
    scores = scores_of(q, stage, phase, memory, tiling)
    if MASKED:
        scores = masked(scores, first, column, sequence, tiling, features)
    p, factor, top, total = softmax_block(scores, top, total, problem.scale, MASKED)
    p = as_operand(p, p_layout, memory.vt.dtype)
    return summed(p, factor, acc, stage, phase, memory, tiling), top, total


@gluon.jit
def finish(acc, top, total, factor, peak_s, place, first, sequence, problem, features):
    """(O in float32 before scale_o, the largest probability so far); Stats are stored.

    ``factor`` is what a sum of rounded probabilities times V is still to be multiplied by.
    """
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = first + gl.arange(0, ROWS, layout)
    total = gl.convert_layout(gl.sum(total, 1), layout) * P_UNIT
    shift = gl.convert_layout(top, layout) * problem.scale
    empty, scaled, total = row_ends(total, shift, rows, place, sequence, problem, features)
    # The largest probability of a row is that of its maximum.
    largest = gl.where(empty, 0.0, scaled / total)
    found = gl.where(rows < problem.rows, largest, 0.0).to(gl.int32, bitcast=True)
    peak_s = gl.maximum(peak_s, found)
    return without_padding(acc * (largest * factor)[:, None], empty, features), peak_s


@gluon.jit
def consume(
    q_map,
    k_map,
    v_map,
    o_map,
    memory,
    problem,
    tiling,
    features,
    WARPGROUP: gl.constexpr,
):
    """A consumer: 64 rows of every tile."""
    score_layout: gl.constexpr = product_layout(tiling.BLOCK_N, 8)
    out_layout: gl.constexpr = product_layout(tiling.DEPTH_V, 8)
    of_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    BN: gl.constexpr = tiling.BLOCK_N
    SLOTS: gl.constexpr = tiling.Q_SLOTS
    no_sums = thread_sums(gl.zeros([ROWS, BN], gl.float32, score_layout))
    peak_s = gl.zeros([ROWS], gl.int32, of_row)
    peak_o = gl.zeros([ROWS], gl.int32, of_row)
    spoiled = peak_o
    block = 0
    count = count_tiles(problem, tiling, features)
    step = next_step(0, problem, tiling, features)
    for number in range(count):
        place, sequence = place_of(step, problem, tiling, features)
        first = place.first + WARPGROUP * ROWS
        slot = number % SLOTS
        q = memory.q.index(slot * tiling.WARPGROUPS + WARPGROUP)
        column = (place.high - 1) * BN
        top = gl.full([ROWS], MINUS_INFINITY, gl.float32, gl.SliceLayout(1, score_layout))
        acc = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, out_layout)
        total = no_sums
        mbarrier.wait(memory.q_full.index(slot), (number // SLOTS) & 1)
        free, edge, _ = ends_of_masks(place, first, sequence, tiling, features)
        if features.FIRST_MASKED:
            for j in range(0, free):
                acc, top, total = next_block(
                    q,
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
                )
                block += 1
        else:
            free = free * 0
        for _ in range(free, edge):
            acc, top, total = next_block(
                q,
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
            )
            block += 1
        if number + SLOTS < count:
            barrier_arrive(tiling.Q_BARRIER + slot, tiling.RELEASE)
        factor = gl.load(problem.descale_v) * gl.load(problem.descale_s) * gl.load(problem.scale_s)
        out, peak_s = finish(
            acc, top, total, factor * P_UNIT, peak_s, place, first, sequence, problem, features
        )
        peak_o, spoiled = hand_over(
            out, peak_o, spoiled, o_map, place, first, memory, problem, features, WARPGROUP
        )
        step = next_step(step + 1, problem, tiling, features)
    tma.store_wait(0)
    if features.REPAIRS:
        if gl.max(spoiled, 0) > INFINITY_BITS:
            stores_done()
            peak_o = repair(peak_o, count, problem, tiling, features, WARPGROUP)
    give_maxima(peak_s, peak_o, problem, features)


@gluon.jit
def consume_0(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 0)


@gluon.jit
def consume_1(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 1)


@gluon.jit
def consume_2(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 2)
