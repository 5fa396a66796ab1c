"""Attention forward on SM90, the device code: O = softmax(scale * Q K^T + mask) V.

A program keeps one multiprocessor and walks its tiles of queries (``attention_tiles``). One warp
brings Q, K and V (``attention_producer``); WARPGROUPS consumers of four warps each own 64 rows of a
tile (``attention_consumer``).

Sources: Dao 2023; Shah et al. 2024 (warp roles, turns, overlapped products).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewright.engines.hopper.attention_consumer import consume_0, consume_1, consume_2
from tilewright.engines.hopper.attention_producer import produce
from tilewright.engines.hopper.attention_records import (
    CAPPED,
    ORDERED,
    PLAIN,
    ROWS,
    Memory,
    Operand,
    Pages,
    Problem,
)
from tilewright.engines.hopper.attention_repair import repair_all
from tilewright.engines.hopper.attention_settings import Features, Tiling
from tilewright.engines.hopper.attention_softmax import LOG2E
from tilewright.engines.hopper.attention_words import WORDS as TOLD


@gluon.jit
def number_of(given):
    """A float32: ``given`` itself, or what lies at that address."""
    if given.dtype.is_ptr():
        number = gl.load(given).to(gl.float32)
    else:
        number = given
    return number


@gluon.jit
def cap_of(gain, inner, outer, DIVIDES: gl.constexpr):
    """(gain, ceiling) of ``shaped`` for tanh(score * inner) * outer; ``gain`` is the scale's."""
    gain = 2.0 * gain
    if inner is not None:
        if DIVIDES:
            gain = gain / number_of(inner)
        else:
            gain = gain * number_of(inner)
    ceiling = gl.to_tensor(LOG2E)
    if outer is not None:
        ceiling = number_of(outer) * LOG2E
    return gain, ceiling


@gluon.jit
def pages_of(table, batch, entry, rows, nowhere, nothing):
    """The record of a page table; one that nobody reads if there is none."""
    if table is None:
        pages = Pages(nowhere, nothing, nothing, nothing)
    else:
        pages = Pages(table, batch, entry, rows)
    return pages


