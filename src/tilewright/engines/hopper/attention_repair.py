"""Hidden values that are not finite: finding that they spoiled a tile, and computing it again.

A hidden key has probability 0, and 0 times NaN or infinity is NaN: a matrix product spreads it to
rows that must not see it. That is rare, so the fast path only looks whether a tile came out finite
where masks hide keys of it. If not, and if a value that some row may not see is to blame, the tile
is summed again key by key, and what a row does not see is not looked at.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_ROWS = gl.constexpr(64)
_CHUNK = gl.constexpr(64)


@gluon.jit
def is_spoiled(out):
    """1 if some element of a warpgroup's tile is not finite (or a row's sum is not), else 0."""
    sums = gl.sum(out, 1)
    return gl.max((sums - sums != 0.0).to(gl.int32), 0)


@gluon.jit
def value_row(place, key, problem, config, layout: gl.constexpr):
    """Row ``key`` of V in float32."""
    columns = gl.arange(0, config.DEPTH_V, layout)
    at = problem.v + place + key.to(gl.int64) * problem.v_row
    return gl.load(at + columns, mask=columns < problem.depth_v, other=0.0).to(gl.float32)


@gluon.jit
def hides_infinities(first, low_key, high_key, place, problem, config, layout: gl.constexpr):
    """1 if a value that some row of the tile may not see is not finite, else 0."""
    columns = gl.arange(0, config.DEPTH_V, layout)
    found = (columns * 0).to(gl.float32)
    if config.HAS_RIGHT:
        for key in range(max(first + problem.right + 1, low_key), high_key):
            row = value_row(place, key, problem, config, layout)
            found += row - row
    if config.HAS_LEFT:
        for key in range(low_key, min(first + _ROWS - problem.left, high_key)):
            row = value_row(place, key, problem, config, layout)
            found += row - row
    return gl.max((found != 0.0).to(gl.int32), 0)


@gluon.jit
def summed_again(
    q,
    shift,
    inverse,
    first,
    low_key,
    high_key,
    k_place,
    v_place,
    problem,
    config,
    layout: gl.constexpr,
):
    """The tile key by key: sum over j of 2^(c q.k_j - shift) v_j over the keys that a row sees."""
    chunk_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _CHUNK, 16]
    )
    out = gl.zeros([_ROWS, config.DEPTH_V], gl.float32, layout)
    rows = first + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    parts = gl.arange(0, _CHUNK, gl.SliceLayout(0, chunk_layout))
    for key in range(low_key, high_key):
        score = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, chunk_layout))
        for start in gl.static_range(0, config.DEPTH, _CHUNK):
            part = q.slice(start, _CHUNK, 1).load(chunk_layout).to(gl.float32)
            at = problem.k + k_place + key.to(gl.int64) * problem.k_row + start
            k = gl.load(at + parts, mask=start + parts < problem.depth, other=0.0)
            score += gl.sum(part * k.to(gl.float32)[None, :], 1)
        score = gl.convert_layout(score, gl.SliceLayout(1, layout))
        weight = gl.exp2(score * problem.scale - shift) * inverse
        seen = rows == rows
        if config.HAS_RIGHT:
            seen = seen & (key <= rows + problem.right)
        if config.HAS_LEFT:
            seen = seen & (key > rows - problem.left)
        value = value_row(v_place, key, problem, config, gl.SliceLayout(0, layout))
        out += gl.where(seen[:, None], weight[:, None] * value[None, :], 0.0)
    return out
