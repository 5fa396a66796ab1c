"""Rotary position embedding (Su and others 2021) and its adjoint, in the half-split layout.

input (B, H, S, D); freqs are angles in radians, (B or 1, 1, S, R) or (B or 1, 1, S, R / 2), with
R = rope_dim, or D where that is 0. With h = R / 2 and a the angles, for i < h:

    out[i]     = output_scale (x[i] cos a[i] - x[i + h] sin a[i])
    out[i + h] = output_scale (x[i + h] cos a[i + h] + x[i] sin a[i + h])

where a[i + h] = a[i] if freqs has R / 2. Elements from R on are output_scale x.
"""

from __future__ import annotations

from typing import ClassVar

from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.operations.checks import require_floating
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@record(frozen=True, kw_only=True, eq=False)
class _Rotation(Operation):
    produces: ClassVar = ("out",)
    # The port of the tensor that is rotated.
    source_port: ClassVar[str] = ""

    output_scale: float = 1.0
    rope_dim: int = 0

    def infer(self) -> None:
        """The output has the input's dim and axis order."""
        self.require_rank(self.source_port, 4, 4, "(B, H, S, D)")
        source = self.inputs[self.source_port]
        self.fill("out", source.dim, order_of=source)

    def check(self) -> None:
        """The rotated extent is even and within D, and the angles broadcast."""
        source, freqs = self.inputs[self.source_port], self.inputs["freqs"]
        batch, _, length, extent = source.dim
        rotated = self.rope_dim or extent
        if rotated % 2 or not 0 <= rotated <= extent:
            self.fail(
                f"rope_dim is {self.rope_dim}; expected an even number of at most {extent}, or 0 "
                f"for all: tensor {source.label()} has dim {source.dim} and pairs are rotated"
            )
        self.require_rank("freqs", 4, 4, "(B or 1, 1, S, R)")
        shape = freqs.dim
        fits = (
            shape[0] in (1, batch)
            and shape[1] == 1
            and shape[2] in (1, length)
            and shape[3] in (rotated, rotated // 2)
        )
        if not fits:
            self.fail(
                f"tensor {freqs.label()} (freqs) has dim {shape}; expected ({batch} or 1, 1, "
                f"{length} or 1, {rotated} or {rotated // 2}): an angle a position and pair"
            )
        self.require_dim("out", source.dim, "a rotation keeps the dim")
        require_floating(self, (self.source_port, "freqs"), "rotations are of real numbers")


@operation_kind("rope")
@record(frozen=True, kw_only=True, eq=False)
class Rope(_Rotation):
    """The rotation of ``input`` by the angles of each position."""

    required: ClassVar = ("input", "freqs")
    shares: ClassVar = (("out", "input"),)
    source_port: ClassVar = "input"


@operation_kind("rope_backward")
@record(frozen=True, kw_only=True, eq=False)
class RopeBackward(_Rotation):
    """The adjoint of the rotation, applied to the gradient ``dY``."""

    required: ClassVar = ("dY", "freqs")
    shares: ClassVar = (("out", "dY"),)
    source_port: ClassVar = "dY"


class RopeMethods(Builder):
    """Declares rotary position embeddings."""

    def rope(
        self,
        input: Tensor,
        freqs: Tensor,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """Rotate ``input`` (B, H, S, D) by the angles ``freqs``, in radians.

        Of the first R = ``rope_dim`` elements (0: D) of a head, a pair (x[i], x[i + h]), h = R/2,
        becomes output_scale (x[i] cos a[i] - x[i + h] sin a[i]) and
        output_scale (x[i + h] cos a[i + h] + x[i] sin a[i + h]); the rest is output_scale x.
        ``freqs`` holds a: (B or 1, 1, S, R), or (B or 1, 1, S, R/2) for equal halves. The output
        may be bound to the input's own buffer. Source: Su and others 2021 (arXiv:2104.09864).

        Raises:
            GraphError: at ``validate`` if the dims do not fit or ``rope_dim`` is odd.
        """
        operation = self.append(
            Rope,
            {"input": input, "freqs": freqs},
            name=name,
            compute_data_type=compute_data_type,
            output_scale=output_scale,
            rope_dim=rope_dim,
        )
        return operation.outputs["out"]

    def rope_backward(
        self,
        dY: Tensor,
        freqs: Tensor,
        output_scale: float = 1.0,
        rope_dim: int = 0,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The gradient of ``rope``'s input from ``dY`` (B, H, S, D), the gradient of its output.

        The other arguments are those of the ``rope`` it belongs to.

        Raises:
            GraphError: at ``validate`` if the dims do not fit or ``rope_dim`` is odd.
        """
        operation = self.append(
            RopeBackward,
            {"dY": dY, "freqs": freqs},
            name=name,
            compute_data_type=compute_data_type,
            output_scale=output_scale,
            rope_dim=rope_dim,
        )
        return operation.outputs["out"]
