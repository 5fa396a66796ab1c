"""The producer of attention forward: one warp that moves Q, K and V into shared memory.

K and V go through a ring of STAGES blocks of BLOCK_N keys, last keys first, Q through Q_SLOTS
tiles. A copy reports to the mbarrier of its place; a place is free when all consumers have joined
its named barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.engines.hopper.attention_places import count_tiles, next_step, place_of
from tilewright.engines.hopper.attention_records import ROWS
from tilewright.engines.hopper.barriers import barrier_wait


@gluon.jit
def produce(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    """The producer warp: every copy into shared memory."""
    block = 0
    step = next_step(0, problem, tiling, features)
    for number in range(count_tiles(problem, tiling, features)):
        place, sequence = place_of(step, problem, tiling, features)
        batch_q = place.batch
        batch_kv = place.batch
        if features.RAGGED_Q:
            batch_q = place.batch * 0
        if features.RAGGED_KV:
            batch_kv = place.batch * 0
        head_kv = place.head // problem.group
        slot = number % tiling.Q_SLOTS
        if number >= tiling.Q_SLOTS:
            barrier_wait(tiling.Q_BARRIER + slot, tiling.RELEASE)
        q_full = memory.q_full.index(slot)
        mbarrier.expect(q_full, tiling.BLOCK_M * tiling.DEPTH * 2)
        for w in gl.static_range(tiling.WARPGROUPS):
            for s in gl.static_range(tiling.SLABS):
                tma.async_copy_global_to_shared(
                    q_map,
                    [
                        batch_q,
                        place.head,
                        sequence.q_row + place.first + w * ROWS,
                        s * tiling.SLAB,
                    ],
                    q_full,
                    memory.q.index((slot * tiling.WARPGROUPS + w) * tiling.Q_PITCH + s),
                )
        for j in range(place.high - place.low):
            stage = block % tiling.STAGES
            column = (place.high - 1 - j) * tiling.BLOCK_N
            if block >= tiling.STAGES:
                barrier_wait(tiling.K_BARRIER + stage, tiling.RELEASE)
            k_full = memory.k_full.index(stage)
            mbarrier.expect(k_full, tiling.BLOCK_N * tiling.DEPTH * 2)
            for s in gl.static_range(tiling.SLABS):
                tma.async_copy_global_to_shared(
                    k_map,
                    [batch_kv, head_kv, sequence.k_row + column, s * tiling.SLAB],
                    k_full,
                    memory.k.index(stage * tiling.SLABS + s),
                )
            if block >= tiling.STAGES:
                barrier_wait(tiling.V_BARRIER + stage, tiling.RELEASE)
            v_full = memory.v_full.index(stage)
            mbarrier.expect(v_full, tiling.BLOCK_N * tiling.DEPTH_V * 2)
            tma.async_copy_global_to_shared(
                v_map,
                [batch_kv, head_kv, sequence.v_row + column, 0],
                v_full,
                memory.v.index(stage),
            )
            block += 1
        step = next_step(step + 1, problem, tiling, features)
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for j in range(max(block - tiling.STAGES, 0), block):
        barrier_wait(tiling.K_BARRIER + j % tiling.STAGES, tiling.RELEASE)
        barrier_wait(tiling.V_BARRIER + j % tiling.STAGES, tiling.RELEASE)
