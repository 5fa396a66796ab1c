"""The producer of attention forward: one warp that moves Q, K and V into shared memory.

K and V go through a ring of STAGES blocks of BLOCK_N keys, last keys first, Q through Q_SLOTS
tiles. A copy reports to the mbarrier of its place; a place is free when all consumers have joined
its named barrier. A block of paged keys comes in boxes of rows that lie in one page each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.engines.hopper.attention_places import count_tiles, next_step, place_of
from tilewright.engines.hopper.attention_records import ROWS
from tilewright.engines.hopper.barriers import barrier_wait

# Columns of V that lie together in shared memory.
PANEL = gl.constexpr(64)
# Boxes whose pages are looked up at a time.
LOOKS = gl.constexpr(8)


@gluon.jit
def copy_pages(
    map, full, stage, column, BOX: gl.constexpr, PANELS: gl.constexpr, ring, pages, batch, head,
    sequence, tiling,
):  # fmt: skip
    """A block of paged rows into its place: ``PANELS`` stripes of columns, boxes of BOX rows.

    A box behind the sequence's end has no page, and gets zeros: its table entry is not read.
    """
    WIDTH: gl.constexpr = map.block_shape[3]
    COUNT: gl.constexpr = tiling.BLOCK_N // BOX
    AT_ONCE: gl.constexpr = min(COUNT, LOOKS)
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, WIDTH * 2) if BOX >= 8 else 0, element_bitwidth=16, rank=2
    )
    boxes = ring._reinterpret(ring.dtype, [tiling.STAGES * PANELS * COUNT, BOX, WIDTH], layout)
    table = pages.table + batch.to(gl.int64) * pages.batch
    for first in range(0, COUNT, AT_ONCE):
        for i in gl.static_range(AT_ONCE):
            row = column + (first + i) * BOX
            at = (row // pages.rows).to(gl.int64) * pages.entry
            page = gl.load(table + at, mask=row < sequence.keys, other=-1).to(gl.int32)
            for p in gl.static_range(PANELS):
                tma.async_copy_global_to_shared(
                    map,
                    [page, head, row % pages.rows, p * WIDTH],
                    full,
                    boxes.index((stage * PANELS + p) * COUNT + first + i),
                )


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
            if features.PAGED:
                copy_pages(
                    k_map, k_full, stage, column, tiling.K_BOX, tiling.SLABS, memory.k,
                    problem.k_pages, place.batch, head_kv, sequence, tiling,
                )  # fmt: skip
            else:
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
            if features.PAGED:
                copy_pages(
                    v_map, v_full, stage, column, tiling.V_BOX, tiling.DEPTH_V // PANEL, memory.v,
                    problem.v_pages, place.batch, head_kv, sequence, tiling,
                )  # fmt: skip
            else:
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
