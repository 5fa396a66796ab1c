"""Linear layers: product, bias, activation and gated units as one graph.

    y = act(x W^T + b)                       without glu
    y = u * act(g),  (u, g) = split(x W^T + b)   with glu, act = swish by default (SwiGLU)

Sources: Shazeer 2020 (gated linear units), Hendrycks and Gimpel 2016 (GELU).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from tilewright.errors import BindingError
from tilewright.graph.enums import reduction_mode, reshape_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.ops.arguments import (
    require_choice,
    require_float,
    require_out,
    require_shape,
    require_tensor,
    require_type_of_x,
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
from tilewright.ops.declaring import bind_output, declare_all
from tilewright.ops.first_order import first_order
from tilewright.ops.plan_cache import operands_key, run
from tilewright.ops.streams import lowered
from tilewright.ops.transforms import apply

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_approx_tanh",
    "silu": "swish",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
# Columns of one input block, and of one gate block, of the interleaved layout.
GLU_BLOCK = 32


class _Epilogue(NamedTuple):
    activation: str | None
    glu: str | None


@lowered("x", "weight", "bias")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    glu: str | None = None,
    out: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """x times weight transposed, plus bias, then an epilogue: act(x weight^T + bias).

    Args:
        x: (..., K), any strides and float type.
        weight: (N, K), of x's dtype.
        bias: (N,), of x's dtype; none if None.
        activation: "relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", or None.
        glu: the N columns hold inputs u and gates g, and the result (..., N/2) is u * act(g), act
            being silu unless ``activation`` says otherwise: "halves" has u first and g second;
            "interleaved32" alternates blocks of 32 columns of u and of g.
        out: the result's shape, written in place of a new tensor.
        engine: run this engine or raise.
        stream: where to run; default is the device's current stream.

    Returns:
        (..., N), or (..., N/2) with ``glu``, in x's dtype. Sums are float32, float64 for float64.
        Differentiable in x, weight and bias.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.

    Source of the gated units: Shazeer 2020 (arXiv:2002.05202).
    """
    require_float("x", require_tensor("x", x))
    require_tensor("weight", weight, 2)
    if x.dim() < 1:
        raise BindingError("x: shape (); expected (..., K)")
    columns, depth = weight.shape
    require_shape("weight", weight, (columns, x.shape[-1]), "(N, K) with x's last axis K")
    require_type_of_x(x, weight, bias)
    if bias is not None:
        require_shape("bias", bias, (columns,), "one entry a row of weight")
    require_choice("activation", activation, (None, *ACTIVATIONS))
    require_choice("glu", glu, (None, "halves", "interleaved32"))
    unit = {"halves": 2, "interleaved32": 2 * GLU_BLOCK}.get(glu or "", 1)
    if columns % unit:
        raise BindingError(
            f"weight: {columns} rows; expected a multiple of {unit} with glu={glu!r}"
        )
    epilogue = _Epilogue("silu" if glu and activation is None else activation, glu)
    flat = x.reshape(math.prod(x.shape[:-1]), depth)
    shape = (*x.shape[:-1], columns // 2 if glu else columns)
    require_out(out, shape, "(..., N), or (..., N/2) with glu", (x, weight, bias))
    needs_grad = needs_gradient(x, weight, bias)
    y: torch.Tensor
    if is_traced(x, weight, bias, out):
        require_operator_arguments(engine, stream)
        wants = serves_gradients(x, weight, bias)
        y = _linear(flat, weight, bias, *epilogue, wants, engine)[0].reshape(shape)
        return y if out is None else store(out, y)
    if needs_grad:
        y = apply("linear", _LinearFunction, flat, weight, bias, epilogue, engine, stream)
        return y.reshape(shape)
    y_type = None if out is None else out.dtype
    y = _forward(flat, weight, bias, epilogue, engine, stream, y_type=y_type)[0]
    return y.reshape(shape) if out is None else out.copy_(y.reshape(shape))


class _LinearFunction(torch.autograd.Function):
    """Saves the product before the epilogue, which its gradient is a function of."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epilogue: _Epilogue,
        engine: str | None,
        stream: Any,
    ) -> torch.Tensor:
        keep = epilogue.activation is not None
        y, product = _forward(x, weight, bias, epilogue, engine, stream, keep_product=keep)
        ctx.save_for_backward(x, weight, product)
        # Not read by the backward, but the product depends on it.
        ctx.anchors = (bias,)
        ctx.call = (None if bias is None else bias.dtype, epilogue, engine, stream)
        return y

    @staticmethod
    @first_order("linear")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, product = ctx.saved_tensors
        bias_type, epilogue, engine, stream = ctx.call
        grads = _backward(grad, x, weight, product, bias_type, epilogue, engine, stream)
        return *grads, None, None, None


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    product: torch.Tensor | None,
    bias_type: torch.dtype | None,
    epilogue: _Epilogue,
    engine: str | None,
    stream: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of x, weight and bias; None for an absent bias."""
    inputs = {"x": x, "weight": weight, "grad": grad}
    if product is not None:
        inputs["product"] = product
    outputs = {"dx": torch.empty_like(x), "dweight": torch.empty_like(weight)}
    if bias_type is not None:
        outputs["dbias"] = torch.empty((1, weight.shape[0]), dtype=bias_type, device=x.device)

    def declare(graph: DeclaredGraph) -> None:
        named = declare_all(graph, inputs)
        dproduct = _declare_epilogue_backward(graph, named["grad"], named.get("product"), epilogue)
        rows, columns = x.shape[0], weight.shape[0]
        bind_output(graph.matmul(dproduct, named["weight"]), "dx", outputs["dx"])
        transposed = graph.transpose(dproduct, permutation=(1, 0)).set_dim((columns, rows))
        bind_output(graph.matmul(transposed, named["x"]), "dweight", outputs["dweight"])
        if bias_type is not None:
            total = graph.reduction(dproduct, reduction_mode.ADD).set_dim((1, columns))
            bind_output(total, "dbias", outputs["dbias"])

    key = (epilogue, operands_key(inputs), operands_key(outputs))
    run(
        "linear_backward",
        key,
        declare,
        inputs,
        outputs,
        device=x.device,
        engine=engine,
        stream=stream,
    )
    dbias = None if bias_type is None else outputs["dbias"].reshape(-1)
    return outputs["dx"], outputs["dweight"], dbias


def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: _Epilogue,
    engine: str | None,
    stream: Any,
    *,
    keep_product: bool = False,
    y_type: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows, columns = x.shape[0], weight.shape[0]
    width = columns // 2 if epilogue.glu else columns
    inputs = {"x": x, "weight": weight.t()}
    if bias is not None:
        inputs["bias"] = bias.unsqueeze(0)
    y = torch.empty((rows, width), dtype=y_type or x.dtype, device=x.device)
    outputs = {"y": y}
    if keep_product:
        outputs["product"] = torch.empty((rows, columns), dtype=x.dtype, device=x.device)

    def declare(graph: DeclaredGraph) -> None:
        named = declare_all(graph, inputs)
        product = graph.matmul(named["x"], named["weight"])
        if bias is not None:
            product = graph.bias(product, named["bias"])
        if keep_product:
            bind_output(product, "product", outputs["product"])
        bind_output(_declare_epilogue(graph, product, epilogue, (rows, columns)), "y", y)

    key = (epilogue, operands_key(inputs), operands_key(outputs))
    run("linear", key, declare, inputs, outputs, device=x.device, engine=engine, stream=stream)
    return y, outputs.get("product")


def _declare_epilogue(
    graph: DeclaredGraph, product: Tensor, epilogue: _Epilogue, shape: tuple[int, int]
) -> Tensor:
    if epilogue.activation is None:
        return product
    activate = getattr(graph, ACTIVATIONS[epilogue.activation])
    if epilogue.glu is None:
        activated: Tensor = activate(product)
        return activated
    value, gate = _split(graph, product, epilogue.glu, shape)
    joined = graph.mul(value, activate(gate))
    if epilogue.glu == "halves":
        return joined
    # The columns are put together in the type that they were computed in, then rounded.
    return graph.identity(graph.reshape(joined).set_dim((shape[0], shape[1] // 2)))


def _declare_epilogue_backward(
    graph: DeclaredGraph, grad: Tensor, product: Tensor | None, epilogue: _Epilogue
) -> Tensor:
    if epilogue.activation is None or product is None:
        return grad
    name = ACTIVATIONS[epilogue.activation]
    activate = getattr(graph, name)
    activate_backward = getattr(graph, f"{name}_backward")
    if epilogue.glu is None:
        dproduct: Tensor = activate_backward(grad, product)
        return dproduct
    rows, columns = product.dim
    value, gate = _split(graph, product, epilogue.glu, (rows, columns))
    if epilogue.glu != "halves":
        # The gradient of a sum is expanded, and its elements are not distinct.
        grad = graph.reshape(grad, reshape_mode=reshape_mode.LOGICAL)
        grad = grad.set_dim((rows, columns // (2 * GLU_BLOCK), 1, GLU_BLOCK))
    dvalue = graph.mul(grad, activate(gate))
    dgate = activate_backward(graph.mul(grad, value), gate)
    if epilogue.glu == "halves":
        return graph.concatenate([dvalue, dgate], axis=1)
    blocks = graph.concatenate([dvalue, dgate], axis=2)
    return graph.reshape(blocks).set_dim((rows, columns))


def _split(
    graph: DeclaredGraph, product: Tensor, glu: str, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The values and the gates among the product's columns."""
    rows, columns = shape
    if glu == "halves":
        half = columns // 2
        every = slice(0, rows)
        return (
            graph.slice(product, [every, slice(0, half)]),
            graph.slice(product, [every, slice(half, columns)]),
        )
    count = columns // (2 * GLU_BLOCK)
    blocks = graph.reshape(product).set_dim((rows, count, 2, GLU_BLOCK))
    whole = [slice(0, rows), slice(0, count)]
    return (
        graph.slice(blocks, [*whole, slice(0, 1), slice(0, GLU_BLOCK)]),
        graph.slice(blocks, [*whole, slice(1, 2), slice(0, GLU_BLOCK)]),
    )


