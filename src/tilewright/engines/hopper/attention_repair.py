"""Hidden values that are not finite: finding that they spoiled a tile, and computing it again.

A hidden key has probability 0, and 0 times NaN or infinity is NaN: a matrix product spreads it to
rows that must not see it. That is rare, so the fast path only looks whether a tile came out finite
where masks hide keys of it. If not, and if a value that some row may not see is to blame, the tile
is summed again key by key, and what a row does not see is not looked at.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_places import element
from tilewright.engines.hopper.attention_records import NO_LENGTHS, ROWS


@gluon.jit
def repaired(out, q, q_first, shift, inverse, place, first, sequence, problem, tiling, features):
    """The tile, summed again if hidden values spoiled it."""
    # A row's sum is not finite if an element is not.
    sums = gl.sum(out, 1)
    if gl.max((sums - sums != 0.0).to(gl.int32), 0) != 0:
        low = place.low * tiling.BLOCK_N
        high = min(place.high * tiling.BLOCK_N, sequence.keys)
        if hides_infinities(first, low, high, place, sequence, problem, tiling, features, out) != 0:
            out = summed_again(
                out,
                q,
                q_first,
                shift,
                inverse,
                low,
                high,
                place,
                first,
                sequence,
                problem,
                tiling,
                features,
            )
    return out


@gluon.jit
def value_row(key, place, sequence, problem, tiling, features, LAYOUT: gl.constexpr):
    """Row ``key`` of V in float32."""
    columns = gl.arange(0, tiling.DEPTH_V, LAYOUT)
    head = place.head // problem.group
    at = element(problem.v, place.batch, head, key + sequence.v_row, features.RAGGED_KV)
    values = gl.load(problem.v.pointer + at + columns, mask=columns < problem.depth_v, other=0.0)
    return values.to(gl.float32)


@gluon.jit
def hides_infinities(first, low, high, place, sequence, problem, tiling, features, out):
    """1 if a value that some row of the tile may not see is not finite, else 0."""
    layout: gl.constexpr = gl.SliceLayout(0, out.type.layout)
    found = gl.zeros([tiling.DEPTH_V], gl.float32, layout)
    if features.HAS_RIGHT:
        for key in range(max(first + sequence.right + 1, low), high):
            row = value_row(key, place, sequence, problem, tiling, features, layout)
            found += row - row
    if features.HAS_LEFT:
        for key in range(low, min(first + ROWS - sequence.left, high)):
            row = value_row(key, place, sequence, problem, tiling, features, layout)
            found += row - row
    return gl.max((found != 0.0).to(gl.int32), 0)


@gluon.jit
def summed_again(
    out, q, q_first, shift, inverse, low, high, place, first, sequence, problem, tiling, features
):
    """The tile key by key: sum over j of 2^(c q.k_j - shift) v_j over the keys that a row sees."""
    layout: gl.constexpr = out.type.layout
    # Columns of Q that are multiplied at a time.
    CHUNK: gl.constexpr = tiling.SLAB if tiling.SLAB < 64 else 64
    chunk_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, CHUNK, 16]
    )
    again = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, layout)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    parts = gl.arange(0, CHUNK, gl.SliceLayout(0, chunk_layout))
    head = place.head // problem.group
    for key in range(low, high):
        score = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, chunk_layout))
        at = problem.k.pointer + element(
            problem.k, place.batch, head, key + sequence.k_row, features.RAGGED_KV
        )
        for start in gl.static_range(0, tiling.DEPTH, CHUNK):
            slab = q.index(q_first + start // tiling.SLAB)
            part = slab.slice(start % tiling.SLAB, CHUNK, 1).load(chunk_layout).to(gl.float32)
            k = gl.load(at + start + parts, mask=start + parts < problem.depth, other=0.0)
            score += gl.sum(part * k.to(gl.float32)[None, :], 1)
        score = gl.convert_layout(score, gl.SliceLayout(1, layout))
        weight = gl.exp2(score * problem.scale - shift) * inverse
        seen = rows >= 0
        if features.LENGTHS_Q != NO_LENGTHS:
            seen = rows < sequence.rows
        if features.HAS_RIGHT:
            seen = seen & (key <= rows + sequence.right)
        if features.HAS_LEFT:
            seen = seen & (key > rows - sequence.left)
        value = value_row(
            key, place, sequence, problem, tiling, features, gl.SliceLayout(0, layout)
        )
        again += gl.where(seen[:, None], weight[:, None] * value[None, :], 0.0)
    return again
