"""What the producer of attention forward tells the consumers of a tile: words in shared memory.

The producer finds out where a tile is, which takes divisions, and for packed sequences loads; the
consumers, who have the products to feed, read it with the tile's Q. What a declaration does not
need is not told.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.engines.hopper.attention_records import NO_LENGTHS, Place, Sequence
from tilewright.engines.hopper.barriers import partition_barrier

# Words of a tile.
WORDS = gl.constexpr(11)


@gluon.jit
def word_told(memory, at):
    """A word of ``memory.words``, for a consumer."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    return gl.max(gl.max(memory.words.index(at).load(layout), 1), 0)


@gluon.jit
def tell_word(memory, at, word):
    """Store a word of ``memory.words``."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])
    memory.words.index(at).store(gl.zeros([1, 1], gl.int32, layout) + word)


@gluon.jit
def tell(more, place, sequence, slot, memory, features):
    """Tell the consumers which tile comes to a slot of Q, or that no more does."""
    at = slot * WORDS
    tell_word(memory, at, more.to(gl.int32))
    tell_word(memory, at + 1, place.batch)
    tell_word(memory, at + 2, place.head)
    tell_word(memory, at + 3, place.first)
    tell_word(memory, at + 4, place.high)
    if features.HAS_LEFT:
        tell_word(memory, at + 5, place.low)
    if features.LENGTHS_Q != NO_LENGTHS:
        tell_word(memory, at + 6, sequence.rows)
    if features.LENGTHS_KV != NO_LENGTHS:
        tell_word(memory, at + 7, sequence.keys)
    if features.BOTTOM_RIGHT:
        tell_word(memory, at + 8, sequence.left)
        tell_word(memory, at + 9, sequence.right)
    if features.RAGGED_Q:
        tell_word(memory, at + 10, sequence.o_row)
    partition_barrier()


@gluon.jit
def told(slot, memory, problem, features):
    """(more, place, sequence) of what comes to a slot of Q, for a consumer."""
    at = slot * WORDS
    more = word_told(memory, at) > 0
    batch = word_told(memory, at + 1)
    head = word_told(memory, at + 2)
    first = word_told(memory, at + 3)
    high = word_told(memory, at + 4)
    low = high * 0
    if features.HAS_LEFT:
        low = word_told(memory, at + 5)
    rows, keys, left, right = problem.rows, problem.keys, problem.left, problem.right
    if features.LENGTHS_Q != NO_LENGTHS:
        rows = word_told(memory, at + 6)
    if features.LENGTHS_KV != NO_LENGTHS:
        keys = word_told(memory, at + 7)
    if features.BOTTOM_RIGHT:
        left = word_told(memory, at + 8)
        right = word_told(memory, at + 9)
    o_row = high * 0
    if features.RAGGED_Q:
        o_row = word_told(memory, at + 10)
    # Where Q, K and V lie is the producer's business.
    sequence = Sequence(rows, keys, left, right, o_row, o_row, o_row, o_row)
    return more, Place(batch, head, first, low, high), sequence
