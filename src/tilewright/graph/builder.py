"""What a graph holds while it is being declared: tensors, operations, and default types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tilewright.dtypes import DataType, as_data_type
from tilewright.errors import GraphError
from tilewright.graph.attributes import coerce, shown
from tilewright.graph.enums import tensor_reordering
from tilewright.graph.operation import Operation, check_ports, coerce_attributes
from tilewright.graph.tensor import Scalar, Tensor, packed_strides

OperationType = TypeVar("OperationType", bound=Operation)


class Builder:
    """Tensors and operations in declaration order; the family mixins add their methods to it."""

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: object = None,
        intermediate_data_type: object = None,
        compute_data_type: object = None,
    ) -> None:
        self.name = str(name)
        self.io_data_type = _data_type(io_data_type, "io_data_type")
        self.intermediate_data_type = _data_type(intermediate_data_type, "intermediate_data_type")
        self.compute_data_type = _data_type(compute_data_type, "compute_data_type")
        self.tensors: list[Tensor] = []
        self.operations: list[Operation] = []
        self._validated = False
        self._given_uids: dict[int, Tensor] = {}
        self._from_arrays: dict[int, Tensor] = {}
        self._kept_arrays: list[Any] = []
        # While a score_mod callback runs, operations go to its program and not to the graph.
        self._recording: list[Operation] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: the declaration, without the caller's arrays."""
        return {**vars(self), "_from_arrays": {}, "_kept_arrays": [], "_recording": None}

    def tensor(
        self,
        dim: Iterable[int] = (),
        stride: Iterable[int] = (),
        data_type: object = None,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int = -1,
        ragged_offset_multiplier: int = 1,
        alignment_value: int = 0,
    ) -> Tensor:
        """Declare an input tensor.

        ``dim`` and ``stride`` are in elements; an absent ``stride`` means packed, row-major. An
        absent ``data_type`` is the graph's ``io_data_type``. ``alignment_value`` is the alignment
        in bytes that every bound buffer promises; 0 means the element's own.

        Raises:
            GraphError: if an argument has the wrong type, or the uid is taken.
        """
        tensor = self._new_tensor(name)
        tensor.set_dim(dim).set_stride(stride).set_data_type(data_type)
        if tensor.dim and not tensor.stride:
            tensor.stride = packed_strides(tensor.dim)
        tensor.is_virtual = bool(is_virtual)
        tensor.is_pass_by_value = bool(is_pass_by_value)
        tensor.set_ragged_offset(ragged_offset)
        tensor.set_ragged_offset_multiplier(ragged_offset_multiplier)
        tensor.set_reordering_type(reordering_type)
        where = f"tensor {tensor.label()}: alignment_value"
        tensor.alignment_value = coerce(int, alignment_value, where)
        if uid != -1:
            tensor.set_uid(uid)
        return tensor

    def tensor_like(self, source: Any, name: str = "") -> Tensor:
        """Declare an input with the dim, stride and data type of a tensor or DLPack object.

        A one-element CPU tensor may be passed by value: its value is kept as the default, and
        a buffer is still accepted for it at execution.

        Raises:
            GraphError: if ``source`` tells no shape, or its type is not in the vocabulary.
        """
        if isinstance(source, Tensor):
            tensor = self.tensor(source.dim, source.stride, source.data_type, name=name)
            tensor.is_pass_by_value, tensor.value = source.is_pass_by_value, source.value
            tensor.ragged_offset_multiplier = source.ragged_offset_multiplier
            tensor.reordering_type = source.reordering_type
            return tensor
        from tilewright.graph.buffers import describe_buffer

        description = describe_buffer(source)
        tensor = self.tensor(description.dim, description.stride, description.data_type, name=name)
        tensor.is_pass_by_value, tensor.value = description.is_scalar, description.value
        return tensor

    def tensor_scalar(self, value: Scalar, scalar_type: object = None) -> Tensor:
        """Declare a pass-by-value scalar of dim (1, 1, 1, 1).

        ``scalar_type`` is its data type; by default FLOAT for a float, INT32 or INT64 for an
        int, BOOLEAN for a bool.

        Raises:
            GraphError: if ``value`` is no number.
        """
        if not isinstance(value, bool | int | float):
            raise GraphError(f"tensor_scalar: value is {shown(value)}; expected a number")
        if isinstance(value, bool):
            default = DataType.BOOLEAN
        elif isinstance(value, int):
            default = DataType.INT32 if -(2**31) <= value < 2**31 else DataType.INT64
        else:
            default = DataType.FLOAT
        data_type = _data_type(scalar_type, "scalar_type")
        tensor = self.tensor((1, 1, 1, 1), data_type=default)
        if data_type is not DataType.NOT_SET:
            tensor.data_type = data_type
        tensor.is_pass_by_value = True
        tensor.value = value
        return tensor

    def append(
        self,
        record: type[OperationType],
        inputs: Mapping[str, Tensor | None],
        *,
        name: str = "",
        compute_data_type: object = None,
        outputs: Iterable[str] | None = None,
        given_outputs: Mapping[str, Tensor | None] | None = None,
        **attributes: Any,
    ) -> OperationType:
        """Append an operation; the family methods call this.

        ``outputs`` are the ports to make tensors for (default: all the record produces);
        ``given_outputs`` are tensors that the user declared for optional outputs. None entries
        are absent ports.

        Raises:
            GraphError: for a missing or foreign tensor, or an attribute that does not fit.
        """
        self.require_open(record.kind)
        title = f"{record.kind} {name!r}" if name else record.kind
        present = {
            port: self._as_tensor(value, f"{name}::{port}" if name else "")
            for port, value in inputs.items()
            if value is not None
        }
        given = {p: t for p, t in (given_outputs or {}).items() if t is not None}
        for port, tensor in (*present.items(), *given.items()):
            self.require_own(tensor, f"{title}: {port}")
        check_ports(record, present, title)
        made: dict[str, Tensor] = {}
        for port in record.produces if outputs is None else outputs:
            tensor = self._new_tensor(f"{name}::{port}" if name else "")
            tensor.is_virtual = True
            made[port] = tensor
        for port, tensor in given.items():
            tensor.is_output = True
            tensor.is_virtual = False
            # A one-element output made by tensor_like is a buffer, not a host scalar.
            tensor.is_pass_by_value = False
            tensor.value = None
            made[port] = tensor
        operation = record(
            name=name,
            compute_data_type=_data_type(compute_data_type, f"{title}: compute_data_type"),
            inputs=present,
            outputs=made,
            **coerce_attributes(record, attributes),
        )
        (self.operations if self._recording is None else self._recording).append(operation)
        return operation

    def claim_uid(self, tensor: Tensor, uid: int) -> int:
        """Reserve ``uid`` for ``tensor``.

        Raises:
            GraphError: if it is negative, no int, or another tensor's.
        """
        if isinstance(uid, bool) or not isinstance(uid, int) or not 0 <= uid < 2**63:
            raise GraphError(f"tensor {tensor.label()}: uid is {shown(uid)}; expected an int >= 0")
        owner = self._given_uids.get(uid)
        if owner is not None and owner is not tensor:
            raise GraphError(
                f"tensor {tensor.label()}: uid {uid} is taken by tensor {owner.label()}; "
                "a uid names one tensor of a graph"
            )
        self._given_uids.pop(tensor.uid, None)
        self._given_uids[uid] = tensor
        return uid

    def require_open(self, what: str) -> None:
        """Require that the graph is not validated yet.

        Raises:
            GraphError: if it is; a validated graph does not change.
        """
        if self._validated:
            raise GraphError(
                f"{what}: the graph {self.name!r} is validated and can no longer change; "
                "declare a new graph"
            )

    def _new_tensor(self, name: str) -> Tensor:
        self.require_open("tensor")
        tensor = Tensor(self, str(name))
        self.tensors.append(tensor)
        return tensor

    def _as_tensor(self, value: Any, name: str) -> Tensor:
        """``value`` itself, or for a caller's array a tensor like it; one tensor an array."""
        if isinstance(value, Tensor) or not hasattr(value, "shape"):
            return value  # type: ignore[no-any-return]
        known = self._from_arrays.get(id(value))
        if known is None:
            known = self.tensor_like(value, name)
            # The array is kept, so that its id stays its own.
            self._from_arrays[id(value)] = known
            self._kept_arrays.append(value)
        return known

    def require_own(self, tensor: Any, where: str) -> None:
        """Require that ``tensor`` is a tensor of this graph.

        Raises:
            GraphError: if it is not.
        """
        if not isinstance(tensor, Tensor):
            raise GraphError(f"{where} is {type(tensor).__name__}; expected a graph tensor")
        if tensor._graph is not self:
            raise GraphError(f"{where}: tensor {tensor.label()} belongs to another graph")


def _data_type(value: object, what: str) -> DataType:
    try:
        return as_data_type(value)
    except TypeError as error:
        raise GraphError(f"{what}: {error}") from error
