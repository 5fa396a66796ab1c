"""A block of keys where FP8 attention has three consumers of 64 rows each.

A consumer's products come one after the other, with nothing of its own beside them: there are no
registers for more. While one consumer makes exponentials, the two others multiply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from tilewright.engines.hopper.attention_consumer import ends_of_masks
from tilewright.engines.hopper.attention_fp8_blocks import (
    last_product,
    masked,
    rescaled,
    stage_of,
    start_scores,
)
from tilewright.engines.hopper.attention_fp8_early import softmax_early, with_maxima
from tilewright.engines.hopper.attention_fp8_softmax import started
from tilewright.engines.hopper.barriers import barrier_arrive


@gluon.jit
def in_turn(scores, bias, total, peak, problem, tiling, WARPGROUP: gl.constexpr):
    """``softmax_early`` when it is this warpgroup's turn."""
    OWN: gl.constexpr = tiling.T_BARRIER + WARPGROUP
    OTHER: gl.constexpr = tiling.T_BARRIER + (WARPGROUP + 1) % tiling.WARPGROUPS
    return softmax_early(scores, bias, total, peak, problem.scale, OWN, OTHER)


@gluon.jit
def scores_of(q, block, memory, tiling):
    """Scores of a block."""
    stage, phase = stage_of(block, tiling)
    mbarrier.wait(memory.k_full.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=(start_scores(q, stage, memory, tiling),))
    barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    return scores


@gluon.jit
def next_block(q, words, acc, bias, total, peak, first, column, block, sequence, memory, problem,
               tiling, features, MASKED: gl.constexpr, WARPGROUP: gl.constexpr):  # fmt: skip
    """Probabilities of a block, and the product of those of the block before."""
    acc = last_product(words, acc, block - 1, memory, tiling)
    scores = scores_of(q, block, memory, tiling)
    if MASKED:
        scores = masked(scores, first, column, sequence, features)
        bias, total, peak, moved = with_maxima(scores, bias, total, peak, problem.scale)
    made, bias, total, peak, factor = in_turn(scores, bias, total, peak, problem, tiling, WARPGROUP)
    if MASKED:
        factor = factor * moved
    return made, rescaled(acc, factor), bias, total, peak


@gluon.jit
def tile_sums(q, acc, place, first, block, sequence, memory, problem, tiling, features,
              WARPGROUP: gl.constexpr):  # fmt: skip
    """(sums of a tile, b, l, the largest x, the next tile's first block)."""
    column = (place.high - 1) * tiling.BLOCK_N
    scores = scores_of(q, block, memory, tiling)
    if features.FIRST_MASKED:
        scores = masked(scores, first, column, sequence, features)
    bias, total, peak = started(scores, problem.scale)
    words, bias, total, peak, _ = in_turn(scores, bias, total, peak, problem, tiling, WARPGROUP)
    block += 1
    free, edge, _ = ends_of_masks(place, first, sequence, tiling, features)
    if features.RIGHT_LOOP:
        # A block that no mask cuts may be the first that the first row sees: it is masked, too.
        open_to = gl.maximum(first + sequence.right, 0) // tiling.BLOCK_N
        free = gl.maximum(gl.minimum(place.high - open_to, edge), 1)
        for j in range(1, free):
            words, acc, bias, total, peak = next_block(
                q, words, acc, bias, total, peak, first, column - j * tiling.BLOCK_N, block,
                sequence, memory, problem, tiling, features, True, WARPGROUP,
            )  # fmt: skip
            block += 1
    for _ in range(free, edge):
        words, acc, bias, total, peak = next_block(
            q, words, acc, bias, total, peak, first, 0, block, sequence, memory, problem, tiling,
            features, False, WARPGROUP,
        )  # fmt: skip
        block += 1
    return last_product(words, acc, block - 1, memory, tiling), bias, total, peak, block
