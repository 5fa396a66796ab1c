"""Tiny kernels that show what racecheck takes for a race: controls of the sanitizer's record.

In each, four warps get 32 numbers that another one brought to shared memory.

    plain         no warp partitions; a barrier of the block stands between
    mbarrier      no warp partitions; an mbarrier stands between
    partitions    two warp partitions that share nothing but what the compiler hands over
    handed_over   two partitions; after the numbers an mbarrier is arrived at, and waited for
    arrived       two partitions; a named barrier is arrived at by one and waited for by the other
    ring          as ``handed_over``, eight times through two places that a named barrier frees
    beside_copy   as ``ring``; the same mbarrier also waits for a bulk copy into other memory
    not_handed    as ``handed_over`` without the wait: a race

A tool that follows all of this reports ``not_handed`` alone.
"""

from __future__ import annotations

import sys
from typing import Any

from partition_words import line_of_words
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewright.engines.hopper.barriers import (
    FIRST_FREE,
    barrier_arrive,
    barrier_wait,
    partition_barrier,
)

SIZE = gl.constexpr(32)
ROUNDS = gl.constexpr(8)
TILE_BYTES = gl.constexpr(16 * 64 * 2)


@gluon.jit
def store_numbers(source, room, WARPS: gl.constexpr):
    """Numbers from global to shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    place = gl.arange(0, SIZE, gl.SliceLayout(0, layout))[None, :]
    room.store(gl.load(source + place))


@gluon.jit
def load_numbers(target, room):
    """Numbers, turned around, from shared to global memory, by four warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    place = gl.arange(0, SIZE, gl.SliceLayout(0, layout))[None, :]
    gl.store(target + (SIZE - 1 - place), room.load(layout))


@gluon.jit
def give(source, target, rooms, ready):
    """The partition of one warp that brings the numbers."""
    store_numbers(source, rooms.index(0), 1)
    mbarrier.arrive(ready.index(0), count=1)


@gluon.jit
def take(source, target, rooms, ready):
    """The partition of four warps that gets them."""
    mbarrier.wait(ready.index(0), 0)
    load_numbers(target, rooms.index(0))


@gluon.jit
def give_by_name(source, target, rooms, ready):
    """``give`` by a named barrier of both partitions' threads."""
    store_numbers(source, rooms.index(0), 1)
    barrier_arrive(FIRST_FREE, "160")


@gluon.jit
def take_by_name(source, target, rooms, ready):
    """``take`` by a named barrier."""
    barrier_wait(FIRST_FREE, "160")
    load_numbers(target, rooms.index(0))


@gluon.jit
def give_round(map, source, rooms, tiles, ready, COPIES: gl.constexpr):
    """``give`` in rounds: two places, each free again when its barrier is joined."""
    for step in range(ROUNDS):
        place = step % 2
        if step >= 2:
            barrier_wait(FIRST_FREE + place, "160")
        if COPIES:
            mbarrier.expect(ready.index(place), TILE_BYTES)
            tma.async_copy_global_to_shared(map, [0, 0], ready.index(place), tiles.index(place))
        store_numbers(source + step * SIZE, rooms.index(place), 1)
        mbarrier.arrive(ready.index(place), count=1)
    for place in range(2):
        barrier_wait(FIRST_FREE + place, "160")


