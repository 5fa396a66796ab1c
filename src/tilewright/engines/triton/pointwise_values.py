"""The values of a generated kernel's text: what is read, computed, rounded and reduced.

See ``pointwise_codegen``. Values are kept in float32, float64 or 64-bit integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.dtypes import DataType
from tilewright.engines.triton.pointwise_index import (
    JOIN_TASK,
    PARTS_TASK,
    IndexWriter,
)
from tilewright.engines.triton.pointwise_layout import Problem, Walk
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
from tilewright.engines.triton.pointwise_nodes import Apply, Node, Read, Reduce, Scalar
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


@dataclass(frozen=True)
class Value:
    """A computed value: the variable, what it is kept in, and the variable as it is stored."""

    name: str
    kind: str
    stored: str


class ValueWriter(IndexWriter):
    """Writes the lines that compute the values of one kernel's nodes."""

    def __init__(self, problem: Problem, walk: Walk, task: str, parts: int = 1) -> None:
        super().__init__(problem, walk, task, parts)
        self.values: dict[int, Value] = {}
        self.results = problem.results()
        self.reads = {id(node): at for at, node in enumerate(problem.reads)}
        # Lines before the loop over reduced tiles, in it and after it; without a loop, all before.
        self.before: list[str] = []
        self.body: list[str] = []
        self.after: list[str] = []
        self._count = 0

    def _section(self, node: Node) -> list[str]:
        if not self.walk.is_looped:
            return self.before
        if self.problem.is_full(node):
            return self.body
        return self.after if id(node) in self.results else self.before

    def _set(self, lines: list[str], text: str) -> str:
        name = f"v{self._count}"
        self._count += 1
        lines.append(f"{name} = {text}")
        return name

    def _value(self, node: Node) -> Value:
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

    def _scalar(self, node: Scalar) -> Value:
        name = self.made.scalars.setdefault(
            node.tensor.uid, (f"s{len(self.made.scalars)}", node.tensor)
        )[0]
        kind = SINGLE if node.data_type.is_floating else WHOLE
        kind = DOUBLE if node.data_type is DataType.DOUBLE else kind
        # A block, since the interpreter hands over Python's own numbers, and loses the type of a
        # condition that is no block.
        name = self._set(self.before, f"tl.full({self._single()}, {name}, {kind})")
        return Value(name, kind, name)

    def _read(self, node: Read) -> Value:
        position = self.reads[id(node)]
        address, has_rows, has_inner = self._address(position, self.problem.offsets[position])
        lines = self._section(node)
        if node.tensor is None:
            name = self._set(lines, self._widened(address, has_rows or has_inner))
            return Value(name, WHOLE, name)
        pointer = self._pointer(node.tensor)
        self._note_contiguity(node.tensor, position)
        mask = self._mask(has_rows, has_inner)
        place = f"{pointer} + {self._widened(address, has_rows or has_inner)}"
        loaded = self._set(lines, f"tl.load({place}{f', mask={mask}' if mask else ''})")
        data_type = node.data_type
        if data_type in (DataType.FLOAT, DataType.DOUBLE):
            return Value(loaded, SINGLE if data_type is DataType.FLOAT else DOUBLE, loaded)
        kind = SINGLE if data_type in _NARROW else WHOLE
        if kind == WHOLE and data_type not in _INTEGERS and data_type is not DataType.BOOLEAN:
            raise NotSupportedError(
                f"tensor {node.tensor.label()} has data type {data_type.name}; generated kernels "
                "do not read it"
            )
        return Value(self._set(lines, f"cast({loaded}, {kind})"), kind, loaded)

    def _pointer(self, tensor: Tensor) -> str:
        tensors = self.made.tensors
        return tensors.setdefault(tensor.uid, (f"p{len(tensors)}", tensor))[0]

    def _converted(self, lines: list[str], value: Value, kind: str) -> str:
        return value.name if value.kind == kind else self._set(lines, f"cast({value.name}, {kind})")

    def _settled(self, lines: list[str], name: str, kind: str, data_type: DataType) -> Value:
        """A result rounded to its data type."""
        if data_type in (DataType.FLOAT, DataType.DOUBLE):
            target = SINGLE if data_type is DataType.FLOAT else DOUBLE
            if kind != target:
                name = self._set(lines, f"cast({name}, {target})")
            return Value(name, target, name)
        if data_type in _NARROW:
            if kind in (CONDITION, WHOLE):
                name = self._set(lines, f"cast({name}, {DOUBLE if kind == WHOLE else SINGLE})")
            target = _NARROW[data_type]
            text = f"narrow({name}, {target})"
            if data_type in _FP8:
                text = f"saturated({name}, {target}, {literal(data_type.layout.largest)})"
            stored = self._set(lines, text)
            return Value(self._set(lines, f"cast({stored}, {SINGLE})"), SINGLE, stored)
        if data_type is DataType.BOOLEAN:
            stored = name if kind == CONDITION else self._set(lines, f"{name} != 0")
            return Value(self._set(lines, f"cast({stored}, {WHOLE})"), WHOLE, stored)
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
        return Value(held, WHOLE, self._set(lines, f"cast({held}, {target})"))

    # -- reductions -------------------------------------------------------------------------------

    def _reduced(self, node: Reduce) -> Value:
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
        if self.task == JOIN_TASK:
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
        if self.task == PARTS_TASK:
            share = self._share(kind)
            mask = self._mask(True, False)
            place = f"{share} + part * {self._number(self.walk.kept)} + result"
            lines.append(f"tl.store({place}, {name}{f', mask={mask}' if mask else ''})")
            return Value(name, kind, name)
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
