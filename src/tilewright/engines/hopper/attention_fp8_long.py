"""A consumer of FP8 attention where it is long: four warps that make 64 rows of every tile.

Block by block it multiplies keys with Q, makes probabilities by maxima of before, and multiplies
values with them, as one of two, which hold Q in registers (``attention_fp8_blocks``), or of three
(``attention_fp8_three``). Hidden NaN are repaired when all are done.

Probabilities are rounded to E4M3 in registers (``attention_fp8_softmax`` tells at which scale). A
row's sum is only known when its last block is done, so what is rounded is not the normalized
probability; both have the same three bits of mantissa. Sums of a row are of the unrounded ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewright.engines.hopper import attention_fp8_blocks, attention_fp8_three
from tilewright.engines.hopper.attention_fp8_leaving import (
    end_of_consumer,
    hand_over,
    row_ends,
    without_padding,
)
from tilewright.engines.hopper.attention_fp8_softmax import EXPONENT, UNIT
from tilewright.engines.hopper.attention_fp8_turns import begin_turns, end_turns
from tilewright.engines.hopper.attention_places import (
    count_tiles,
    next_step,
    place_of,
)
from tilewright.engines.hopper.attention_records import ROWS, product_layout
from tilewright.engines.hopper.barriers import barrier_arrive


@gluon.jit
def finish(acc, bias, total, peak, factor, peak_s, place, first, sequence, problem, features,
           PEAK_IS_LOG: gl.constexpr):  # fmt: skip
    """(O in float32 before scale_o, the largest probability so far); Stats are stored.

    ``factor`` is what a sum of rounded probabilities times V is still to be multiplied by; ``peak``
    has the bits of a row's largest probability, or of its logarithm to base 2.
    """
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    rows = first + gl.arange(0, ROWS, layout)
    total = gl.convert_layout(gl.sum(total, 1), layout) * UNIT
    peak = gl.convert_layout(gl.max(peak, 1), layout).to(gl.float32, bitcast=True)
    if PEAK_IS_LOG:
        peak = gl.exp2(peak)
    peak = peak * UNIT
    shift = gl.convert_layout(gl.max(bias, 1), layout) + EXPONENT
    empty, scaled, total = row_ends(total, shift, rows, place, sequence, problem, features)
    gain = gl.where(empty, 0.0, scaled / total)
    # Rows of padding may hold NaN.
    largest = gl.where(empty | (rows >= problem.rows), 0.0, gain * peak)
    peak_s = gl.maximum(peak_s, largest.to(gl.int32, bitcast=True))
    return without_padding(acc * (gain * factor)[:, None], empty, features), peak_s


@gluon.jit
def consume_long(
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
    q_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=score_layout, k_width=4)
    out_layout: gl.constexpr = product_layout(tiling.DEPTH_V, 8)
    of_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    SLOTS: gl.constexpr = tiling.Q_SLOTS
    ARE_THREE: gl.constexpr = tiling.WARPGROUPS == 3
    peak_s = gl.zeros([ROWS], gl.int32, of_row)
    peak_o = gl.zeros([ROWS], gl.int32, of_row)
    spoiled = peak_o
    block = 0
    begin_turns(tiling, WARPGROUP)
    count = count_tiles(problem, tiling, features)
    step = next_step(0, problem, tiling, features)
    for number in range(count):
        place, sequence = place_of(step, problem, tiling, features)
        first = place.first + WARPGROUP * ROWS
        slot = number % SLOTS
        mbarrier.wait(memory.q_full.index(slot), (number // SLOTS) & 1)
        q = memory.q.index(slot * tiling.WARPGROUPS + WARPGROUP)
        acc = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, out_layout)
        if ARE_THREE:
            acc, bias, total, peak, block = attention_fp8_three.tile_sums(
                q, acc, place, first, block, sequence, memory, problem, tiling, features, WARPGROUP
            )
        else:
            q = q.load(q_layout)
            acc, bias, total, peak, block = attention_fp8_blocks.tile_sums(
                q, acc, place, first, block, sequence, memory, problem, tiling, features, WARPGROUP
            )
        if number + SLOTS < count:
            barrier_arrive(tiling.Q_BARRIER + slot, tiling.RELEASE)
        factor = gl.load(problem.descale_v) * gl.load(problem.descale_s) * gl.load(problem.scale_s)
        out, peak_s = finish(
            acc, bias, total, peak, factor * UNIT, peak_s, place, first, sequence, problem,
            features, ARE_THREE,
        )  # fmt: skip
        peak_o, spoiled = hand_over(
            out, peak_o, spoiled, o_map, place, first, memory, problem, features, WARPGROUP
        )
        step = next_step(step + 1, problem, tiling, features)
    end_turns(tiling, WARPGROUP)
    end_of_consumer(spoiled, peak_s, peak_o, memory, problem, features, WARPGROUP)


@gluon.jit
def consume_long_first(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume_long(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 0)


@gluon.jit
def consume_long_second(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume_long(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 1)


@gluon.jit
def consume_long_third(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    consume_long(q_map, k_map, v_map, o_map, memory, problem, tiling, features, 2)
