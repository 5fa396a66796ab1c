"""A kernel's source text from a problem and the way to walk it, and the function it defines.

The text depends on nothing but the two, and the function's source can be inspected, so the key of
its artifact sees it. Values are kept in float32, float64 or 64-bit integers; what an operation
stores is rounded to its data type, in the graph or outside of it.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import triton
import triton.language as tl

from tilewright.dtypes import DataType
from tilewright.engines.triton import device_math, pointwise_functions
from tilewright.engines.triton.addressing import Axis
from tilewright.engines.triton.pointwise_layout import Problem, Walk, combining
from tilewright.engines.triton.pointwise_modes import (
    CONDITION,
    DOUBLE,
    SINGLE,
    WHOLE,
    arithmetic_kind,
    expression,
    floating_kind,
    literal,
)
from tilewright.engines.triton.pointwise_nodes import Apply, Node, Read, Reduce, Scalar, operands_of
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor

_NARROW = {
    DataType.HALF: "tl.float16",
    DataType.BFLOAT16: "tl.bfloat16",
    DataType.FP8_E4M3: "tl.float8e4nv",
    DataType.FP8_E5M2: "tl.float8e5",
}
_FP8 = (DataType.FP8_E4M3, DataType.FP8_E5M2)
_INTEGERS = {
    DataType.INT8: ("tl.int8", -(2**7), 2**7 - 1),
    DataType.UINT8: ("tl.uint8", 0, 2**8 - 1),
    DataType.INT32: ("tl.int32", -(2**31), 2**31 - 1),
    DataType.INT64: ("tl.int64", -(2**63), 2**63 - 1),
}
# Mode -> (each element, neutral element in floating and whole numbers, the row's reduction, how
# two are joined, the result).
_REDUCTIONS = {
    "ADD": ("{0}", "0.0", "0", "row_sum", "{0} + {1}", "{0}"),
    "AVG": ("{0}", "0.0", "0", "row_sum", "{0} + {1}", "average({0}, {count})"),
    "NORM1": ("tl.abs({0})", "0.0", "0", "row_sum", "{0} + {1}", "{0}"),
    "NORM2": ("{0} * {0}", "0.0", "0", "row_sum", "{0} + {1}", "root({0})"),
    "MUL": ("{0}", "1.0", "1", "row_product", "{0} * {1}", "{0}"),
    "MUL_NO_ZEROS": ("tl.where({0} == 0, 1.0, {0})", "1.0", "1", "row_product", "{0} * {1}", "{0}"),
    "AMAX": ("tl.abs({0})", "0.0", "0", "row_max", "larger({0}, {1})", "{0}"),
    "MAX": (
        "{0}", 'float("-inf")', "-9223372036854775808", "row_max", "larger({0}, {1})", "{0}",
    ),
    "MIN": ("{0}", 'float("inf")', "9223372036854775807", "row_min", "smaller({0}, {1})", "{0}"),
}  # fmt: skip
_INTEGER_REDUCTIONS = frozenset({"ADD", "MAX", "MIN", "AMAX", "NORM1"})
# What a reduction over no axis makes of an element.
_ELEMENTWISE = {
    "AMAX": "tl.abs({0})",
    "NORM1": "tl.abs({0})",
    "NORM2": "tl.abs({0})",
    "MUL_NO_ZEROS": "tl.where({0} == 0, 1.0, {0})",
}
_LARGEST_UNIT = 16
# What a kernel is for: all of it, the parts of its reductions, or joining those.
_WHOLE, _PARTS, _JOIN = "whole", "parts", "join"


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


@dataclass(frozen=True)
class _Value:
    """A computed value: the variable, what it is kept in, and the variable as it is stored."""

    name: str
    kind: str
    stored: str


def generate(problem: Problem, walk: Walk) -> list[Generated]:
    """The sources: one kernel, or one for the parts of a reduction and one that joins them.

    Raises:
        NotSupportedError: for a mode or data type that generated kernels do not have.
    """
    if walk.parts == 1:
        return [_Writer(problem, walk, _WHOLE).write()]
    return [
        _Writer(problem, walk, _PARTS).write(),
        _Writer(problem, combining(walk), _JOIN, walk.parts).write(),
    ]


@functools.lru_cache(maxsize=1024)
def function_of(name: str, text: str) -> object:
    """The jitted function that ``text`` defines as ``name``; one for each text."""
    file = f"<generated {name}>"
    # With no time stamp the lines are never looked for on a disk.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, object] = {"__name__": __name__, "triton": triton, "tl": tl, **_names()}
    exec(compile(text, file, "exec"), names)
    return names[name]


@functools.cache
def _names() -> dict[str, object]:
    """What expressions call."""
    found: dict[str, object] = {}
    for module in (device_math, pointwise_functions):
        for name in dir(module):
            member = getattr(module, name)
            if not name.startswith("_") and callable(member) and not isinstance(member, type):
                found[name] = member
    return found


class _Writer:
    def __init__(self, problem: Problem, walk: Walk, task: str, parts: int = 1) -> None:
        self.problem, self.walk, self.task = problem, walk, task
        self.parts = walk.parts if task == _PARTS else parts
        self.made = Generated(walk=walk)
        self.values: dict[int, _Value] = {}
        self.results = problem.results()
        # Lines before the loop over reduced tiles, in it and after it; without a loop, all before.
        self.before: list[str] = []
        self.body: list[str] = []
        self.after: list[str] = []
        self.numbers: dict[int, str] = {}
        self.count = 0
        self.is_flat = not walk.rows and not walk.is_reduction
        self.reads = {id(node): at for at, node in enumerate(problem.reads)}

    def write(self) -> Generated:
        head = self._index()
        stores: dict[int, list[int]] = {}
        for position, (_, node) in enumerate(self.problem.outputs):
            # Of two kernels the first writes what has elements along the reduced axes.
            if self.task == _WHOLE or (self.task == _PARTS) == self.problem.is_full(node):
                stores.setdefault(id(node), []).append(position)
        needed = self._needed(stores)
        for node in self.problem.nodes:
            if id(node) not in needed:
                continue
            self.values[id(node)] = self._value(node)
            for position in stores.get(id(node), []):
                self._store(position, node)
        lines = head + self.before
        if self.walk.is_looped:
            extent = self._number(_extent(self.walk.inner))
            span = f"0, {extent}"
            if self.task == _PARTS:
                tiles = -(-_extent(self.walk.inner) // self.walk.block_inner)
                size = self._number(-(-tiles // self.parts) * self.walk.block_inner)
                span = f"part * {size}, min((part + 1) * {size}, {extent})"
            lines += [f"for start in range({span}, BLOCK_I):"]
            lines += ["    " + line for line in [*self._inner_index("start"), *self.body]]
            lines += self.after
        made = self.made
        names = [name for name, _ in made.tensors.values()]
        names += [name for name, _, _ in made.shares]
        names += [name for name, _ in made.scalars.values()]
        names += [name for name, _, _ in made.integers]
        names += ["BLOCK_R: tl.constexpr", "BLOCK_I: tl.constexpr"]
        body = "".join(f"    {line}\n" for line in lines)
        digest = hashlib.sha256((", ".join(names) + body).encode()).hexdigest()[:16]
        made.name = f"chain_{digest}"
        made.text = f"@triton.jit\ndef {made.name}({', '.join(names)}):\n{body}"
        return made

    def _needed(self, stores: dict[int, list[int]]) -> set[int]:
        """ids of the nodes that this kernel computes."""
        needed = set(stores)
        for node in reversed(self.problem.nodes):
            takes_axes = self.problem.takes_axes(node)
            if self.task == _PARTS and takes_axes:
                needed.add(id(node))
            if id(node) in needed and not (self.task == _JOIN and takes_axes):
                needed.update(id(operand) for operand in operands_of(node))
        return needed

    # -- the index --------------------------------------------------------------------------------

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
        if self.task == _PARTS:
            self._integer("parts", self.parts, "i32")
            lines += ["part = (program % parts).to(tl.int64)", "program = program // parts"]
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
            if _extent(walk.rows) % walk.block_rows:
                lines += [f"in_r = r < {self._number(_extent(walk.rows))}"]
            lines += self._digits("r", walk.rows)
        if self.task != _WHOLE:
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
        rows = _extent(self.walk.rows)
        return f"({text}) * {self._number(rows)} + r" if text else "r"

    def _inner_index(self, start: str) -> list[str]:
        start = f"{start} + " if start else ""
        index = f"{start}tl.arange(0, BLOCK_I).to(tl.int64)"
        lines = [f"i = {index}" if self.is_flat else f"i = ({index})[None, :]"]
        if self.walk.is_reduction or _extent(self.walk.inner) % self.walk.block_inner:
            lines += [f"in_i = i < {self._number(_extent(self.walk.inner))}"]
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
        if value not in self.numbers:
            unit = math.gcd(value, _LARGEST_UNIT)
            name = f"n{len(self.numbers)}"
            whole = unit == _LARGEST_UNIT
            self._integer(name, value if whole else value // unit, "i64")
            if whole:
                self.made.aligned.add(name)
            self.numbers[value] = name if whole or unit == 1 else f"({name} * {unit})"
        return self.numbers[value]

    def _integer(self, name: str, value: int, kind: str) -> None:
        self.made.integers.append((name, value, kind))

    # -- values -----------------------------------------------------------------------------------

    def _section(self, node: Node) -> list[str]:
        if not self.walk.is_looped:
            return self.before
        if self.problem.is_full(node):
            return self.body
        return self.after if id(node) in self.results else self.before

    def _set(self, lines: list[str], text: str) -> str:
        name = f"v{self.count}"
        self.count += 1
        lines.append(f"{name} = {text}")
        return name

    def _value(self, node: Node) -> _Value:
        if isinstance(node, Scalar):
            return self._scalar(node)
        if isinstance(node, Read):
            return self._read(node)
        if isinstance(node, Apply):
            operation = node.operation
            operands = [operation.inputs[p] for p in ("in0", "in1", "in2") if p in operation.inputs]
            kind = arithmetic_kind(operation.mode, operands, operation.outputs["out"])
            lines = self._section(node)
            names = [self._converted(lines, self.values[id(o)], kind) for o in node.operands]
            text, kind = expression(operation, names, kind)
            return self._settled(lines, self._set(lines, text), kind, node.data_type)
        return self._reduced(node)

    def _scalar(self, node: Scalar) -> _Value:
        name = self.made.scalars.setdefault(
            node.tensor.uid, (f"s{len(self.made.scalars)}", node.tensor)
        )[0]
        kind = SINGLE if node.data_type.is_floating else WHOLE
        kind = DOUBLE if node.data_type is DataType.DOUBLE else kind
        # A block, since the interpreter hands over Python's own numbers, and loses the type of a
        # condition that is no block.
        name = self._set(self.before, f"tl.full({self._single()}, {name}, {kind})")
        return _Value(name, kind, name)

    def _read(self, node: Read) -> _Value:
        position = self.reads[id(node)]
        address, has_rows, has_inner = self._address(position, self.problem.offsets[position])
        lines = self._section(node)
        if node.tensor is None:
            name = self._set(lines, self._widened(address, has_rows or has_inner))
            return _Value(name, WHOLE, name)
        pointer = self._pointer(node.tensor)
        self._note_contiguity(node.tensor, position)
        mask = self._mask(has_rows, has_inner)
        place = f"{pointer} + {self._widened(address, has_rows or has_inner)}"
        loaded = self._set(lines, f"tl.load({place}{f', mask={mask}' if mask else ''})")
        data_type = node.data_type
        if data_type in (DataType.FLOAT, DataType.DOUBLE):
            return _Value(loaded, SINGLE if data_type is DataType.FLOAT else DOUBLE, loaded)
        kind = SINGLE if data_type in _NARROW else WHOLE
        if kind == WHOLE and data_type not in _INTEGERS and data_type is not DataType.BOOLEAN:
            raise NotSupportedError(
                f"tensor {node.tensor.label()} has data type {data_type.name}; generated kernels "
                "do not read it"
            )
        return _Value(self._set(lines, f"cast({loaded}, {kind})"), kind, loaded)

    def _single(self) -> str:
        """The shape of one element, in the kernel's rank."""
        return "(1,)" if self.is_flat else "(1, 1)"

    def _widened(self, address: str, is_block: bool) -> str:
        """An address as a block: values are blocks throughout."""
        if is_block:
            return address
        single = f"tl.zeros({self._single()}, tl.int64)"
        return f"{address} + {single}" if address else single

    def _pointer(self, tensor: Tensor) -> str:
        tensors = self.made.tensors
        return tensors.setdefault(tensor.uid, (f"p{len(tensors)}", tensor))[0]

    def _note_contiguity(self, tensor: Tensor, position: int) -> None:
        axes = [axes[-1] for axes in (self.walk.rows, self.walk.inner) if axes]
        if any(axis.strides[position] == 1 for axis in axes):
            self.made.contiguous.add(tensor.uid)

    def _mask(self, has_rows: bool, has_inner: bool) -> str:
        walk = self.walk
        parts = []
        if has_rows and _extent(walk.rows) % walk.block_rows:
            parts.append("in_r")
        if has_inner and _extent(walk.inner) % walk.block_inner:
            parts.append("in_i")
        return " & ".join(parts)

    def _converted(self, lines: list[str], value: _Value, kind: str) -> str:
        return value.name if value.kind == kind else self._set(lines, f"cast({value.name}, {kind})")

    def _settled(self, lines: list[str], name: str, kind: str, data_type: DataType) -> _Value:
        """A result rounded to its data type."""
        if data_type in (DataType.FLOAT, DataType.DOUBLE):
            target = SINGLE if data_type is DataType.FLOAT else DOUBLE
            if kind != target:
                name = self._set(lines, f"cast({name}, {target})")
            return _Value(name, target, name)
        if data_type in _NARROW:
            if kind in (CONDITION, WHOLE):
                name = self._set(lines, f"cast({name}, {DOUBLE if kind == WHOLE else SINGLE})")
            target = _NARROW[data_type]
            text = f"narrow({name}, {target})"
            if data_type in _FP8:
                text = f"saturated({name}, {target}, {literal(data_type.layout.largest)})"
            stored = self._set(lines, text)
            return _Value(self._set(lines, f"cast({stored}, {SINGLE})"), SINGLE, stored)
        if data_type is DataType.BOOLEAN:
            stored = name if kind == CONDITION else self._set(lines, f"{name} != 0")
            return _Value(self._set(lines, f"cast({stored}, {WHOLE})"), WHOLE, stored)
        if data_type not in _INTEGERS:
            raise NotSupportedError(f"generated kernels do not write {data_type.name}")
        target, low, high = _INTEGERS[data_type]
        if kind == CONDITION:
            text = f"cast({name}, {WHOLE})"
        elif kind == WHOLE:
            text = name if data_type is DataType.INT64 else f"within({name}, {low}, {high})"
        elif data_type is DataType.INT64:
            text = f"to_int64({name})"
        else:
            text = f"to_integer({name}, {literal(low)}, {literal(high)})"
        held = self._set(lines, text)
        return _Value(held, WHOLE, self._set(lines, f"cast({held}, {target})"))

    # -- reductions -------------------------------------------------------------------------------

    def _reduced(self, node: Reduce) -> _Value:
        mode = node.mode.name
        source = node.operation.inputs["input"]
        tensors = (source, node.operation.outputs["out"])
        whole = source.data_type.is_integer and mode in _INTEGER_REDUCTIONS
        kind = WHOLE if whole else floating_kind(tensors)
        if not self.problem.takes_axes(node):
            lines = self._section(node)
            name = self._converted(lines, self.values[id(node.operand)], kind)
            name = self._set(lines, _ELEMENTWISE.get(mode, "{0}").format(name))
            return self._settled(lines, name, kind, node.data_type)
        element, neutral, whole_neutral, reduce, join, result = _REDUCTIONS[mode]
        neutral = whole_neutral if kind == WHOLE else neutral
        if self.task == _JOIN:
            lines, name = self.before, self._shared(kind)
        else:
            lines = self.body if self.walk.is_looped else self.before
            name = self._converted(lines, self.values[id(node.operand)], kind)
            name = self._set(lines, element.format(name))
        name = self._set(lines, f"tl.where(in_i, {name}, {neutral})")
        if self.walk.is_looped:
            total = self._set(self.before, f"tl.full((BLOCK_R, BLOCK_I), {neutral}, {kind})")
            lines.append(f"{total} = {join.format(total, name)}")
            name, lines = total, self.after
        name = self._set(lines, f"{reduce}({name})")
        if self.task == _PARTS:
            share = self._share(kind)
            mask = self._mask(True, False)
            place = f"{share} + part * {self._number(self.walk.kept)} + result"
            lines.append(f"tl.store({place}, {name}{f', mask={mask}' if mask else ''})")
            return _Value(name, kind, name)
        count = math.prod(a for a, b in zip(node.source_dim, node.dim, strict=True) if a != b)
        name = self._set(lines, result.format(name, count=literal(count)))
        return self._settled(lines, name, kind, node.data_type)

    def _share(self, kind: str) -> str:
        """The buffer between the kernels for the next reduction."""
        name = f"q{len(self.made.shares)}"
        self.made.shares.append((name, kind, self.parts * self.walk.kept))
        return name

    def _shared(self, kind: str) -> str:
        place = f"{self._share(kind)} + i * {self._number(self.walk.kept)} + result"
        mask = self._mask(True, True)
        return self._set(self.before, f"tl.load({place}{f', mask={mask}' if mask else ''})")

    # -- results ----------------------------------------------------------------------------------

    def _store(self, position: int, node: Node) -> None:
        walk = self.walk
        tensor = self.problem.outputs[position][0]
        place = position + len(self.problem.reads)
        lines = self._section(node)
        value = self.values[id(node)]
        stored = value.stored
        if isinstance(node, Read | Scalar):
            stored = self._settled(lines, value.name, value.kind, tensor.data_type).stored
        address, has_rows, has_inner = self._address(place, 0)
        parts = [self._mask(has_rows, has_inner)]
        # What has no extent along an axis is written by the first program there alone.
        if not has_rows and walk.row_tiles > 1:
            parts.append("(tile_r == 0)")
        if not has_inner and walk.inner_tiles > 1:
            parts.append("(tile_i == 0)")
        parts += [f"(a{at} == 0)" for at, axis in enumerate(walk.outer) if not axis.strides[place]]
        mask = " & ".join(part for part in parts if part)
        address = self._widened(address, has_rows or has_inner)
        self._note_contiguity(tensor, place)
        pointer = self._pointer(tensor)
        lines.append(f"tl.store({pointer} + {address}, {stored}{f', mask={mask}' if mask else ''})")


def _extent(axes: Sequence[Axis]) -> int:
    return math.prod(axis.extent for axis in axes)
