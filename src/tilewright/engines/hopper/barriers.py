"""Named barriers of a program, by inline assembly: what Gluon's mbarriers cost too much for.

An ``mbarrier.arrive`` first synchronizes the warps of its partition. ``bar.arrive`` needs no such
thing: every warp adds itself and goes on, and whoever waits sees all of them. A multiprocessor has
16 barriers a program; Triton takes the first ones for itself, one a partition and two more.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIRST_FREE = gl.constexpr(5)

# All threads of a partition meet; Triton 3.7 has another name for it.
partition_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


@gluon.jit
def barrier_wait(number, THREADS: gl.constexpr):
    """Join barrier ``number`` and wait until ``THREADS`` threads have."""
    gl.inline_asm_elementwise(
        "bar.sync $1, " + THREADS + "; mov.b32 $0, 0;",
        "=r,r,~{memory}",
        [gl.to_tensor(number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_arrive(number, THREADS: gl.constexpr):
    """Join barrier ``number`` of ``THREADS`` threads, and do not wait."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, " + THREADS + "; mov.b32 $0, 0;",
        "=r,r,~{memory}",
        [gl.to_tensor(number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def barrier_arrive_if(given, number, THREADS: gl.constexpr):
    """``barrier_arrive`` where ``given`` holds, without a branch."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; @p bar.arrive $1, " + THREADS + "; mov.b32 $0, 0;}",
        "=r,r,r,~{memory}",
        [gl.to_tensor(number), gl.to_tensor(given).to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def stores_done():
    """Wait until this warpgroup's bulk stores are in global memory, in everybody's sight."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, 0;",
        "=r,r,~{memory}",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    partition_barrier()


@gluon.jit
def opaque_zero():
    """0, which the compiler does not know: what is computed from it is computed where it stands.

    A rarely taken branch that repeats computations of a hot loop would otherwise share their
    results, and registers would hold those throughout the loop.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, 0;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unmoved(x):
    """``x``, and what is computed from it is computed here: the compiler sees another value."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1
    )