@gluon.jit
def take_round(target, rooms, ready):
    """``take`` in rounds."""
    for step in range(ROUNDS):
        place = step % 2
        mbarrier.wait(ready.index(place), (step // 2) & 1)
        load_numbers(target + step * SIZE, rooms.index(place))
        barrier_arrive(FIRST_FREE + place, "160")


@gluon.jit
def give_ring(map, source, target, rooms, tiles, ready):
    give_round(map, source, rooms, tiles, ready, False)


@gluon.jit
def give_beside_copy(map, source, target, rooms, tiles, ready):
    give_round(map, source, rooms, tiles, ready, True)


@gluon.jit
def take_ring(map, source, target, rooms, tiles, ready):
    take_round(target, rooms, ready)


@gluon.jit
def rounds(map, source, target, COPIES: gl.constexpr):
    """See the top: ``ring`` and ``beside_copy``."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rooms = gl.allocate_shared_memory(gl.int64, [2, 1, SIZE], layout)
    tiles = gl.allocate_shared_memory(map.dtype, [2, 16, 64], map.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(ready.index(place), count=2 if COPIES else 1)
    arguments = (map, source, target, rooms, tiles, ready)
    if COPIES:
        gl.warp_specialize([(take_ring, arguments), (give_beside_copy, arguments)], [1], [24])
    else:
        gl.warp_specialize([(take_ring, arguments), (give_ring, arguments)], [1], [24])


@gluon.jit
def take_at_once(source, target, rooms, ready):
    """``take`` without its wait."""
    load_numbers(target, rooms.index(0))


@gluon.jit
def turn(source, target, rooms, ready):
    """Numbers, turned around, from global to global memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = gl.arange(0, SIZE, layout)
    gl.store(target + (SIZE - 1 - place), gl.load(source + place))


@gluon.jit
def rest(source, target, rooms, ready):
    """A partition with nothing to do."""
    pass


@gluon.jit
def specialized(source, target, KIND: gl.constexpr):
    """See the top: 0 is ``partitions``, 1 ``handed_over``, 2 ``not_handed``,
    3 ``arrived``."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rooms = gl.allocate_shared_memory(gl.int64, [1, 1, SIZE], layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    arguments = (source, target, rooms, ready)
    if KIND == 0:
        gl.warp_specialize([(turn, arguments), (rest, arguments)], [1], [24])
    elif KIND == 1:
        gl.warp_specialize([(take, arguments), (give, arguments)], [1], [24])
    elif KIND == 3:
        gl.warp_specialize([(take_by_name, arguments), (give_by_name, arguments)], [1], [24])
    else:
        gl.warp_specialize([(take_at_once, arguments), (give, arguments)], [1], [24])


@gluon.jit
def together(source, target, BY_MBARRIER: gl.constexpr):
    """See the top: ``plain`` and ``mbarrier``."""
    room = gl.allocate_shared_memory(gl.int64, [1, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if BY_MBARRIER:
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        store_numbers(source, room, 4)
        mbarrier.arrive(ready, count=1)
        mbarrier.wait(ready, 0)
    else:
        store_numbers(source, room, 4)
        partition_barrier()
    load_numbers(target, room)


CONTROLS: dict[str, Any] = {
    "plain": (together, {"BY_MBARRIER": False}),
    "mbarrier": (together, {"BY_MBARRIER": True}),
    "partitions": (specialized, {"KIND": 0}),
    "handed_over": (specialized, {"KIND": 1}),
    "arrived": (specialized, {"KIND": 3}),
    "ring": (rounds, {"COPIES": False}),
    "beside_copy": (rounds, {"COPIES": True}),
    "not_handed": (specialized, {"KIND": 2}),
}


def main() -> int:
    import torch
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    kernel, constants = CONTROLS[sys.argv[1]]
    count = ROUNDS.value if kernel is rounds else 1
    source = torch.arange(32 * count, dtype=torch.int64, device="cuda")
    target = torch.zeros_like(source)
    operands = [source, target]
    if kernel is rounds:
        tile = torch.zeros(16, 64, dtype=torch.float16, device="cuda")
        layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.float16)
        operands.insert(0, TensorDescriptor.from_tensor(tile, [16, 64], layout))
    compiled = kernel[(1,)](*operands, **constants, num_warps=4)
    torch.cuda.synchronize()
    told = compiled.metadata
    print(line_of_words([(told.name, compiled.asm["cubin"], told.num_warps, told.shared)]))
    print("right" if torch.equal(target, source.view(count, 32).flip(1).reshape(-1)) else "wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
