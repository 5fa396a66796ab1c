"""The two products of a block in FP8 attention, Q K^T and P V, of a consumer's 64 rows.

A thread of the first product has keys 8c + 2q + e of 16, where q is its number among four; as an
operand of the second it has positions 4q + 2c + e. So key 8c + 2q + e takes position 4q + 2c + e,
and nothing moves between threads: ``attention_fp8_producer`` lays V^T in that order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.engines.hopper.attention_fp8_words import of_words_operand
from tilewright.engines.hopper.attention_records import ROWS, product_layout
from tilewright.engines.hopper.attention_softmax import (
    products_in_place,
    rescaled,
    skipping_products,
)
from tilewright.engines.hopper.barriers import barrier_arrive


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
def start_scores(q, stage, memory, tiling):
    """Start Q K^T for a stage."""
    layout: gl.constexpr = product_layout(tiling.BLOCK_N, 8)
    zero = gl.zeros([ROWS, tiling.BLOCK_N], gl.float32, layout)
    k = memory.k.index(stage).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def scores_of(q, stage, phase, memory, tiling):
    """Q K^T for a stage, when its keys are there; they are not needed any more."""
    mbarrier.wait(memory.k_full.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=(start_scores(q, stage, memory, tiling),))
    barrier_arrive(tiling.K_BARRIER + stage, tiling.RELEASE)
    return scores


@gluon.jit
def as_operand(p, LAYOUT: gl.constexpr, kind: gl.constexpr):
    """Probabilities as the second product reads them: rounded, keys in the order of V^T."""
    rows: gl.constexpr = p.shape[0]
    keys: gl.constexpr = p.shape[1]
    p = p.reshape([rows, keys // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([rows, keys])
    return gl.convert_layout(p, LAYOUT, assert_trivial=True).to(kind)


@gluon.jit
def summed(p, factor, acc, stage, phase, memory, tiling):
    """P V of a stage and, in float32, ``acc`` times a factor a row: a block by itself.

    ``p`` is what ``as_operand`` made.
    """
    layout: gl.constexpr = acc.type.layout
    mbarrier.wait(memory.vt_full.index(stage), phase)
    v = memory.vt.index(stage).permute((1, 0))
    nothing = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, layout)
    token = warpgroup_mma(p, v, nothing, use_acc=False, is_async=True)
    added = warpgroup_mma_wait(0, deps=(token,))
    barrier_arrive(tiling.V_BARRIER + stage, tiling.RELEASE)
    return rescaled(acc, factor) + added


@gluon.jit
def start_sums(words, acc, stage, memory):
    """Start to add P V of a stage to ``acc``: the tensor cores add blocks up."""
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=4)
    p = of_words_operand(words, layout, memory.vt.dtype)
    return warpgroup_mma(p, memory.vt.index(stage).permute((1, 0)), acc, is_async=True)


@gluon.jit
def last_sums(words, acc, block, memory, tiling):
    """``acc`` with P V of a block, when its values are there; they are not needed any more."""
    stage, phase = stage_of(block, tiling)
    mbarrier.wait(memory.vt_full.index(stage), phase)
    acc, words = warpgroup_mma_wait(0, deps=(start_sums(words, acc, stage, memory), words))
    barrier_arrive(tiling.V_BARRIER + stage, tiling.RELEASE)
    return acc


@gluon.jit
def rescaled_by_thread(acc, factor):
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
