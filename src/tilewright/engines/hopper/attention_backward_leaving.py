"""How dK and dV leave the consumers of attention's backward that make dQ too."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewright.engines.hopper.attention_backward_consumer import store_gradient
from tilewright.engines.hopper.attention_backward_records import CONSUMERS, D_S_STORED
from tilewright.engines.hopper.barriers import barrier_wait


@gluon.jit
def leave(sum_k, sum_v, first_own, given, dtype: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer's dK and dV, by the copy engine through where its keys were, or row by row.

    The copies end with the tensor's last key.
    """
    memory, problem, config = given.memory, given.problem, given.config
    if config.COPIES_OUT:
        values, keys = memory.v.index(CONSUMER), memory.k.index(CONSUMER)
        values.store(sum_v.to(dtype))
        # The other consumer's last piece is a product with these keys.
        barrier_wait(D_S_STORED, CONSUMERS)
        keys.store((sum_k * problem.scale).to(dtype))
        fence_async_shared()
        at = [problem.batch_kv, problem.head_kv, first_own, 0]
        tma.async_copy_shared_to_global(given.d_v_map, at, values)
        tma.async_copy_shared_to_global(given.d_k_map, at, keys)
        tma.store_wait(0)
    else:
        store_gradient(sum_k * problem.scale, given.d_k, first_own, problem, config.WIDTH, dtype)
        store_gradient(sum_v, given.d_v, first_own, problem, config.WIDTH_V, dtype)
