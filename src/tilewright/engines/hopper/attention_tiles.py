"""Which tile of queries a program works on, step by step: arithmetic, no table.

A program (one a multiprocessor) walks its tiles in a fixed order. ``tiles`` blocks of query rows a
head, ``heads`` heads in all (batch included), ``programs`` programs.

Without a causal mask every tile costs the same: tile t goes to program t % programs, head by head,
so that the programs at work share few heads' keys in L2.

With one, tile m of a head costs about m + 1. Two heads make a pair of lists: tile tiles - 1 - p of
one and tile p of the other, which cost the same together for every p. Programs take such pairs in
rounds, again head by head, and all stay level. What is left for the last round and a bit is sorted,
longest first, and dealt back and forth: the shortest tiles fill the last gaps.

Packed sequences have tiles of any cost: programs fetch them one by one (``attention_order``).

These functions run inside kernels, and as plain Python (``function.fn``) in tests.
"""

from __future__ import annotations

from triton.experimental import gluon


@gluon.jit
def pair_rounds(tiles, heads, programs):
    """Rounds in which every program takes a pair; what is left fills one to two rounds."""
    rounds = (heads // 2) * tiles // programs - 1
    if rounds < 0:
        rounds = 0
    return rounds


@gluon.jit
def count_even(program, tiles, heads, programs):
    """How many tiles a program has if all cost the same."""
    return (tiles * heads - program + programs - 1) // programs


@gluon.jit
def tile_even(step, program, tiles, programs):
    """(tile, head) of a program's ``step``, if all cost the same."""
    number = program + step * programs
    return number % tiles, number // tiles


@gluon.jit
def number_dealt(step, program, programs):
    """The item of a program's ``step``, if items are dealt back and forth."""
    number = step * programs + program
    if step % 2 == 1:
        number = (step + 1) * programs - 1 - program
    return number


@gluon.jit
def count_dealt(program, items, programs):
    """How many of ``items`` a program has if they are dealt back and forth."""
    full = items // programs
    rest = items % programs
    place = program
    if full % 2 == 1:
        place = programs - 1 - program
    extra = 0
    if place < rest:
        extra = 1
    return full + extra


@gluon.jit
def count_causal(program, tiles, heads, programs):
    """How many tiles a program has if they are dealt by cost."""
    rounds = pair_rounds(tiles, heads, programs)
    left = tiles * heads - 2 * rounds * programs
    return 2 * rounds + count_dealt(program, left, programs)


@gluon.jit
def tile_causal(step, program, tiles, heads, programs):
    """(tile, head) of a program's ``step``, dealt by cost."""
    rounds = pair_rounds(tiles, heads, programs)
    first = rounds * programs
    pair = (step // 2) * programs + program
    head = 2 * (pair // tiles)
    tile = tiles - 1 - pair % tiles
    if step % 2 == 1:
        head = head + 1
        tile = pair % tiles
    if step >= 2 * rounds:
        turn = step - 2 * rounds
        number = number_dealt(turn, program, programs)
        # The first pair that is left is pair ``cut`` of head ``split``; whole heads follow it.
        split = 2 * (first // tiles)
        cut = first % tiles
        whole = split
        if cut > 0:
            whole = split + 2
        count = heads - whole
        # Of the split heads, one has its tiles below tiles - cut left, the other those from cut on.
        edge = cut
        both = 2
        if 2 * cut > tiles:
            edge = tiles - cut
            both = 0
        if cut == 0:
            both = 0
        outer = edge * (count + 1)
        inner = (tiles - 2 * edge) * (count + both)
        width = count + 1
        level = number
        start = 0
        if number >= outer:
            width = count + both
            level = number - outer
            start = edge
            if number >= outer + inner:
                width = count + 1
                level = number - outer - inner
                start = tiles - edge
        if width < 1:
            width = 1
        tile = tiles - 1 - start - level // width
        place = level % width
        head = whole + place
        if place >= count:
            # The upper tiles are left of the second head, the lower ones of the first.
            head = split
            if place > count:
                head = split + 1
            if both == 0:
                head = split + 1
                if tile < tiles - cut:
                    head = split
            if (both == 2) & (tile >= tiles - cut):
                head = split + 1
    return tile, head


@gluon.jit
def tile_of_item(item, tile, tiles, heads):
    """(tile, head) of an item of a packed sequence of ``tiles`` tiles, the last tile first.

    ``tile`` is the one of the order's entry ``item // heads``.
    """
    before = item // heads - (tiles - 1 - tile)
    number = item - before * heads
    return tiles - 1 - number % tiles, number // tiles
