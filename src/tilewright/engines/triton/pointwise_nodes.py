"""A graph of pointwise operations, reductions and moves as expressions over bound tensors.

Moves (reshape, transpose, slice) are pushed to the tensors that are read, where they are a matter
of addressing; what lies between is computed once for each way in which it is looked at. Pure.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilewright.dtypes import DataType
from tilewright.engines.triton.addressing import Access, Dim, access_of
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import reduction_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.shapes import broadcast_dims
from tilewright.graph.tensor import Tensor

Change = Callable[[Access], Access]


@dataclass(frozen=True, eq=False)
class Read:
    """The elements of a bound tensor; of no tensor: the offset itself, which is an index."""

    tensor: Tensor | None
    access: Access

    @property
    def dim(self) -> Dim:
        return self.access.dim

    @property
    def data_type(self) -> DataType:
        return DataType.INT64 if self.tensor is None else self.tensor.data_type


@dataclass(frozen=True, eq=False)
class Scalar:
    """A number that the call passes by value."""

    tensor: Tensor
    dim: Dim = ()

    @property
    def data_type(self) -> DataType:
        return self.tensor.data_type


@dataclass(frozen=True, eq=False)
class Apply:
    """A pointwise operation, rounded to its output's data type."""

    operation: Operation
    operands: tuple[Node, ...]
    dim: Dim

    @property
    def data_type(self) -> DataType:
        return self.operation.outputs["out"].data_type


@dataclass(frozen=True, eq=False)
class Reduce:
    """A reduction; ``source_dim`` is that of its input, ``dim`` has 1 on the reduced axes."""

    operation: Operation
    operand: Node
    source_dim: Dim
    dim: Dim

    @property
    def data_type(self) -> DataType:
        return self.operation.outputs["out"].data_type

    @property
    def mode(self) -> reduction_mode:
        return self.operation.mode


Node = Read | Scalar | Apply | Reduce


def expressions(graph: DeclaredGraph) -> list[tuple[Tensor, Node]]:
    """(bound output, its expression) in declaration order.

    Raises:
        NotSupportedError: naming the operation or tensor and the rule.
    """
    values: dict[int, Node] = {}

    def value(tensor: Tensor) -> Node:
        if tensor.uid not in values:
            values[tensor.uid] = _bound(tensor)
        return values[tensor.uid]

    for operation in graph.operations:
        out = operation.outputs["out"]
        if operation.kind == "pointwise":
            values[out.uid] = _apply(operation, value)
        elif operation.kind == "reduction":
            source = operation.inputs["input"]
            values[out.uid] = Reduce(operation, value(source), source.dim, out.dim)
        else:
            source = operation.inputs["input"]
            change = _change(operation)
            values[out.uid] = _moved(value(source), source.dim, out.dim, change, operation, {})
    return [(tensor, values[tensor.uid]) for tensor in graph.outputs()]


def walk(nodes: Sequence[Node]) -> Iterator[Node]:
    """Every node once, operands before what uses them."""
    seen: set[int] = set()

    def visit(node: Node) -> Iterator[Node]:
        if id(node) in seen:
            return
        seen.add(id(node))
        for operand in operands_of(node):
            yield from visit(operand)
        yield node

    for node in nodes:
        yield from visit(node)


def operands_of(node: Node) -> tuple[Node, ...]:
    """What a node is computed from."""
    if isinstance(node, Apply):
        return node.operands
    return (node.operand,) if isinstance(node, Reduce) else ()


def joint_dim(dims: Sequence[Dim]) -> Dim:
    """The broadcast of all dims.

    Raises:
        NotSupportedError: if they do not fit.
    """
    whole: Dim = ()
    for dim in dims:
        joined = broadcast_dims(whole, dim)
        if joined is None:
            raise NotSupportedError(
                f"values of dim {whole} and {dim} do not broadcast to one another; a generated "
                "kernel walks one index"
            )
        whole = joined
    return whole


def _bound(tensor: Tensor) -> Node:
    if tensor.is_pass_by_value:
        return Scalar(tensor)
    if tensor.ragged_offset is not None or tensor.reordering_type.name != "NONE":
        raise NotSupportedError(
            f"tensor {tensor.label()} is ragged or reordered; generated kernels take strided "
            "tensors"
        )
    return Read(tensor, access_of(tensor.dim, tensor.stride))


def _apply(operation: Operation, value: Callable[[Tensor], Node]) -> Node:
    out = operation.outputs["out"]
    if operation.mode != "gen_index":
        ports = [port for port in ("in0", "in1", "in2") if port in operation.inputs]
        return Apply(operation, tuple(value(operation.inputs[p]) for p in ports), out.dim)
    dim = operation.inputs["in0"].dim
    steps = [0] * len(dim)
    steps[operation.axis] = 1
    return Apply(operation, (Read(None, access_of(dim, steps)),), out.dim)


def _change(operation: Operation) -> Change:
    out = operation.outputs["out"]
    if operation.kind == "reshape":
        return lambda access: access.reshaped(out.dim)
    if operation.kind == "transpose":
        return lambda access: access.permuted(operation.permutation)
    return lambda access: access.sliced(operation.slices)


def _moved(
    node: Node, dim: Dim, new_dim: Dim, change: Change, operation: Operation, done: dict[int, Node]
) -> Node:
    """``node``, broadcast to ``dim``, looked at through ``change``."""
    if id(node) in done:
        return done[id(node)]
    result: Node
    if isinstance(node, Scalar):
        result = node
    elif isinstance(node, Read):
        try:
            result = Read(node.tensor, change(node.access.expanded(dim)))
        except NotSupportedError as error:
            label = "an index" if node.tensor is None else f"tensor {node.tensor.label()}"
            raise NotSupportedError(f"{operation.title()} of {label}: {error}") from error
    elif isinstance(node, Apply):
        operands = [_moved(o, dim, new_dim, change, operation, done) for o in node.operands]
        result = Apply(node.operation, tuple(operands), new_dim)
    else:
        result = _moved_reduction(node, len(dim), operation)
    done[id(node)] = result
    return result


def _moved_reduction(node: Reduce, rank: int, operation: Operation) -> Node:
    """The reduction of what is moved instead: axes change places, and kept ones are cut."""
    lead = (1,) * (rank - len(node.dim))
    source_dim, dim = lead + node.source_dim, lead + node.dim
    if operation.kind == "transpose":
        order = operation.permutation
        new_source = tuple(source_dim[axis] for axis in order)
        new_dim = tuple(dim[axis] for axis in order)
        change: Change = operator.methodcaller("permuted", order)
    elif operation.kind == "slice":
        whole = (0, None, 1)
        cuts = [*operation.slices, *(whole,) * (rank - len(operation.slices))]
        # An axis that is reduced, or repeated afterwards, has nothing to cut.
        cuts = [cut if extent > 1 else whole for cut, extent in zip(cuts, dim, strict=True)]
        new_dim = tuple(
            len(range(*slice(*cut).indices(extent))) for cut, extent in zip(cuts, dim, strict=True)
        )
        pairs = zip(source_dim, dim, new_dim, strict=True)
        new_source = tuple(new if extent > 1 else source for source, extent, new in pairs)
        change = operator.methodcaller("sliced", cuts)
    else:
        raise NotSupportedError(
            f"{operation.title()} regroups the result of {node.operation.title()}; a generated "
            "kernel regroups what it reads, not what it has reduced"
        )
    operand = _moved(node.operand, source_dim, new_source, change, operation, {})
    return Reduce(node.operation, operand, new_source, new_dim)
