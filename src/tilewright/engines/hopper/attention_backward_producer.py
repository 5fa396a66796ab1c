"""The producer of attention's backward: one warp that makes every copy into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.engines.hopper.attention_backward_parts import PARTS
from tilewright.engines.hopper.attention_backward_places import row_tiles, turned
from tilewright.engines.hopper.attention_backward_records import (
    EVERYBODY,
    KEYS,
    RELEASE_O,
    RELEASE_Q,
)
from tilewright.engines.hopper.barriers import barrier_wait


@gluon.jit
def produce(q_map, k_map, v_map, d_o_map, lse_parts, delta_parts, memory, problem, config):
    """K and V of the program's keys, then rings of Q and dO with statistics, a tile at a time."""
    ROWS: gl.constexpr = config.ROWS
    COLUMNS: gl.constexpr = config.DEPTH + (PARTS if config.MAKES_D_Q else 0)
    COLUMNS_O: gl.constexpr = config.DEPTH_V + (PARTS if config.MAKES_D_Q else 0)
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
        line = (problem.batch * heads + head) * problem.padded_rows
        at = line.to(gl.int64)
        for tile in range(low, high):
            first = tile * ROWS
            if config.MAKES_D_Q:
                first = turned(tile, low, high, config) * ROWS
            stage = step % config.STAGES
            if not config.MAKES_D_Q:
                lse = gl.load(problem.lse + at + first + row)
                delta = gl.load(problem.delta + at + first + row)
            if step >= config.STAGES:
                barrier_wait(RELEASE_Q + stage, EVERYBODY)
            q_full = memory.q_full.index(stage)
            mbarrier.expect(q_full, ROWS * COLUMNS * 2)
            tma.async_copy_global_to_shared(
                q_map,
                [problem.batch_q, head, problem.q_row + first, 0],
                q_full,
                memory.q.index(stage),
            )
            if config.MAKES_D_Q:
                tma.async_copy_global_to_shared(
                    lse_parts, [line + first, 0], q_full, memory.lse.index(stage)
                )
            else:
                memory.lse.index(stage).store(lse)
                # The sums of dP start from it.
                memory.delta.index(stage).store(-delta)
                mbarrier.arrive(q_full, count=1)
            stage = step % config.STAGES_O
            if step >= config.STAGES_O:
                barrier_wait(RELEASE_O + stage, EVERYBODY)
            d_o_full = memory.d_o_full.index(stage)
            mbarrier.expect(d_o_full, ROWS * COLUMNS_O * 2)
            tma.async_copy_global_to_shared(
                d_o_map,
                [problem.batch_q, head, problem.d_o_row + first, 0],
                d_o_full,
                memory.d_o.index(stage),
            )
            if config.MAKES_D_Q:
                tma.async_copy_global_to_shared(
                    delta_parts, [line + first, 0], d_o_full, memory.delta.index(stage)
                )
            step += 1
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for left_over in range(max(step - config.STAGES, 0), step):
        barrier_wait(RELEASE_Q + left_over % config.STAGES, EVERYBODY)
    for left_over in range(max(step - config.STAGES_O, 0), step):
        barrier_wait(RELEASE_O + left_over % config.STAGES_O, EVERYBODY)
