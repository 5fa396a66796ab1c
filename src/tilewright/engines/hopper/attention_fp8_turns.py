"""Turns of FP8 attention's consumers: one at a time makes exponentials, by a named barrier each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.barriers import barrier_arrive, barrier_wait


@gluon.jit
def begin_turns(tiling, WARPGROUP: gl.constexpr):
    """The first turn is the first consumer's; the last one says so."""
    if WARPGROUP == tiling.WARPGROUPS - 1:
        pass_turn(tiling, WARPGROUP)


@gluon.jit
def pass_turn(tiling, WARPGROUP: gl.constexpr):
    """The next warpgroup's turn begins."""
    barrier_arrive(tiling.T_BARRIER + (WARPGROUP + 1) % tiling.WARPGROUPS, "256")


@gluon.jit
def end_turns(tiling, WARPGROUP: gl.constexpr):
    """The first consumer takes a turn for nothing: no barrier is left half joined."""
    if WARPGROUP == 0:
        barrier_wait(tiling.T_BARRIER, "256")
