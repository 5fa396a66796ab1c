"""Barriers in shared memory that nothing waits for, taken out of a kernel's PTX.

Where Triton 3.6 deals a loop to warp groups, each load gets two arrays of mbarriers, and one of
them is used. The other is initialised once for each load, at addresses that data have later, and
never invalidated. PTX leaves open what becomes of data there ("mbarrier.init" and "mbarrier.inval"
in the PTX ISA). On an H200 nothing, as long as a program runs through; but when another process
gets the device in the middle of a kernel, the words of such barriers come back into the data:
attention's first key of a stage was NaN, and so were all rows that were at it.
"""

from __future__ import annotations

import collections
import re

# Where a register's address in shared memory is made.
_ADDRESS = re.compile(
    r"^\s*(?:mov\.b32\s+(%r\d+), global_smem;|add\.s32\s+(%r\d+), (%r\d+), (\d+);)", re.MULTILINE
)
# What is done to a barrier, and the register with its address.
_BARRIER = re.compile(r"^[^\n]*\bmbarrier\.(\w+)[^\n\[]*\[(%r\d+)\][^\n]*\n", re.MULTILINE)


def without_unused_barriers(ptx: str) -> str:
    """``ptx`` without barriers that are initialised more than once and never heard of again.

    An address that is invalidated somewhere, or named by a wait or an arrival, is left alone.
    """
    offsets: dict[str, int] = {}
    for base, made, of, step in _ADDRESS.findall(ptx):
        if base:
            offsets[base] = 0
        elif of in offsets:
            offsets[made] = offsets[of] + int(step)
    starts: collections.Counter[int] = collections.Counter()
    used = set()
    for kind, register in _BARRIER.findall(ptx):
        if register not in offsets:
            continue
        if kind == "init":
            starts[offsets[register]] += 1
        else:
            used.add(offsets[register])
    unused = {offset for offset, times in starts.items() if times > 1} - used
    if not unused:
        return ptx

    def kept(found: re.Match[str]) -> str:
        return "" if found[1] == "init" and offsets.get(found[2]) in unused else found[0]

    return _BARRIER.sub(kept, ptx)
