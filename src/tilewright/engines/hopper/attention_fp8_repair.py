"""Hidden values that are NaN in FP8 attention: a tile that they spoiled is computed again.

As in ``attention_repair``: a hidden key has probability 0, and 0 times NaN is NaN. A program whose
tiles all came out finite does none of this. Another goes through its tiles again when all is done.
Those in which some row may not see a NaN are summed anew, key by key, with probabilities that are
not rounded; the others keep what they have, and a NaN there is one that a row does see.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_places import (
    count_tiles,
    element,
    next_step,
    place_of,
)
from tilewright.engines.hopper.attention_records import NO_LENGTHS, ROWS, product_layout
from tilewright.engines.hopper.attention_sinks import sink_level
from tilewright.engines.hopper.attention_softmax import MINUS_INFINITY
from tilewright.engines.hopper.barriers import stores_done

# Columns of Q that are multiplied at a time.
CHUNK = gl.constexpr(64)
# The bits of infinity; above them are those of NaN.
INFINITY_BITS = gl.constexpr(0x7F800000)


@gluon.jit
def magnitudes(out, rows, end):
    """The largest magnitude of each row before ``end`` as an integer that orders like it."""
    found = gl.max(gl.abs(out).to(gl.int32, bitcast=True), 1)
    return gl.where(rows < end, found, 0)


@gluon.jit
def repair(peak, count, problem, tiling, features, WARPGROUP: gl.constexpr):
    """Go through this program's tiles again; gives ``peak`` with their largest magnitudes."""
    step = next_step(0, problem, tiling, features)
    for _ in range(count):
        place, sequence = place_of(step, problem, tiling, features)
        first = place.first + WARPGROUP * ROWS
        peak = repaired(peak, place, first, sequence, problem, tiling, features)
        step = next_step(step + 1, problem, tiling, features)
    return peak


@gluon.jit
def note_spoiled(spoiled, note):
    """A consumer's word at its end: 1 if one of its tiles came out not finite, else 0."""
    found = (gl.max(spoiled, 0) > INFINITY_BITS).to(gl.int32)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    note.store(gl.zeros([1, 32], gl.int32, layout) + found)
    if found != 0:
        stores_done()


@gluon.jit
def repair_all(memory, problem, tiling, features):
    """Compute spoiled tiles of all consumers again, when they are done."""
    note_layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    layout: gl.constexpr = product_layout(tiling.DEPTH_V, 8)
    noted = memory.spoiled.index(0).load(note_layout)
    for w in gl.static_range(1, tiling.WARPGROUPS):
        noted = noted | memory.spoiled.index(w).load(note_layout)
    if gl.max(gl.max(noted, 1), 0) != 0:
        peak = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, layout))
        step = next_step(0, problem, tiling, features)
        for _ in range(count_tiles(problem, tiling, features)):
            place, sequence = place_of(step, problem, tiling, features)
            for part in range(tiling.WARPGROUPS):
                first = place.first + part * ROWS
                peak = repaired(peak, place, first, sequence, problem, tiling, features)
            step = next_step(step + 1, problem, tiling, features)
        if features.HAS_AMAX_O:
            gl.atomic_max(problem.amax_o, gl.max(peak, 0))


@gluon.jit
def repaired(peak, place, first, sequence, problem, tiling, features):
    """``peak`` with the magnitudes of a tile's rows, which are computed again if spoiled."""
    layout: gl.constexpr = product_layout(tiling.DEPTH_V, 8)
    if is_spoiled(place, first, sequence, problem, tiling, features, layout):
        out = summed_anew(place, first, sequence, problem, tiling, features, layout)
    else:
        out = as_stored(place, first, problem, tiling, layout)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    return gl.maximum(peak, magnitudes(out, rows, problem.rows))


@gluon.jit
def is_spoiled(place, first, sequence, problem, tiling, features, LAYOUT: gl.constexpr):
    """True if a value is NaN that some row of the tile may not see."""
    low = place.low * tiling.BLOCK_N
    high = min(place.high * tiling.BLOCK_N, sequence.keys)
    found = gl.zeros([tiling.DEPTH_V], gl.float32, gl.SliceLayout(0, LAYOUT))
    if features.HAS_RIGHT:
        for key in range(max(first + sequence.right + 1, low), high):
            row = value_row(key, place, problem, tiling, LAYOUT)
            found += row - row
    return gl.max((found != 0.0).to(gl.int32), 0) != 0


