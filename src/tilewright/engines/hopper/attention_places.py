"""Where a program's tiles are: batch entries, their lengths, and the keys that a tile sees."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_order import HEADER as _HEADER
from tilewright.engines.hopper.attention_order import SCALE as _SCALE
from tilewright.engines.hopper.attention_records import (
    NO_LENGTHS,
    ORDERED,
    SUMS,
    Place,
    Sequence,
)
from tilewright.engines.hopper.attention_tiles import (
    count_causal,
    count_even,
    tile_causal,
    tile_even,
    tile_of_item,
)

# Numbers before an order's tiles: the count of tiles, the counter of items, and the buckets.
BEFORE = gl.constexpr(_HEADER + _SCALE)


@gluon.jit
def length_of(batch, lengths, step, declared, KIND: gl.constexpr):
    """The length of a batch entry, at most the declared one."""
    if KIND == NO_LENGTHS:
        length = declared
    else:
        at = lengths + batch.to(gl.int64) * step
        found = gl.load(at)
        if KIND == SUMS:
            found = gl.load(at + step) - found
        length = min(max(found, 0), declared).to(gl.int32)
    return length


@gluon.jit
def start_of(batch, operand, RAGGED: gl.constexpr):
    """Rows before a batch entry of a ragged operand; 0 for a dense one."""
    row = batch * 0
    if RAGGED:
        start = gl.load(operand.starts + batch.to(gl.int64) * operand.starts_step)
        row = (start.to(gl.int64) * operand.unit).to(gl.int32)
    return row


@gluon.jit
def sequence_of(batch, problem, features):
    """The batch entry's extents, band and starts."""
    rows = length_of(
        batch, problem.lengths_q, problem.lengths_q_step, problem.rows, features.LENGTHS_Q
    )
    keys = length_of(
        batch, problem.lengths_kv, problem.lengths_kv_step, problem.keys, features.LENGTHS_KV
    )
    left, right = problem.left, problem.right
    if features.BOTTOM_RIGHT:
        left = left - (keys - rows)
        right = right + (keys - rows)
    return Sequence(
        rows,
        keys,
        left,
        right,
        start_of(batch, problem.q, features.RAGGED_Q),
        start_of(batch, problem.k, features.RAGGED_KV),
        start_of(batch, problem.v, features.RAGGED_KV),
        start_of(batch, problem.o, features.RAGGED_Q),
    )


