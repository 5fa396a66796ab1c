"""The producer of attention's backward: one warp that makes every copy into shared memory.

The first ones are begun before it is there, as soon as the program knows its part.
"""

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
def copy_keys(tensor_map, rows_before, is_full, tiles, problem):
    """Have K or V of the program's keys copied; ``is_full`` expects as many bytes."""
    for w in gl.static_range(2):
        row = rows_before + problem.first_key + w * KEYS
        tma.async_copy_global_to_shared(
            tensor_map, [problem.batch_kv, problem.head_kv, row, 0], is_full, tiles.index(w)
        )


@gluon.jit
def copy_q(maps, head, first, stage, memory, problem, config):
    """Have a tile of Q copied, with its parts of Stats if it has any."""
    COLUMNS: gl.constexpr = config.DEPTH + (PARTS if config.MAKES_D_Q else 0)
    is_full = memory.q_full.index(stage)
    mbarrier.expect(is_full, config.ROWS * COLUMNS * 2)
    tma.async_copy_global_to_shared(
        maps.q, [problem.batch_q, head, problem.q_row + first, 0], is_full, memory.q.index(stage)
    )
    if config.MAKES_D_Q:
        line = (problem.batch * problem.heads_kv * problem.group + head) * problem.padded_rows
        tma.async_copy_global_to_shared(
            maps.lse_parts, [line + first, 0], is_full, memory.lse.index(stage)
        )


@gluon.jit
def copy_d_o(maps, head, first, stage, memory, problem, config):
    """Have a tile of dO copied, with its parts of Delta if it has any; its bytes are expected."""
    is_full = memory.d_o_full.index(stage)
    tma.async_copy_global_to_shared(
        maps.d_o,
        [problem.batch_q, head, problem.d_o_row + first, 0],
        is_full,
        memory.d_o.index(stage),
    )
    if config.MAKES_D_Q:
        line = (problem.batch * problem.heads_kv * problem.group + head) * problem.padded_rows
        tma.async_copy_global_to_shared(
            maps.delta_parts, [line + first, 0], is_full, memory.delta.index(stage)
        )


@gluon.jit
def begin_copies(k_map, v_map, maps, memory, problem, config):
    """K and the first tile of Q, then V and dO: the first scores wait for two of them alone."""
    COLUMNS_O: gl.constexpr = config.DEPTH_V + (PARTS if config.MAKES_D_Q else 0)
    low, high = row_tiles(problem, config)
    first = low * config.ROWS
    if config.MAKES_D_Q:
        first = turned(low, low, high, config) * config.ROWS
    head = problem.head_kv * problem.group
    keys_full = memory.keys_full.index(0)
    mbarrier.expect(keys_full, 2 * KEYS * config.DEPTH * 2)
    copy_keys(k_map, problem.k_row, keys_full, memory.k, problem)
    copy_q(maps, head, first, 0, memory, problem, config)
    d_o_full = memory.d_o_full.index(0)
    mbarrier.expect(d_o_full, (config.ROWS * COLUMNS_O + 2 * KEYS * config.DEPTH_V) * 2)
    copy_keys(v_map, problem.v_row, d_o_full, memory.v, problem)
    copy_d_o(maps, head, first, 0, memory, problem, config)


@gluon.jit
def produce(given):
    """Rings of Q and dO with statistics, a tile at a time; the first one's copies are begun."""
    maps, memory, problem, config = given.rows, given.memory, given.problem, given.config
    ROWS: gl.constexpr = config.ROWS
    COLUMNS_O: gl.constexpr = config.DEPTH_V + (PARTS if config.MAKES_D_Q else 0)
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
            if step > 0:
                copy_q(maps, head, first, stage, memory, problem, config)
            if not config.MAKES_D_Q:
                memory.lse.index(stage).store(lse)
                # The sums of dP start from it.
                memory.delta.index(stage).store(-delta)
                mbarrier.arrive(memory.q_full.index(stage), count=1)
            stage = step % config.STAGES_O
            if step >= config.STAGES_O:
                barrier_wait(RELEASE_O + stage, EVERYBODY)
            if step > 0:
                mbarrier.expect(memory.d_o_full.index(stage), ROWS * COLUMNS_O * 2)
                copy_d_o(maps, head, first, stage, memory, problem, config)
            step += 1
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for left_over in range(max(step - config.STAGES, 0), step):
        barrier_wait(RELEASE_Q + left_over % config.STAGES, EVERYBODY)
    for left_over in range(max(step - config.STAGES_O, 0), step):
        barrier_wait(RELEASE_O + left_over % config.STAGES_O, EVERYBODY)
