"""Which reports of racecheck are of nothing but the words that tell warps their partition.

Where a kernel's warps are dealt, the first four write a byte for each later one, what it runs next,
into the last bytes of shared memory, and it reads its own. A barrier of the whole block stands
between, which racecheck does not hold to separate them: controls that are right get such a report,
too (``sanitizer_controls.py``). Whether an access is of those words is told by the machine code:
its address is among those bytes, and the barrier stands next to it, before a read and behind a
write, with no branch and no label between. Any other access is none of them. That a warp has read
its word before the next is written rests on the barrier where warps join again, which is the
compiler's for each deal, and the controls' too.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable

# Warps that run from the start.
FIRST_WARPS = 4
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+((?:@\S+\s+)?)(\S+)\s*(.*?)\s*;")
_ADDRESS = re.compile(r"\[[^\]]*\+(0x[0-9a-f]+)\]")
_BRANCHES = ("BRA", "BRX", "CALL", "RET", "EXIT", "JMP", "JMX")
_WORDS = "partition words: "
_RACE = "Race reported between"
_DISPLAYED = re.compile(r"(\d+) hazards? displayed")
_ACCESS = re.compile(r"(?:Read|Write) access at (\w+)\+(0x[0-9a-f]+)")

# Offset, guard, operation, arguments.
Instruction = tuple[int, str, str, str]


def disassembled(image: bytes) -> str:
    """A kernel's machine code as text, by Triton's own ``nvdisasm``."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def word_accesses(disassembly: str, warps: int, shared_bytes: int) -> frozenset[int]:
    """Offsets of the instructions that read or write partition words behind their barrier.

    ``warps`` are all of a block, ``shared_bytes`` all that the kernel asks for. Empty for a kernel
    whose warps are not dealt.
    """
    first = shared_bytes - warps
    reads, writes = set(), set()
    for piece in _straight_pieces(disassembly):
        for place, (offset, _, operation, arguments) in enumerate(piece):
            address = _ADDRESS.search(arguments)
            at = int(address[1], 16) if address else -1
            # Of a warp with number n, at first + n.
            if operation == "LDS.U8" and at == first:
                reads.add((offset, _barrier(reversed(piece[:place]))))
            elif operation.startswith("STS") and first + FIRST_WARPS <= at < shared_bytes:
                writes.add((offset, _barrier(piece[place:])))
    barriers = {barrier for _, barrier in reads}
    # All words are read behind one barrier, or this is not what it is taken for.
    if len(barriers) != 1 or "" in barriers:
        return frozenset()
    return frozenset(offset for offset, barrier in reads | writes if barrier in barriers)


def _straight_pieces(disassembly: str) -> list[list[Instruction]]:
    """Instructions between labels and branches."""
    pieces: list[list[Instruction]] = [[]]
    for line in disassembly.splitlines():
        found = _LINE.match(line)
        if found is None:
            pieces.append([])
            continue
        pieces[-1].append((int(found[1], 16), found[2], found[3], found[4]))
        if found[3].partition(".")[0] in _BRANCHES:
            pieces.append([])
    return pieces


def _barrier(instructions: Iterable[Instruction]) -> str:
    """The first barrier among these, if all of the block wait at it; else nothing."""
    for _, guard, operation, arguments in instructions:
        if operation.startswith("BAR."):
            # With a number of threads behind a comma it is for some.
            is_whole = operation.startswith("BAR.SYNC") and not guard and "," not in arguments
            return arguments if is_whole else ""
    return ""


def line_of_words(codes: Iterable[tuple[str, bytes, int, int]]) -> str:
    """A line for ``reports_by_kind``, of the kernels (name, image, warps, shared bytes) of a run.

    Of several kernels of one name, which a report does not tell apart, what is true of all.
    """
    found: dict[str, frozenset[int]] = {}
    for name, image, warps, shared_bytes in codes:
        words = word_accesses(disassembled(image), warps, shared_bytes)
        found[name] = words & found.get(name, words)
    return _WORDS + json.dumps({name: sorted(words) for name, words in found.items()})


def reports_by_kind(output: str) -> dict[str, int]:
    """How many races racecheck reports of partition words alone, and how many others.

    ``output`` is racecheck's and that of a run which ended with ``line_of_words``. One more is
    another if it did not, or if not every race is printed.
    """
    lines = [line[len(_WORDS) :] for line in output.splitlines() if line.startswith(_WORDS)]
    words = json.loads(lines[-1]) if lines else {}
    counts = {"partition words": 0, "other": 0}
    for report in output.split(_RACE)[1:]:
        # Its accesses stand on lines of their own, up to an empty one.
        accesses = _ACCESS.findall(report.split("========= \n")[0])
        is_of_words = accesses and all(int(at, 16) in words.get(name, ()) for name, at in accesses)
        counts["partition words" if is_of_words else "other"] += 1
    displayed = _DISPLAYED.search(output)
    if not lines or displayed is None or int(displayed[1]) != sum(counts.values()):
        counts["other"] += 1
    return counts
