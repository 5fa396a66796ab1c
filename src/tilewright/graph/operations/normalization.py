"""Layer, instance, adaptive layer and RMS normalization.

With mean and (biased) variance over the normalized axes,

    Y = (input - mean) inv_variance scale + bias,   inv_variance = (variance + epsilon)^-1/2

after Ba, Kiros and Hinton 2016 (layer), Ulyanov, Vedaldi and Lempitsky 2016 (instance), and
Peebles and Xie 2023 (adaptive: scale and bias of each sample). RMSNorm (Zhang and Sennrich 2019)
has no mean and inv_variance = (mean of input^2 + epsilon)^-1/2.

The normalized axes are those on which scale has an extent other than 1; without axis 0 for
adalayernorm, whose scale has the batch there; the spatial axes (2 and on) for instancenorm.
"""

from __future__ import annotations

import math
from typing import ClassVar

from tilewright.graph import enums
from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.operations.checks import (
    channel_dim,
    require_floating,
    require_scalar,
    scalar_input,
)
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@record(frozen=True, kw_only=True, eq=False)
class Normalization(Operation):
    """What forward and backward share: the normalized axes, and the dims that follow from them."""

    def normalized_axes(self) -> tuple[int, ...]:
        """The axes that a statistic is taken over."""
        return tuple(axis for axis, extent in enumerate(self.inputs["scale"].dim) if extent != 1)

    def statistics_dim(self) -> tuple[int, ...]:
        """The input's dim with 1 on the normalized axes."""
        axes = self.normalized_axes()
        return tuple(
            1 if axis in axes else extent for axis, extent in enumerate(self.inputs["input"].dim)
        )

    def require_layout(self) -> None:
        """Require a scale that fits the input and normalizes some axis."""
        source, scale = self.inputs["input"], self.inputs["scale"]
        self.require_broadcast("scale", source.dim, "scale varies along the normalized axes")
        if not self.normalized_axes() and source.dim[-1] != 1:
            self.fail(
                f"tensor {scale.label()} (scale) has dim {scale.dim}; expected the extent of the "
                f"input {source.dim} on an axis: it normalizes where scale varies"
            )

    def require_statistics(self) -> None:
        """Require the dim of mean and inv_variance, where they are ports."""
        for port in ("mean", "inv_variance"):
            self.require_dim(port, self.statistics_dim(), "a statistic is 1 on normalized axes")


class _InstanceLayout(Normalization):
    """Normalizes the spatial axes of each sample and channel."""

    def normalized_axes(self) -> tuple[int, ...]:
        return tuple(range(2, self.inputs["input"].rank))

    def require_layout(self) -> None:
        self.require_rank("input", 3, 8, "N, C and spatial axes")
        expected = channel_dim(self.inputs["input"].dim)
        self.require_dim("scale", expected, "one value a channel")


class _AdaptiveLayout(Normalization):
    """Normalizes the axes where scale varies, axis 0 being the batch."""

    def normalized_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in super().normalized_axes() if axis != 0)


@record(frozen=True, kw_only=True, eq=False)
class _Forward(Normalization):
    required: ClassVar[tuple[str, ...]] = ("input", "scale", "epsilon")
    optional: ClassVar[tuple[str, ...]] = ("bias",)
    produces: ClassVar[tuple[str, ...]] = ("Y", "mean", "inv_variance")
    # The outputs of a TRAINING phase.
    statistics: ClassVar[tuple[str, ...]] = ("mean", "inv_variance")

    norm_forward_phase: enums.norm_forward_phase = enums.norm_forward_phase.NOT_SET

    def infer(self) -> None:
        """Y like the input; statistics with 1 on the normalized axes."""
        self.require_layout()
        source = self.inputs["input"]
        self.fill("Y", source.dim, order_of=source)
        for port in self.statistics:
            self.fill(port, self.statistics_dim(), order_of=source)

    def check(self) -> None:
        """The phase is set and the outputs are its own; types and dims fit."""
        phase = self.norm_forward_phase
        if phase.name == "NOT_SET":
            self.fail("norm_forward_phase is NOT_SET; accepted are TRAINING, INFERENCE")
        for port in self.statistics:
            if (port in self.outputs) is not (phase.name == "TRAINING"):
                state = "present" if port in self.outputs else "absent"
                self.fail(
                    f"output {port} is {state} in phase {phase.name}; TRAINING saves statistics, "
                    "INFERENCE does not"
                )
        self.require_dim("bias", self.inputs["scale"].dim, "bias has the scale's dim")
        self.require_dim("Y", self.inputs["input"].dim, "Y has the input's dim")
        self.require_statistics()
        require_floating(
            self, ("input", "scale", "bias", *self.statistics), "normalization is of real numbers"
        )
        require_scalar(self, "epsilon", 0.0, math.inf)


