"""What FP8 attention's consumers do where a tile ends: Stats, and O through shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewright.engines.hopper.attention_fp8_repair import INFINITY_BITS, magnitudes, note_spoiled
from tilewright.engines.hopper.attention_places import element
from tilewright.engines.hopper.attention_records import NO_LENGTHS, ROWS
from tilewright.engines.hopper.attention_sinks import with_sink
from tilewright.engines.hopper.attention_softmax import LN2, MINUS_INFINITY
from tilewright.engines.hopper.barriers import partition_barrier


@gluon.jit
def row_ends(total, shift, rows, place, sequence, problem, features):
    """(rows that saw nothing, what exponentials are to be multiplied by, sums); Stats are stored.

    ``total`` sums 2^(s - ``shift``) of each row; with a sink, ``shift`` is no longer a maximum.
    ``attention_softmax.finish`` has the same in its own text: called there, this changes the order
    of instructions in a fourth of its kernels, through nothing but their line tables.
    """
    scaled = 1.0
    if features.HAS_SINK:
        total, shift, scaled = with_sink(total, shift, problem.sink, place.head)
    empty = total == 0.0
    if features.LENGTHS_Q != NO_LENGTHS:
        empty = empty | (rows >= sequence.rows)
    if features.HAS_STATS:
        stats = shift + gl.log2(total)
        if not features.STATS_LOG2:
            stats = stats * LN2
        at = problem.stats.pointer + element(
            problem.stats, place.batch, place.head, place.head * 0, False
        )
        gl.store(
            at + rows.to(gl.int64) * problem.stats.row,
            gl.where(empty, MINUS_INFINITY, stats),
            mask=rows < problem.rows,
        )
    return empty, scaled, total


@gluon.jit
def without_padding(out, empty, features):
    """``out`` with 0 in rows of padding: what they hold, NaN included, does not matter."""
    if features.LENGTHS_Q != NO_LENGTHS:
        out = gl.where(empty[:, None], 0.0, out)
    return out


@gluon.constexpr_function
def ordered_layout(columns):
    """Who holds what of ``in_order``: four columns side by side a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0]]
        + [[0, 16 << i] for i in range((columns // 16).bit_length() - 1)],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def in_order(out):
    """O with its columns in order: column 16x + 8p + i of the product is column 16x + 2i + p."""
    rows: gl.constexpr = out.shape[0]
    columns: gl.constexpr = out.shape[1]
    layout: gl.constexpr = ordered_layout(columns)
    out = out.reshape([rows, columns // 16, 2, 8]).permute((0, 1, 3, 2)).reshape([rows, columns])
    return gl.convert_layout(out, layout, assert_trivial=True)


@gluon.jit
def leave(out, o_map, place, first, memory, WARPGROUP: gl.constexpr):
    """O of a tile, times its scale, through shared memory."""
    room = memory.o.index(WARPGROUP)
    out = in_order(out).to(room.dtype)
    # The tile before has left the room by now: one thread sees to it for all.
    tma.store_wait(0)
    partition_barrier()
    room.store(out)
    fence_async_shared()
    tma.async_copy_shared_to_global(o_map, [place.batch, place.head, first, 0], room)


@gluon.jit
def finite_peaks(found, spoiled, peak, features):
    """(the largest magnitudes so far of rows that are finite, those of all): see the repair."""
    if features.REPAIRS:
        # Tiles that are not finite are looked at once more when all are done.
        spoiled = gl.maximum(spoiled, found)
        found = gl.where(found > INFINITY_BITS, 0, found)
    return gl.maximum(peak, found), spoiled


@gluon.jit
def hand_over(out, peak_o, spoiled, o_map, place, first, memory, problem, features,
              WARPGROUP: gl.constexpr):  # fmt: skip
    """``finite_peaks`` with O of a tile, which leaves; ``out`` is O before scale_o."""
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, out.type.layout))
    found = magnitudes(out, rows, problem.rows)
    peak_o, spoiled = finite_peaks(found, spoiled, peak_o, features)
    leave(out * gl.load(problem.scale_o), o_map, place, first, memory, WARPGROUP)
    return peak_o, spoiled


@gluon.jit
def give_maxima(peak_s, peak_o, problem, features):
    """A consumer's share in Amax_S and Amax_O, as integers."""
    if features.HAS_AMAX_S:
        gl.atomic_max(problem.amax_s, gl.max(peak_s, 0))
    if features.HAS_AMAX_O:
        gl.atomic_max(problem.amax_o, gl.max(peak_o, 0))


@gluon.jit
def end_of_consumer(spoiled, peak_s, peak_o, memory, problem, features, WARPGROUP: gl.constexpr):
    """A consumer is done: what it says to who repairs when all are, and its maxima."""
    tma.store_wait(0)
    if features.REPAIRS:
        note_spoiled(spoiled, memory.spoiled.index(WARPGROUP))
    give_maxima(peak_s, peak_o, problem, features)
