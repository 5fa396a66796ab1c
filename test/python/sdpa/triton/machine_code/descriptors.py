"""Follows constants through SM90's machine code to the descriptors of its matrix products.

A product's operand in shared memory is told by 64 bits in uniform registers. The upper half holds
the swizzle and how far groups of rows lie apart (PTX ISA, "Matrix Descriptor Format"), which the
kernel's source fixes: on every path to a product it is one constant, and of these

    0x40000040, 0x80000020, 0xc0000010      lines of 128, 64, 32 bytes, groups of 8 lines

where a tile is no wider than a line. The lower half is an address in units of 16 bytes, small and
unknown here; adding to it carries nothing into the upper half, and taking off borrows.

What is not known is a name, so that registers swapped by three exclusive ors are known again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_WORD = 0xFFFFFFFF
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(.*?)\s*;")
_LABEL = re.compile(r"(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_REGISTER = re.compile(r"(UR|R)(\d+)")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
_LOCAL = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
# From here on a word that is added is a negative number.
_NEGATIVE = 0x80000000
_PLAIN = re.compile(r"0x[48c]0000[0-9a-f]{3}")
_EXCLUSIVE_OR = "0x3c"
# Registers that variants write.
_WIDTHS = {"128": 4, "64": 2, "WIDE": 2, "4": 4}


@dataclass(frozen=True)
class Word:
    """An exclusive or of words that are not known, by the instructions that made them, and bits."""

    names: frozenset[tuple[int, str]]
    bits: int = 0

    def __xor__(self, other: Word) -> Word:
        return Word(self.names ^ other.names, self.bits ^ other.bits)


State = dict[str, Word]


def known(bits: int) -> Word:
    """A word that is known."""
    return Word(frozenset(), bits & _WORD)


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    address: int
    guard: str
    operation: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The operation without its variants."""
        return self.operation.partition(".")[0]

    def has(self, variant: str) -> bool:
        """Whether the operation is this variant of its own."""
        return variant in self.operation.split(".")[1:]


@dataclass(frozen=True)
class Product:
    """A matrix product and the upper halves of its descriptors; "unknown" for what is no constant.

    Those are A's, if it lies in shared memory, and B's.
    """

    address: str
    text: str
    halves: tuple[str, ...]

    @property
    def is_plain(self) -> bool:
        """True if all are constants, and such as say a swizzle and groups of lines."""
        return all(_PLAIN.fullmatch(half) for half in self.halves)


def products(disassembly: str) -> list[Product]:
    """Every matrix product of a kernel, as ``nvdisasm -c`` prints it."""
    code, labels = _parsed(disassembly)
    before = _states(code, labels)
    found = []
    for instruction, state in zip(code, before, strict=True):
        text = " ".join((instruction.operation, ", ".join(instruction.arguments)))
        told = _DESCRIPTOR.search(text)
        if instruction.name != "HGMMA" or told is None or state is None:
            continue
        first = int(told[1])
        is_shared = instruction.arguments[1].startswith("gdesc")
        halves = [first + 1, first + 3] if is_shared else [first + 3]
        words = [state.get(f"UR{number}") for number in halves]
        told_as = tuple(hex(w.bits) if w is not None and not w.names else "unknown" for w in words)
        found.append(Product(hex(instruction.address), text, told_as))
    return found


