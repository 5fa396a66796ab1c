"""Gradients of layer, instance, adaptive layer and RMS normalization.

With g = grad, n the normalized input, w = g scale, and averages over the normalized axes:

    DX = inv_variance (w - average(w) - n average(w n))     (RMSNorm: without average(w))
    DScale = sum of g n,   DBias = sum of g,   over the axes that scale broadcasts along
"""

from __future__ import annotations

from typing import ClassVar

from tilewright.graph.builder import Builder
from tilewright.graph.operation import operation_kind
from tilewright.graph.operations.checks import require_floating
from tilewright.graph.operations.normalization import (
    Normalization,
    _AdaptiveLayout,
    _InstanceLayout,
)
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@record(frozen=True, kw_only=True, eq=False)
class _Backward(Normalization):
    required: ClassVar[tuple[str, ...]] = ("grad", "input", "scale", "mean", "inv_variance")
    produces: ClassVar[tuple[str, ...]] = ("DX", "DScale", "DBias")
    required_outputs: ClassVar[tuple[str, ...]] = ("DScale", "DBias")

    def infer(self) -> None:
        """DX like the input, DScale and DBias like the scale."""
        self.require_layout()
        source, scale = self.inputs["input"], self.inputs["scale"]
        self.fill("DX", source.dim, order_of=source)
        for port in ("DScale", "DBias"):
            self.fill(port, scale.dim, order_of=scale)

    def check(self) -> None:
        """Dims and types fit the input, the scale and the normalized axes."""
        source, scale = self.inputs["input"], self.inputs["scale"]
        self.require_dim("grad", source.dim, "the gradient of Y has the input's dim")
        self.require_dim("DX", source.dim, "DX has the input's dim")
        for port in ("DScale", "DBias"):
            self.require_dim(port, scale.dim, f"{port} has the scale's dim")
        self.require_statistics()
        require_floating(self, self.required, "normalization is of real numbers")


@operation_kind("layernorm_backward")
@record(frozen=True, kw_only=True, eq=False)
class LayernormBackward(_Backward):
    """DX, DScale and DBias of a layer normalization."""


@operation_kind("instancenorm_backward")
@record(frozen=True, kw_only=True, eq=False)
class InstancenormBackward(_InstanceLayout, _Backward):
    """DX, DScale and DBias of an instance normalization."""


@operation_kind("adalayernorm_backward")
@record(frozen=True, kw_only=True, eq=False)
class AdalayernormBackward(_AdaptiveLayout, _Backward):
    """DX, and DScale and DBias a sample, of an adaptive layer normalization."""


@operation_kind("rmsnorm_backward")
@record(frozen=True, kw_only=True, eq=False)
class RmsnormBackward(_Backward):
    """DX, DScale and, if ``has_dbias``, DBias of an RMS normalization."""

    required: ClassVar = ("grad", "input", "scale", "inv_variance")
    required_outputs: ClassVar = ("DScale",)

    has_dbias: bool = False

    def check(self) -> None:
        """As for the others, and DBias is present exactly if ``has_dbias``."""
        super().check()
        if self.has_dbias is not ("DBias" in self.outputs):
            state = "present" if "DBias" in self.outputs else "absent"
            self.fail(f"output DBias is {state} and has_dbias is {self.has_dbias}")


class NormalizationBackwardMethods(Builder):
    """Declares the gradients of normalizations."""

    def layernorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[DX, DScale, DBias] of ``layernorm``, from the statistics that its TRAINING phase saves.

        ``grad`` is the gradient of Y and has the input's dim, as DX has; DScale and DBias have the
        scale's.

        Raises:
            GraphError: at ``validate`` if the dims do not fit.
        """
        return self._normalize_backward(
            LayernormBackward, grad, input, scale, mean, inv_variance, compute_data_type, name
        )

    def instancenorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[DX, DScale, DBias] of ``instancenorm``; arguments as for ``layernorm_backward``.

        Raises:
            GraphError: at ``validate`` if the dims do not fit.
        """
        return self._normalize_backward(
            InstancenormBackward, grad, input, scale, mean, inv_variance, compute_data_type, name
        )

    def adalayernorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[DX, DScale, DBias] of ``adalayernorm``; the last two have the batch on axis 0.

        Arguments as for ``layernorm_backward``.

        Raises:
            GraphError: at ``validate`` if the dims do not fit.
        """
        return self._normalize_backward(
            AdalayernormBackward, grad, input, scale, mean, inv_variance, compute_data_type, name
        )

    def rmsnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        inv_variance: Tensor,
        has_dbias: bool,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[DX, DScale, DBias] of ``rmsnorm``; DBias is None unless ``has_dbias``.

        Arguments as for ``layernorm_backward``, without a mean.

        Raises:
            GraphError: at ``validate`` if the dims do not fit.
        """
        operation = self.append(
            RmsnormBackward,
            {"grad": grad, "input": input, "scale": scale, "inv_variance": inv_variance},
            name=name,
            compute_data_type=compute_data_type,
            outputs=("DX", "DScale", "DBias") if has_dbias else ("DX", "DScale"),
            has_dbias=has_dbias,
        )
        return [operation.outputs.get(port) for port in RmsnormBackward.produces]

    def _normalize_backward(
        self,
        record: type[_Backward],
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        compute_data_type: object,
        name: str,
    ) -> list[Tensor | None]:
        operation = self.append(
            record,
            {
                "grad": grad,
                "input": input,
                "scale": scale,
                "mean": mean,
                "inv_variance": inv_variance,
            },
            name=name,
            compute_data_type=compute_data_type,
        )
        return [operation.outputs[port] for port in record.produces]
