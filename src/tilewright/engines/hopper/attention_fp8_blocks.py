"""A block of keys where FP8 attention is long: two consumers of 64 rows each.

Scores of a block are made; then they become probabilities (``attention_fp8_softmax``) while those
of the block before multiply V. Sums hardly ever need a factor, so the tensor cores add blocks up.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_consumer import ends_of_masks
from tilewright.engines.hopper.attention_fp8_consumer import start_scores
from tilewright.engines.hopper.attention_fp8_softmax import of_words_operand, softmax_block, started
from tilewright.engines.hopper.attention_records import ROWS
from tilewright.engines.hopper.attention_softmax import (
    MINUS_INFINITY,
    products_in_place,
    skipping_products,
)
from tilewright.engines.hopper.barriers import barrier_arrive


@gluon.jit
def start_sums(words, acc, stage, memory):
    """Start to add P V of a stage to ``acc``."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=4)
    p = of_words_operand(words, layout, memory.vt.dtype)
    return warpgroup_mma(p, memory.vt.index(stage).permute((1, 0)), acc, is_async=True)


@gluon.jit
def masked(scores, first, column, sequence, features):
    """Scores with -inf where row ``first + i`` does not see key ``column + j``.

    What a thread's columns have in common is on the rows' side: constants are compared.
    """
    layout: gl.constexpr = scores.type.layout
    columns = gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout))
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    common = columns & 6
    columns = columns & -7
    if features.HAS_RIGHT:
        end = (gl.minimum(rows + sequence.right + 1, sequence.keys) - column)[:, None]
        seen = columns[None, :] < end - common[None, :]
    else:
        seen = (columns < sequence.keys - column - common)[None, :]
    return gl.where(seen, scores, MINUS_INFINITY)


@gluon.jit
def rescaled(acc, factor):
    """Sums times the factor (rows, 4) of their row; a warp whose factors are all 1 skips that."""
    COUNT: gl.constexpr = acc.shape[1] // 2
    parts = acc.reshape([acc.shape[0], acc.shape[1] // 8, 4, 2])
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, parts.type.layout))
    factor = gl.convert_layout(factor, layout, assert_trivial=True).expand_dims(1).expand_dims(3)
    parts = gl.inline_asm_elementwise(
        skipping_products(COUNT), products_in_place(COUNT), [parts, factor],
        dtype=gl.float32, is_pure=False, pack=COUNT,
    )  # fmt: skip
    return gl.convert_layout(parts.reshape(acc.shape), acc.type.layout, assert_trivial=True)


@gluon.jit
def stage_of(block, tiling):
    """(the stage of a block, the parity of its barriers' phase)."""
    if tiling.STAGES == 2:
        # Without a division of signed numbers, so that it is seen what does not change in a loop.
        stage = block & 1
        phase = (block >> 1) & 1
    else:
        stage = block % tiling.STAGES
        phase = (block // tiling.STAGES) & 1
    return stage, phase


@gluon.jit
def turn_of_softmax(scores, bias, total, peak, problem, tiling, WARPGROUP: gl.constexpr):
    """``softmax_block`` when it is this warpgroup's turn."""
    OWN: gl.constexpr = tiling.T_BARRIER + WARPGROUP
    OTHER: gl.constexpr = tiling.T_BARRIER + 1 - WARPGROUP
    return softmax_block(scores, bias, total, peak, problem.scale, OWN, OTHER)


@gluon.jit
def first_block(q, first, column, block, sequence, memory, problem, tiling, features,
                WARPGROUP: gl.constexpr):  # fmt: skip
    """(probabilities, b, l, the largest) of a tile's first block."""
    stage, phase = stage_of(block, tiling)
    mbarrier.wait(memory.k_full.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=(start_scores(q, stage, memory, tiling),))
    barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    if features.FIRST_MASKED:
        scores = masked(scores, first, column, sequence, features)
    bias, total, peak = started(scores, problem.scale)
    words, bias, total, peak, _ = turn_of_softmax(
        scores, bias, total, peak, problem, tiling, WARPGROUP
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
        scores = masked(scores, first, column, sequence, features)
    made, bias, total, peak, factor = turn_of_softmax(
        scores, bias, total, peak, problem, tiling, WARPGROUP
    )
    acc, words = warpgroup_mma_wait(0, deps=(acc, words))
    barrier_arrive(tiling.V_BARRIER + before, tiling.RELEASE)
    return made, rescaled(acc, factor), bias, total, peak


@gluon.jit
def last_product(words, acc, block, memory, tiling):
    """The product of a tile's last block."""
    stage, phase = stage_of(block, tiling)
    mbarrier.wait(memory.vt_full.index(stage), phase)
    acc, words = warpgroup_mma_wait(0, deps=(start_sums(words, acc, stage, memory), words))
    barrier_arrive(tiling.V_BARRIER + stage, tiling.RELEASE)
    return acc


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
    return last_product(words, acc, block - 1, memory, tiling), bias, total, peak, block
