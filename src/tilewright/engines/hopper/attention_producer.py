"""The producer of attention forward: one warp that moves Q, K and V into shared memory.

K and V go through a ring of STAGES blocks of BLOCK_N keys, last keys first, Q through Q_SLOTS
tiles. A copy reports to the mbarrier of its place; a place is free when all consumers have joined
its named barrier. A block of paged keys comes in boxes of rows that lie in one page each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.engines.hopper.attention_places import (
    fetched,
    items_of,
    next_step,
    note_owner,
    place_of,
    steps_of,
)
from tilewright.engines.hopper.attention_records import ORDERED, ROWS
from tilewright.engines.hopper.attention_words import tell
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
def copy_k(block, column, place, sequence, k_map, memory, problem, tiling, features):
    """A block of K into its place in the ring."""
    stage = block % tiling.STAGES
    if block >= tiling.STAGES:
        barrier_wait(tiling.K_BARRIER + stage, tiling.RELEASE)
    k_full = memory.k_full.index(stage)
    mbarrier.expect(k_full, tiling.BLOCK_N * tiling.DEPTH * 2)
    batch, head = batch_and_head(place, problem, features)
    if features.PAGED:
        copy_pages(
            k_map, k_full, stage, column, tiling.K_BOX, tiling.SLABS, memory.k, problem.k_pages,
            place.batch, head, sequence, tiling,
        )  # fmt: skip
    else:
        for s in gl.static_range(tiling.SLABS):
            tma.async_copy_global_to_shared(
                k_map,
                [batch, head, sequence.k_row + column, s * tiling.SLAB],
                k_full,
                memory.k.index(stage * tiling.SLABS + s),
            )


@gluon.jit
def copy_v(block, column, place, sequence, v_map, memory, problem, tiling, features):
    """A block of V into its place in the ring."""
    stage = block % tiling.STAGES
    if block >= tiling.STAGES:
        barrier_wait(tiling.V_BARRIER + stage, tiling.RELEASE)
    v_full = memory.v_full.index(stage)
    mbarrier.expect(v_full, tiling.BLOCK_N * tiling.DEPTH_V * 2)
    batch, head = batch_and_head(place, problem, features)
    if features.PAGED:
        copy_pages(
            v_map, v_full, stage, column, tiling.V_BOX, tiling.DEPTH_V // PANEL, memory.v,
            problem.v_pages, place.batch, head, sequence, tiling,
        )  # fmt: skip
    else:
        tma.async_copy_global_to_shared(
            v_map, [batch, head, sequence.v_row + column, 0], v_full, memory.v.index(stage)
        )


@gluon.jit
def batch_and_head(place, problem, features):
    """Where K and V of a tile are."""
    batch = place.batch
    if features.RAGGED_KV:
        batch = place.batch * 0
    return batch, place.head // problem.group


@gluon.jit
def copy_q(place, sequence, number, q_map, memory, tiling, features):
    """A tile of Q into its slot."""
    batch_q = place.batch
    if features.RAGGED_Q:
        batch_q = place.batch * 0
    slot = number % tiling.Q_SLOTS
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


@gluon.jit
def copy_blocks(place, sequence, block, k_map, v_map, memory, problem, tiling, features):
    """The copies of a tile's K, but the first block, and V; the number of blocks so far.

    A block of K goes before V of the block before: its place is free earlier, and it is wanted
    first.
    """
    column = (place.high - 1) * tiling.BLOCK_N
    for _ in range(1, place.high - place.low):
        before = column
        column -= tiling.BLOCK_N
        copy_k(block + 1, column, place, sequence, k_map, memory, problem, tiling, features)
        copy_v(block, before, place, sequence, v_map, memory, problem, tiling, features)
        block += 1
    copy_v(block, column, place, sequence, v_map, memory, problem, tiling, features)
    return block + 1


@gluon.jit
def produce(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    """The producer warp: every copy into shared memory."""
    FETCHES: gl.constexpr = features.RAGGED_Q == ORDERED
    block = 0
    number = gl.to_tensor(0)
    more = gl.to_tensor(True)
    if FETCHES:
        count = items_of(problem)
        step = fetched(problem)
        place, sequence = place_of(step, problem, tiling, features)
    else:
        count = steps_of(problem, tiling, features)
        step = next_step(0, problem, tiling, features)
    while more:
        more = step < count
        if not FETCHES:
            place, sequence = place_of(step, problem, tiling, features)
        if more:
            # Q may have to wait for its slot.
            column = (place.high - 1) * tiling.BLOCK_N
            copy_k(block, column, place, sequence, k_map, memory, problem, tiling, features)
        slot = number % tiling.Q_SLOTS
        if number >= tiling.Q_SLOTS:
            barrier_wait(tiling.Q_BARRIER + slot, tiling.RELEASE)
        tell(more, place, sequence, slot, memory, features)
        if more:
            if FETCHES:
                if features.REPAIRS:
                    note_owner(step, problem)
            copy_q(place, sequence, number, q_map, memory, tiling, features)
            if FETCHES:
                # It takes several loads, one after another: while copies are under way.
                step = fetched(problem)
                place_then, sequence_then = place_of(step, problem, tiling, features)
            block = copy_blocks(
                place, sequence, block, k_map, v_map, memory, problem, tiling, features
            )
            if FETCHES:
                place = place_then
                sequence = sequence_then
            else:
                step = next_step(step + 1, problem, tiling, features)
            number += 1
        else:
            mbarrier.arrive(memory.q_full.index(slot), count=1)
    # Meet the releases that no copy waited for, so that no barrier is left half joined.
    for j in range(max(number + 1 - tiling.Q_SLOTS, 0), number):
        barrier_wait(tiling.Q_BARRIER + j % tiling.Q_SLOTS, tiling.RELEASE)
    for j in range(max(block - tiling.STAGES, 0), block):
        barrier_wait(tiling.K_BARRIER + j % tiling.STAGES, tiling.RELEASE)
        barrier_wait(tiling.V_BARRIER + j % tiling.STAGES, tiling.RELEASE)
