"""Batch normalization (Ioffe and Szegedy 2015): training forward, inference, backward.

With mean and (biased) variance over every axis but the channel, axis 1:

    Y = (input - mean) inv_variance scale + bias,   inv_variance = (variance + epsilon)^-1/2
    next_running = (1 - momentum) in_running + momentum statistic

where the running variance takes the unbiased statistic, n / (n - 1) times the biased one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.operations.checks import (
    FLOATING_TYPES,
    channel_dim,
    require_floating,
    require_scalar,
    scalar_input,
)
from tilewright.graph.tensor import Tensor
from tilewright.records import record

_RUNNING = ("in_running_mean", "in_running_var", "momentum")
_NEXT = ("next_running_mean", "next_running_var")


@record(frozen=True, kw_only=True, eq=False)
class _BatchNormalization(Operation):
    # Ports that have the input's dim; all others but scalars are one value a channel.
    image_ports: ClassVar[tuple[str, ...]] = ()
    channel_ports: ClassVar[tuple[str, ...]] = ()

    def infer(self) -> None:
        """Images like the input, the rest one value a channel."""
        self.require_rank("input", 2, 8, "N, C and more axes")
        source = self.inputs["input"]
        for port in self.image_ports:
            self.fill(port, source.dim, order_of=source)
        for port in self.channel_ports:
            self.fill(port, channel_dim(source.dim))

    def check(self) -> None:
        """Dims and types of every port."""
        dim = self.inputs["input"].dim
        for port in self.image_ports:
            self.require_dim(port, dim, f"{port} has the input's dim")
        for port in self.channel_ports:
            self.require_dim(port, channel_dim(dim), f"{port} is one value a channel")
        inputs = [port for port in self.image_ports + self.channel_ports if port in self.inputs]
        require_floating(self, ("input", *inputs), "normalization is of real numbers")
        self._check_peers()

    def _check_peers(self) -> None:
        peers = [port for port in self.inputs if self.list_port and port.startswith(self.list_port)]
        if set(peers) != {f"{self.list_port}{position}" for position in range(len(peers))}:
            self.fail(f"inputs are {', '.join(peers)}; expected peer_stats_0, ... without a gap")
        for port in peers:
            self.require_type(port, FLOATING_TYPES, "a peer's statistics are real numbers")


@operation_kind("batchnorm")
@record(frozen=True, kw_only=True, eq=False)
class Batchnorm(_BatchNormalization):
    """Training forward. Running statistics are updated if they and momentum are given."""

    required: ClassVar = ("input", "scale", "bias", "epsilon")
    optional: ClassVar = _RUNNING
    produces: ClassVar = ("Y", "mean", "inv_variance", *_NEXT)
    required_outputs: ClassVar = ("mean", "inv_variance")
    list_port: ClassVar = "peer_stats_"
    shares: ClassVar = (
        ("next_running_mean", "in_running_mean"),
        ("next_running_var", "in_running_var"),
    )
    image_ports: ClassVar = ("Y",)
    channel_ports: ClassVar = (
        "scale",
        "bias",
        "in_running_mean",
        "in_running_var",
        "mean",
        "inv_variance",
        *_NEXT,
    )

    def check(self) -> None:
        """Also the scalars, and that running statistics are complete or absent."""
        super().check()
        require_scalar(self, "epsilon", 0.0, math.inf)
        require_scalar(self, "momentum", 0.0, 1.0)
        given = [port for port in _RUNNING if port in self.inputs]
        if given and len(given) < len(_RUNNING):
            missing = next(port for port in _RUNNING if port not in self.inputs)
            self.fail(
                f"input {missing!r} is missing beside {', '.join(given)}; running statistics take "
                "in_running_mean, in_running_var and momentum, or none of them"
            )
        for port in _NEXT:
            if (port in self.outputs) is not bool(given):
                state = "present" if port in self.outputs else "absent"
                self.fail(
                    f"output {port} is {state} and the running statistics are "
                    f"{'given' if given else 'not given'}; the next ones follow from them"
                )


@operation_kind("batchnorm_inference")
@record(frozen=True, kw_only=True, eq=False)
class BatchnormInference(_BatchNormalization):
    """Y of input with given statistics."""

    required: ClassVar = ("input", "mean", "inv_variance", "scale", "bias")
    produces: ClassVar = ("Y",)
    image_ports: ClassVar = ("Y",)
    channel_ports: ClassVar = ("mean", "inv_variance", "scale", "bias")


@operation_kind("batchnorm_backward")
@record(frozen=True, kw_only=True, eq=False)
class BatchnormBackward(_BatchNormalization):
    """DX, DScale and DBias of the training forward."""

    required: ClassVar = ("grad", "input", "scale", "mean", "inv_variance")
    produces: ClassVar = ("DX", "DScale", "DBias")
    required_outputs: ClassVar = ("DScale", "DBias")
    list_port: ClassVar = "peer_stats_"
    image_ports: ClassVar = ("grad", "DX")
    channel_ports: ClassVar = ("scale", "mean", "inv_variance", "DScale", "DBias")


class BatchnormMethods(Builder):
    """Declares batch normalizations."""

    def batchnorm(
        self,
        input: Tensor,
        scale: Tensor,
        bias: Tensor,
        in_running_mean: Tensor | None,
        in_running_var: Tensor | None,
        epsilon: Tensor | float,
        momentum: Tensor | float | None,
        peer_stats: Sequence[Tensor] = (),
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor | None]:
        """[Y, mean, inv_variance, next_running_mean, next_running_var] of input (N, C, ...).

        Y = (input - mean) inv_variance scale + bias, inv_variance = (variance + epsilon)^-1/2, with
        mean and biased variance over every axis but the channel; next_running is
        (1 - momentum) in_running + momentum statistic, of the unbiased variance. ``scale``,
        ``bias`` and statistics are (1, C, 1, ...); ``epsilon`` and ``momentum`` numbers or
        one-element tensors. The last two results are None where no running statistics are given;
        they may be bound to the buffers of the incoming ones. Source: Ioffe and Szegedy 2015
        (arXiv:1502.03167).

        Raises:
            GraphError: at ``validate`` if the dims do not fit, or running statistics are given in
                part.
        """
        running = in_running_mean is not None or in_running_var is not None
        operation = self.append(
            Batchnorm,
            {
                "input": input,
                "scale": scale,
                "bias": bias,
                "in_running_mean": in_running_mean,
                "in_running_var": in_running_var,
                "epsilon": scalar_input(self, epsilon, input),
                "momentum": scalar_input(self, momentum, input),
                **_peer_ports(peer_stats),
            },
            name=name,
            compute_data_type=compute_data_type,
            outputs=Batchnorm.produces if running else Batchnorm.produces[:3],
        )
        return [operation.outputs.get(port) for port in Batchnorm.produces]

    def batchnorm_inference(
        self,
        input: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        scale: Tensor,
        bias: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """Y = (input - mean) inv_variance scale + bias, all but input and Y (1, C, 1, ...).

        Raises:
            GraphError: at ``validate`` if the dims do not fit.
        """
        operation = self.append(
            BatchnormInference,
            {
                "input": input,
                "mean": mean,
                "inv_variance": inv_variance,
                "scale": scale,
                "bias": bias,
            },
            name=name,
            compute_data_type=compute_data_type,
        )
        return operation.outputs["Y"]

    def batchnorm_backward(
        self,
        grad: Tensor,
        input: Tensor,
        scale: Tensor,
        mean: Tensor,
        inv_variance: Tensor,
        peer_stats: Sequence[Tensor] = (),
        compute_data_type: object = None,
        name: str = "",
    ) -> list[Tensor]:
        """[DX, DScale, DBias] from the statistics that ``batchnorm`` saves.

        ``grad`` is the gradient of Y and has the input's dim, as DX has; the rest is
        (1, C, 1, ...).

        Raises:
            GraphError: at ``validate`` if the dims do not fit.
        """
        operation = self.append(
            BatchnormBackward,
            {
                "grad": grad,
                "input": input,
                "scale": scale,
                "mean": mean,
                "inv_variance": inv_variance,
                **_peer_ports(peer_stats),
            },
            name=name,
            compute_data_type=compute_data_type,
        )
        return [operation.outputs[port] for port in BatchnormBackward.produces]


def _peer_ports(peer_stats: Sequence[Tensor] | None) -> dict[str, Tensor]:
    return {f"peer_stats_{position}": peer for position, peer in enumerate(peer_stats or ())}