def _compute(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    glu: str | None,
    is_training: bool,
    engine: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    keep = is_training and activation is not None
    epilogue = _Epilogue(activation, glu)
    y, product = _forward(x, weight, bias, epilogue, engine, None, keep_product=keep)
    return y, nothing(y) if product is None else product


def _fake(x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    activation, glu, is_training, _ = rest
    rows, columns = x.shape[0], weight.shape[0]
    y = x.new_empty((rows, columns // 2 if glu else columns))
    keep = is_training and activation is not None
    return y, x.new_empty((rows, columns)) if keep else nothing(x)


def _compute_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: torch.Tensor,
    activation: str | None,
    glu: str | None,
    engine: str | None,
) -> tuple[torch.Tensor, ...]:
    kept = None if activation is None else product
    bias_type = None if bias is None else bias.dtype
    epilogue = _Epilogue(activation, glu)
    dx, dweight, dbias = _backward(grad, x, weight, kept, bias_type, epilogue, engine, None)
    return dx, dweight, nothing(x) if dbias is None else dbias


def _fake_backward(grad: Any, x: Any, weight: Any, bias: Any, *_: Any) -> tuple[Any, ...]:
    dbias = nothing(x) if bias is None else bias.new_empty(bias.shape)
    return torch.empty_like(x), torch.empty_like(weight), dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, bias, activation, glu, is_training, engine = inputs
    if not is_training:
        raise made_without_gradients("is_training")
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.options = (activation, glu, engine)
    ctx.mark_non_differentiable(output[1])


def _autograd_backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    grads = _linear_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *wanted_gradients(ctx, grads), None, None, None, None


_OPERANDS = "Tensor x, Tensor weight, Tensor? bias"
# The product before the epilogue is empty where the gradient does not need it.
_linear_backward = register(
    "linear_backward",
    f"(Tensor grad, {_OPERANDS}, Tensor product, str? activation, str? glu, str? engine)"
    " -> (Tensor, Tensor, Tensor)",
    _compute_backward,
    _fake_backward,
)
_linear = register(
    "linear",
    f"({_OPERANDS}, str? activation, str? glu, bool is_training, str? engine) -> (Tensor, Tensor)",
    _compute,
    _fake,
    setup=_setup,
    backward=_autograd_backward,
)
