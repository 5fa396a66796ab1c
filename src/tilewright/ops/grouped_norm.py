"""GroupNorm of (N, C, ...), with autograd, as a graph of instance normalization and pointwise.

    group_norm(x) = (x - mean) / sqrt(var + eps) * weight + bias

with mean and biased variance over a group of C / num_groups channels and all their positions, one
weight and bias a channel. Channels are split into (groups, channels a group), which is a view, so
that a group is to instance normalization what a channel is. Statistics are float32 (float64 for
float64 inputs); weight gradients accumulate likewise. Source: Wu and He 2018 (arXiv:1803.08494).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.dtypes import DataType
from tilewright.errors import BindingError
from tilewright.graph.enums import norm_forward_phase, reduction_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import MAX_RANK, Tensor
from tilewright.ops.arguments import (
    require_epsilon,
    require_float,
    require_out,
    require_parameters,
    require_tensor,
)
from tilewright.ops.custom import (
    is_traced,
    made_without_gradients,
    needs_gradient,
    nothing,
    register,
    require_operator_arguments,
    serves_gradients,
    store,
    wanted_gradients,
)
from tilewright.ops.declaring import bind_output
from tilewright.ops.first_order import first_order
from tilewright.ops.plan_cache import Operands, operands_key, run
from tilewright.ops.streams import widened
from tilewright.ops.transforms import apply


class _Options(NamedTuple):
    groups: int
    eps: float


@widened("x", "weight", "bias")
def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """GroupNorm: (x - mean) / sqrt(var + eps) * weight + bias, over a group of channels.

    Args:
        x: (N, C, ...), two to seven axes, any strides and float type.
        num_groups: a divisor of C; mean and biased variance are over C / num_groups neighbouring
            channels of a sample and all their positions.
        weight: (C,), of any float type; 1 if None.
        bias: (C,), of any float type; 0 if None.
        eps: added to the variance, from 0 up.
        out: x's shape, written in place of a new tensor.
        engine: run this engine or raise.
        stream: where to run; default is the device's current stream.

    Returns:
        y in x's shape and dtype. Differentiable in x, weight and bias.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.

    Source: Wu and He 2018 (arXiv:1803.08494).
    """
    require_float("x", require_tensor("x", x))
    if not 2 <= x.dim() < MAX_RANK:
        raise BindingError(
            f"x: shape {tuple(x.shape)}; expected (N, C, ...) of 2 to {MAX_RANK - 1} axes"
        )
    if not isinstance(num_groups, int) or num_groups < 1 or x.shape[1] % num_groups:
        raise BindingError(
            f"num_groups: got {num_groups!r}; expected a divisor of x's {x.shape[1]} channels"
        )
    require_parameters(x, x.shape[1:2], "one entry a channel of x", weight, bias)
    require_out(out, x.shape, "x's shape", (x, weight, bias))
    needs_grad = needs_gradient(x, weight, bias)
    options = _Options(num_groups, require_epsilon(eps))
    y: torch.Tensor
    if is_traced(x, weight, bias, out):
        require_operator_arguments(engine, stream)
        wants = serves_gradients(x, weight, bias)
        y = _group_norm(x, weight, bias, *options, wants, engine)[0]
        return y if out is None else store(out, y)
    if needs_grad:
        y = apply("group_norm", _GroupNormFunction, x, weight, bias, options, engine, stream)
        return y
    return _forward(x, weight, bias, options, out, engine, stream, want_statistics=False)[0]


class _GroupNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        options: _Options,
        engine: str | None,
        stream: Any,
    ) -> torch.Tensor:
        y, mean, inv_variance = _forward(
            x, weight, bias, options, None, engine, stream, want_statistics=True
        )
        ctx.save_for_backward(x, weight, bias, mean, inv_variance)
        ctx.call = (options, engine, stream)
        return y

    @staticmethod
    @first_order("group_norm")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return *_backward(grad, *ctx.saved_tensors, *ctx.call), None, None, None


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    options: _Options,
    out: torch.Tensor | None,
    engine: str | None,
    stream: Any,
    *,
    want_statistics: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, and the statistics (N, groups, 1, ...), which are empty unless wanted."""
    y = torch.empty_like(x) if out is None else out
    inputs = _split_operands(x, weight, bias, options.groups)
    outputs = {"y": _split(y, options.groups)}
    if want_statistics:
        outputs |= {name: _statistic(x, options.groups) for name in ("mean", "inv_variance")}

    def declare(graph: DeclaredGraph) -> None:
        named, kept = _declare_operands(graph, inputs)
        phase = norm_forward_phase.TRAINING if want_statistics else norm_forward_phase.INFERENCE
        made = graph.instancenorm(
            phase,
            named["x"],
            named["ones"],
            None,
            graph.tensor_scalar(options.eps, inputs["ones"].dtype),
        )
        value = made[0]
        for name, combine in (("weight", graph.mul), ("bias", graph.add)):
            if name in named and value is not None:
                value = combine(value.set_data_type(kept), named[name])
        for name, tensor in zip(outputs, (value, *made[1:]), strict=False):
            bind_output(tensor, name, outputs[name])

    key = (options, operands_key(inputs), operands_key(outputs))
    run("group_norm", key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    mean, inv_variance = (outputs.get(name, nothing(y)) for name in ("mean", "inv_variance"))
    return y, mean, inv_variance


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inv_variance: torch.Tensor,
    options: _Options,
    engine: str | None,
    stream: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, weight and bias; None for a parameter that is absent."""
    groups = options.groups
    dx = torch.empty_like(x)
    inputs = _split_operands(x, weight, None, groups)
    inputs |= {"grad": _split(grad, groups), "mean": mean, "inv_variance": inv_variance}
    outputs = {"dx": _split(dx, groups)}
    made: dict[str, torch.Tensor | None] = {"weight": None, "bias": None}
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            gradient = parameter.new_empty(parameter.shape)
            made[name] = gradient
            outputs[f"d{name}"] = _as_channels(gradient, x, groups)

    def declare(graph: DeclaredGraph) -> None:
        named, kept = _declare_operands(graph, inputs)
        source, incoming = named["x"], named["grad"]
        scaled = incoming
        if "weight" in named:
            scaled = graph.mul(incoming, named["weight"]).set_data_type(kept)
        statistics = (named["mean"], named["inv_variance"])
        found = graph.instancenorm_backward(scaled, source, named["ones"], *statistics)
        bind_output(found[0], "dx", outputs["dx"])
        products = {"dbias": incoming}
        if "dweight" in outputs:
            centered = graph.sub(source, named["mean"]).set_data_type(kept)
            normal = graph.mul(centered, named["inv_variance"]).set_data_type(kept)
            products["dweight"] = graph.mul(incoming, normal).set_data_type(kept)
        for name, product in products.items():
            if name in outputs:
                total = graph.reduction(product, reduction_mode.ADD)
                bind_output(total.set_dim(outputs[name].shape), name, outputs[name])

    run(
        "group_norm_backward",
        (options, operands_key(inputs), operands_key(outputs)),
        declare,
        inputs,
        outputs,
        device=x.device,
        engine=engine,
        stream=stream,
    )
    return dx, made["weight"], made["bias"]


def _split(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(N, C, ...) as (N, groups, C / groups, ...), a view."""
    return x.view(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _as_channels(parameter: torch.Tensor, x: torch.Tensor, groups: int) -> torch.Tensor:
    """(C,) as (1, groups, C / groups, 1, ...), a view."""
    return parameter.view(1, groups, x.shape[1] // groups, *(1,) * (x.dim() - 2))


def _compute_type(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _statistic(x: torch.Tensor, groups: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], groups, *(1,) * (x.dim() - 1)), dtype=_compute_type(x))


def _split_operands(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, groups: int
) -> dict[str, torch.Tensor]:
    """The inputs with split channels, and the scale of a plain normalization."""
    identity = (1, groups, *(1,) * (x.dim() - 1))
    inputs = {"x": _split(x, groups), "ones": x.new_ones(identity, dtype=_compute_type(x))}
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            inputs[name] = _as_channels(parameter.contiguous(), x, groups)
    return inputs


def _declare_operands(graph: DeclaredGraph, inputs: Operands) -> tuple[dict[str, Tensor], DataType]:
    """The declared inputs by name, and the type of what is kept between operations."""
    kept = DataType.DOUBLE if inputs["x"].dtype is torch.float64 else DataType.FLOAT
    graph.intermediate_data_type = kept
    named = {
        name: graph.tensor(t.shape, t.stride(), t.dtype, name=name) for name, t in inputs.items()
    }
    return named, kept


def _compute(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    eps: float,
    want_statistics: bool,
    engine: str | None,
) -> tuple[torch.Tensor, ...]:
    options = _Options(groups, eps)
    return _forward(x, weight, bias, options, None, engine, None, want_statistics=want_statistics)


def _fake(x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[torch.Tensor, ...]:
    groups, _, want_statistics, _ = rest
    kept = [_statistic(x, groups) if want_statistics else nothing(x) for _ in range(2)]
    return torch.empty_like(x), *kept


def _compute_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    grad, x, weight, bias, mean, inv_variance, groups, eps, engine = arguments
    options = _Options(groups, eps)
    grads = _backward(grad, x, weight, bias, mean, inv_variance, options, engine, None)
    return tuple(nothing(grads[0]) if grad is None else grad for grad in grads)


def _fake_backward(grad: Any, x: Any, weight: Any, bias: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    parameters = (nothing(x) if p is None else p.new_empty(p.shape) for p in (weight, bias))
    return torch.empty_like(x), *parameters


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *operands, groups, eps, want_statistics, engine = inputs
    if not want_statistics:
        raise made_without_gradients("want_statistics")
    ctx.save_for_backward(*operands, *output[1:])
    ctx.options = (groups, eps, engine)
    ctx.mark_non_differentiable(*output[1:])


def _autograd_backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    grads = _group_norm_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *wanted_gradients(ctx, grads), None, None, None, None


_group_norm_backward = register(
    "group_norm_backward",
    "(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor inv_variance,"
    " SymInt groups, float eps, str? engine) -> (Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)
_group_norm = register(
    "group_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, SymInt groups, float eps, bool want_statistics,"
    " str? engine) -> (Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    setup=_setup,
    backward=_autograd_backward,
)
