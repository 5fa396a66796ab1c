"""The index part of a generated kernel's text: which elements a program walks, and where they are.

See ``pointwise_codegen``. Extents and strides become arguments, so that the text is the same for
others; of those that are multiples of 16 the compiler is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.engines.triton.addressing import Axis
from tilewright.engines.triton.pointwise_layout import Problem, Walk
from tilewright.graph.tensor import Tensor

_LARGEST_UNIT = 16
# What a kernel is for: all of it, the parts of its reductions, or joining those.
WHOLE_TASK, PARTS_TASK, JOIN_TASK = "whole", "parts", "join"


@dataclass
class Generated:
    """Source text and what its arguments stand for, in order.

    ``integers`` are (name, value, Triton's type); ``aligned`` names those that are multiples of
    16, and ``contiguous`` the tensors whose neighbouring elements a tile reads or writes.
    """

    name: str = ""
    text: str = ""
    tensors: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    scalars: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    integers: list[tuple[str, int, str]] = field(default_factory=list)
    aligned: set[str] = field(default_factory=set)
    contiguous: set[int] = field(default_factory=set)
    walk: Walk = field(default_factory=lambda: Walk((), (), (), 1, 1))
    # Between two kernels: (name, kind, elements) of what each reduction gives for the parts.
    shares: list[tuple[str, str, int]] = field(default_factory=list)


class IndexWriter:
    """Writes indices, addresses and masks of one kernel."""

    def __init__(self, problem: Problem, walk: Walk, task: str, parts: int = 1) -> None:
        self.problem, self.walk, self.task = problem, walk, task
        self.parts = walk.parts if task == PARTS_TASK else parts
        self.made = Generated(walk=walk)
        self.is_flat = not walk.rows and not walk.is_reduction
        self._numbers: dict[int, str] = {}

    def _index(self) -> list[str]:
        walk = self.walk
        lines = ["program = tl.program_id(0)"]
        if walk.inner_tiles > 1:
            self._integer("tiles_i", walk.inner_tiles, "i32")
            lines += ["tile_i = program % tiles_i", "program = program // tiles_i"]
        else:
            lines += ["tile_i = 0"]
        if walk.row_tiles > 1:
            self._integer("tiles_r", walk.row_tiles, "i32")
            lines += ["tile_r = program % tiles_r", "program = program // tiles_r"]
        else:
            lines += ["tile_r = 0"]
        if self.task == PARTS_TASK:
            self._integer("parts", self.parts, "i32")
            lines += [
                "part = (program % parts).to(tl.int64)",
                "program = program // parts",
            ]
        for at in reversed(range(len(walk.outer))):
            if at:
                self._integer(f"extent_{at}", walk.outer[at].extent, "i32")
                lines += [f"a{at} = (program % extent_{at}).to(tl.int64)"]
                lines += [f"program = program // extent_{at}"]
            else:
                lines += ["a0 = program.to(tl.int64)"]
        if not self.is_flat:
            start = "tile_r.to(tl.int64) * BLOCK_R + " if walk.row_tiles > 1 else ""
            lines += [f"r = ({start}tl.arange(0, BLOCK_R).to(tl.int64))[:, None]"]
            if extent_of(walk.rows) % walk.block_rows:
                lines += [f"in_r = r < {self._number(extent_of(walk.rows))}"]
            lines += self._digits("r", walk.rows)
        if self.task != WHOLE_TASK:
            lines += [f"result = {self._result_number()}"]
        if not walk.is_looped:
            start = "tile_i.to(tl.int64) * BLOCK_I" if walk.inner_tiles > 1 else ""
            lines += self._inner_index(start)
        return lines

    def _result_number(self) -> str:
        """The number of a kept element among all of them."""
        text = ""
        for at, axis in enumerate(self.walk.outer):
            text = f"({text}) * {self._number(axis.extent)} + a{at}" if text else f"a{at}"
        rows = extent_of(self.walk.rows)
        return f"({text}) * {self._number(rows)} + r" if text else "r"

    def _inner_index(self, start: str) -> list[str]:
        start = f"{start} + " if start else ""
        index = f"{start}tl.arange(0, BLOCK_I).to(tl.int64)"
        lines = [f"i = {index}" if self.is_flat else f"i = ({index})[None, :]"]
        if self.walk.is_reduction or extent_of(self.walk.inner) % self.walk.block_inner:
            lines += [f"in_i = i < {self._number(extent_of(self.walk.inner))}"]
        return lines + self._digits("i", self.walk.inner)

    def _digits(self, name: str, axes: Sequence[Axis]) -> list[str]:
        """The indices of several axes that share one number, which int32 holds."""
        if len(axes) < 2:
            return []
        lines = [f"{name}_all = {name}.to(tl.int32)"]
        inner = 1
        for at in reversed(range(len(axes))):
            digit = f"{name}_all // {inner}" if inner > 1 else f"{name}_all"
            digit = f"({digit}) % {axes[at].extent}" if at else f"({digit})"
            lines += [f"{name}{at} = ({digit}).to(tl.int64)"]
            inner *= axes[at].extent
        return lines

    def _address(self, position: int, offset: int) -> tuple[str, bool, bool]:
        """(offset of an access as text, does it step rows, does it step the inner index)."""
        walk = self.walk
        scalar = [self._number(offset)] if offset else []
        for at, axis in enumerate(walk.outer):
            scalar += self._term(f"a{at}", axis.strides[position])
        rows = self._terms("r", walk.rows, position)
        inner = self._terms("i", walk.inner, position)
        parts = [f"({' + '.join(scalar)})"] if scalar else []
        return " + ".join([*parts, *rows, *inner]), bool(rows), bool(inner)

    def _terms(self, name: str, axes: Sequence[Axis], position: int) -> list[str]:
        terms = []
        for at, axis in enumerate(axes):
            digit = name if len(axes) == 1 else f"{name}{at}"
            terms += self._term(digit, axis.strides[position])
        return terms

    def _term(self, name: str, stride: int) -> list[str]:
        if not stride:
            return []
        return [name] if stride == 1 else [f"{name} * {self._number(stride)}"]

    def _number(self, value: int) -> str:
        """A run-time integer as text: an argument, times a known divisor for the compiler."""
        if value not in self._numbers:
            unit = math.gcd(value, _LARGEST_UNIT)
            name = f"n{len(self._numbers)}"
            whole = unit == _LARGEST_UNIT
            self._integer(name, value if whole else value // unit, "i64")
            if whole:
                self.made.aligned.add(name)
            self._numbers[value] = name if whole or unit == 1 else f"({name} * {unit})"
        return self._numbers[value]

    def _integer(self, name: str, value: int, kind: str) -> None:
        self.made.integers.append((name, value, kind))

    def _mask(self, has_rows: bool, has_inner: bool) -> str:
        walk = self.walk
        parts = []
        if has_rows and extent_of(walk.rows) % walk.block_rows:
            parts.append("in_r")
        if has_inner and extent_of(walk.inner) % walk.block_inner:
            parts.append("in_i")
        return " & ".join(parts)

    def _single(self) -> str:
        """The shape of one element, in the kernel's rank."""
        return "(1,)" if self.is_flat else "(1, 1)"

    def _widened(self, address: str, is_block: bool) -> str:
        """An address as a block: values are blocks throughout."""
        if is_block:
            return address
        single = f"tl.zeros({self._single()}, tl.int64)"
        return f"{address} + {single}" if address else single

    def _note_contiguity(self, tensor: Tensor, position: int) -> None:
        axes = [axes[-1] for axes in (self.walk.rows, self.walk.inner) if axes]
        if any(axis.strides[position] == 1 for axis in axes):
            self.made.contiguous.add(tensor.uid)


def extent_of(axes: Sequence[Axis]) -> int:
    """The number of indices of several axes."""
    return math.prod(axis.extent for axis in axes)