@gluon.jit
def value_row(key, place, problem, tiling, LAYOUT: gl.constexpr):
    """Row ``key`` of V in float32."""
    columns = gl.arange(0, tiling.DEPTH_V, gl.SliceLayout(0, LAYOUT))
    at = element(problem.v, place.batch, place.head // problem.group, key, False)
    values = gl.load(problem.v.pointer + at + columns, mask=columns < problem.depth_v, other=0.0)
    return values.to(gl.float32)


@gluon.jit
def as_stored(place, first, problem, tiling, LAYOUT: gl.constexpr):
    """NaN where a tile of O was stored as NaN, else 0: its other magnitudes are known."""
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, tiling.DEPTH_V, gl.SliceLayout(0, LAYOUT))
    at = problem.o.pointer + element(problem.o, place.batch, place.head, place.head * 0, False)
    mask = (rows < problem.rows)[:, None] & (columns < problem.depth_v)[None, :]
    at = at + rows.to(gl.int64)[:, None] * problem.o.row + columns[None, :]
    out = gl.load(at, mask=mask, other=0.0).to(gl.float32)
    return out - out


@gluon.jit
def score_column(key, rows, place, sequence, problem, tiling):
    """q_i . k_key for the tile's rows."""
    layout: gl.constexpr = product_layout(CHUNK, 8)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    parts = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    k_at = problem.k.pointer + element(
        problem.k, place.batch, place.head // problem.group, key, False
    )
    q_at = problem.q.pointer + element(problem.q, place.batch, place.head, key * 0, False)
    q_at = q_at + rows.to(gl.int64)[:, None] * problem.q.row
    score = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for start in range(0, tiling.DEPTH, CHUNK):
        inside = start + parts < problem.depth
        k = gl.load(k_at + start + parts, mask=inside, other=0.0).to(gl.float32)
        mask = (rows < sequence.rows)[:, None] & inside[None, :]
        q = gl.load(q_at + (start + parts)[None, :], mask=mask, other=0.0).to(gl.float32)
        score += gl.sum(q * k[None, :], 1)
    return score


@gluon.jit
def summed_anew(place, first, sequence, problem, tiling, features, LAYOUT: gl.constexpr):
    """O of a tile before scale_o, key by key, and stored; Stats were right, as scores are chosen.

    What a row does not see is not looked at.
    """
    of_row: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    rows = first + gl.arange(0, ROWS, of_row)
    top = gl.full([ROWS], MINUS_INFINITY, gl.float32, of_row)
    if features.HAS_SINK:
        top = gl.full([ROWS], 0.0, gl.float32, of_row) + sink_level(problem.sink, place.head)
    total = gl.exp2(top - top)
    total = gl.where(top == MINUS_INFINITY, 0.0, total)
    out = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, LAYOUT)
    low = place.low * tiling.BLOCK_N
    for key in range(low, min(place.high * tiling.BLOCK_N, sequence.keys)):
        score = score_column(key, rows, place, sequence, problem, tiling)
        score = gl.convert_layout(score, of_row) * problem.scale
        seen = rows < sequence.rows
        if features.HAS_RIGHT:
            seen = seen & (key <= rows + sequence.right)
        new_top = gl.where(seen, gl.maximum(top, score), top)
        shift = gl.where(new_top == MINUS_INFINITY, 0.0, new_top)
        weight = gl.exp2(score - shift)
        factor = gl.where(seen, gl.exp2(top - shift), 1.0)
        value = value_row(key, place, problem, tiling, LAYOUT)
        total = total * factor + gl.where(seen, weight, 0.0)
        added = gl.where(seen[:, None], weight[:, None] * value[None, :], 0.0)
        out = out * factor[:, None] + added
        top = new_top
    product = gl.load(problem.descale_v) * gl.load(problem.descale_s) * gl.load(problem.scale_s)
    out = gl.where((total == 0.0)[:, None], 0.0, out * (product / total)[:, None])
    columns = gl.arange(0, tiling.DEPTH_V, gl.SliceLayout(0, LAYOUT))
    at = problem.o.pointer + element(problem.o, place.batch, place.head, place.head * 0, False)
    end = problem.rows
    if features.LENGTHS_Q != NO_LENGTHS:
        end = sequence.rows
    gl.store(
        at + rows.to(gl.int64)[:, None] * problem.o.row + columns[None, :],
        (out * gl.load(problem.scale_o)).to(problem.o.pointer.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < problem.depth_v)[None, :],
    )
    return out
