"""Attention forward on SM90 in FP8 (E4M3), the device code.

    S = scale descale_q descale_k Q K^T + mask, P = softmax(S), Amax_S = max P
    O = scale_s descale_s descale_v P8 V, Amax_O = max |O|, stored O scale_o

where P8 is P rounded to E4M3 (the consumers tell at which scale). Four warps copy Q, K and V, and
transpose V in shared memory (``attention_fp8_producer``); two or three consumers of four warps each
own 64 rows of a tile (``attention_fp8_pair`` where bands are short, ``attention_fp8_long`` where
wide heads are long, else ``attention_fp8_consumer``). Tiles are dealt as in ``attention_kernel``.

Source: Shah et al. 2024.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewright.engines.hopper.attention_fp8_consumer import consume_0, consume_1, consume_2
from tilewright.engines.hopper.attention_fp8_long import (
    consume_long_first,
    consume_long_second,
    consume_long_third,
)
from tilewright.engines.hopper.attention_fp8_pair import consume_first, consume_second
from tilewright.engines.hopper.attention_fp8_producer import produce
from tilewright.engines.hopper.attention_fp8_records import (
    SLAB,
    V_STAGES,
    Features,
    Memory,
    Problem,
    Tiling,
)
from tilewright.engines.hopper.attention_fp8_repair import repair_all
from tilewright.engines.hopper.attention_records import ROWS, Operand
from tilewright.engines.hopper.attention_softmax import LOG2E

# Scores of 0 times this are 0, and -inf times it is still -inf.
TINY = gl.constexpr(1e-37)


@gluon.jit
def clear_amax(amax_s, amax_o, HAS_AMAX_S: gl.constexpr, HAS_AMAX_O: gl.constexpr):
    """Zero what the attention kernel takes the maximum into."""
    if HAS_AMAX_S:
        gl.store(amax_s, 0)
    if HAS_AMAX_O:
        gl.store(amax_o, 0)


@gluon.jit
def attention_fp8_forward(
    q_map,
    k_map,
    v_map,
    o_map,
    q_pointer,
    k_pointer,
    v_pointer,
    o_pointer,
    stats_pointer,
    sink,
    lengths_q,
    lengths_kv,
    descale_q,
    descale_k,
    descale_v,
    descale_s,
    scale_s,
    scale_o,
    amax_s,
    amax_o,
    scale,
    rows,
    keys,
    depth,
    depth_v,
    right,
    tiles,
    heads,
    heads_q,
    group,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    o_batch,
    o_head,
    o_row,
    stats_batch,
    stats_head,
    stats_row,
    lengths_q_step,
    lengths_kv_step,
    BLOCK_N: gl.constexpr,
    DEPTH: gl.constexpr,
    DEPTH_V: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    IS_LONG: gl.constexpr,
    STAGES: gl.constexpr,
    Q_SLOTS: gl.constexpr,
    BY_COST: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    RIGHT_LOOP: gl.constexpr,
    FIRST_MASKED: gl.constexpr,
    REPAIRS: gl.constexpr,
    LENGTHS_Q: gl.constexpr,
    LENGTHS_KV: gl.constexpr,
    HAS_STATS: gl.constexpr,
    STATS_LOG2: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_AMAX_S: gl.constexpr,
    HAS_AMAX_O: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    tiling = Tiling(BLOCK_N, DEPTH, DEPTH_V, WARPGROUPS, STAGES, Q_SLOTS, BY_COST)
    features = Features(
        HAS_RIGHT,
        BOTTOM_RIGHT,
        RIGHT_LOOP,
        FIRST_MASKED,
        REPAIRS,
        LENGTHS_Q,
        LENGTHS_KV,
        HAS_STATS,
        STATS_LOG2,
        HAS_SINK,
        HAS_AMAX_S,
        HAS_AMAX_O,
    )
    # Negative factors would turn the maximum round: what comes of them is NaN, and never quietly
    # something else.
    full_scale = scale * LOG2E * gl.load(descale_q) * gl.load(descale_k)
    full_scale = gl.where(full_scale < 0.0, float("nan"), gl.maximum(full_scale, TINY))
    none = rows.to(gl.int64) * 0
    problem = Problem(
        rows,
        keys,
        depth,
        depth_v,
        rows * 0,
        right,
        full_scale,
        tiles,
        heads,
        heads_q,
        group,
        Operand(q_pointer, q_batch, q_head, q_row, q_pointer, none, none),
        Operand(k_pointer, k_batch, k_head, k_row, k_pointer, none, none),
        Operand(v_pointer, v_batch, v_head, v_row, v_pointer, none, none),
        Operand(o_pointer, o_batch, o_head, o_row, o_pointer, none, none),
        Operand(stats_pointer, stats_batch, stats_head, stats_row, stats_pointer, none, none),
        sink,
        lengths_q,
        lengths_q_step,
        lengths_kv,
        lengths_kv_step,
        descale_v,
        descale_s,
        scale_s,
        scale_o,
        amax_s,
        amax_o,
    )
    kind: gl.constexpr = q_map.dtype
    kind_o: gl.constexpr = o_map.dtype
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], kind)
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, DEPTH], kind)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, SLAB], kind)
    vt_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DEPTH_V, BLOCK_N], kind)
    o_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH_V], kind_o)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    q_room = gl.allocate_shared_memory(kind, [Q_SLOTS * WARPGROUPS, ROWS, DEPTH], q_layout)
    k_room = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, DEPTH], k_layout)
    v_room = gl.allocate_shared_memory(kind, [V_STAGES * tiling.SLABS_V, BLOCK_N, SLAB], v_layout)
    vt_room = gl.allocate_shared_memory(kind, [STAGES, DEPTH_V, BLOCK_N], vt_layout)
    o_room = gl.allocate_shared_memory(kind_o, [WARPGROUPS, ROWS, DEPTH_V], o_layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], one)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    v_full = gl.allocate_shared_memory(gl.int64, [V_STAGES, 1], one)
    vt_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
    # Consumers without turns repair what they spoiled themselves, and note nothing.
    IN_TURNS: gl.constexpr = WARPGROUPS == 2 or IS_LONG
    notes = q_room
    if IN_TURNS:
        notes = gl.allocate_shared_memory(
            gl.int32, [WARPGROUPS, 1, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        )
    memory = Memory(q_room, k_room, v_room, vt_room, o_room, q_full, k_full, v_full, vt_full, notes)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(memory.q_full.index(i), count=1)
    for i in gl.static_range(V_STAGES):
        mbarrier.init(memory.v_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(memory.k_full.index(i), count=1)
        mbarrier.init(memory.vt_full.index(i), count=1)
    fence_async_shared()
    arguments = (q_map, k_map, v_map, o_map, memory, problem, tiling, features)
    if WARPGROUPS == 3 and IS_LONG:
        gl.warp_specialize(
            [
                (consume_long_first, arguments),
                (consume_long_second, arguments),
                (consume_long_third, arguments),
                (produce, arguments),
            ],
            [4, 4, 4],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif WARPGROUPS == 3:
        gl.warp_specialize(
            [
                (consume_0, arguments),
                (consume_1, arguments),
                (consume_2, arguments),
                (produce, arguments),
            ],
            [4, 4, 4],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif IS_LONG:
        gl.warp_specialize(
            [
                (consume_long_first, arguments),
                (consume_long_second, arguments),
                (produce, arguments),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(consume_first, arguments), (consume_second, arguments), (produce, arguments)],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    if IN_TURNS and REPAIRS:
        repair_all(memory, problem, tiling, features)
