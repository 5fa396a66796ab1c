"""Operations that move elements and change none: reshape, slice, transpose, concatenate.

The output has the input's data type; ``identity`` converts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from tilewright.errors import GraphError
from tilewright.graph import enums
from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.shapes import element_count, self_overlaps, view_strides
from tilewright.graph.tensor import Tensor, strides_in_order_of
from tilewright.records import record

Slice = slice | Sequence[int | None]


@record(frozen=True, kw_only=True, eq=False)
class _Move(Operation):
    required: ClassVar[tuple[str, ...]] = ("input",)
    produces: ClassVar = ("out",)

    def _require_same_type(self, port: str) -> None:
        source = self.inputs[port]
        self.require_type(
            "out", (source.data_type,), f"{self.kind} moves the elements of {source.label()}"
        )


@operation_kind("reshape")
@record(frozen=True, kw_only=True, eq=False)
class Reshape(_Move):
    """The input's elements, in row-major order of its declared axes, under another dim.

    VIEW_ONLY demands that the input's strides can express the new dim without moving an element;
    the output then has those strides. LOGICAL permits any strides on either side.
    """

    reshape_mode: enums.reshape_mode = enums.reshape_mode.VIEW_ONLY

    def infer(self) -> None:
        """The output's dim must be set; a view has the view's strides."""
        out, source = self.outputs["out"], self.inputs["input"]
        if not out.dim:
            self.fail(f"tensor {out.label()} (out) has no dim; call set_dim with the new shape")
        if element_count(out.dim) != element_count(source.dim) or min(out.dim) < 0:
            self.fail(
                f"tensor {out.label()} (out) has dim {out.dim}; expected "
                f"{element_count(source.dim)} elements, as tensor {source.label()} of dim "
                f"{source.dim} has: a reshape keeps them all"
            )
        strides = self._view_strides() if self._is_view() else None
        self.fill("out", out.dim, stride=strides, data_type=source.data_type)

    def check(self) -> None:
        """A view's strides are the input's, and the type is kept."""
        self._require_same_type("input")
        out = self.outputs["out"]
        if not self._is_view():
            return
        strides = self._view_strides()
        differs = any(
            extent > 1 and have != want
            for extent, have, want in zip(out.dim, out.stride, strides, strict=True)
        )
        if differs:
            self.fail(
                f"tensor {out.label()} (out) has stride {out.stride}; expected {strides}: a "
                "VIEW_ONLY reshape keeps every element in place and in row-major order; use "
                "reshape_mode LOGICAL to copy, or transpose to permute axes"
            )

    def _is_view(self) -> bool:
        return self.reshape_mode is enums.reshape_mode.VIEW_ONLY

    def _view_strides(self) -> tuple[int, ...]:
        source, out = self.inputs["input"], self.outputs["out"]
        strides = view_strides(source.dim, source.stride, out.dim)
        if strides is None:
            self.fail(
                f"tensor {source.label()} (input) has dim {source.dim} and stride "
                f"{source.stride}; no strides express it as {out.dim} without moving an element, "
                "which VIEW_ONLY demands; use reshape_mode LOGICAL"
            )
        if self_overlaps(out.dim, strides):
            self.fail(
                f"tensor {source.label()} (input) has dim {source.dim} and stride "
                f"{source.stride}, which is expanded; its view as {out.dim} would name elements "
                "twice, and those of a result are distinct; use reshape_mode LOGICAL"
            )
        return strides


@operation_kind("slice")
@record(frozen=True, kw_only=True, eq=False)
class SliceOperation(_Move):
    """The part of the input that ``slices`` name: (start, stop, step) an axis, from axis 0 on.

    Negative positions count from the end, as in Python; a stop of None is the end. Axes without
    a slice are kept whole.
    """

    slices: tuple[tuple[int, int | None, int], ...] = ()

    def infer(self) -> None:
        """One extent a slice, in the input's axis order, packed."""
        source = self.inputs["input"]
        self.fill("out", self._dim(), order_of=source, data_type=source.data_type)

    def check(self) -> None:
        """The output has the sliced dim and the input's type."""
        self._require_same_type("input")
        self.require_dim("out", self._dim(), f"the input {self.inputs['input'].dim}, sliced")

    def _dim(self) -> tuple[int, ...]:
        source = self.inputs["input"]
        if len(self.slices) > source.rank:
            self.fail(
                f"slices has {len(self.slices)} entries; expected at most {source.rank}, one an "
                f"axis of tensor {source.label()} of dim {source.dim}"
            )
        dim = list(source.dim)
        for axis, (start, stop, step) in enumerate(self.slices):
            extent = source.dim[axis]
            if step < 1:
                self.fail(f"slice {axis} has step {step}; expected at least 1")
            first = start + extent if start < 0 else start
            end = extent if stop is None else stop + extent if stop < 0 else stop
            if not 0 <= first <= end <= extent:
                self.fail(
                    f"slice {axis} is from {start} to {stop}; expected a range within 0 to "
                    f"{extent}: the extent of tensor {source.label()} on that axis"
                )
            dim[axis] = -(-(end - first) // step)
        return tuple(dim)


@operation_kind("transpose")
@record(frozen=True, kw_only=True, eq=False)
class Transpose(_Move):
    """Axis i of the output is axis permutation[i] of the input."""

    permutation: tuple[int, ...] = ()

    def infer(self) -> None:
        """The permuted dim, in memory in the order that the input has."""
        source = self.inputs["input"]
        dim = self._permuted(source.dim)
        stride = strides_in_order_of(dim, self._permuted(source.stride), dim)
        self.fill("out", dim, stride=stride, data_type=source.data_type)

    def check(self) -> None:
        """The output has the permuted dim and the input's type."""
        self._require_same_type("input")
        source = self.inputs["input"]
        self.require_dim(
            "out", self._permuted(source.dim), f"{source.dim} permuted by {self.permutation}"
        )

    def _permuted(self, values: Sequence[int]) -> tuple[int, ...]:
        if sorted(self.permutation) != list(range(len(values))):
            self.fail(
                f"permutation is {self.permutation}; expected each of 0 to {len(values) - 1} "
                f"once: the axes of tensor {self.inputs['input'].label()}"
            )
        return tuple(values[axis] for axis in self.permutation)


@operation_kind("concatenate")
@record(frozen=True, kw_only=True, eq=False)
class Concatenate(_Move):
    """The inputs one after another along ``axis``; other axes agree.

    With ``in_place_index`` i, input i may be bound to its place in the output's buffer.
    """

    required: ClassVar = ()
    list_port: ClassVar = "input_"

    axis: int = 0
    in_place_index: int | None = None

    @property
    def in_place(self) -> tuple[tuple[str, str], ...]:
        """The output may hold the one input that ``in_place_index`` names."""
        if self.in_place_index is None:
            return ()
        return (("out", f"{self.list_port}{self.in_place_index}"),)

    def infer(self) -> None:
        """The summed extent along the axis, in the first input's axis order."""
        dim = self._dim()
        first = self._parts()[0]
        self.fill("out", dim, order_of=first, data_type=first.data_type)

    def check(self) -> None:
        """The output has the summed dim, the inputs one type, and in_place_index names one."""
        self.require_dim("out", self._dim(), f"the inputs' extents added along axis {self.axis}")
        parts = self._parts()
        for position, part in enumerate(parts):
            if part.data_type is not parts[0].data_type:
                self.fail(
                    f"tensor {part.label()} (input_{position}) has data type "
                    f"{part.data_type.name}; expected {parts[0].data_type.name}: concatenated "
                    "tensors have one type"
                )
        self._require_same_type("input_0")
        index = self.in_place_index
        if index is not None and not 0 <= index < len(parts):
            self.fail(f"in_place_index is {index}; expected 0 to {len(parts) - 1}: an input")

    def _parts(self) -> list[Tensor]:
        names = [f"{self.list_port}{position}" for position in range(len(self.inputs))]
        if not names or set(names) != set(self.inputs):
            given = ", ".join(self.inputs) or "none"
            self.fail(f"inputs are {given}; expected input_0, input_1, ... without a gap")
        return [self.inputs[name] for name in names]

    def _dim(self) -> tuple[int, ...]:
        parts = self._parts()
        first = parts[0]
        if not -first.rank <= self.axis < first.rank:
            self.fail(
                f"axis is {self.axis}; expected {-first.rank} to {first.rank - 1}: tensor "
                f"{first.label()} has rank {first.rank}"
            )
        axis = self.axis % first.rank
        for position, part in enumerate(parts):
            fits = part.rank == first.rank and all(
                part.dim[other] == first.dim[other] for other in range(first.rank) if other != axis
            )
            if not fits:
                self.fail(
                    f"tensor {part.label()} (input_{position}) has dim {part.dim}; expected that "
                    f"of tensor {first.label()} {first.dim} on every axis but {axis}"
                )
        total = sum(part.dim[axis] for part in parts)
        return (*first.dim[:axis], total, *first.dim[axis + 1 :])


class ShapeMethods(Builder):
    """Declares operations that move elements."""

    def reshape(
        self,
        input: Tensor,
        name: str = "",
        reshape_mode: enums.reshape_mode = enums.reshape_mode.VIEW_ONLY,
        compute_data_type: object = None,
    ) -> Tensor:
        """The input under another dim; call ``set_dim`` on the result.

        Raises:
            GraphError: at ``validate`` if no dim is set, the number of elements differs, or a
                VIEW_ONLY reshape would have to move an element.
        """
        operation = self.append(
            Reshape,
            {"input": input},
            name=name,
            compute_data_type=compute_data_type,
            reshape_mode=reshape_mode,
        )
        return operation.outputs["out"]

    def transpose(
        self,
        input: Tensor,
        permutation: Sequence[int],
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The input with its axes permuted: axis i of the result is axis permutation[i].

        Raises:
            GraphError: at ``validate`` if ``permutation`` does not name each axis once.
        """
        operation = self.append(
            Transpose,
            {"input": input},
            name=name,
            compute_data_type=compute_data_type,
            permutation=permutation,
        )
        return operation.outputs["out"]

    def concatenate(
        self,
        inputs: Sequence[Tensor],
        axis: int,
        in_place_index: int | None = None,
        name: str = "",
        compute_data_type: object = None,
    ) -> Tensor:
        """The inputs one after another along ``axis``.

        Raises:
            GraphError: at ``validate`` if the inputs differ on another axis or in type.
        """
        if not isinstance(inputs, list | tuple):
            raise GraphError(
                f"concatenate: inputs is {type(inputs).__name__}; expected a list of tensors"
            )
        operation = self.append(
            Concatenate,
            {f"input_{position}": tensor for position, tensor in enumerate(inputs)},
            name=name,
            compute_data_type=compute_data_type,
            axis=axis,
            in_place_index=in_place_index,
        )
        return operation.outputs["out"]

    # Last in the class: below it, the name slice would mean this method.
    def slice(
        self,
        input: Tensor,
        slices: Sequence[Slice] = (),
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """A part of the input: a Python slice or (start, stop[, step]) an axis, from axis 0 on.

        Raises:
            GraphError: for an entry of another form, or at ``validate`` if one leaves the input.
        """
        operation = self.append(
            SliceOperation,
            {"input": input},
            name=name,
            compute_data_type=compute_data_type,
            slices=tuple(_triple(entry) for entry in slices),
        )
        return operation.outputs["out"]


def _triple(entry: object) -> tuple[object, object, object]:
    """(start, stop, step) of a slice or of a sequence of two or three."""
    if isinstance(entry, slice):
        return (
            0 if entry.start is None else entry.start,
            entry.stop,
            1 if entry.step is None else entry.step,
        )
    if isinstance(entry, list | tuple) and len(entry) in (2, 3):
        start, stop, *step = entry
        return (0 if start is None else start, stop, step[0] if step else 1)
    raise GraphError(f"slice: got {entry!r}; expected a slice, or (start, stop) or with a step")
