"""The producer of FP8 attention: copies Q, K and V to shared memory, and transposes V there.

The tensor cores take 8-bit operands only with the summed axis contiguous. For P V that is the keys,
while V lies with the head size contiguous. Four warps turn a block round: ``ldmatrix`` transposes
pairs of columns, two byte permutations part a pair, ``stmatrix`` stores.

What falls out of that is a V^T in an order of its own, and the others follow it at no cost:
- keys within 16: position 4q + 2c + e holds key 8c + 2q + e, which is the order in which a thread
  of the first product holds its probabilities (``attention_fp8_products.as_operand``);
- columns within 16: row 8p + i holds column 2i + p (``attention_fp8_leaving.in_order``), so that
  eight rows that are stored at once lie side by side and in different banks.

Source: Shah et al. 2024, section 3.3.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewright.engines.hopper.attention_fp8_records import SLAB, V_STAGES
from tilewright.engines.hopper.attention_places import count_tiles, next_step, place_of
from tilewright.engines.hopper.attention_records import NO_LENGTHS, ROWS
from tilewright.engines.hopper.barriers import barrier_wait


@gluon.constexpr_function
def pairs_layout(keys, pairs):
    """Who holds which (key, pair of columns) so that ``ldmatrix`` transposes."""
    own_keys = [[1, 0], [8, 0]] + [[16 << i, 0] for i in range((keys // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=own_keys + [[0, 8 << i] for i in range((pairs // 8).bit_length() - 1)],
        lane_bases=[[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[keys // 4, 0], [keys // 2, 0]],
        block_bases=[],
        shape=[keys, pairs],
    )


@gluon.jit
def parted(first, second):
    """(even columns, odd columns) of words that hold two columns for two keys each."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=r,=r,r,r",
        [first, second],
        dtype=(gl.int16, gl.int16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def as_pairs(block):
    """A block of bytes in shared memory, seen as pairs of them."""
    rows: gl.constexpr = block.shape[0]
    pairs: gl.constexpr = block.shape[1] // 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, pairs], gl.int16)
    return block._reinterpret(gl.int16, [rows, pairs], layout)


@gluon.jit
def transpose(block, memory, valid, tiling, features):
    """V^T of block number ``block``, slab by slab; keys from ``valid`` on become zeros."""
    KEYS: gl.constexpr = tiling.BLOCK_N
    layout: gl.constexpr = pairs_layout(KEYS, SLAB // 2)
    came = block % V_STAGES
    stage = block % tiling.STAGES
    if block >= tiling.STAGES:
        barrier_wait(tiling.V_BARRIER + stage, tiling.RELEASE)
    mbarrier.wait(memory.v_full.index(came), (block // V_STAGES) & 1)
    for s in gl.static_range(tiling.SLABS_V):
        pairs = as_pairs(memory.v.index(came * tiling.SLABS_V + s)).load(layout)
        if features.LENGTHS_KV != NO_LENGTHS:
            # A weight of 0 times NaN would be NaN.
            keys = gl.arange(0, KEYS, gl.SliceLayout(1, layout))
            pairs = gl.where((keys < valid)[:, None], pairs, 0)
        pairs = pairs.reshape([KEYS // 16, 2, 8, SLAB // 2]).permute((0, 2, 3, 1))
        even, odd = parted(*gl.split(pairs))
        turned = gl.join(even, odd).reshape([KEYS // 2, SLAB // 16, 8, 2])
        room = as_pairs(memory.vt.index(stage)).slice(s * SLAB, SLAB)
        room.store(turned.permute((1, 3, 2, 0)).reshape([SLAB, KEYS // 2]))
    fence_async_shared()
    mbarrier.arrive(memory.vt_full.index(stage), count=1)


@gluon.jit
def produce(q_map, k_map, v_map, o_map, memory, problem, tiling, features):
    """Every copy into shared memory; V^T of a block while the next one is on its way."""
    block = 0
    valid = 0
    step = next_step(0, problem, tiling, features)
    for number in range(count_tiles(problem, tiling, features)):
        place, sequence = place_of(step, problem, tiling, features)
        head_kv = place.head // problem.group
        slot = number % tiling.Q_SLOTS
        if number >= tiling.Q_SLOTS:
            barrier_wait(tiling.Q_BARRIER + slot, tiling.RELEASE)
        q_full = memory.q_full.index(slot)
        mbarrier.expect(q_full, tiling.BLOCK_M * tiling.DEPTH)
        for w in gl.static_range(tiling.WARPGROUPS):
            tma.async_copy_global_to_shared(
                q_map,
                [place.batch, place.head, place.first + w * ROWS, 0],
                q_full,
                memory.q.index(slot * tiling.WARPGROUPS + w),
            )
        for j in range(place.high - place.low):
            stage = block % tiling.STAGES
            column = (place.high - 1 - j) * tiling.BLOCK_N
            if block >= tiling.STAGES:
                barrier_wait(tiling.K_BARRIER + stage, tiling.RELEASE)
            k_full = memory.k_full.index(stage)
            mbarrier.expect(k_full, tiling.BLOCK_N * tiling.DEPTH)
            tma.async_copy_global_to_shared(
                k_map, [place.batch, head_kv, column, 0], k_full, memory.k.index(stage)
            )
            came = block % V_STAGES
            v_full = memory.v_full.index(came)
            mbarrier.expect(v_full, tiling.BLOCK_N * tiling.DEPTH_V)
            for s in gl.static_range(tiling.SLABS_V):
                tma.async_copy_global_to_shared(
                    v_map,
                    [place.batch, head_kv, column, s * SLAB],
                    v_full,
                    memory.v.index(came * tiling.SLABS_V + s),
                )
            if block > 0:
                transpose(block - 1, memory, valid, tiling, features)
            valid = sequence.keys - column
            block += 1
        step = next_step(step + 1, problem, tiling, features)
    if block > 0:
        transpose(block - 1, memory, valid, tiling, features)
    # Meet the releases that nothing waited for, so that no barrier is left half joined.
    for j in range(max(block - tiling.STAGES, 0), block):
        barrier_wait(tiling.K_BARRIER + j % tiling.STAGES, tiling.RELEASE)
        barrier_wait(tiling.V_BARRIER + j % tiling.STAGES, tiling.RELEASE)
