"""What the attention kernels pass around: the call's numbers, the memory, and places.

Records of Gluon: their fields live in registers or are compile-time. (No postponed annotations
here: the compiler reads the types.)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

# Rows of one warpgroup's product.
ROWS = gl.constexpr(64)
# How lengths come: not at all, as lengths, or as running sums.
NO_LENGTHS = gl.constexpr(0)
LENGTHS = gl.constexpr(1)
SUMS = gl.constexpr(2)
# How q lies: RAGGED_Q is one of these.
DENSE = gl.constexpr(0)
PACKED = gl.constexpr(1)
ORDERED = gl.constexpr(2)  # packed, and its tiles are walked as ``problem.order`` says
# What becomes of Q K^T before masks: nothing (a positive scale is folded into the exponent), it is
# scaled, or it is scaled and capped.
PLAIN = gl.constexpr(0)
SCALED = gl.constexpr(1)
CAPPED = gl.constexpr(2)


@gluon.constexpr_function
def product_layout(columns, bits):
    """Who holds what of a product: 64 rows, 16 a warp, of operands of ``bits`` bits an element."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 256 // bits]
    )


@aggregate
class Operand:
    """An operand in global memory: pointer, steps in elements, and where sequences start.

    Sequence b of a ragged operand starts ``starts[b * starts_step] * unit`` rows behind the first
    (elements, for one that is read through its pointer alone).
    """

    pointer: gl.tensor
    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    starts: gl.tensor
    starts_step: gl.tensor
    unit: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        pointer,
        batch,
        head,
        row,
        starts,
        starts_step,
        unit,
    ):
        self.pointer = pointer
        self.batch = batch
        self.head = head
        self.row = row
        self.starts = starts
        self.starts_step = starts_step
        self.unit = unit


@aggregate
class Pages:
    """Where pages of keys or values are: entry i of batch entry b is the page of token i * rows.

    It is ``table[b * batch + i * entry]``.
    """

    table: gl.tensor
    batch: gl.tensor
    entry: gl.tensor
    rows: gl.tensor

    @gluon.constexpr_function
    def __init__(self, table, batch, entry, rows):
        self.table = table
        self.batch = batch
        self.entry = entry
        self.rows = rows


@aggregate
class Problem:
    """The call: extents, the band, the operands, and the lengths of sequences.

    ``scale`` is what scores are multiplied by in the exponent (of 2); ``gain`` and ``ceiling`` are
    ``shaped``'s, where features say that scores are scaled or capped.
    """

    rows: gl.tensor
    keys: gl.tensor
    depth: gl.tensor
    depth_v: gl.tensor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    tiles: gl.tensor
    heads: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    q: Operand
    k: Operand
    v: Operand
    o: Operand
    stats: Operand
    sink: gl.tensor
    lengths_q: gl.tensor
    lengths_q_step: gl.tensor
    lengths_kv: gl.tensor
    lengths_kv_step: gl.tensor
    k_pages: Pages
    v_pages: Pages
    gain: gl.tensor
    ceiling: gl.tensor
    order: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
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
        q,
        k,
        v,
        o,
        stats,
        sink,
        lengths_q,
        lengths_q_step,
        lengths_kv,
        lengths_kv_step,
        k_pages,
        v_pages,
        gain,
        ceiling,
        order,
    ):
        self.rows = rows
        self.keys = keys
        self.depth = depth
        self.depth_v = depth_v
        self.left = left
        self.right = right
        self.scale = scale
        self.tiles = tiles
        self.heads = heads
        self.heads_q = heads_q
        self.group = group
        self.q = q
        self.k = k
        self.v = v
        self.o = o
        self.stats = stats
        self.sink = sink
        self.lengths_q = lengths_q
        self.lengths_q_step = lengths_q_step
        self.lengths_kv = lengths_kv
        self.lengths_kv_step = lengths_kv_step
        self.k_pages = k_pages
        self.v_pages = v_pages
        self.gain = gain
        self.ceiling = ceiling
        self.order = order


@gluon.jit
def moved(operand, zero):
    """The operand by other words: see ``apart``."""
    return Operand(
        operand.pointer + zero,
        operand.batch + zero,
        operand.head + zero,
        operand.row + zero,
        operand.starts + zero,
        operand.starts_step + zero,
        operand.unit + zero,
    )


@gluon.jit
def apart(problem, zero):
    """The problem again, of numbers that the compiler takes for others; ``zero`` is opaque."""
    return Problem(
        problem.rows + zero,
        problem.keys + zero,
        problem.depth + zero,
        problem.depth_v + zero,
        problem.left + zero,
        problem.right + zero,
        problem.scale,
        problem.tiles + zero,
        problem.heads + zero,
        problem.heads_q + zero,
        problem.group + zero,
        moved(problem.q, zero),
        moved(problem.k, zero),
        moved(problem.v, zero),
        moved(problem.o, zero),
        moved(problem.stats, zero),
        problem.sink + zero,
        problem.lengths_q + zero,
        problem.lengths_q_step + zero,
        problem.lengths_kv + zero,
        problem.lengths_kv_step + zero,
        Pages(
            problem.k_pages.table + zero,
            problem.k_pages.batch + zero,
            problem.k_pages.entry + zero,
            problem.k_pages.rows + zero,
        ),
        Pages(
            problem.v_pages.table + zero,
            problem.v_pages.batch + zero,
            problem.v_pages.entry + zero,
            problem.v_pages.rows + zero,
        ),
        problem.gain,
        problem.ceiling,
        problem.order + zero,
    )


@aggregate
class Sequence:
    """One batch entry: its extents and band, and the rows before it where it is ragged."""

    rows: gl.tensor
    keys: gl.tensor
    left: gl.tensor
    right: gl.tensor
    q_row: gl.tensor
    k_row: gl.tensor
    v_row: gl.tensor
    o_row: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        rows,
        keys,
        left,
        right,
        q_row,
        k_row,
        v_row,
        o_row,
    ):
        self.rows = rows
        self.keys = keys
        self.left = left
        self.right = right
        self.q_row = q_row
        self.k_row = k_row
        self.v_row = v_row
        self.o_row = o_row


@aggregate
class Memory:
    """Shared memory: the tiles of Q, K, V, "it is there" of each, and where O leaves through.

    O has room of its own, one part of its columns after another, or leaves through its Q's.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    spoiled: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self,
        q,
        k,
        v,
        q_full,
        k_full,
        v_full,
        o,
        spoiled,
        words,
    ):
        self.q = q
        self.k = k
        self.v = v
        self.q_full = q_full
        self.k_full = k_full
        self.v_full = v_full
        self.o = o
        self.spoiled = spoiled
        self.words = words


@aggregate
class Place:
    """Where a tile is: its batch entry, query head, first row, and blocks of keys."""

    batch: gl.tensor
    head: gl.tensor
    first: gl.tensor
    low: gl.tensor
    high: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        batch,
        head,
        first,
        low,
        high,
    ):
        self.batch = batch
        self.head = head
        self.first = first
        self.low = low
        self.high = high
