"""Batch normalization: training forward, inference, backward. The channel is axis 1.

    Y = (x - mean) inv_variance scale + bias,   inv_variance = (variance + epsilon)^-1/2
    next_running = (1 - momentum) in_running + momentum statistic

Statistics are over every axis but the channel; the batch uses the biased variance, the running
one the unbiased variance (n / (n - 1); with n = 1, where that is undefined, 0). Arithmetic runs
in float32 whatever the operands' types are (float64 for float64).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.normalization import require_dim, scalar_reader
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor as TensorRecord

Tensor = torch.Tensor
_backward_function = torch.ops.aten.native_batch_norm_backward.default


@implements_dense("batchnorm")
def prepare_batchnorm(operation: Any, device: torch.device) -> Kernel:
    """Y, mean, inv_variance and, where running statistics are given, the next ones.

    ATen's function folds mean and scale into one factor and one term, which cancels where the
    mean is far from 0; this subtracts the mean first, in no more passes over memory.
    """
    source, y = operation.inputs["input"], operation.outputs["Y"]
    _check(operation, source, y)
    dtype = casts.compute_dtype((source, y))
    load = casts.port_loader(operation.inputs, dtype, device)
    epsilon = scalar_reader(operation, "epsilon", device)
    store = _storers(operation)
    update = _running_updater(operation, source, dtype, device)
    if 0 in source.dim:
        return _prepare_empty(operation, update, dtype, device)
    axes = tuple(axis for axis in range(len(source.dim)) if axis != 1)
    per_element = source.dim[1] / math.prod(source.dim)
    in_place = {port for port, t in operation.outputs.items() if casts.is_plain(t, dtype)}

    def run(inputs: Operands, outputs: Operands) -> None:
        x = load(inputs, "input")
        # Outputs of the arithmetic's own type are computed in, the others stored at the end.
        y, mean, inverse = (
            outputs[port] if port in in_place else None for port in ("Y", "mean", "inv_variance")
        )
        mean = torch.mean(x, axes, keepdim=True, out=mean)
        deviation = torch.sub(x, mean, out=y)
        squares = torch.sum(deviation * deviation, axes, keepdim=True)
        inverse = torch.mul(squares, per_element, out=inverse).add_(epsilon(inputs)).rsqrt_()
        deviation.mul_(inverse * load(inputs, "scale")).add_(load(inputs, "bias"))
        if update is not None:
            update(inputs, outputs, mean, squares)
        for port, value in (("Y", deviation), ("mean", mean), ("inv_variance", inverse)):
            if port not in in_place:
                store(outputs, port, value)

    return run


@implements_dense("batchnorm_inference")
def prepare_batchnorm_inference(operation: Any, device: torch.device) -> Kernel:
    """Y of input, mean, inv_variance, scale and bias."""
    source, y = operation.inputs["input"], operation.outputs["Y"]
    _check(operation, source, y)
    dtype = casts.compute_dtype((source, y))
    load = casts.port_loader(operation.inputs, dtype, device)
    plain = casts.is_plain(y, dtype)
    store = casts.storer(y)

    def run(inputs: Operands, outputs: Operands) -> None:
        x, mean, bias = load(inputs, "input"), load(inputs, "mean"), load(inputs, "bias")
        factor = load(inputs, "inv_variance") * load(inputs, "scale")
        # Subtracting first keeps the digits that x * factor - mean * factor would cancel.
        if plain:
            output = torch.sub(x, mean, out=outputs["Y"])
            output.mul_(factor).add_(bias)
        else:
            store(outputs["Y"], (x - mean).mul_(factor).add_(bias))

    return run


@implements_dense("batchnorm_backward")
def prepare_batchnorm_backward(operation: Any, device: torch.device) -> Kernel:
    """DX, DScale and DBias of grad, input, scale, mean and inv_variance."""
    source, dx = operation.inputs["input"], operation.outputs["DX"]
    _check(operation, source, dx)
    require_dim(operation.inputs["grad"], source.dim, "the gradient has the input's dim")
    dtype = casts.compute_dtype((source, dx))
    load = casts.port_loader(operation.inputs, dtype, device)
    store = _storers(operation)
    channels = source.dim[1]
    if 0 in source.dim:
        zero = torch.zeros((), dtype=dtype, device=device)

        def run_empty(inputs: Operands, outputs: Operands) -> None:
            for port in ("DScale", "DBias"):
                store(outputs, port, zero.expand(channels))

        return run_empty

    def run(inputs: Operands, outputs: Operands) -> None:
        grad, x = _laid_out_alike(load(inputs, "grad"), load(inputs, "input"))
        dx, dscale, dbias = _backward_function(
            grad,
            x,
            # For some inputs ATen's function reads values a channel as packed, whatever their
            # strides say.
            load(inputs, "scale").reshape(channels).contiguous(),
            None,
            None,
            load(inputs, "mean").reshape(channels).contiguous(),
            load(inputs, "inv_variance").reshape(channels).contiguous(),
            True,
            0.0,
            [True, True, True],
        )
        store(outputs, "DX", dx)
        store(outputs, "DScale", dscale)
        store(outputs, "DBias", dbias)

    return run


def _laid_out_alike(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the same strides: ATen's function confuses the channels of some that differ."""
    if grad.stride() == x.stride():
        return grad, x
    copy = torch.empty_like(x).copy_(grad)
    if copy.stride() != x.stride():
        x = torch.empty_like(copy).copy_(x)
    return copy, x


