"""How O of a tile leaves a consumer of attention forward.

Through shared memory of its own, all at once or one part of its columns after another, or through
the memory of the tile's Q.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewright.engines.hopper.attention_places import element
from tilewright.engines.hopper.attention_records import ROWS, product_layout
from tilewright.engines.hopper.barriers import partition_barrier


@gluon.jit
def in_parts(out, tiling):
    """The columns of O in as many parts as leave one after another."""
    if tiling.OUT_PARTS == 2:
        half: gl.constexpr = out.shape[1] // 2
        layout: gl.constexpr = product_layout(half, 16)
        low, high = gl.split(gl.permute(gl.reshape(out, [ROWS, 2, half]), [0, 2, 1]))
        low = gl.convert_layout(low, layout, assert_trivial=True)
        high = gl.convert_layout(high, layout, assert_trivial=True)
        parts = (low, high)
    else:
        parts = (out,)
    return parts


@gluon.jit
def leave(out, q, o_map, place, first, sequence, memory, problem, tiling, features,
          WARPGROUP: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr):  # fmt: skip
    """O of a tile, through shared memory; the end of a packed sequence row by row.

    Parts FROM to TO - 1 of its columns; rows that go one by one do so with the first part.
    """
    WIDTH: gl.constexpr = tiling.DEPTH_V // max(tiling.OUT_PARTS, 1)
    parts = in_parts(out, tiling)
    room = q
    if tiling.OUT_PARTS > 0:
        room = memory.o.index(WARPGROUP)
    elif tiling.DEPTH_V != tiling.SLAB:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, tiling.DEPTH_V], q.dtype)
        room = q._reinterpret(q.dtype, [ROWS, tiling.DEPTH_V], layout)
    batch = place.batch
    if features.RAGGED_Q:
        batch = place.batch * 0
    if not features.RAGGED_Q or first + ROWS <= sequence.rows:
        for i in gl.static_range(FROM, TO):
            if tiling.OUT_PARTS > 0:
                # What left before has been read.
                tma.store_wait(0)
                partition_barrier()
            room.store(parts[i])
            fence_async_shared()
            tma.async_copy_shared_to_global(
                o_map, [batch, place.head, sequence.o_row + first, i * WIDTH], room
            )
    elif FROM == 0:
        # What follows in memory belongs to another sequence.
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
        columns = gl.arange(0, tiling.DEPTH_V, gl.SliceLayout(0, out.type.layout))
        at = problem.o.pointer + element(problem.o, place.batch, place.head, sequence.o_row, True)
        gl.store(
            at + rows.to(gl.int64)[:, None] * problem.o.row + columns[None, :],
            out,
            mask=(rows < sequence.rows)[:, None] & (columns < problem.depth_v)[None, :],
        )
