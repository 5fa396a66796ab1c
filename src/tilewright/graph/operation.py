"""An operation of a graph: a frozen record of its ports and attributes.

Each family file under ``graph/operations`` subclasses ``Operation``: it names the ports, holds
the attributes as fields, infers what the user left open, and checks what the user gave.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import field
from typing import Any, ClassVar

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.attributes import coerce
from tilewright.graph.tensor import Tensor, packed_strides, strides_in_order_of
from tilewright.records import field_names, record

_COMMON_FIELDS = frozenset({"name", "compute_data_type", "inputs", "outputs"})


@record(frozen=True, kw_only=True, eq=False)
class Operation:
    """One node. ``inputs`` and ``outputs`` map port names to tensors; absent ports are absent."""

    kind: ClassVar[str] = ""
    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    produces: ClassVar[tuple[str, ...]] = ()
    # Output ports that exist only if the user passes a tensor for them.
    accepts_outputs: ClassVar[tuple[str, ...]] = ()
    # Prefixes of list ports: each accepts "prefix0", "prefix1", ... beside the names above.
    list_port: ClassVar[str | tuple[str, ...]] = ()
    # Output ports that every form of the operation has, beside the first one it produces.
    required_outputs: ClassVar[tuple[str, ...]] = ()
    # Pairs (output port, input port) whose buffers may be one where their layouts are.
    shares: ClassVar[tuple[tuple[str, str], ...]] = ()

    name: str = ""
    compute_data_type: DataType = DataType.NOT_SET
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)

    def infer(self) -> None:
        """Fill dim, stride and data type of the outputs where the user left them open."""

    def check(self) -> None:
        """Check the meaning of the operation once everything is known.

        Raises:
            GraphError: naming the tensor, what was given, what was expected, and the rule.
        """

    def open_nested(self) -> None:
        """Declare the tensors that feed nested operations, before those are inferred."""

    def nested_operations(self) -> Sequence[Operation]:
        """Operations inside this one (a score program's), in order."""
        return ()

    @property
    def in_place(self) -> tuple[tuple[str, str], ...]:
        """Pairs (output port, input port) whose buffers may be one and the same.

        Of the pairs that the operation permits, those with one dim, stride and data type: element
        i of the output is then written over element i of the input.
        """
        return tuple(
            (out, source)
            for out, source in self.shares
            if out in self.outputs
            and source in self.inputs
            and _same_layout(self.outputs[out], self.inputs[source])
        )

    def attributes(self) -> dict[str, Any]:
        """The attributes by name: every field but the ports, the name and the compute type."""
        return {name: getattr(self, name) for name in attribute_hints(type(self))}

    def title(self) -> str:
        """How messages call this operation."""
        return f"{self.kind} {self.name!r}" if self.name else self.kind

    def fill(
        self,
        port: str,
        dim: Sequence[int],
        *,
        stride: Sequence[int] | None = None,
        order_of: Tensor | None = None,
        data_type: DataType | None = None,
    ) -> None:
        """Fill what is open on output ``port``; a port without a tensor is passed over.

        Without ``stride`` the strides are packed, in the axis order of ``order_of`` if given.
        ``data_type`` is for outputs whose type the operation fixes (Stats); others take the
        graph's.
        """
        tensor = self.outputs.get(port)
        if tensor is None:
            return
        if not tensor.dim:
            tensor.dim = tuple(dim)
        if not tensor.stride:
            if stride is not None and tensor.dim == tuple(dim):
                tensor.stride = tuple(stride)
            elif order_of is not None:
                tensor.stride = strides_in_order_of(tensor.dim, order_of.stride, order_of.dim)
            else:
                tensor.stride = packed_strides(tensor.dim)
        if data_type is not None and tensor.data_type is DataType.NOT_SET:
            tensor.data_type = data_type

    def fail(self, message: str) -> typing.NoReturn:
        """Raise GraphError with this operation's title before ``message``."""
        raise GraphError(f"{self.title()}: {message}")

    def require_dim(self, port: str, expected: Sequence[int], rule: str) -> None:
        """Require that the tensor on ``port`` (input or output, if present) has this dim."""
        tensor = self.inputs.get(port) or self.outputs.get(port)
        if tensor is not None and tensor.dim != tuple(expected):
            self.fail(
                f"tensor {tensor.label()} ({port}) has dim {tensor.dim}; "
                f"expected {tuple(expected)}: {rule}"
            )

    def require_rank(self, port: str, low: int, high: int, rule: str) -> None:
        """Require low <= rank <= high of the tensor on ``port``, if present."""
        tensor = self.inputs.get(port) or self.outputs.get(port)
        if tensor is not None and not low <= tensor.rank <= high:
            wanted = str(low) if low == high else f"{low} to {high}"
            self.fail(
                f"tensor {tensor.label()} ({port}) has rank {tensor.rank}; "
                f"expected {wanted}: {rule}"
            )

    def require_type(self, port: str, accepted: Sequence[DataType], rule: str) -> None:
        """Require that the tensor on ``port`` (if present) has one of these data types."""
        tensor = self.inputs.get(port) or self.outputs.get(port)
        if tensor is not None and tensor.data_type not in accepted:
            names = ", ".join(data_type.name for data_type in accepted)
            self.fail(
                f"tensor {tensor.label()} ({port}) has data type {tensor.data_type.name}; "
                f"expected one of {names}: {rule}"
            )

    def require_broadcast(self, port: str, target: Sequence[int], rule: str) -> None:
        """Require that the tensor on ``port`` (if present) broadcasts to ``target``, same rank."""
        tensor = self.inputs.get(port) or self.outputs.get(port)
        if tensor is None:
            return
        fits = tensor.rank == len(target) and all(
            have in (1, want) for have, want in zip(tensor.dim, target, strict=True)
        )
        if not fits:
            self.fail(
                f"tensor {tensor.label()} ({port}) has dim {tensor.dim}; "
                f"expected 1 or the extent of {tuple(target)} on each axis: {rule}"
            )


def _same_layout(first: Tensor, second: Tensor) -> bool:
    """True for the same dim and data type, and the same stride on every axis that is stepped."""
    return (
        first.dim == second.dim
        and first.data_type is second.data_type
        and all(
            extent == 1 or a == b
            for extent, a, b in zip(first.dim, first.stride, second.stride, strict=True)
        )
    )


_KINDS: dict[str, type[Operation]] = {}
OperationType = typing.TypeVar("OperationType", bound=Operation)


def operation_kind(kind: str) -> Callable[[type[OperationType]], type[OperationType]]:
    """Register the decorated record under its kind (the name in JSON and in engines)."""

    def register(record: type[OperationType]) -> type[OperationType]:
        if kind in _KINDS:
            raise ValueError(f"operation kind {kind!r} is registered twice")
        record.kind = kind
        _KINDS[kind] = record
        return record

    return register


def operation_kinds() -> dict[str, type[Operation]]:
    """Every operation record by kind."""
    from tilewright.graph.operations.late import load_families

    load_families()
    return dict(_KINDS)


_HINTS: dict[str, Mapping[str, Any]] = {}


def attribute_hints(record: type[Operation]) -> Mapping[str, Any]:
    """Attribute name -> type hint of a record, in field order."""
    if record.kind not in _HINTS:
        names = [name for name in field_names(record) if name not in _COMMON_FIELDS]
        hints = _type_hints(record, frozenset(names))
        _HINTS[record.kind] = {name: hints[name] for name in names}
    return _HINTS[record.kind]


def _type_hints(record: type[Operation], names: Set[str]) -> dict[str, Any]:
    """The types of these fields; Python 3.10 cannot read those of a class with a bare ClassVar."""
    hints: dict[str, Any] = {}
    for base in reversed(record.__mro__):
        own = vars(base).get("__annotations__", {})
        fields = {name: own[name] for name in own if name in names}
        holder = types.SimpleNamespace(__annotations__=fields)
        hints |= typing.get_type_hints(holder, vars(sys.modules[base.__module__]))
    return hints


def coerce_attributes(record: type[Operation], given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` converted to the record's field types.

    Raises:
        GraphError: for an unknown attribute or a value that does not fit, naming both.
    """
    hints = attribute_hints(record)
    coerced = {}
    for name, value in given.items():
        if name not in hints:
            known = ", ".join(hints) or "none"
            raise GraphError(f"{record.kind}: no attribute {name!r}; known are {known}")
        coerced[name] = coerce(hints[name], value, f"{record.kind}: attribute {name!r}")
    return coerced


def check_ports(record: type[Operation], inputs: Mapping[str, Tensor], title: str) -> None:
    """Require every required port and no unknown one.

    Raises:
        GraphError: naming the port.
    """
    for port in record.required:
        if port not in inputs:
            raise GraphError(f"{title}: the required input {port!r} is missing")
    prefixes = (record.list_port,) if isinstance(record.list_port, str) else record.list_port
    for port in inputs:
        known = port in record.required or port in record.optional
        listed = any(port.startswith(p) and port[len(p) :].isdecimal() for p in prefixes)
        if not known and not listed:
            raise GraphError(f"{title}: no input {port!r}")


def walk(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Every operation and, before it, those nested inside it."""
    for operation in operations:
        yield from walk(operation.nested_operations())
        yield operation