@operation_kind("layernorm")
@record(frozen=True, kw_only=True, eq=False)
class Layernorm(_Forward):
    """Layer normalization over the axes where scale varies."""


@operation_kind("instancenorm")
@record(frozen=True, kw_only=True, eq=False)
class Instancenorm(_InstanceLayout, _Forward):
    """Normalization over the spatial axes, scale and bias (1, C, 1, ...)."""


@operation_kind("adalayernorm")
@record(frozen=True, kw_only=True, eq=False)
class Adalayernorm(_AdaptiveLayout, _Forward):
    """Layer normalization with a scale and a bias for each sample, (N, ...) on axis 0."""


@operation_kind("rmsnorm")
@record(frozen=True, kw_only=True, eq=False)
class Rmsnorm(_Forward):
    """Root-mean-square normalization over the axes where scale varies; bias is optional."""

    produces: ClassVar = ("Y", "inv_variance")
    statistics: ClassVar = ("inv_variance",)


class NormalizationMethods(Builder):
    """Declares normalizations, forward."""

    def layernorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        epsilon: Tensor | float,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[Y, mean, inv_variance]: Y = (input - mean) inv_variance scale + bias.

        inv_variance = (variance + epsilon)^-1/2, of the biased variance. ``scale`` and ``bias``
        have the input's rank and 1 on the axes that are not normalized; the statistics have 1 on
        those that are, and are None in the INFERENCE phase. ``epsilon`` is a number or a
        one-element tensor. Source: Ba, Kiros and Hinton 2016 (arXiv:1607.06450).

        Raises:
            GraphError: at ``validate`` if the phase is not set or the dims do not fit.
        """
        return self._normalize(
            Layernorm, norm_forward_phase, input, scale, bias, epsilon, compute_data_type, name
        )

    def instancenorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        epsilon: Tensor | float,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[Y, mean, inv_variance] of input (N, C, ...) over its spatial axes.

        Formula, phase and ``epsilon`` as for ``layernorm``; ``scale`` and ``bias`` are
        (1, C, 1, ...), the statistics (N, C, 1, ...). Source: Ulyanov, Vedaldi and Lempitsky 2016
        (arXiv:1607.08022).

        Raises:
            GraphError: at ``validate`` if the phase is not set or the dims do not fit.
        """
        return self._normalize(
            Instancenorm, norm_forward_phase, input, scale, bias, epsilon, compute_data_type, name
        )

    def adalayernorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        epsilon: Tensor | float | None = None,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[Y, mean, inv_variance] with a scale and a bias of each sample.

        As ``layernorm``, but ``scale`` and ``bias`` have the batch on axis 0, which is not
        normalized: (N, 1, C) for an input (N, S, C). Source: Peebles and Xie 2023
        (arXiv:2212.09748).

        Raises:
            GraphError: at ``validate`` if the phase is not set or the dims do not fit.
        """
        return self._normalize(
            Adalayernorm, norm_forward_phase, input, scale, bias, epsilon, compute_data_type, name
        )

    def rmsnorm(
        self,
        norm_forward_phase: enums.norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        epsilon: Tensor | float | None = None,
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[Y, inv_variance]: Y = input inv_variance scale + bias.

        inv_variance = (mean of input^2 + epsilon)^-1/2 is None in the INFERENCE phase. Dims are
        those of ``layernorm``. Source: Zhang and Sennrich 2019 (arXiv:1910.07467).

        Raises:
            GraphError: if ``epsilon`` is missing, or at ``validate`` if the phase is not set or
                the dims do not fit.
        """
        return self._normalize(
            Rmsnorm, norm_forward_phase, input, scale, bias, epsilon, compute_data_type, name
        )

    def _normalize(
        self,
        record: type[_Forward],
        phase: enums.norm_forward_phase,
        input: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        epsilon: Tensor | float | None,
        compute_data_type: object,
        name: str,
    ) -> list[Tensor | None]:
        training = getattr(phase, "name", phase) == "TRAINING"
        operation = self.append(
            record,
            {
                "input": input,
                "scale": scale,
                "bias": bias,
                "epsilon": scalar_input(self, epsilon, input),
            },
            name=name,
            compute_data_type=compute_data_type,
            outputs=record.produces if training else ("Y",),
            norm_forward_phase=phase,
        )
        return [operation.outputs.get(port) for port in record.produces]
