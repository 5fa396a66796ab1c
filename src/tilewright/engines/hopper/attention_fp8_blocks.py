"""A block of keys where FP8 attention is long and has two consumers of 64 rows each.

Scores of a block are made; then they become probabilities (``attention_fp8_softmax``) while those
of the block before multiply V. Sums hardly ever need a factor, so the tensor cores add blocks up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from tilewright.engines.hopper.attention_consumer import ends_of_masks
from tilewright.engines.hopper.attention_fp8_products import (
    last_sums,
    rescaled_by_thread,
    scores_of,
    stage_of,
    start_scores,
    start_sums,
)
from tilewright.engines.hopper.attention_fp8_softmax import softmax_text, started
from tilewright.engines.hopper.attention_fp8_words import words_in_turn
from tilewright.engines.hopper.attention_softmax import masked
from tilewright.engines.hopper.barriers import barrier_arrive


@gluon.jit
def first_block(q, first, column, block, sequence, memory, problem, tiling, features,
                WARPGROUP: gl.constexpr):  # fmt: skip
    """(probabilities, b, l, the largest) of a tile's first block."""
    stage, phase = stage_of(block, tiling)
    scores = scores_of(q, stage, phase, memory, tiling)
    if features.FIRST_MASKED:
        scores = masked(scores, first, column, sequence, tiling, features, True)
    bias, total, peak = started(scores, problem.scale)
    words, bias, total, peak, _ = words_in_turn(
        scores, bias, total, peak, problem.scale, tiling, softmax_text, WARPGROUP
    )
    return words, bias, total, peak


@gluon.jit
def next_block(q, words, acc, bias, total, peak, first, column, block, sequence, memory, problem,
               tiling, features, MASKED: gl.constexpr, WARPGROUP: gl.constexpr):  # fmt: skip
    """Probabilities of a block, and the product of those of the block before."""
    stage, phase = stage_of(block, tiling)
    before, phase_before = stage_of(block - 1, tiling)
    mbarrier.wait(memory.k_full.index(stage), phase)
    scores = start_scores(q, stage, memory, tiling)
    mbarrier.wait(memory.vt_full.index(before), phase_before)
    acc = start_sums(words, acc, before, memory)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    if MASKED:
        scores = masked(scores, first, column, sequence, tiling, features, True)
    made, bias, total, peak, factor = words_in_turn(
        scores, bias, total, peak, problem.scale, tiling, softmax_text, WARPGROUP
    )
    acc, words = warpgroup_mma_wait(0, deps=(acc, words))
    barrier_arrive(tiling.V_BARRIER + before, tiling.RELEASE)
    return made, rescaled_by_thread(acc, factor), bias, total, peak


@gluon.jit
def tile_sums(q, acc, place, first, block, sequence, memory, problem, tiling, features,
              WARPGROUP: gl.constexpr):  # fmt: skip
    """(sums of a tile, b, l, the largest p, the next tile's first block); see the softmax."""
    column = (place.high - 1) * tiling.BLOCK_N
    words, bias, total, peak = first_block(
        q, first, column, block, sequence, memory, problem, tiling, features, WARPGROUP
    )
    block += 1
    free, edge, _ = ends_of_masks(place, first, sequence, tiling, features)
    if features.RIGHT_LOOP:
        for j in range(1, free):
            words, acc, bias, total, peak = next_block(
                q, words, acc, bias, total, peak, first, column - j * tiling.BLOCK_N, block,
                sequence, memory, problem, tiling, features, True, WARPGROUP,
            )  # fmt: skip
            block += 1
    # Two a turn: of two stages it is known in the loop which is whose.
    for _ in range((edge - free) // 2):
        for _ in gl.static_range(2):
            words, acc, bias, total, peak = next_block(
                q, words, acc, bias, total, peak, first, 0, block, sequence, memory, problem,
                tiling, features, False, WARPGROUP,
            )  # fmt: skip
            block += 1
    for _ in range((edge - free) % 2):
        words, acc, bias, total, peak = next_block(
            q, words, acc, bias, total, peak, first, 0, block, sequence, memory, problem, tiling,
            features, False, WARPGROUP,
        )  # fmt: skip
        block += 1
    return last_sums(words, acc, block - 1, memory, tiling), bias, total, peak, block