@gluon.jit
def attention_forward(
    q_map,
    k_map,
    v_map,
    o_map,
    q_pointer,
    k_pointer,
    v_pointer,
    o_pointer,
    stats_pointer,
    q_starts,
    k_starts,
    v_starts,
    o_starts,
    stats_starts,
    sink,
    lengths_q,
    lengths_kv,
    k_table,
    v_table,
    order,
    scale,
    cap_inner,
    cap_outer,
    rows,
    keys,
    depth,
    depth_v,
    left,
    right,
    tiles,
    heads,
    heads_q,
    group,
    q_batch,
    q_head,
    q_row,
    q_starts_step,
    q_unit,
    k_batch,
    k_head,
    k_row,
    k_starts_step,
    k_unit,
    v_batch,
    v_head,
    v_row,
    v_starts_step,
    v_unit,
    o_batch,
    o_head,
    o_row,
    o_starts_step,
    o_unit,
    stats_batch,
    stats_head,
    stats_row,
    stats_starts_step,
    stats_unit,
    lengths_q_step,
    lengths_kv_step,
    k_table_batch,
    k_table_entry,
    k_page,
    v_table_batch,
    v_table_entry,
    v_page,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    DEPTH_V: gl.constexpr,
    SLABS: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    TURNS: gl.constexpr,
    BY_COST: gl.constexpr,
    K_BOX: gl.constexpr,
    V_BOX: gl.constexpr,
    OUT_PARTS: gl.constexpr,
    EARLY: gl.constexpr,
    WORDS: gl.constexpr,
    PRESCALE: gl.constexpr,
    LAZY: gl.constexpr,
    AHEAD: gl.constexpr,
    LATE: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    RIGHT_LOOP: gl.constexpr,
    FIRST_MASKED: gl.constexpr,
    REPAIRS: gl.constexpr,
    LENGTHS_Q: gl.constexpr,
    LENGTHS_KV: gl.constexpr,
    RAGGED_Q: gl.constexpr,
    RAGGED_KV: gl.constexpr,
    HAS_STATS: gl.constexpr,
    STATS_LOG2: gl.constexpr,
    HAS_SINK: gl.constexpr,
    PAGED: gl.constexpr,
    SCORES: gl.constexpr,
    CAP_DIVIDES: gl.constexpr,
):
    tiling = Tiling(
        BLOCK_N,
        DEPTH,
        DEPTH_V,
        SLABS,
        WARPGROUPS,
        STAGES,
        Q_SLOTS,
        TURNS,
        BY_COST,
        K_BOX,
        V_BOX,
        OUT_PARTS,
        EARLY,
        WORDS,
        PRESCALE,
        LAZY,
        AHEAD,
        LATE,
    )
    features = Features(
        HAS_LEFT,
        HAS_RIGHT,
        BOTTOM_RIGHT,
        RIGHT_LOOP,
        FIRST_MASKED,
        REPAIRS,
        LENGTHS_Q,
        LENGTHS_KV,
        RAGGED_Q,
        RAGGED_KV,
        HAS_STATS,
        STATS_LOG2,
        HAS_SINK,
        PAGED,
        SCORES,
    )
    k_pages = pages_of(k_table, k_table_batch, k_table_entry, k_page, q_pointer, rows)
    v_pages = pages_of(v_table, v_table_batch, v_table_entry, v_page, q_pointer, rows)
    scale = number_of(scale) * LOG2E
    gain = scale
    ceiling = scale
    if SCORES != PLAIN:
        scale = gl.to_tensor(1.0)
    if SCORES == CAPPED:
        gain, ceiling = cap_of(gain, cap_inner, cap_outer, CAP_DIVIDES)
    # Not looked at unless there is one.
    order_given = q_pointer
    if RAGGED_Q == ORDERED:
        order_given = order
    problem = Problem(
        rows,
        keys,
        depth,
        depth_v,
        left,
        right,
        scale,
        tiles,
        heads,
        heads_q,
        group,
        Operand(q_pointer, q_batch, q_head, q_row, q_starts, q_starts_step, q_unit),
        Operand(k_pointer, k_batch, k_head, k_row, k_starts, k_starts_step, k_unit),
        Operand(v_pointer, v_batch, v_head, v_row, v_starts, v_starts_step, v_unit),
        Operand(o_pointer, o_batch, o_head, o_row, o_starts, o_starts_step, o_unit),
        Operand(
            stats_pointer,
            stats_batch,
            stats_head,
            stats_row,
            stats_starts,
            stats_starts_step,
            stats_unit,
        ),
        sink,
        lengths_q,
        lengths_q_step,
        lengths_kv,
        lengths_kv_step,
        k_pages,
        v_pages,
        gain,
        ceiling,
        order_given,
    )
    kind: gl.constexpr = q_map.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH // SLABS], kind)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DEPTH // SLABS], kind)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DEPTH_V], kind)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_room = gl.allocate_shared_memory(
        kind, [Q_SLOTS * WARPGROUPS * tiling.Q_PITCH, ROWS, DEPTH // SLABS], q_layout
    )
    k_room = gl.allocate_shared_memory(kind, [STAGES * SLABS, BLOCK_N, DEPTH // SLABS], k_layout)
    v_room = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, DEPTH_V], v_layout)
    o_room = q_room
    if OUT_PARTS > 0:
        o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(
            [ROWS, DEPTH_V // OUT_PARTS], kind
        )
        o_room = gl.allocate_shared_memory(kind, [WARPGROUPS, ROWS, DEPTH_V // OUT_PARTS], o_layout)
    memory = Memory(
        q_room,
        k_room,
        v_room,
        gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], one),
        o_room,
        gl.allocate_shared_memory(
            gl.int32, [WARPGROUPS, 1, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ),
        gl.allocate_shared_memory(
            gl.int32, [Q_SLOTS * TOLD, 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        ),
    )
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(memory.q_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.k_full.index(i), count=1)
        mbarrier.init(memory.v_full.index(i), count=1)
    fence_async_shared()
    arguments = (q_map, k_map, v_map, o_map, memory, problem, tiling, features)
    if WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (consume_0, arguments),
                (consume_1, arguments),
                (consume_2, arguments),
                (produce, arguments),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [(consume_0, arguments), (consume_1, arguments), (produce, arguments)],
            [4, 1],
            [240, 24],
        )
    if REPAIRS:
        repair_all(memory, problem, tiling, features)
