"""The declared graph: all operation methods, validation, and the JSON form. Pure Python."""

from __future__ import annotations

import math

from tilewright.dtypes import DataType
from tilewright.errors import GraphError
from tilewright.graph.attributes import shown
from tilewright.graph.operation import Operation, walk
from tilewright.graph.operations.late import OperationMethods
from tilewright.graph.shapes import self_overlaps, span_elements
from tilewright.graph.tensor import INT64_MAX, MAX_RANK, Scalar, Tensor, packed_strides


class DeclaredGraph(OperationMethods):
    """A graph of tensor operations, declared but not planned.

    Operations are kept in declaration order, which is also the order they run in.
    """

    def validate(self) -> None:
        """Infer what was left open and check the whole graph. The graph is closed afterwards.

        Raises:
            GraphError: naming the tensor or operation, what was given, and the rule.
        """
        if self._validated:
            return
        if not self.operations:
            raise GraphError(f"graph {self.name!r} has no operation")
        self._number_tensors()
        self._check_producers()
        self._check_score_programs()
        inputs = self.inputs()
        # All types first: a ragged offset may be declared after the tensor it belongs to.
        for tensor in inputs:
            self._complete_input(tensor)
        for tensor in inputs:
            self._check_declaration(tensor)
        for operation in self.operations:
            self._validate_operation(operation)
        if not self.outputs():
            raise GraphError(
                f"graph {self.name!r} has no output; call set_output(True) on a tensor"
            )
        self._validated = True

    @property
    def is_validated(self) -> bool:
        """True once ``validate`` succeeded."""
        return self._validated

    def inputs(self) -> list[Tensor]:
        """The tensors that operations read and none makes, in declaration order."""
        made = {id(t) for op in walk(self.operations) for t in op.outputs.values()}
        read = {id(t) for op in walk(self.operations) for t in op.inputs.values()}
        for tensor in self.tensors:
            if tensor.ragged_offset is not None:
                read.add(id(tensor.ragged_offset))
        scores = {id(t) for op in self.operations for t in self._score_inputs(op)}
        return [t for t in self.tensors if id(t) in read and id(t) not in made | scores]

    def outputs(self) -> list[Tensor]:
        """The tensors that an operation makes and the caller binds, in declaration order."""
        made = {id(t) for op in self.operations for t in op.outputs.values()}
        return [t for t in self.tensors if id(t) in made and not t.is_virtual]

    def virtual_tensors(self) -> list[Tensor]:
        """The tensors that live only inside a plan, in declaration order."""
        made = {id(t) for op in self.operations for t in op.outputs.values()}
        return [t for t in self.tensors if id(t) in made and t.is_virtual]

    def _validate_operation(self, operation: Operation) -> None:
        operation.open_nested()
        for nested in operation.nested_operations():
            self._validate_operation(nested)
        operation.infer()
        for tensor in operation.outputs.values():
            self._resolve_data_type(tensor, operation)
            self._check_declaration(tensor)
            if _overlaps(tensor):
                raise GraphError(
                    f"tensor {tensor.label()} has dim {tensor.dim} and stride {tensor.stride}, "
                    "whose elements overlap; an output's elements are distinct"
                )
        operation.check()

    def _complete_input(self, tensor: Tensor) -> None:
        if tensor.is_virtual or tensor.is_output:
            role = "virtual" if tensor.is_virtual else "an output"
            raise GraphError(f"tensor {tensor.label()} is {role} but no operation makes it")
        if tensor.dim and not tensor.stride:
            tensor.stride = packed_strides(tensor.dim)
        self._resolve_data_type(tensor, None)

    @staticmethod
    def _score_inputs(operation: Operation) -> list[Tensor]:
        programs = (getattr(operation, name, None) for name in ("score_mod", "score_mod_bprop"))
        return [tensor for p in programs if p is not None for tensor in p.own_inputs()]

    def _number_tensors(self) -> None:
        taken = set(self._given_uids)
        following = 1
        for tensor in self.tensors:
            if tensor.uid_is_given:
                continue
            while following in taken:
                following += 1
            tensor._set_automatic_uid(following)
            taken.add(following)

    def _check_producers(self) -> None:
        producer: dict[int, Operation] = {}
        for operation in walk(self.operations):
            for port, tensor in operation.outputs.items():
                if id(tensor) in producer:
                    raise GraphError(
                        f"{operation.title()}: tensor {tensor.label()} ({port}) is already made by "
                        f"{producer[id(tensor)].title()}; a tensor has one producer"
                    )
                producer[id(tensor)] = operation
        done: set[int] = set()
        for operation in walk(self.operations):
            for port, tensor in operation.inputs.items():
                if id(tensor) in producer and id(tensor) not in done:
                    raise GraphError(
                        f"{operation.title()}: tensor {tensor.label()} ({port}) is read before "
                        f"{producer[id(tensor)].title()} makes it; operations run in "
                        "declaration order"
                    )
            done.update(id(tensor) for tensor in operation.outputs.values())

    def _check_score_programs(self) -> None:
        inner = {
            id(tensor)
            for operation in self.operations
            for tensor in (
                *self._score_inputs(operation),
                *(t for step in operation.nested_operations() for t in step.outputs.values()),
            )
        }
        for operation in self.operations:
            for port, tensor in (*operation.inputs.items(), *operation.outputs.items()):
                if id(tensor) in inner:
                    raise GraphError(
                        f"{operation.title()}: tensor {tensor.label()} ({port}) lives inside a "
                        "score program; expected a tensor of the graph: scores are never stored"
                    )

    def _check_declaration(self, tensor: Tensor) -> None:
        label = tensor.label()
        if not tensor.dim:
            raise GraphError(f"tensor {label} has no dim; declare it or call set_dim")
        if tensor.rank > MAX_RANK:
            raise GraphError(f"tensor {label} has rank {tensor.rank}; expected at most {MAX_RANK}")
        if len(tensor.stride) != tensor.rank:
            raise GraphError(
                f"tensor {label} has dim {tensor.dim} and stride {tensor.stride}; "
                "expected one stride an axis"
            )
        if min(tensor.dim) < 0:
            raise GraphError(f"tensor {label} has dim {tensor.dim}; expected no negative extent")
        if min(tensor.stride) < 0:
            raise GraphError(
                f"tensor {label} has stride {tensor.stride}; expected no negative stride"
            )
        self._check_size(tensor)
        self._check_roles(tensor)

    @staticmethod
    def _check_size(tensor: Tensor) -> None:
        # A singleton axis may have any stride that 64 bits hold.
        span_bytes = tensor.data_type.span_bytes(span_elements(tensor.dim, tensor.stride))
        if max(*tensor.dim, *tensor.stride, span_bytes) > INT64_MAX:
            raise GraphError(
                f"tensor {tensor.label()} has dim {tensor.dim} and stride {tensor.stride}; its "
                "span in bytes does not fit 64 bits"
            )

    def _check_roles(self, tensor: Tensor) -> None:
        label = tensor.label()
        if tensor.is_pass_by_value and any(extent != 1 for extent in tensor.dim):
            raise GraphError(
                f"tensor {label} is passed by value and has dim {tensor.dim}; expected one element"
            )
        if not _holds(tensor.data_type, tensor.value):
            raise GraphError(
                f"tensor {label} has value {shown(tensor.value)}; expected one that its data type "
                f"{tensor.data_type.name} holds"
            )
        if tensor.alignment_value < 0 or tensor.alignment_value & (tensor.alignment_value - 1):
            raise GraphError(
                f"tensor {label} has alignment {tensor.alignment_value}; expected a power of two "
                "in bytes, or 0"
            )
        offset = tensor.ragged_offset
        if offset is None:
            return
        self.require_own(offset, f"tensor {label}: ragged_offset")
        batch = tensor.dim[0]
        if offset.dim and (offset.dim[0] != batch + 1 or any(e != 1 for e in offset.dim[1:])):
            raise GraphError(
                f"tensor {offset.label()} has dim {offset.dim}; expected ({batch + 1}, 1, ...): "
                f"a ragged offset of tensor {label} has one entry a sequence and one more"
            )
        if offset.data_type not in (DataType.INT32, DataType.INT64, DataType.NOT_SET):
            raise GraphError(
                f"tensor {offset.label()} has data type {offset.data_type.name}; expected INT32 or "
                f"INT64: it is the ragged offset of tensor {label}"
            )
        if tensor.ragged_offset_multiplier < 1:
            raise GraphError(
                f"tensor {label} has ragged_offset_multiplier {tensor.ragged_offset_multiplier}; "
                "expected at least 1"
            )

    def _resolve_data_type(self, tensor: Tensor, producer: Operation | None) -> None:
        if tensor.data_type is not DataType.NOT_SET:
            return
        default = self.intermediate_data_type if tensor.is_virtual else self.io_data_type
        if default is DataType.NOT_SET and producer is not None and producer.inputs:
            default = next(iter(producer.inputs.values())).data_type
        if default is DataType.NOT_SET:
            raise GraphError(
                f"tensor {tensor.label()} has no data type; set it, or give the graph an "
                "io_data_type and an intermediate_data_type"
            )
        tensor.data_type = default


def _overlaps(tensor: Tensor) -> bool:
    """True if two indices of a result surely name one element."""
    if tensor.ragged_offset is None:
        return self_overlaps(tensor.dim, tensor.stride)
    # How far a sequence reaches is known at run time only; a stride of 0 makes no step in any.
    inner = zip(tensor.dim[1:], tensor.stride[1:], strict=True)
    return 0 not in tensor.dim and any(extent > 1 and step == 0 for extent, step in inner)


def _holds(data_type: DataType, value: Scalar | None) -> bool:
    """Whether a scalar can be stored as it is meant: in range, and a number where it must be one.

    A fraction is truncated in an integer type, as results are.
    """
    if value is None or data_type in (DataType.BOOLEAN, DataType.NOT_SET):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return data_type.is_floating
    largest = data_type.layout.largest
    lowest = -largest
    if data_type.is_integer:
        lowest = 0 if data_type is DataType.UINT8 else -largest - 1
        value = math.trunc(value)
    return lowest <= value <= largest
