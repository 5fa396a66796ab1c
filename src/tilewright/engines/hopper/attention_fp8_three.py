"""A block of keys where FP8 attention is long and has three consumers of 64 rows each.

A consumer's products come one after the other, with nothing of its own beside them: there are no
registers for more. While one consumer makes exponentials, the two others multiply.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_consumer import ends_of_masks
from tilewright.engines.hopper.attention_fp8_early import early_text, with_maxima
from tilewright.engines.hopper.attention_fp8_products import (
    last_sums,
    rescaled_by_thread,
    scores_of,
    stage_of,
)
from tilewright.engines.hopper.attention_fp8_softmax import started
from tilewright.engines.hopper.attention_fp8_words import words_in_turn
from tilewright.engines.hopper.attention_softmax import masked


@gluon.jit
def next_block(q, words, acc, bias, total, peak, first, column, block, sequence, memory, problem,
               tiling, features, MASKED: gl.constexpr, WARPGROUP: gl.constexpr):  # fmt: skip
    """Probabilities of a block, and the product of those of the block before."""
    acc = last_sums(words, acc, block - 1, memory, tiling)
    stage, phase = stage_of(block, tiling)
    scores = scores_of(q, stage, phase, memory, tiling)
    if MASKED:
        scores = masked(scores, first, column, sequence, tiling, features, True)
        bias, total, peak, moved = with_maxima(scores, bias, total, peak, problem.scale)
    made, bias, total, peak, factor = words_in_turn(
        scores, bias, total, peak, problem.scale, tiling, early_text, WARPGROUP
    )
    if MASKED:
        factor = factor * moved
    return made, rescaled_by_thread(acc, factor), bias, total, peak


@gluon.jit
def tile_sums(q, acc, place, first, block, sequence, memory, problem, tiling, features,
              WARPGROUP: gl.constexpr):  # fmt: skip
    """(sums of a tile, b, l, the largest x, the next tile's first block)."""
    column = (place.high - 1) * tiling.BLOCK_N
    stage, phase = stage_of(block, tiling)
    scores = scores_of(q, stage, phase, memory, tiling)
    if features.FIRST_MASKED:
        scores = masked(scores, first, column, sequence, tiling, features, True)
    bias, total, peak = started(scores, problem.scale)
    words, bias, total, peak, _ = words_in_turn(
        scores, bias, total, peak, problem.scale, tiling, early_text, WARPGROUP
    )
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
    return last_sums(words, acc, block - 1, memory, tiling), bias, total, peak, block