@gluon.jit
def tile_of(step, problem, tiling, features):
    """(tile, head) of this program's ``step``; one of the last beyond the end."""
    if features.RAGGED_Q == ORDERED:
        # ``step`` is an item.
        item = max(step, 0)
        entry = gl.load(problem.order + BEFORE + item // problem.heads_q)
        # Where no sequence has a row there is no entry, and what lies there is not looked at.
        last = problem.heads // problem.heads_q * problem.tiles - 1
        entry = min(max(entry, 0), last)
        batch = entry // problem.tiles
        rows = length_of(
            batch, problem.lengths_q, problem.lengths_q_step, problem.rows, features.LENGTHS_Q
        )
        own = max((rows + tiling.BLOCK_M - 1) // tiling.BLOCK_M, 1)
        tile, head = tile_of_item(item, entry % problem.tiles, own, problem.heads_q)
        head = batch * problem.heads_q + min(max(head, 0), problem.heads_q - 1)
    elif tiling.BY_COST:
        tile, head = tile_causal(
            step, gl.program_id(0), problem.tiles, problem.heads, gl.num_programs(0)
        )
    else:
        tile, head = tile_even(step, gl.program_id(0), problem.tiles, gl.num_programs(0))
    return tile, min(head, problem.heads - 1)


@gluon.jit
def items_of(problem):
    """How many items an order has: tiles, once a head."""
    return gl.load(problem.order) * problem.heads_q


@gluon.jit
def fetched(problem):
    """The next item that no program has."""
    return gl.atomic_add(problem.order + 1, 1, sem="relaxed")


@gluon.jit
def note_owner(item, problem):
    """Write down that an item is this program's."""
    gl.store(owners_of(problem) + item, gl.program_id(0).to(gl.int16))


@gluon.jit
def owners_of(problem):
    """Where the programs of items are written down: behind the tiles, two bytes each."""
    tiles = problem.heads // problem.heads_q * problem.tiles
    return (problem.order + BEFORE + tiles).to(gl.pointer_type(gl.int16))


@gluon.jit
def steps_of(problem, tiling, features):
    """How many tiles this program walks, those beyond a sequence's end included."""
    if features.RAGGED_Q == ORDERED:
        count = items_of(problem)
    elif tiling.BY_COST:
        count = count_causal(gl.program_id(0), problem.tiles, problem.heads, gl.num_programs(0))
    else:
        count = count_even(gl.program_id(0), problem.tiles, problem.heads, gl.num_programs(0))
    return count


@gluon.jit
def exists(step, problem, tiling, features):
    """True if the tile of ``step`` has a row of its sequence."""
    tile, head = tile_of(step, problem, tiling, features)
    rows = length_of(
        head // problem.heads_q,
        problem.lengths_q,
        problem.lengths_q_step,
        problem.rows,
        features.LENGTHS_Q,
    )
    return tile * tiling.BLOCK_M < rows


@gluon.jit
def count_tiles(problem, tiling, features):
    """How many tiles this program has."""
    count = steps_of(problem, tiling, features)
    if features.RAGGED_Q and features.RAGGED_Q != ORDERED:
        steps = count
        count = steps * 0
        for step in range(steps):
            count += exists(step, problem, tiling, features).to(gl.int32)
    return count


@gluon.jit
def next_step(step, problem, tiling, features):
    """The first step from ``step`` on whose tile exists, or the number of steps."""
    step = gl.to_tensor(step)
    if features.RAGGED_Q and features.RAGGED_Q != ORDERED:
        steps = steps_of(problem, tiling, features)
        looks = (step < steps) & (not exists(step, problem, tiling, features))
        while looks:
            step += 1
            looks = (step < steps) & (not exists(step, problem, tiling, features))
    return step


@gluon.jit
def place_of(step, problem, tiling, features):
    """(place, sequence) of the tile of a step.

    Row i sees columns i - left < j <= i + right. A tile that sees nothing gets a block of keys all
    the same, in which everything is masked.
    """
    tile, head = tile_of(step, problem, tiling, features)
    batch = head // problem.heads_q
    sequence = sequence_of(batch, problem, features)
    first = tile * tiling.BLOCK_M
    last = sequence.keys
    if features.HAS_RIGHT:
        last = min(first + tiling.BLOCK_M + sequence.right, last)
    if features.LENGTHS_Q != NO_LENGTHS:
        # Rows of padding see nothing.
        last = gl.where(first < sequence.rows, last, 0)
    if features.HAS_RIGHT or features.LENGTHS_Q != NO_LENGTHS or features.LENGTHS_KV != NO_LENGTHS:
        last = max(last, 1)
    high = (last + tiling.BLOCK_N - 1) // tiling.BLOCK_N
    low = high * 0
    if features.HAS_LEFT:
        low = max(first - sequence.left + 1, 0) // tiling.BLOCK_N
        low = min(low, high - 1)
    return Place(batch, head % problem.heads_q, first, low, high), sequence


@gluon.jit
def element(operand, batch, head, row, RAGGED: gl.constexpr):
    """Elements before (head, row) of a batch entry; ``row`` counts those before a sequence too."""
    at = head.to(gl.int64) * operand.head + row.to(gl.int64) * operand.row
    if not RAGGED:
        at += batch.to(gl.int64) * operand.batch
    return at


@gluon.jit
def key_element(operand, pages, batch, head, key, row, features):
    """Elements before (head, key) of a batch entry; ``row`` counts those before a sequence."""
    if features.PAGED:
        at = batch.to(gl.int64) * pages.batch + (key // pages.rows).to(gl.int64) * pages.entry
        page = gl.load(pages.table + at)
        found = element(operand, page, head, key % pages.rows, False)
    else:
        found = element(operand, batch, head, key + row, features.RAGGED_KV)
    return found
