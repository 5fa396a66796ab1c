"""A consumer of FP8 attention where there are two: for short bands, whose tiles are soon done.

As ``attention_fp8_consumer``, in less code. A multiprocessor's schedulers hold about 2000
instructions, and a program that walks short tiles runs through all that it has again and again:
three consumers, each with a loop for blocks that masks cut and one for the others, wait for
instructions more than for anything else. So here blocks share one loop, and hidden NaN are repaired
when the consumers are done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_consumer import ends_of_masks
from tilewright.engines.hopper.attention_fp8_leaving import (
    end_of_consumer,
    finite_peaks,
    leave,
    row_ends,
    without_padding,
)
from tilewright.engines.hopper.attention_fp8_pair_softmax import masked, softmax_block
from tilewright.engines.hopper.attention_fp8_products import start_scores, summed
from tilewright.engines.hopper.attention_fp8_records import P_UNIT
from tilewright.engines.hopper.attention_fp8_repair import magnitudes
from tilewright.engines.hopper.attention_fp8_turns import begin_turns, end_turns
from tilewright.engines.hopper.attention_places import (
    count_tiles,
    next_step,
    place_of,
)
from tilewright.engines.hopper.attention_records import ROWS, product_layout
from tilewright.engines.hopper.attention_softmax import (
    MINUS_INFINITY,
    thread_sums,
)
from tilewright.engines.hopper.barriers import barrier_arrive


@gluon.jit
def next_block(
    q,
    acc,
    top,
    total,
    first,
    column,
    is_cut,
    block,
    sequence,
    memory,
    problem,
    tiling,
    features,
    WARPGROUP: gl.constexpr,
):
    """Both products of a block, and what lies between them."""
    layout: gl.constexpr = acc.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout, k_width=4)
    stage = block % tiling.STAGES
    phase = (block // tiling.STAGES) & 1
    # ``scores_of``, whose call would change the order of instructions.
    mbarrier.wait(memory.k_full.index(stage), phase)
    token = start_scores(q, stage, memory, tiling)
    scores = warpgroup_mma_wait(0, deps=(token,))
    barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    if features.FIRST_MASKED:
        # One copy of the loop for all blocks: what programs run must fit into caches.
        if is_cut:
            scores = masked(scores, first, column, sequence, tiling, features)
    p, factor, top, total = softmax_block(
        scores,
        top,
        total,
        problem.scale,
        tiling,
        p_layout,
        memory.vt.dtype,
        features.FIRST_MASKED,
        WARPGROUP,
    )
    return summed(p, factor, acc, stage, phase, memory, tiling), top, total


@gluon.jit
def finish(acc, top, total, factor, peak_s, place, first, sequence, problem, features):
    """(sums, what they are to be multiplied by, the largest probability so far); Stats are stored.

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
    return without_padding(acc, empty, features), largest * factor, peak_s


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
    factor = gl.load(problem.descale_v) * gl.load(problem.descale_s) * gl.load(problem.scale_s)
    factor = factor * P_UNIT
    scale_o = gl.load(problem.scale_o)
    begin_turns(tiling, WARPGROUP)
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
        free, _, n = ends_of_masks(place, first, sequence, tiling, features)
        for j in range(0, n):
            acc, top, total = next_block(
                q,
                acc,
                top,
                total,
                first,
                column - j * BN,
                j < free,
                block,
                sequence,
                memory,
                problem,
                tiling,
                features,
                WARPGROUP,
            )
            block += 1
        if number + SLOTS < count:
            barrier_arrive(tiling.Q_BARRIER + slot, tiling.RELEASE)
        acc, gain, peak_s = finish(
            acc, top, total, factor, peak_s, place, first, sequence, problem, features
        )
        rows = first + gl.arange(0, ROWS, of_row)
        found = magnitudes(acc, rows, problem.rows).to(gl.float32, bitcast=True)
        found = (found * gl.abs(gain)).to(gl.int32, bitcast=True)
        peak_o, spoiled = finite_peaks(found, spoiled, peak_o, features)
        leave(acc * (gain * scale_o)[:, None], o_map, place, first, memory, WARPGROUP)
        step = next_step(step + 1, problem, tiling, features)
    end_turns(tiling, WARPGROUP)
    end_of_consumer(spoiled, peak_s, peak_o, memory, problem, features, WARPGROUP)


@gluon.jit
def consume_first(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 0)


@gluon.jit
def consume_second(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 1)
