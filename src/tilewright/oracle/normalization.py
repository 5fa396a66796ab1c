"""LayerNorm, RMSNorm, InstanceNorm, AdaLayerNorm and BatchNorm, forward and backward.

With mean and variance over the normalized axes (biased variance), r = (var + epsilon)^(-1/2) and
x^ = (x - mean) * r:  y = x^ * scale + bias.  RMSNorm has no mean and r = (mean(x^2) +
epsilon)^(-1/2).  Backward, with g = dy * scale:  dx = r * (g - mean(g) - x^ * mean(g * x^)),
without the mean(g) term for RMSNorm.

Sources: Ba, Kiros, Hinton 2016 (arXiv:1607.06450); Zhang, Sennrich 2019 (arXiv:1910.07467); Ioffe,
Szegedy 2015 (arXiv:1502.03167).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["NormGradients", "NormResult", "backward", "forward", "running_update"]


class NormResult(NamedTuple):
    """y (the input's shape); mean (None without one), variance and inverse, 1 where normalized."""

    y: torch.Tensor
    mean: torch.Tensor | None
    variance: torch.Tensor
    inv_variance: torch.Tensor


class NormGradients(NamedTuple):
    """dx in the input's shape, dscale and dbias in the scale's."""

    dx: torch.Tensor
    dscale: torch.Tensor
    dbias: torch.Tensor


def forward(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    axes: Sequence[int],
    epsilon: float,
    centered: bool = True,
) -> NormResult:
    """Normalize x over `axes`; scale and bias broadcast. `centered` False is RMSNorm."""
    values, dims = to_float64(x), list(axes)
    mean = _mean(values, dims) if centered else None
    shifted = values - mean if mean is not None else values
    variance = _mean(shifted * shifted, dims)
    inverse = 1.0 / torch.sqrt(variance + epsilon)
    y = shifted * inverse
    if scale is not None:
        y = y * to_float64(scale)
    if bias is not None:
        y = y + to_float64(bias)
    return NormResult(y, mean, variance, inverse)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor | None,
    inv_variance: torch.Tensor,
    *,
    axes: Sequence[int],
) -> NormGradients:
    """Gradients from the saved statistics; `mean` None is RMSNorm.

    dscale and dbias sum over every axis on which scale has extent 1.
    """
    dy, values, weight = to_float64(grad), to_float64(x), to_float64(scale)
    inverse, dims = to_float64(inv_variance), list(axes)
    shifted = values - to_float64(mean) if mean is not None else values
    normal = shifted * inverse
    g = dy * weight
    inner = g - normal * _mean(g * normal, dims)
    if mean is not None:
        inner = inner - _mean(g, dims)
    shared = [axis for axis in range(dy.dim()) if weight.shape[axis] == 1]
    return NormGradients(inverse * inner, _sum(dy * normal, shared), _sum(dy, shared))


def running_update(
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    *,
    count: int,
    momentum: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next running mean and variance: (1 - momentum) * running + momentum * batch statistic.

    The batch variance is made unbiased by count / (count - 1); with a count of 1 it stays as it is.
    """
    unbiased = variance * (count / (count - 1)) if count > 1 else variance
    keep = 1.0 - momentum
    return (
        keep * to_float64(running_mean) + momentum * mean,
        keep * to_float64(running_var) + momentum * unbiased,
    )


def _mean(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    count = 1
    for axis in dims:
        count *= x.shape[axis]
    return _sum(x, dims) / count


def _sum(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return torch.sum(x, dim=dims, keepdim=True) if dims else x


def _scalar(tensor: torch.Tensor) -> float:
    return float(to_float64(tensor).reshape(-1)[0])


def _axes(operation: Any, x: torch.Tensor, scale: torch.Tensor | None) -> list[int]:
    """The normalized axes of each kind, by the rule of the kind's scale shape."""
    kind = operation.kind.removesuffix("_backward").removesuffix("_inference")
    ndim = x.dim()
    if kind == "instancenorm":
        return list(range(2, ndim))
    if kind == "batchnorm":
        return [axis for axis in range(ndim) if axis != 1]
    if scale is None:
        return [ndim - 1]
    if kind == "adalayernorm":
        return [axis for axis in range(1, ndim) if scale.shape[axis] != 1]
    # An axis of extent 1 may count as normalized or not: its statistics are the same.
    return [axis for axis in range(ndim) if scale.shape[axis] != 1]


@reference("layernorm", "instancenorm", "adalayernorm", "rmsnorm")
def _norm(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    x, scale = inputs["input"], inputs.get("scale")
    result = forward(
        x,
        scale,
        inputs.get("bias"),
        axes=_axes(operation, x, scale),
        epsilon=_scalar(inputs["epsilon"]),
        centered=operation.kind != "rmsnorm",
    )
    outputs = {"Y": result.y, "inv_variance": result.inv_variance}
    if result.mean is not None:
        outputs["mean"] = result.mean
    return outputs


@reference("batchnorm")
def _batchnorm(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    x = inputs["input"]
    axes = _axes(operation, x, None)
    epsilon = _scalar(inputs["epsilon"])
    result = forward(x, inputs["scale"], inputs["bias"], axes=axes, epsilon=epsilon)
    outputs = {"Y": result.y, "inv_variance": result.inv_variance}
    if result.mean is not None:
        outputs["mean"] = result.mean
    if "in_running_mean" in inputs:
        running = running_update(
            inputs["in_running_mean"],
            inputs["in_running_var"],
            outputs["mean"],
            result.variance,
            count=x.numel() // max(x.shape[1], 1),
            momentum=_scalar(inputs["momentum"]),
        )
        outputs["next_running_mean"], outputs["next_running_var"] = running
    return outputs


@reference("batchnorm_inference")
def _batchnorm_inference(
    operation: Any, inputs: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    x = to_float64(inputs["input"])
    normal = (x - to_float64(inputs["mean"])) * to_float64(inputs["inv_variance"])
    return {"Y": normal * to_float64(inputs["scale"]) + to_float64(inputs["bias"])}


@reference(
    "layernorm_backward",
    "instancenorm_backward",
    "adalayernorm_backward",
    "rmsnorm_backward",
    "batchnorm_backward",
)
def _norm_backward(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    x, scale = inputs["input"], inputs["scale"]
    gradients = backward(
        inputs["grad"],
        x,
        scale,
        None if operation.kind == "rmsnorm_backward" else inputs["mean"],
        inputs["inv_variance"],
        axes=_axes(operation, x, scale),
    )
    return {"DX": gradients.dx, "DScale": gradients.dscale, "DBias": gradients.dbias}
