"""A tensor of a graph: a declaration, never storage."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tilewright.dtypes import DataType, as_data_type
from tilewright.errors import GraphError
from tilewright.graph.attributes import coerce, shown
from tilewright.graph.enums import tensor_reordering

if TYPE_CHECKING:
    from tilewright.graph.builder import Builder

Scalar = bool | int | float

MAX_RANK = 8
INT64_MAX = 2**63 - 1


def as_extents(values: Iterable[int], what: str, tensor_name: str) -> tuple[int, ...]:
    """``values`` as a tuple of 64-bit ints.

    Raises:
        GraphError: if an entry is no integer or does not fit 64 bits.
    """
    try:
        extents = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise GraphError(
            f"tensor {tensor_name!r}: {what} is {shown(values)}; expected a sequence of integers"
        ) from error
    for extent in extents:
        if not -INT64_MAX <= extent <= INT64_MAX:
            raise GraphError(f"tensor {tensor_name!r}: {what} {shown(extent)} does not fit 64 bits")
    return extents


def packed_strides(dim: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``dim``, in elements, last axis fastest."""
    strides = [1] * len(dim)
    for axis in range(len(dim) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(dim[axis + 1], 1)
    return tuple(strides)


def strides_in_order_of(
    dim: Sequence[int], model_stride: Sequence[int], model_dim: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Packed strides of ``dim`` whose axes are ordered in memory as the model's are.

    A channels-last model gives channels-last strides. On equal strides an axis of extent 1 (known
    from ``model_dim``) is the faster one, as it is in any packed layout, then the later axis. A
    model of another rank, or one expanded by stride 0, tells no order: row-major.
    """
    extents = (0,) * len(dim) if model_dim is None else model_dim
    if len(dim) != len(model_stride) or len(extents) != len(dim):
        return packed_strides(dim)
    if any(step == 0 and extent != 1 for step, extent in zip(model_stride, extents, strict=True)):
        return packed_strides(dim)

    def step_and_ties(axis: int) -> tuple[int, bool, int]:
        return model_stride[axis], extents[axis] != 1, -axis

    order = sorted(range(len(dim)), key=step_and_ties)  # fastest axis first
    strides = [1] * len(dim)
    step = 1
    for axis in order:
        strides[axis] = step
        step *= max(dim[axis], 1)
    return tuple(strides)


class Tensor:
    """A declared tensor: dim and stride in elements, data type, and its role in the graph.

    Made by ``Graph.tensor`` and by operations. Setters are chainable and return self. An
    operation's output may have no dim, stride or data type until ``Graph.validate``.
    """

    __slots__ = (
        "_graph",
        "_uid",
        "alignment_value",
        "data_type",
        "dim",
        "is_output",
        "is_pass_by_value",
        "is_virtual",
        "name",
        "ragged_offset",
        "ragged_offset_multiplier",
        "reordering_type",
        "stride",
        "uid_is_given",
        "value",
    )

    def __init__(self, graph: Builder, name: str) -> None:
        self._graph = graph
        self._uid = -1
        self.uid_is_given = False
        self.name = name
        self.dim: tuple[int, ...] = ()
        self.stride: tuple[int, ...] = ()
        self.data_type = DataType.NOT_SET
        self.is_virtual = False
        self.is_output = False
        self.is_pass_by_value = False
        self.value: Scalar | None = None
        self.ragged_offset: Tensor | None = None
        self.ragged_offset_multiplier = 1
        self.reordering_type = tensor_reordering.NONE
        self.alignment_value = 0

    def __repr__(self) -> str:
        return (
            f"Tensor(uid={self._uid}, name={self.name!r}, dim={self.dim}, "
            f"stride={self.stride}, data_type={self.data_type.name})"
        )

    @property
    def uid(self) -> int:
        """The tensor's number in its graph; -1 until one is given or the graph is validated."""
        return self._uid

    @property
    def rank(self) -> int:
        """The number of axes; 0 while the dim is not known."""
        return len(self.dim)

    def set_output(self, value: bool) -> Tensor:
        """Mark the tensor as one that the caller binds a buffer for."""
        self._mutate()
        self.is_output = bool(value)
        self.is_virtual = not value
        return self

    def set_is_virtual(self, value: bool) -> Tensor:
        """Mark the tensor as living only inside the plan."""
        self._mutate()
        self.is_virtual = bool(value)
        return self

    def set_is_pass_by_value(self, value: bool) -> Tensor:
        """Mark the tensor as a one-element scalar that is read on the host."""
        self._mutate()
        self.is_pass_by_value = bool(value)
        return self

    def set_name(self, value: str) -> Tensor:
        """Set the name; names may repeat, but only a unique one can key a variant pack."""
        self._mutate()
        self.name = str(value)
        return self

    def set_uid(self, value: int) -> Tensor:
        """Set the uid, a non-negative int; it wins over automatic ones.

        Raises:
            GraphError: if it is negative or another tensor of the graph was given it.
        """
        self._mutate()
        self._uid = self._graph.claim_uid(self, value)
        self.uid_is_given = True
        return self

    def set_data_type(self, value: object) -> Tensor:
        """Set the element type: a DataType, a torch dtype, or the name of one."""
        self._mutate()
        try:
            self.data_type = as_data_type(value)
        except TypeError as error:
            raise GraphError(f"tensor {self.name!r}: {error}") from error
        return self

    def set_dim(self, value: Iterable[int]) -> Tensor:
        """Set the logical shape, in elements."""
        self._mutate()
        self.dim = as_extents(value, "dim", self.name)
        return self

    def set_stride(self, value: Iterable[int]) -> Tensor:
        """Set the strides, in elements."""
        self._mutate()
        self.stride = as_extents(value, "stride", self.name)
        return self

    def set_ragged_offset(self, value: Tensor | None) -> Tensor:
        """Set the tensor of B + 1 offsets (in elements) at which each sequence starts."""
        self._mutate()
        if value is not None:
            self._graph.require_own(value, f"tensor {self.label()}: ragged_offset")
        self.ragged_offset = value
        return self

    def set_ragged_offset_multiplier(self, value: int) -> Tensor:
        """Set the factor from the ragged offset's unit to elements."""
        self._mutate()
        where = f"tensor {self.label()}: ragged_offset_multiplier"
        self.ragged_offset_multiplier = coerce(int, value, where)
        return self

    def set_reordering_type(self, value: tensor_reordering) -> Tensor:
        """Set a storage order that strides cannot express."""
        self._mutate()
        where = f"tensor {self.label()}: reordering_type"
        self.reordering_type = coerce(tensor_reordering, value, where)
        return self

    def get_uid(self) -> int:
        """The uid."""
        return self._uid

    def get_name(self) -> str:
        """The name."""
        return self.name

    def get_dim(self) -> list[int]:
        """The shape as a list; empty while it is not known."""
        return list(self.dim)

    def get_stride(self) -> list[int]:
        """The strides in elements as a list; empty while they are not known."""
        return list(self.stride)

    def get_data_type(self) -> DataType:
        """The element type."""
        return self.data_type

    def get_is_virtual(self) -> bool:
        """True if the tensor lives only inside the plan."""
        return self.is_virtual

    def get_is_pass_by_value(self) -> bool:
        """True if the tensor is a scalar read on the host."""
        return self.is_pass_by_value

    def get_reordering_type(self) -> tensor_reordering:
        """The storage order that strides cannot express."""
        return self.reordering_type

    def get_ragged_offset(self) -> Tensor | None:
        """The tensor of offsets, or None for a dense tensor."""
        return self.ragged_offset

    def label(self) -> str:
        """The name for messages: the given one, else the uid."""
        return repr(self.name) if self.name else f"#{self._uid}"

    def _mutate(self) -> None:
        self._graph.require_open(f"tensor {self.label()}")

    def _set_automatic_uid(self, value: int) -> None:
        self._uid = value
