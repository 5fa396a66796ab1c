"""Attention backward on SM90, the device code: dK and dV, and dQ added up in memory where asked.

A program owns 128 keys of one key head. One warp moves Q and dO of the rows that see them into
shared memory, rings of tiles of ROWS rows (``attention_backward_producer``); two consumers of four
warps own 64 keys each (``attention_backward_consumer``, ``attention_backward_sums``):

    S^T = K Q^T,   dP^T = V dO^T,   P = 2^(c S - Stats),   dS = P (dP - Delta),
    dV += P^T dO,  dK += dS^T Q,    and with MAKES_D_Q   dQ += dS K.

P and dS stay in registers for dV and dK. For dQ, which sums over all keys, the consumers exchange
dS through shared memory and make half of a tile each, which the copy engine adds to float32 sums in
the order in which threads hold them (``attention_backward_rows``). The order of the additions is
not fixed, so that dQ repeats up to rounding.

Sources: Dao 2023; Shah et al. 2024.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewright.engines.hopper.attention_backward_consumer import consume
from tilewright.engines.hopper.attention_backward_parts import PARTS
from tilewright.engines.hopper.attention_backward_places import gradient_of, problem_of, works
from tilewright.engines.hopper.attention_backward_producer import begin_copies, produce
from tilewright.engines.hopper.attention_backward_records import (
    KEYS,
    LINE,
    PIECE,
    Config,
    Given,
    Memory,
    RowMaps,
    Starts,
)
from tilewright.engines.hopper.attention_backward_sums import carry, consume_with_sums
from tilewright.engines.hopper.barriers import partition_barrier


@gluon.jit
def consume_0(given):
    if works(given.problem, given.config):
        if given.config.MAKES_D_Q:
            consume_with_sums(given, 0)
        else:
            consume(given, 0)


@gluon.jit
def consume_1(given):
    if works(given.problem, given.config):
        if given.config.MAKES_D_Q:
            consume_with_sums(given, 1)
        else:
            consume(given, 1)


@gluon.jit
def produce_for(given):
    if works(given.problem, given.config):
        produce(given)


@gluon.jit
def carry_for(given):
    if works(given.problem, given.config):
        carry(given)


@gluon.jit
def attention_backward(
    q_map, k_map, v_map, d_o_map, d_k_map, d_v_map, d_k, d_v, lse, delta,
    sums, lse_parts, delta_parts,
    lengths_q, lengths_q_step, lengths_kv, lengths_kv_step,
    q_starts, q_starts_step, q_unit, d_o_starts, d_o_starts_step, d_o_unit,
    k_starts, k_starts_step, k_unit, v_starts, v_starts_step, v_unit,
    d_k_starts, d_k_starts_step, d_k_unit, d_v_starts, d_v_starts_step, d_v_unit,
    scale, rows, keys, padded_rows, left, right, heads_kv, group, together,
    d_k_batch, d_k_head, d_k_row, d_v_batch, d_v_head, d_v_row,
    held_shares, arrivals, whole, shares,
    DEPTH: gl.constexpr, DEPTH_V: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr,
    ROWS: gl.constexpr, STAGES: gl.constexpr, STAGES_O: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    HAS_TAIL: gl.constexpr, MAKES_D_Q: gl.constexpr, LENGTHS_Q: gl.constexpr,
    LENGTHS_KV: gl.constexpr, RAGGED_Q: gl.constexpr, RAGGED_KV: gl.constexpr,
    SHARES: gl.constexpr, HAS_END: gl.constexpr,
):  # fmt: skip
    config = Config(
        DEPTH, DEPTH_V, WIDTH, WIDTH_V, 2 * KEYS, ROWS, STAGES, STAGES_O, HAS_LEFT, HAS_RIGHT,
        BOTTOM_RIGHT, HAS_TAIL, MAKES_D_Q, LENGTHS_Q, LENGTHS_KV, RAGGED_Q, RAGGED_KV,
        SHARES, HAS_END,
    )  # fmt: skip
    problem = problem_of(
        lse, delta, lengths_q, lengths_q_step, lengths_kv, lengths_kv_step,
        Starts(q_starts, q_starts_step, q_unit), Starts(d_o_starts, d_o_starts_step, d_o_unit),
        Starts(k_starts, k_starts_step, k_unit), Starts(v_starts, v_starts_step, v_unit),
        scale, rows, keys, padded_rows, left, right, heads_kv, group, together, config,
        whole, shares,
    )  # fmt: skip
    d_k_starts = Starts(d_k_starts, d_k_starts_step, d_k_unit)
    d_v_starts = Starts(d_v_starts, d_v_starts_step, d_v_unit)
    dtype: gl.constexpr = q_map.dtype
    depth_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH], dtype)
    depth_v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, DEPTH_V], dtype)
    d_s_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, ROWS], dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    one: gl.constexpr = mbarrier.MBarrierLayout()
    k_memory = gl.allocate_shared_memory(dtype, [2, KEYS, DEPTH], depth_layout)
    d_s_memory = k_memory
    pieces = k_memory
    if MAKES_D_Q:
        d_s_memory = gl.allocate_shared_memory(dtype, [4, KEYS, ROWS], d_s_layout)
        lines: gl.constexpr = PIECE * config.COLUMNS // LINE
        pieces = gl.allocate_shared_memory(gl.float32, [2, lines, LINE], sums.layout)
        parts_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PARTS], dtype)
        lse_memory = gl.allocate_shared_memory(dtype, [STAGES, ROWS, PARTS], parts_layout)
        delta_memory = gl.allocate_shared_memory(dtype, [STAGES_O, ROWS, PARTS], parts_layout)
    else:
        lse_memory = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
        delta_memory = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], plain)
    memory = Memory(
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], depth_layout),
        k_memory,
        gl.allocate_shared_memory(dtype, [2, KEYS, DEPTH_V], depth_v_layout),
        gl.allocate_shared_memory(dtype, [STAGES_O, ROWS, DEPTH_V], depth_v_layout),
        d_s_memory,
        pieces,
        lse_memory,
        delta_memory,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES_O, 1], one),
        gl.allocate_shared_memory(gl.int64, [1, 1], one),
    )
    mbarrier.init(memory.keys_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        # The copies' arrival, and that of row statistics that are stored.
        mbarrier.init(memory.q_full.index(i), count=1 if MAKES_D_Q else 2)
    for i in gl.static_range(STAGES_O):
        mbarrier.init(memory.d_o_full.index(i), count=1)
    fence_async_shared()
    partition_barrier()
    rows_maps = RowMaps(q_map, d_o_map, lse_parts, delta_parts)
    if works(problem, config):
        begin_copies(k_map, v_map, rows_maps, memory, problem, config)
    given = Given(
        rows_maps, sums, memory, problem, config,
        gradient_of(d_k, d_k_starts, d_k_batch, d_k_head, d_k_row, problem, config),
        gradient_of(d_v, d_v_starts, d_v_batch, d_v_head, d_v_row, problem, config),
        d_k_map, d_v_map, held_shares, arrivals,
    )  # fmt: skip
    if MAKES_D_Q:
        gl.warp_specialize(
            [
                (consume_0, (given,)),
                (consume_1, (given,)),
                (produce_for, (given,)),
                (carry_for, (given,)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        gl.warp_specialize(
            [(consume_0, (given,)), (consume_1, (given,)), (produce_for, (given,))],
            [4, 1],
            [240, 24],
        )
