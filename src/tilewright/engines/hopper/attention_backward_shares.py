"""The dK and dV of keys whose rows several programs share.

Each program puts its sums by in the workspace, in float32, and counts itself; who comes last adds
up all of them, in the order of the shares, so that the result does not depend on who that was.
Nobody waits. In the workspace, a consumer of a program after the other: 64 rows of dK, then of dV.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_backward_consumer import store_gradient
from tilewright.engines.hopper.attention_backward_records import KEYS
from tilewright.engines.hopper.barriers import partition_barrier


@gluon.jit
def places_of(held, sums, share, step: gl.constexpr, CONSUMER: gl.constexpr):
    """Where a consumer's sums of a share are."""
    layout: gl.constexpr = sums.type.layout
    row = gl.arange(0, KEYS, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))[None, :]
    at = held + (share.to(gl.int64) * 2 + CONSUMER) * (KEYS * step)
    return at + (row * sums.shape[1] + column)


@gluon.jit
def added_up(held, sums, problem, step: gl.constexpr, CONSUMER: gl.constexpr):
    """The sum of all shares, which have the shape of ``sums``; they are not in the first cache."""
    total = gl.zeros_like(sums)
    for share in range(problem.shares):
        places = places_of(held, sums, problem.first_share + share, step, CONSUMER)
        total += gl.load(places, cache_modifier=".cg")
    return total


@gluon.jit
def add_share(sum_k, sum_v, first_own, given, dtype: gl.constexpr, CONSUMER: gl.constexpr):
    """Put this program's sums by; the last one stores the gradients."""
    problem, config, held = given.problem, given.config, given.held_shares
    step: gl.constexpr = config.DEPTH + config.DEPTH_V
    held_v = held + KEYS * config.DEPTH
    own = problem.first_share + problem.share
    gl.store(places_of(held, sum_k, own, step, CONSUMER), sum_k)
    gl.store(places_of(held_v, sum_v, own, step, CONSUMER), sum_v)
    partition_barrier()
    arrived = gl.atomic_add(given.arrivals + problem.first_share * 2 + CONSUMER, 1, sem="acq_rel")
    if arrived == problem.shares - 1:
        total = added_up(held, sum_k, problem, step, CONSUMER)
        store_gradient(total * problem.scale, given.d_k, first_own, problem, config.WIDTH, dtype)
        total = added_up(held_v, sum_v, problem, step, CONSUMER)
        store_gradient(total, given.d_v, first_own, problem, config.WIDTH_V, dtype)
