"""The producer of attention's backward: one warp that makes every copy into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.engines.hopper.attention_backward_places import row_tiles
from tilewright.engines.hopper.attention_backward_records import (
    EVERYBODY,
    KEYS,
    RELEASE_O,
    RELEASE_Q,
)
from tilewright.engines.hopper.barriers import barrier_wait


@gluon.jit
def produce(q_map, k_map, v_map, d_o_map, memory, problem, config):
    """K and V of the program's keys, then rings of Q and dO, a tile of rows at a time."""
    ROWS: gl.constexpr = config.ROWS
    keys_full = memory.keys_full.index(0)
    mbarrier.expect(keys_full, 2 * KEYS * (config.DEPTH + config.DEPTH_V) * 2)
    for w in gl.static_range(2):
        key = problem.first_key + w * KEYS
        tma.async_copy_global_to_shared(
            k_map,
            [problem.batch_kv, problem.head_kv, problem.k_row + key, 0],
            keys_full,
            memory.k.index(w),
        )
        tma.async_copy_global_to_shared(
            v_map,
            [problem.batch_kv, problem.head_kv, problem.v_row + key, 0],
            keys_full,
            memory.v.index(w),
        )
    low, high = row_tiles(problem, config)
    heads = problem.heads_kv * problem.group
    layout: gl.constexpr = gl.BlockedLayout([ROWS // 32], [32], [1], [0])
    row = gl.arange(0, ROWS, layout)
    step = low * 0
    for member in range(problem.group):
        head = problem.head_kv * problem.group + member
        line = (problem.batch * heads + head).to(gl.int64) * problem.padded_rows
        for tile in range(low, high):
            first = tile * ROWS
            stage = step % config.STAGES
            lse = gl.load(problem.lse + line + first + row)
            delta = gl.load(problem.delta + line + first + row)
            if step >= config.STAGES:
                barrier_wait(RELEASE_Q + stage, EVERYBODY)
            q_full = memory.q_full.index(stage)
            mbarrier.expect(q_full, ROWS * config.DEPTH * 2)
            tma.async_copy_global_to_shared(
                q_map,
                [problem.batch_q, head, problem.q_row + first, 0],
                q_full,
                memory.q.index(stage),
            )
            memory.lse.index(stage).store(lse)
            # The sums of dP start from it.
            memory.delta.index(stage).store(-delta)
            mbarrier.arrive(q_full, count=1)
            stage = step % config.STAGES_O
            if step >= config.STAGES_O:
                barrier_wait(RELEASE_O + stage, EVERYBODY)
            d_o_full = memory.d_o_full.index(stage)
            mbarrier.expect(d_o_full, ROWS * config.DEPTH_V * 2)
            tma.async_copy_global_to_shared(
                d_o_map,
                [problem.batch_q, head, problem.d_o_row + first, 0],
                d_o_full,
                memory.d_o.index(stage),
            )
            step += 1
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for left_over in range(max(step - config.STAGES, 0), step):
        barrier_wait(RELEASE_Q + left_over % config.STAGES, EVERYBODY)
    for left_over in range(max(step - config.STAGES_O, 0), step):
        barrier_wait(RELEASE_O + left_over % config.STAGES_O, EVERYBODY)