def _parsed(disassembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and where labels stand among them."""
    code: list[Instruction] = []
    labels = {}
    for line in disassembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            operation, _, rest = found[3].partition(" ")
            guard = "" if found[2] in (None, "PT", "UPT") else found[2]
            parts = tuple(part.strip() for part in re.split(r",(?![^\[{(]*[\]})])", rest) if part)
            parts = tuple(part.replace(".reuse", "") for part in parts)
            code.append(Instruction(int(found[1], 16), guard, operation, parts))
    return code, labels


def _followers(code: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """Which instructions may come next."""
    following = []
    for at, instruction in enumerate(code):
        next_ones = []
        target = _TARGET.search(instruction.arguments[-1]) if instruction.arguments else None
        is_jump = instruction.name == "BRA"
        if is_jump and target is not None:
            next_ones.append(labels[target[1]])
        may_pass = instruction.guard or (is_jump and len(instruction.arguments) > 1)
        if may_pass or instruction.name not in ("BRA", "EXIT", "RET"):
            next_ones.append(at + 1)
        following.append([n for n in next_ones if n < len(code)])
    return following


def _states(code: list[Instruction], labels: dict[str, int]) -> list[State | None]:
    """What is known before each instruction, on all paths to it."""
    following = _followers(code, labels)
    before: list[State | None] = [None] * len(code)
    before[0] = {}
    due = [0]
    while due:
        at = due.pop()
        state = before[at]
        assert state is not None
        after = dict(state)
        for place, word in _Step(state, code[at]).written():
            made = Word(frozenset({(at, place)})) if word is None else word
            if code[at].guard and state.get(place) != made:
                after.pop(place, None)
            else:
                after[place] = made
        for follower in following[at]:
            other = before[follower]
            if other is None:
                before[follower] = after
                due.append(follower)
                continue
            joined = {place: word for place, word in other.items() if after.get(place) == word}
            if len(joined) < len(other):
                before[follower] = joined
                due.append(follower)
    return before


class _Step:
    """What one instruction writes: (place, word), None for what is not followed."""

    def __init__(self, state: State, instruction: Instruction) -> None:
        self.state, self.instruction = state, instruction
        self.arguments = list(instruction.arguments)

    def written(self) -> Iterator[tuple[str, Word | None]]:
        """Each place, and its word."""
        return _FOLLOWED.get(self.instruction.name, _Step._other)(self)

    def word(self, argument: str) -> Word | None:
        """The word of an operand, if anything is known of it."""
        if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", argument):
            return known(int(argument, 0))
        if argument.lstrip("-") in ("RZ", "URZ", "SRZ"):
            return known(0)
        found = self.state.get(argument.lstrip("-~"))
        if found is None or not argument.startswith(("-", "~")):
            return found
        if found.names:
            return None
        return known(-found.bits if argument.startswith("-") else ~found.bits)

    def bits(self, argument: str) -> int | None:
        """The bits of an operand that is known."""
        word = self.word(argument)
        return None if word is None or word.names else word.bits

    def registers(self, first: str, count: int) -> list[str]:
        """So many registers from one on."""
        found = _REGISTER.fullmatch(first)
        return [f"{found[1]}{int(found[2]) + n}" for n in range(count)] if found else []

    def _other(self) -> Iterator[tuple[str, Word | None]]:
        """Whatever it is, what it writes comes first."""
        name = self.instruction.name
        if name.startswith(("ST", "RED", "UTMA", "SYNCS", "BAR", "BRA")):
            return
        width = next(
            (n for v, n in (("128", 4), ("64", 2), ("WIDE", 2), ("4", 4)) if self._is(v)), 1
        )
        if name == "HGMMA":
            columns = re.match(r"64x(\d+)x", self.instruction.operation.split(".")[1])
            width = int(columns[1]) // 2 if columns else 128
        if name == "CS2R":
            width = 1 if self._is("32") else 2
        for argument in self.arguments[:3]:
            if re.fullmatch(r"U?P\d", argument):
                yield argument, None
        destination = next((a for a in self.arguments[:3] if _REGISTER.fullmatch(a)), "")
        zero = name == "CS2R" and self.arguments[-1] == "SRZ"
        for register in self.registers(destination, width):
            yield register, known(0) if zero else None

    def _is(self, variant: str) -> bool:
        return self.instruction.has(variant)

    def _mov(self) -> Iterator[tuple[str, Word | None]]:
        yield self.arguments[0], self.word(self.arguments[1])

    def _r2ur(self) -> Iterator[tuple[str, Word | None]]:
        target, source = (a for a in self.arguments if not _PREDICATE.fullmatch(a))
        yield target, self.word(source)

    def _stl(self) -> Iterator[tuple[str, Word | None]]:
        width = 4 if self._is("128") else 2 if self._is("64") else 1
        place = _LOCAL.fullmatch(self.arguments[0])
        if place is None:
            return
        names = self.registers(self.arguments[1], width) or ["RZ"] * width
        for number, name in enumerate(names):
            yield f"local {int(place[1] or '0', 16) + 4 * number}", self.word(name)

    def _ldl(self) -> Iterator[tuple[str, Word | None]]:
        width = 4 if self._is("128") else 2 if self._is("64") else 1
        place = _LOCAL.fullmatch(self.arguments[1])
        for number, name in enumerate(self.registers(self.arguments[0], width)):
            start = None if place is None else int(place[1] or "0", 16) + 4 * number
            yield name, None if start is None else self.state.get(f"local {start}")

    def _lop3(self) -> Iterator[tuple[str, Word | None]]:
        arguments = self.arguments
        if re.fullmatch(r"U?P\d", arguments[0]):
            yield arguments.pop(0), None
        left, right = self.word(arguments[1]), self.word(arguments[2])
        if arguments[4] == _EXCLUSIVE_OR and left is not None and right is not None:
            yield arguments[0], left ^ right
        else:
            yield arguments[0], None

    def _imad(self) -> Iterator[tuple[str, Word | None]]:
        target, *rest = self.arguments
        if self._is("WIDE") or self._is("HI") or _PREDICATE.fullmatch(rest[0]):
            yield from self._other()
            return
        factors, summand = rest[:2], rest[2]
        is_move = any(self.bits(factor) == 0 for factor in factors)
        if self._is("X"):
            total = self._sum([summand], rest[3:])
            yield target, total if is_move else None
        else:
            yield target, self.word(summand) if is_move else None

    def _iadd3(self) -> Iterator[tuple[str, Word | None]]:
        if self._is("64"):
            yield from self._add_pairs()
            return
        target, *rest = self.arguments
        carries_out = []
        while rest and _PREDICATE.fullmatch(rest[0]):
            carries_out.append(rest.pop(0))
        summands = [a for a in rest if not _PREDICATE.fullmatch(a)]
        carries_in = [a for a in rest if _PREDICATE.fullmatch(a)]
        yield target, self._sum(summands, carries_in)
        for carry in carries_out:
            if re.fullmatch(r"U?P\d", carry):
                is_last = self._is("X")
                yield carry, None if is_last else known(self._carry(summands))

    def _add_pairs(self) -> Iterator[tuple[str, Word | None]]:
        """A sum of 64 bits: three pairs of registers."""
        low, high = self.registers(self.arguments[0], 2)
        total: int | None = 0
        for argument in self.arguments[1:4]:
            sign = -1 if argument.startswith("-") else 1
            name = argument.lstrip("-")
            if name == "URZ":
                continue
            if name.startswith("0x"):
                low_bits, high_bits = int(name, 16) & _WORD, int(name, 16) >> 32
            else:
                pair = self.registers(name, 2)
                high_word = self.bits(pair[1])
                total = None if total is None or high_word is None else total
                low_bits, high_bits = self.bits(pair[0]) or 0, high_word or 0
            if total is not None:
                total += sign * (high_bits + (low_bits >= _NEGATIVE))
        yield low, None
        yield high, None if total is None else known(total)

    def _sum(self, summands: list[str], carries: list[str]) -> Word | None:
        """The sum of words and carries, if the words are known.

        Of an unknown carry, as one that was kept as a bit among others, nothing comes: see above.
        """
        total = 0
        for argument in summands:
            bits = self.bits(argument)
            if bits is None:
                return None
            total += bits
        for carry in carries:
            if carry.lstrip("!") in ("PT", "UPT"):
                total += not carry.startswith("!")
                continue
            bits = self.bits(carry.lstrip("!"))
            if bits is not None:
                total += 1 - bits if carry.startswith("!") else bits
        return known(total)

    def _carry(self, summands: list[str]) -> int:
        """What adding to a lower half carries: nothing, or what borrows nothing is a 1."""
        bits = [self.bits(argument) for argument in summands]
        if None in bits:
            return int(any(b is not None and b >= _NEGATIVE for b in bits))
        return int(sum(b for b in bits if b is not None) > _WORD)

    def _sel(self) -> Iterator[tuple[str, Word | None]]:
        target, left, right = self.arguments[:3]
        yield target, self.word(left) if self.word(left) == self.word(right) else None


# What constants are followed through.
_FOLLOWED: dict[str, Callable[[_Step], Iterator[tuple[str, Word | None]]]] = {
    "MOV": _Step._mov,
    "UMOV": _Step._mov,
    "R2UR": _Step._r2ur,
    "STL": _Step._stl,
    "LDL": _Step._ldl,
    "LOP3": _Step._lop3,
    "ULOP3": _Step._lop3,
    "IMAD": _Step._imad,
    "IADD3": _Step._iadd3,
    "UIADD3": _Step._iadd3,
    "VIADD": _Step._iadd3,
    "SEL": _Step._sel,
    "USEL": _Step._sel,
}
