"""The product of causal convolution as a plan that is run, with autograd, eager and in a trace.

A line has every sequence's inputs with its state in front; the product is the graph's convolution
with one group a channel. The operators are ``tilewright::conv1d_causal`` and its backward.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.graph.enums import reduction_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.ops.custom import (
    is_traced,
    nothing,
    register,
    require_operator_arguments,
    wanted_gradients,
)
from tilewright.ops.declaring import bind_output, declare_all
from tilewright.ops.first_order import first_order
from tilewright.ops.plan_cache import operands_key, run
from tilewright.ops.transforms import apply


def convolve(
    line: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    engine: str | None,
    stream: Any,
) -> torch.Tensor:
    """The line (N, C, L) with weight (C, W) and bias (C,): (N, C, L - W + 1) in the line's dtype.

    Raises:
        BindingError: if an operand does not fit.
        NotSupportedError: if no engine takes the call.
    """
    if line.shape[2] < weight.shape[1]:
        # No token at all: nothing but states in the line.
        return line[:, :, :0]
    result: torch.Tensor
    if is_traced(line, weight, bias):
        require_operator_arguments(engine, stream)
        result = _conv1d_causal(line, weight, bias, activation is not None, engine)[0]
        return result
    operands = (line, weight, bias, activation is not None, engine, stream)
    result = apply("conv1d_causal", _ConvolutionFunction, *operands)
    return result


class _ConvolutionFunction(torch.autograd.Function):
    """Saves the product before the activation, which its gradient is a function of."""

    @staticmethod
    def forward(
        ctx: Any,
        line: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        has_activation: bool,
        engine: str | None,
        stream: Any,
    ) -> torch.Tensor:
        made = _forward(line, weight, bias, has_activation, engine, stream)
        ctx.save_for_backward(line, weight, made.get("product"))
        ctx.call = (None if bias is None else bias.dtype, has_activation, engine, stream)
        return made["y"]

    @staticmethod
    @first_order("conv1d_causal")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        line, weight, product = ctx.saved_tensors
        bias_type, has_activation, engine, stream = ctx.call
        kept = product if has_activation else None
        grads = _backward(grad, line, weight, kept, bias_type, engine, stream)
        return *grads, None, None, None


def _forward(
    line: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_activation: bool,
    engine: str | None,
    stream: Any,
) -> dict[str, torch.Tensor]:
    inputs = {"line": line, "weight": weight.unsqueeze(1)}
    if bias is not None:
        inputs["bias"] = bias.view(1, -1, 1)
    shape = (*line.shape[:2], line.shape[2] - weight.shape[1] + 1)
    outputs = {"y": torch.empty(shape, dtype=line.dtype, device=line.device)}
    if has_activation:
        outputs["product"] = torch.empty(shape, dtype=line.dtype, device=line.device)

    def declare(graph: DeclaredGraph) -> None:
        named = declare_all(graph, inputs)
        product = graph.conv_fprop(
            named["line"], named["weight"], padding=[0], stride=[1], dilation=[1]
        )
        if bias is not None:
            product = graph.bias(product, named["bias"])
        if has_activation:
            bind_output(product, "product", outputs["product"])
            product = graph.swish(product)
        bind_output(product, "y", outputs["y"])

    key = (has_activation, operands_key(inputs), operands_key(outputs))
    run(
        "conv1d_causal",
        key,
        declare,
        inputs,
        outputs,
        device=line.device,
        engine=engine,
        stream=stream,
    )
    return outputs


def _backward(
    grad: torch.Tensor,
    line: torch.Tensor,
    weight: torch.Tensor,
    product: torch.Tensor | None,
    bias_type: torch.dtype | None,
    engine: str | None,
    stream: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of line, weight and bias; ``product`` is there if an activation was."""
    outputs = {"dline": torch.empty_like(line), "dweight": torch.empty_like(weight)}
    if bias_type is not None:
        outputs["dbias"] = torch.empty((1, line.shape[1], 1), dtype=bias_type, device=line.device)
    inputs = {"line": line, "weight": weight.unsqueeze(1), "grad": grad.contiguous()}
    if product is not None:
        inputs["product"] = product

    def declare(graph: DeclaredGraph) -> None:
        named = declare_all(graph, inputs)
        loss = named["grad"]
        if product is not None:
            loss = graph.swish_backward(loss, named["product"])
        bind_output(
            graph.conv_dgrad(loss, named["weight"], padding=[0], stride=[1], dilation=[1]),
            "dline",
            outputs["dline"],
        )
        bind_output(
            graph.conv_wgrad(named["line"], loss, padding=[0], stride=[1], dilation=[1]),
            "dweight",
            outputs["dweight"].unsqueeze(1),
        )
        if bias_type is not None:
            total = graph.reduction(loss, reduction_mode.ADD)
            bind_output(total, "dbias", outputs["dbias"])

    key = (operands_key(inputs), operands_key(outputs))
    bound = outputs | {"dweight": outputs["dweight"].unsqueeze(1)}
    run(
        "conv1d_causal_backward",
        key,
        declare,
        inputs,
        bound,
        device=line.device,
        engine=engine,
        stream=stream,
    )
    dbias = outputs["dbias"].flatten() if bias_type is not None else None
    return outputs["dline"], outputs["dweight"], dbias


def _compute(
    line: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    has_activation: bool,
    engine: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    made = _forward(line, weight, bias, has_activation, engine, None)
    return made["y"], made["product"] if has_activation else nothing(line)


def _fake(line: Any, weight: Any, bias: Any, has_activation: bool, _: Any) -> tuple[Any, Any]:
    y = line.new_empty((*line.shape[:2], line.shape[2] - weight.shape[1] + 1))
    return y, torch.empty_like(y) if has_activation else nothing(line)


def _compute_backward(
    grad: torch.Tensor,
    line: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: torch.Tensor,
    has_activation: bool,
    engine: str | None,
) -> tuple[torch.Tensor, ...]:
    kept = product if has_activation else None
    bias_type = None if bias is None else bias.dtype
    dline, dweight, dbias = _backward(grad, line, weight, kept, bias_type, engine, None)
    return dline, dweight, nothing(line) if dbias is None else dbias


def _fake_backward(grad: Any, line: Any, weight: Any, bias: Any, *_: Any) -> tuple[Any, ...]:
    dbias = nothing(line) if bias is None else bias.new_empty(bias.shape)
    return torch.empty_like(line), torch.empty_like(weight), dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    line, weight, bias, *ctx.options = inputs
    ctx.save_for_backward(line, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _autograd_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    grads = _conv1d_causal_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *wanted_gradients(ctx, grads), None, None


_OPERANDS = "Tensor line, Tensor weight, Tensor? bias"
# The product before the activation is empty where there is none.
_conv1d_causal_backward = register(
    "conv1d_causal_backward",
    f"(Tensor grad, {_OPERANDS}, Tensor product, bool has_activation, str? engine)"
    " -> (Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)
_conv1d_causal = register(
    "conv1d_causal",
    f"({_OPERANDS}, bool has_activation, str? engine) -> (Tensor, Tensor)",
    _compute,
    _fake,
    setup=_setup,
    backward=_autograd_backward,
)
