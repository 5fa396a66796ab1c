"""One graph under construction, every decision of it drawn by Hypothesis."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import tilewright
from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.tensor import Tensor, packed_strides

Choice = TypeVar("Choice")
Dim = tuple[int, ...]

EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 31, 33)
# Operands stay below this, so that ten thousand graphs take minutes.
MAX_ELEMENTS = 1500
SINGLETON_STRIDES = (0, 1, 5, 2**40 + 1, 2**62)

FLOAT, HALF, BFLOAT16, DOUBLE = (
    DataType.FLOAT,
    DataType.HALF,
    DataType.BFLOAT16,
    DataType.DOUBLE,
)
FP8 = (DataType.FP8_E4M3, DataType.FP8_E5M2)
INTEGERS = (DataType.INT8, DataType.UINT8, DataType.INT32, DataType.INT64)
# As often as they occur here.
WIDE = (FLOAT, FLOAT, FLOAT, HALF, HALF, BFLOAT16, BFLOAT16, DOUBLE)
FLOATS = (*WIDE, *WIDE, *FP8)
SCALAR_RANK = 4


@dataclass(frozen=True)
class Value:
    """A tensor of the graph and what its maker knows about it.

    ``exact``: every engine has these numbers bit for bit, so that a step may be taken at them.
    """

    tensor: Tensor
    dim: Dim
    data_type: DataType
    exact: bool


@dataclass
class Case:
    """A drawn graph, and what its inputs are to hold beyond what their roles tell."""

    graph: Any
    seed: int
    # The refusal, if declaring the graph already met one.
    error: GraphError | None = None
    # Numbers of inputs that the draw decides: lengths, mostly.
    given: list[tuple[Tensor, tuple[int, ...]]] = field(default_factory=list)
    # Floating inputs that get NaN, infinities and zeros among their numbers.
    special: list[Tensor] = field(default_factory=list)
    # Results that are the same bits whatever computes them.
    exact: list[Tensor] = field(default_factory=list)
    # Bind inputs as one flat axis instead of in their shape.
    flat: bool = False

    def __repr__(self) -> str:
        given = [(tensor.name, values) for tensor, values in self.given]
        return f"seed {self.seed}, given {given}: {self.shape_text()}"

    def shape_text(self) -> str:
        """The graph apart from its numbers: operations, dims, strides and types."""
        if self.error is not None:
            return f"refused at declaration: {self.error}"
        return "; ".join(
            f"{operation.title()}({_listed(operation.inputs)}) -> {_listed(operation.outputs)}"
            for operation in self.graph.operations
        )


def _listed(ports: Any) -> str:
    return ", ".join(
        f"{port}={tensor.name or tensor.uid}:{tensor.data_type.name}{tensor.dim}/{tensor.stride}"
        + ("v" if tensor.is_virtual else "")
        for port, tensor in ports.items()
    )


class Drawing:
    """Draws tensors and choices for one graph; families declare their operations with it."""

    def __init__(self, random: Random) -> None:
        # Hypothesis's own Random: it shrinks as strategies do, and its draws have no labels by
        # which Hypothesis would copy parts of one graph into the next, over and over.
        self._random = random
        self._serial = itertools.count()
        self.values: list[Value] = []
        graph = tilewright.pygraph(
            io_data_type=self.pick((FLOAT, HALF, BFLOAT16)),
            intermediate_data_type=self.pick((FLOAT, FLOAT, HALF, BFLOAT16)),
        )
        self.case = Case(graph, seed=self._random.randrange(2**31))

    @property
    def graph(self) -> Any:
        return self.case.graph

    # -- choices --------------------------------------------------------------------------------

    def pick(self, choices: Sequence[Choice]) -> Choice:
        return choices[self._random.randrange(len(choices))]

    def chance(self, percent: int) -> bool:
        return self._random.randrange(100) >= 100 - percent

    def extent(self, limit: int) -> int:
        """An extent of at most ``limit``, seldom 0."""
        if self.chance(2):
            return 0
        return self.pick([extent for extent in EXTENTS if extent <= max(limit, 1)])

    def dim(self, rank: int, limit: int = MAX_ELEMENTS) -> Dim:
        """A shape of at most ``limit`` elements."""
        dim = []
        for axis in range(rank):
            # Later axes keep room for two elements each.
            extent = self.extent(max(limit >> (rank - 1 - axis), 1))
            dim.append(extent)
            limit = max(limit // max(extent, 1), 1)
        order = self.permutation(rank)
        return tuple(dim[axis] for axis in order)

    def permutation(self, count: int) -> list[int]:
        order = list(range(count))
        for last in reversed(range(1, count)):
            other = last - self._random.randrange(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def subset(self, items: Iterable[int]) -> tuple[int, ...]:
        return tuple(item for item in items if self.chance(50))

    # -- layouts --------------------------------------------------------------------------------

    def strides(self, dim: Dim, *, distinct: bool = False) -> Dim:
        """Strides: packed, permuted, padded, expanded (unless ``distinct``), odd on singletons."""
        rank, style = len(dim), self.pick(("packed", "permuted", "padded", "padded", "expanded"))
        order = list(range(rank)) if style == "packed" else self.permutation(rank)
        strides, step = [1] * rank, 1
        if style == "padded":
            step = self.pick((1, 1, 2, 3))
        for axis in reversed(order):
            strides[axis] = step
            step *= max(dim[axis], 1)
            if style == "padded":
                step += self.pick((0, 1, 3, 5))
        if style == "expanded" and not distinct:
            axis = self.pick(range(rank))
            strides[axis] = 0
        if self.chance(12):
            for axis, extent in enumerate(dim):
                if extent == 1:
                    strides[axis] = self.pick(SINGLETON_STRIDES)
        return tuple(strides)

    # -- tensors --------------------------------------------------------------------------------

    def input(
        self,
        dim: Sequence[int],
        data_type: DataType,
        strides: Sequence[int] | None = None,
        **more: Any,
    ) -> Value:
        """A new bound operand."""
        dim = tuple(dim)
        tensor = self.graph.tensor(
            dim=dim,
            stride=self.strides(dim) if strides is None else tuple(strides),
            data_type=data_type,
            name=f"t{next(self._serial)}",
            **more,
        )
        return Value(tensor, dim, data_type, exact=True)

    def operand(
        self, dim: Sequence[int], types: Sequence[DataType], *, exact: bool = False
    ) -> Value:
        """An operand of this dim: one that exists, or a new one."""
        fits = [
            value
            for value in self.values
            if value.dim == tuple(dim) and value.data_type in types and (value.exact or not exact)
        ]
        if fits and self.chance(40):
            return self.pick(fits)
        value = self.input(dim, self.pick(types))
        self.values.append(value)
        return value

    def scalar(self, value: float, types: Sequence[DataType] = (FLOAT,)) -> Any:
        """A number on a port: a plain one, a scalar by value, or one that the call brings."""
        form = self.pick(("number", "tensor", "by value"))
        if form == "number":
            return value
        if form == "tensor":
            return self.graph.tensor_scalar(value, self.pick(types))
        rank = self.pick((1, SCALAR_RANK))
        return self.input((1,) * rank, self.pick(types), is_pass_by_value=True).tensor

    def given(
        self, dim: Sequence[int], types: Sequence[DataType], numbers: Sequence[int]
    ) -> Tensor:
        """An integer input whose numbers are drawn here."""
        tensor = self.input(dim, self.pick(types), packed_strides(tuple(dim))).tensor
        self.case.given.append((tensor, tuple(numbers)))
        return tensor

    def result(
        self,
        tensor: Tensor,
        dim: Sequence[int],
        types: Sequence[DataType] = (),
        *,
        exact: bool = False,
        layout: bool = True,
        set_dim: bool = False,
    ) -> Value:
        """What an operation made: its type from ``types`` (none: the graph's default), its layout.

        Most results stay inside the graph; whatever the graph ends with becomes an output.
        """
        dim = tuple(dim)
        if set_dim:
            tensor.set_dim(dim)
        if self.chance(25):
            tensor.set_output(True)
        if types:
            tensor.set_data_type(self.pick(types))
        if layout and self.chance(40):
            tensor.set_dim(dim).set_stride(self.strides(dim, distinct=True))
        data_type = tensor.data_type
        if not types:
            graph = self.graph
            data_type = graph.intermediate_data_type if tensor.is_virtual else graph.io_data_type
            # What ends as an output would change its type with that.
            tensor.set_data_type(data_type)
        if exact:
            self.case.exact.append(tensor)
        value = Value(tensor, dim, data_type, exact)
        self.values.append(value)
        return value


def result_types(source: DataType) -> tuple[DataType, ...]:
    """Types that a floating result of a ``source`` operand is stored in, as often as here."""
    return (source, source, FLOAT, FLOAT, HALF, BFLOAT16, DOUBLE, *FP8)