def _prepare_empty(
    operation: Any,
    update: Callable[[Operands, Operands, Tensor, Tensor], None] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Kernel:
    """Statistics over nothing are NaN, and so are the running ones after them."""
    channels = operation.inputs["input"].dim[1]
    store = _storers(operation)
    nothing = torch.full((channels,), math.nan, dtype=dtype, device=device)
    ports = [port for port in operation.outputs if port != "Y"]
    if update is None:
        ports = [port for port in ports if not port.startswith("next_")]

    def run(inputs: Operands, outputs: Operands) -> None:
        for port in ports:
            store(outputs, port, nothing)

    return run


def _running_updater(
    operation: Any, source: TensorRecord, dtype: torch.dtype, device: torch.device
) -> Callable[[Operands, Operands, Tensor, Tensor], None] | None:
    """Writes the next running statistics from the mean and the sum of squared deviations."""
    given = [port for port in ("in_running_mean", "in_running_var") if port in operation.inputs]
    wanted = [
        port for port in ("next_running_mean", "next_running_var") if port in operation.outputs
    ]
    if not wanted:
        return None
    if len(given) != 2 or "momentum" not in operation.inputs:
        raise NotSupportedError(
            f"batchnorm outputs {wanted} with running inputs {given}; the next running "
            "statistics need in_running_mean, in_running_var and momentum"
        )
    load = casts.port_loader(operation.inputs, dtype, device)
    momentum = scalar_reader(operation, "momentum", device)
    store = _storers(operation)
    count = math.prod(source.dim) // source.dim[1] if source.dim[1] else 0
    unbiased = 1.0 / (count - 1) if count > 1 else 1.0

    plain = all(casts.is_plain(operation.outputs[port], dtype) for port in wanted)

    def update(inputs: Operands, outputs: Operands, mean: Tensor, squares: Tensor) -> None:
        rate = momentum(inputs)
        old_mean, old_var = load(inputs, "in_running_mean"), load(inputs, "in_running_var")
        variance = squares * unbiased
        if plain:
            # Elementwise: the new values may take the buffers of the old ones.
            _stepped(old_mean, mean, rate, outputs["next_running_mean"])
            _stepped(old_var, variance, rate, outputs["next_running_var"])
            return
        store(outputs, "next_running_mean", _stepped(old_mean, mean, rate))
        store(outputs, "next_running_var", _stepped(old_var, variance, rate))

    return update


def _stepped(old: Tensor, new: Tensor, rate: float, out: Tensor | None = None) -> Tensor:
    """(1 - rate) old + rate new."""
    if rate < 0.5:
        return torch.lerp(old, new, rate, out=out)
    # From here on lerp counts back from ``new``, and of an infinite one makes NaN.
    return torch.mul(old, 1.0 - rate, out=out).add_(new, alpha=rate)


def _check(operation: Any, source: TensorRecord, result: TensorRecord) -> None:
    """Dims of every port, and what the engine does not serve."""
    if getattr(operation, "peer_stats", None) or any(
        port.startswith("peer_stats") for port in operation.inputs
    ):
        raise NotSupportedError(
            f"{operation.kind}: peer_stats is given; the ATen engine runs on one device and takes "
            "none"
        )
    if len(source.dim) < 2:
        raise NotSupportedError(
            f"tensor {source.label()} has dim {source.dim}; a batch normalization takes N, C and "
            "more axes"
        )
    require_dim(result, source.dim, "the result has the input's dim")
    shape = _channel_dim(source)
    for ports in (operation.inputs, operation.outputs):
        for port, record in ports.items():
            if port not in ("input", "grad", "Y", "DX", "epsilon", "momentum"):
                require_dim(record, shape, "the channel's extent on axis 1, 1 elsewhere")


def _channel_dim(source: TensorRecord) -> tuple[int, ...]:
    return (1, source.dim[1]) + (1,) * (len(source.dim) - 2)


def _storers(operation: Any) -> Callable[[Operands, str, Tensor], None]:
    """Stores a value, one of (C,) as (1, C, 1, ...), on a port; an absent port is passed over."""
    stores = {port: casts.storer(record) for port, record in operation.outputs.items()}
    dims = {port: record.dim for port, record in operation.outputs.items()}

    def store(outputs: Operands, port: str, value: Tensor) -> None:
        if port in stores:
            stores[port](outputs[port], value.reshape(dims[port]))

    return store
