"""Normalization kernels with pointwise operations written into them.

A kernel's own source has marks, lines such as ``# fused: input``. For a graph that has more than
the norm, a function is defined from that source with lines in the marks' places and arguments for
what they read and write. A norm alone runs the source as it stands. What a mark may use: ``raw``
(the elements of x as loaded), ``values`` (in the type of the arithmetic) and ``result``.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.dtypes import DataType
from tilewright.engines.triton import device_math, norm_tiles, pointwise_functions
from tilewright.engines.triton.norm_fusion import Fusion, normalized_axes
from tilewright.engines.triton.pointwise_modes import (
    CONDITION,
    DOUBLE,
    SINGLE,
    WHOLE,
    arithmetic_kind,
    expression,
    literal,
)
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

_FLOATING = {
    DataType.HALF: "tl.float16",
    DataType.BFLOAT16: "tl.bfloat16",
    DataType.FP8_E4M3: "tl.float8e4nv",
    DataType.FP8_E5M2: "tl.float8e5",
}
_INTEGERS = {
    DataType.INT8: ("tl.int8", -(2**7), 2**7 - 1),
    DataType.UINT8: ("tl.uint8", 0, 2**8 - 1),
    DataType.INT32: ("tl.int32", -(2**31), 2**31 - 1),
}
_MARK = "# fused: "


@dataclass(frozen=True)
class Spot:
    """How a kernel names, at its marks, the addresses and masks of what else is read there.

    ``row`` and ``column`` are offsets with ``{0}`` for the operand's name.
    """

    row: str
    column: str
    in_row: str
    in_column: str


WHOLE_ROWS = Spot(
    "place(row, inner_rows, {0}_outer, {0}_inner, ROW_AXES)[:, None]",
    "place(column, INNER_COLUMNS, {0}_jump, {0}_step, COLUMN_AXES)[None, :]",
    "(row < rows)[:, None]",
    "in_width[None, :]",
)
TILES = Spot(
    "place(row, inner_rows, {0}_outer, {0}_inner, ROW_AXES)[:, None]",
    "(run * {0}_jump + column * {0}_step)[None, :]",
    "in_rows[:, None]",
    "in_columns[None, :]",
)


def fused_kernel(function: Any, fusion: Fusion, spot: Spot, names: dict[int, str]) -> Any:
    """``function`` with the operations of ``fusion`` in the places of its marks.

    ``names`` maps the uid of what is read, written or passed by value to the argument's name; the
    parts of maximum n are ``maximum_n``.

    Raises:
        NotSupportedError: for a mode or data type that kernels do not have.
    """
    if fusion.is_plain:
        return function
    writer = _Writer(fusion, spot, names)
    marks = writer.marks()
    lines = []
    used: set[str] = set()
    for line in inspect.getsource(function.fn).splitlines():
        mark = line.strip()
        if mark.startswith(_MARK):
            indent = line[: len(line) - len(line.lstrip())]
            inserted = marks[mark.removeprefix(_MARK)]
            used.update(*(re.findall(r"\w+", text) for text in inserted))
            lines += [indent + text for text in inserted]
        else:
            lines.append(line)
    text = "\n".join(lines) + "\n"
    arguments = "".join(f"    {name},\n" for name in writer.arguments if name in used)
    text = text.replace("(\n", "(\n" + arguments, 1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    name = f"{function.fn.__name__}_{digest}"
    text = text.replace(f"def {function.fn.__name__}(", f"def {name}(", 1)
    return _function(name, text, function)


@functools.lru_cache(maxsize=1024)
def _function(name: str, text: str, function: Any) -> Any:
    """What ``text`` defines as ``name``, among the names of the module of ``function``."""
    file = f"<generated {name}>"
    # With no time stamp the lines are never looked for on a disk.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {**_names(), **function.fn.__globals__}
    exec(compile(text, file, "exec"), names)
    return names[name]


@functools.cache
def _names() -> dict[str, Any]:
    """What expressions call."""
    found: dict[str, Any] = {}
    for module in (device_math, pointwise_functions, norm_tiles):
        for name in dir(module):
            member = getattr(module, name)
            if not name.startswith("_") and callable(member) and not isinstance(member, type):
                found[name] = member
    return found


@dataclass(frozen=True)
class _Value:
    """A variable, what it is kept in, and the variable as it is stored."""

    name: str
    kind: str
    stored: str


class _Writer:
    def __init__(self, fusion: Fusion, spot: Spot, names: dict[int, str]) -> None:
        self.fusion, self.spot, self.names = fusion, spot, names
        self.values: dict[int, _Value] = {}
        self.lines: list[str] = []
        self.count = 0
        self.arguments: list[str] = []
        for tensor in (*fusion.reads, *fusion.writes):
            name = names[tensor.uid]
            self.arguments += [name, *(f"{name}_{s}" for s in ("outer", "inner", "jump", "step"))]
        self.arguments += [names[tensor.uid] for tensor in fusion.scalars]
        self.arguments += [f"maximum_{number}" for number in range(len(fusion.maxima))]
        source = fusion.source
        wide = DataType.DOUBLE in (source.data_type, fusion.norm.inputs["input"].data_type)
        self.compute = DOUBLE if wide else SINGLE

    def marks(self) -> dict[str, list[str]]:
        """Mark -> the lines in its place."""
        fusion = self.fusion
        input_lines = self._taken(self._before, is_stored=False)
        self.values, self.count = {}, 0
        stored_lines = self._taken(self._before, is_stored=True)
        result_lines = self._taken(self._after)
        numbers = range(len(fusion.maxima))
        bits = "tl.int64" if self.compute == DOUBLE else "tl.int32"
        store = "tl.store(maximum_{0} + tl.program_id(0), bits_{0})"
        return {
            "input": input_lines,
            "input and stores": stored_lines,
            "result": result_lines,
            "start": [f"bits_{n} = tl.full((), 0, {bits})" for n in numbers],
            "end": [store.format(n) for n in numbers],
        }

    def _taken(self, write: Any, **options: Any) -> list[str]:
        self.lines = []
        write(**options)
        return self.lines

    def _before(self, is_stored: bool) -> None:
        source = self.fusion.source
        self.values[source.uid] = self._kept("raw", source)
        for item in self.fusion.before:
            self._apply(item)
            if is_stored:
                self._store(item.outputs["out"])
        if self.fusion.before:
            name = self._converted(self.values[self.fusion.norm.inputs["input"].uid], self.compute)
            self.lines.append(f"values = tl.where(inside, {name}, 0.0)")

    def _after(self) -> None:
        y = self.fusion.norm.outputs["Y"]
        if self.fusion.after or self.fusion.maxima:
            self.values[y.uid] = self._settled("result", self.compute, y.data_type)
        for item in self.fusion.after:
            self._apply(item)
            self._store(item.outputs["out"])
        for number, item in enumerate(self.fusion.maxima):
            value = self._value(item.inputs["input"])
            name = self._converted(value, self.compute)
            bits = "tl.int64" if self.compute == DOUBLE else "tl.int32"
            # As whole numbers, magnitudes are in the same order, and NaN is above them all.
            name = self._set(f"tl.abs({name}).to({bits}, bitcast=True)")
            name = self._set(f"tl.where(inside, {name}, 0)")
            name = self._set(f"tl.max(tl.max({name}, axis=1), axis=0)")
            self.lines.append(f"bits_{number} = tl.maximum(bits_{number}, {name})")

    def _apply(self, item: Operation) -> None:
        operands = [item.inputs[port] for port in ("in0", "in1", "in2") if port in item.inputs]
        out = item.outputs["out"]
        kind = arithmetic_kind(item.mode, operands, out)
        names = [self._converted(self._value(tensor), kind) for tensor in operands]
        text, kind = expression(item, names, kind)
        self.values[out.uid] = self._settled(self._set(text), kind, out.data_type)

    def _value(self, tensor: Tensor) -> _Value:
        if tensor.uid not in self.values:
            if tensor.is_pass_by_value:
                kind = SINGLE if tensor.data_type.is_floating else WHOLE
                kind = DOUBLE if tensor.data_type is DataType.DOUBLE else kind
                name = self._set(f"tl.full((1, 1), {self.names[tensor.uid]}, {kind})")
                self.values[tensor.uid] = _Value(name, kind, name)
            else:
                self.values[tensor.uid] = self._kept(self._set(self._load(tensor)), tensor)
        return self.values[tensor.uid]

    def _load(self, tensor: Tensor) -> str:
        at, mask = self._place(tensor)
        return f"tl.load({at}, mask={mask})" if mask else f"tl.load({at})"

    def _place(self, tensor: Tensor) -> tuple[str, str]:
        """Pointers to a tensor's elements here, and their mask."""
        name, spot = self.names[tensor.uid], self.spot
        lead = (1,) * (len(self._dim) - tensor.rank)
        dim = (*lead, *tensor.dim)[-len(self._dim) :]
        columns = set(self._columns)
        by_column = any(n != 1 for axis, n in enumerate(dim) if axis in columns)
        by_row = any(n != 1 for axis, n in enumerate(dim) if axis not in columns)
        parts = [name]
        parts += [spot.row.format(name)] if by_row else []
        parts += [spot.column.format(name)] if by_column else []
        if not by_row and not by_column:
            return f"{name} + tl.zeros((1, 1), tl.int64)", ""
        masks = ([spot.in_row] if by_row else []) + ([spot.in_column] if by_column else [])
        return " + ".join(parts), " & ".join(masks)

    @property
    def _dim(self) -> tuple[int, ...]:
        return self.fusion.norm.inputs["input"].dim

    @property
    def _columns(self) -> Sequence[int]:
        return normalized_axes(self.fusion.norm)

    def _store(self, tensor: Tensor) -> None:
        if tensor.is_virtual:
            return
        name, spot = self.names[tensor.uid], self.spot
        at = f"{name} + {spot.row.format(name)} + {spot.column.format(name)}"
        self.lines.append(f"tl.store({at}, {self.values[tensor.uid].stored}, mask=inside)")

    def _kept(self, loaded: str, tensor: Tensor) -> _Value:
        """A loaded variable in what it is kept in."""
        data_type = tensor.data_type
        if data_type in (DataType.FLOAT, DataType.DOUBLE):
            return _Value(loaded, SINGLE if data_type is DataType.FLOAT else DOUBLE, loaded)
        kind = SINGLE if data_type in _FLOATING else WHOLE
        whole = (*_INTEGERS, DataType.INT64, DataType.BOOLEAN)
        if kind == WHOLE and data_type not in whole:
            raise NotSupportedError(
                f"tensor {tensor.label()} has data type {data_type.name}; the kernels do not "
                "read it"
            )
        return _Value(self._set(f"cast({loaded}, {kind})"), kind, loaded)

    def _settled(self, name: str, kind: str, data_type: DataType) -> _Value:
        """A result rounded to its data type."""
        if data_type in (DataType.FLOAT, DataType.DOUBLE):
            target = SINGLE if data_type is DataType.FLOAT else DOUBLE
            if kind != target:
                name = self._set(f"cast({name}, {target})")
            return _Value(name, target, name)
        if data_type in _FLOATING:
            if kind in (CONDITION, WHOLE):
                name = self._set(f"cast({name}, {DOUBLE if kind == WHOLE else SINGLE})")
            stored = self._set(f"stored({name}, {_FLOATING[data_type]})")
            return _Value(self._set(f"cast({stored}, {SINGLE})"), SINGLE, stored)
        if data_type is DataType.BOOLEAN:
            held = name if kind == CONDITION else self._set(f"{name} != 0")
            return _Value(self._set(f"cast({held}, {WHOLE})"), WHOLE, held)
        if data_type not in _INTEGERS:
            raise NotSupportedError(
                f"beside {self.fusion.norm.title()} the kernels write no {data_type.name}"
            )
        target, low, high = _INTEGERS[data_type]
        if kind == CONDITION:
            name = self._set(f"cast({name}, {WHOLE})")
        elif kind == WHOLE:
            name = self._set(f"within({name}, {low}, {high})")
        else:
            name = self._set(f"to_integer({name}, {literal(low)}, {literal(high)})")
        return _Value(name, WHOLE, self._set(f"cast({name}, {target})"))

    def _converted(self, value: _Value, kind: str) -> str:
        return value.name if value.kind == kind else self._set(f"cast({value.name}, {kind})")

    def _set(self, text: str) -> str:
        name = f"v{self.count}"
        self.count += 1
        self.lines.append(f"{name} = {text}")
        return name
