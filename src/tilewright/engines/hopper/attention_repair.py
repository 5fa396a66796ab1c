"""Hidden values that are not finite: finding that they spoiled a tile, and computing it again.

A hidden key has probability 0, and 0 times NaN or infinity is NaN: a matrix product spreads it to
rows that must not see it. That is rare, so tiles only note whether they came out finite where masks
hide keys. If one did not, its program goes through its tiles again when all is done, outside of the
warp partitions, whose registers that work would cost otherwise: those tiles of which some row may
not see a value that is not finite are summed anew, key by key, and what a row does not see is not
looked at.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_places import (
    count_tiles,
    element,
    items_of,
    key_element,
    next_step,
    owners_of,
    place_of,
)
from tilewright.engines.hopper.attention_records import (
    NO_LENGTHS,
    ORDERED,
    ROWS,
    apart,
    product_layout,
)
from tilewright.engines.hopper.attention_sinks import sink_level
from tilewright.engines.hopper.attention_softmax import MINUS_INFINITY, shaped, thread_sums
from tilewright.engines.hopper.barriers import opaque_zero, stores_done

# Columns of Q that are multiplied at a time.
CHUNK = gl.constexpr(64)


@gluon.jit
def watched(out, spoiled):
    """``spoiled``, which turns from 0 to NaN where a thread's part of the tile is not finite."""
    sums = thread_sums(out)
    return spoiled + (sums - sums)


@gluon.jit
def note_spoiled(spoiled, note):
    """A consumer's word at its end: 1 if one of its tiles came out not finite, else 0."""
    found = gl.max(gl.max((spoiled != 0.0).to(gl.int32), 1), 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    note.store(gl.zeros([1, 32], gl.int32, layout) + found)
    if found != 0:
        stores_done()


@gluon.jit
def repair_all(memory, problem, tiling, features):
    """Compute spoiled tiles of all consumers again, when they are done."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    found = memory.spoiled.index(0).load(layout)
    for w in gl.static_range(1, tiling.WARPGROUPS):
        found = found | memory.spoiled.index(w).load(layout)
    if gl.max(gl.max(found, 1), 0) != 0:
        problem = apart(problem, opaque_zero())
        if features.RAGGED_Q == ORDERED:
            owners = owners_of(problem)
            for item in range(items_of(problem)):
                if gl.load(owners + item) == gl.program_id(0):
                    repair_tile(item, problem, tiling, features)
        else:
            step = next_step(0, problem, tiling, features)
            for _ in range(count_tiles(problem, tiling, features)):
                repair_tile(step, problem, tiling, features)
                step = next_step(step + 1, problem, tiling, features)


@gluon.jit
def repair_tile(step, problem, tiling, features):
    """See ``repair``, for all rows of a tile."""
    place, sequence = place_of(step, problem, tiling, features)
    for part in range(tiling.WARPGROUPS):
        repair(place, place.first + part * ROWS, sequence, problem, tiling, features)


@gluon.jit
def repair(place, first, sequence, problem, tiling, features):
    """Compute a tile's rows again if a value that one of them may not see is not finite."""
    layout: gl.constexpr = product_layout(tiling.DEPTH_V, 16)
    low = place.low * tiling.BLOCK_N
    high = min(place.high * tiling.BLOCK_N, sequence.keys)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    found = gl.zeros([tiling.DEPTH_V], gl.float32, columns)
    if features.HAS_RIGHT:
        for key in range(max(first + sequence.right + 1, low), high):
            row = value_row(key, place, sequence, problem, tiling, features, columns)
            found += row - row
    if features.HAS_LEFT:
        for key in range(low, min(first + ROWS - sequence.left, high)):
            row = value_row(key, place, sequence, problem, tiling, features, columns)
            found += row - row
    if gl.max((found != 0.0).to(gl.int32), 0) != 0:
        compute_again(low, high, place, first, sequence, problem, tiling, features, layout)


@gluon.jit
def value_row(key, place, sequence, problem, tiling, features, LAYOUT: gl.constexpr):
    """Row ``key`` of V in float32."""
    columns = gl.arange(0, tiling.DEPTH_V, LAYOUT)
    head = place.head // problem.group
    at = key_element(problem.v, problem.v_pages, place.batch, head, key, sequence.v_row, features)
    values = gl.load(problem.v.pointer + at + columns, mask=columns < problem.depth_v, other=0.0)
    return values.to(gl.float32)


@gluon.jit
def score_column(key, rows, place, sequence, problem, tiling, features):
    """q_i . k_key for the tile's rows."""
    layout: gl.constexpr = product_layout(CHUNK, 16)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    parts = gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    head = place.head // problem.group
    k_at = problem.k.pointer + key_element(
        problem.k, problem.k_pages, place.batch, head, key, sequence.k_row, features
    )
    q_at = problem.q.pointer + element(
        problem.q, place.batch, place.head, sequence.q_row, features.RAGGED_Q
    )
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
def compute_again(
    low, high, place, first, sequence, problem, tiling, features, LAYOUT: gl.constexpr
):
    """O of a tile, key by key, from global memory; Stats were right, as scores are selected."""
    of_row: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    of_column: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    rows = first + gl.arange(0, ROWS, of_row)
    top = gl.full([ROWS], MINUS_INFINITY, gl.float32, of_row)
    if features.HAS_SINK:
        top = gl.full([ROWS], 0.0, gl.float32, of_row) + sink_level(problem.sink, place.head)
    total = gl.exp2(top - top)
    total = gl.where(top == MINUS_INFINITY, 0.0, total)
    out = gl.zeros([ROWS, tiling.DEPTH_V], gl.float32, LAYOUT)
    for key in range(low, high):
        score = score_column(key, rows, place, sequence, problem, tiling, features)
        score = gl.convert_layout(shaped(score, problem, features), of_row) * problem.scale
        seen = rows < sequence.rows
        if features.HAS_RIGHT:
            seen = seen & (key <= rows + sequence.right)
        if features.HAS_LEFT:
            seen = seen & (key > rows - sequence.left)
        new_top = gl.where(seen, gl.maximum(top, score), top)
        shift = gl.where(new_top == MINUS_INFINITY, 0.0, new_top)
        weight = gl.exp2(score - shift)
        factor = gl.exp2(top - shift)
        factor = gl.where(seen, factor, 1.0)
        value = value_row(key, place, sequence, problem, tiling, features, of_column)
        total = total * factor + gl.where(seen, weight, 0.0)
        added = gl.where(seen[:, None], weight[:, None] * value[None, :], 0.0)
        out = out * factor[:, None] + added
        top = new_top
    out = gl.where((total == 0.0)[:, None], 0.0, out / total[:, None])
    columns = gl.arange(0, tiling.DEPTH_V, of_column)
    at = problem.o.pointer + element(
        problem.o, place.batch, place.head, sequence.o_row, features.RAGGED_Q
    )
    end = problem.rows
    if features.LENGTHS_Q != NO_LENGTHS:
        end = sequence.rows
    gl.store(
        at + rows.to(gl.int64)[:, None] * problem.o.row + columns[None, :],
        out.to(problem.o.pointer.dtype.element_ty),
        mask=(rows < end)[:, None] & (columns < problem.depth_v)[None, :],
    )
