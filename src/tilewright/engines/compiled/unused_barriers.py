"""Barriers in shared memory that nothing waits for, taken out of a kernel's PTX.

Where Triton 3.6 deals a loop to warp groups, each load gets two arrays of mbarriers, and one of
them is used. The other is initialised once for each load, at addresses that data have later, and
never invalidated. PTX leaves open what becomes of data there ("mbarrier.init" and "mbarrier.inval"
in the PTX ISA). On an H200 nothing, as long as a program runs through; but when another process
gets the device in the middle of a kernel, the words of such barriers come back into the data:
attention's first key of a stage was NaN, and so were all rows that were at it.
"""

from __future__ import annotations

import re

# Where a register's address in shared memory is made.
_ADDRESS = re.compile(
    r"^\s*(?:mov\.b32\s+(%r\d+), global_smem;|add\.s32\s+(%r\d+), (%r\d+), (\d+);)", re.MULTILINE
)
_BARRIER = re.compile(
    r"^[^\n]*\bmbarrier\.(init|inval)\.shared(?:::cta)?\.b64\s+\[(%r\d+)\][^\n]*\n", re.MULTILINE
)


def without_unused_barriers(ptx: str) -> str:
    """``ptx`` without the barriers whose address is initialised again before it is invalidated.

    Nobody can have used the first of two such barriers, nor wait for both with the second.
    """
    offsets: dict[str, int] = {}
    for base, made, of, step in _ADDRESS.findall(ptx):
        if base:
            offsets[base] = 0
        elif of in offsets:
            offsets[made] = offsets[of] + int(step)
    held, unused = set(), set()
    for kind, register in _BARRIER.findall(ptx):
        offset = offsets.get(register)
        if kind == "inval":
            held.discard(offset)
        elif offset in held:
            unused.add(offset)
        else:
            held.add(offset)
    unused.discard(None)
    if not unused:
        return ptx

    def kept(found: re.Match[str]) -> str:
        return "" if found[1] == "init" and offsets.get(found[2]) in unused else found[0]

    return _BARRIER.sub(kept, ptx)
