"""Depthwise causal convolution along time, and its one-step update for decoding.

    y[b, t, c] = act(bias[c] + sum over w of weight[c, w] * x[b, t - W + 1 + w, c])

What lies before a sequence is its initial state, zeros without one. The product is the graph's
convolution with one group a channel, over each sequence with its state in front. Source: Mamba (Gu
and Dao 2023), whose causal-conv1d package lays its operands out so.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tilewright.errors import BindingError
from tilewright.graph.enums import reduction_mode
from tilewright.graph.graph import DeclaredGraph
from tilewright.ops.arguments import (
    compact,
    require_choice,
    require_device,
    require_distinct,
    require_float,
    require_shape,
    require_tensor,
)
from tilewright.ops.custom import forbid_stream, is_traced, nothing, register
from tilewright.ops.declaring import bind_output, declare_all
from tilewright.ops.first_order import first_order
from tilewright.ops.plan_cache import operands_key, run
from tilewright.ops.streams import on_its_stream
from tilewright.ops.transforms import apply

_ACTIVATIONS = (None, "silu", "swish")


@on_its_stream
def conv1d_causal(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Convolve x (B, T, C) with weight (C, W) along T, each channel by itself.

    Args:
        x: (B, T, C), any strides.
        weight: (C, W), W at least 1; tap W - 1 meets the newest input.
        bias: (C,).
        activation: None, or "silu" ("swish" is the same).
        initial_state: (N, C, W - 1), the inputs before each of the N sequences, oldest first.
        return_final_state: also return the last W - 1 inputs, (N, C, W - 1) in x's dtype.
        cu_seqlens: (N + 1,) int32 or int64 running sums of sequences packed along T, with B = 1;
            without it N = B. Tokens of no sequence give 0.
        engine: run this engine or raise.
        stream: where to run.

    Returns:
        y (B, T, C), or (y, final state). Differentiable in all floating operands.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    require_float("x", require_tensor("x", x, 3))
    channels, width = _check_weight(weight, bias, x, x.shape[2])
    require_choice("activation", activation, _ACTIVATIONS)
    batch, length, _ = x.shape
    count = batch
    if cu_seqlens is not None:
        _check_prefix(cu_seqlens, x)
        count = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        require_tensor("initial_state", initial_state, 3)
        require_shape("initial_state", initial_state, (count, channels, width - 1), "(N, C, W - 1)")
        require_device("initial_state", initial_state, x.device)
    state = (
        x.new_zeros((count, channels, width - 1))
        if initial_state is None
        else initial_state.to(x.dtype)
    )
    inputs = x.transpose(1, 2)
    if cu_seqlens is None:
        line = torch.cat((state, inputs), dim=2)
        y = _convolve(line, weight, bias, activation, engine, stream)
        final = line[:, :, length:]
    else:
        line, taken, ends, is_in = _packed_line(inputs[0], state, cu_seqlens, width)
        whole = _convolve(line[None], weight, bias, activation, engine, stream)
        # Column j of the result is of the window that ends at column j + W - 1 of the line.
        y = torch.where(is_in, whole.index_select(2, taken - (width - 1)), whole.new_zeros(()))
        tail = ends[:, None] + torch.arange(1 - width, 0, device=x.device)
        final = line[:, tail.flatten()].view(channels, count, width - 1).transpose(0, 1)
    y = y.transpose(1, 2)
    return (y, final.contiguous()) if return_final_state else y


@on_its_stream
def conv1d_causal_update(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    engine: str | None = None,
    stream: Any = None,
) -> torch.Tensor:
    """One decoding step: x (B, C), or T new tokens (B, T, C); ``state`` is updated in place.

    ``state`` is (B, C, W - 1), the newest inputs, oldest first. Returns y of x's shape. For
    inference: nothing is differentiable.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
    """
    require_float("x", require_tensor("x", x))
    if x.dim() not in (2, 3):
        raise BindingError(f"x: shape {tuple(x.shape)}; expected (B, C) or (B, T, C)")
    tokens = x if x.dim() == 3 else x.unsqueeze(1)
    channels, width = _check_weight(weight, bias, x, x.shape[-1])
    require_shape(
        "state", require_tensor("state", state), (x.shape[0], channels, width - 1), "(B, C, W - 1)"
    )
    require_device("state", state, x.device)
    require_distinct("state", state)
    with torch.no_grad():
        y, final = conv1d_causal(
            tokens,
            weight,
            bias,
            activation=activation,
            initial_state=state,
            return_final_state=True,
            engine=engine,
            stream=stream,
        )
        state.copy_(final)
    return y if x.dim() == 3 else y.squeeze(1)


def _convolve(
    line: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    engine: str | None,
    stream: Any,
) -> torch.Tensor:
    """(N, C, L) with (C, W): (N, C, L - W + 1) in the line's dtype."""
    if line.shape[2] < weight.shape[1]:
        # No token at all: nothing but states in the line.
        return line[:, :, :0]
    result: torch.Tensor
    if is_traced(line, weight, bias):
        forbid_stream(stream)
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


def _packed_line(
    x: torch.Tensor, state: torch.Tensor, cu_seqlens: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """All sequences in one line (C, T + N (W - 1)), each behind its state; nothing waits.

    Also the column of each token, the column behind each sequence's last token, and whether a
    token is in a sequence at all.
    """
    count, before = state.shape[0], width - 1
    sums = compact(cu_seqlens).to(torch.int64)
    tokens = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(sums, tokens, right=True) - 1
    is_in = (sequence >= 0) & (sequence < count)
    sequence = sequence.clamp(0, max(count - 1, 0))
    taken = tokens + (sequence + 1) * before
    starts = sums[:-1] + torch.arange(count, device=x.device) * before
    ends = sums[1:] + torch.arange(1, count + 1, device=x.device) * before
    columns = (starts[:, None] + torch.arange(before, device=x.device)).flatten()
    # Room for one state at least: with no sequence, tokens are looked up behind it all the same.
    line = x.new_zeros((x.shape[0], x.shape[1] + max(count, 1) * before))
    kept = torch.where(is_in, x, x.new_zeros(()))
    line = line.index_add(1, taken, kept)
    line = line.index_copy(1, columns, state.transpose(0, 1).flatten(1))
    return line, taken, ends, is_in


def _check_weight(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, channels: int
) -> tuple[int, int]:
    require_tensor("weight", weight, 2)
    if weight.shape[1] < 1:
        raise BindingError(f"weight: shape {tuple(weight.shape)}; expected (C, W), W at least 1")
    require_shape("weight", weight, (channels, weight.shape[1]), "(C, W) with x's C")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if require_tensor(name, tensor).dtype is not x.dtype:
            raise BindingError(f"{name}: data type {tensor.dtype}; expected x's {x.dtype}")
        require_device(name, tensor, x.device)
    if bias is not None:
        require_shape("bias", bias, (channels,), "one entry a channel")
    return channels, int(weight.shape[1])


def _check_prefix(cu_seqlens: torch.Tensor, x: torch.Tensor) -> None:
    require_tensor("cu_seqlens", cu_seqlens, 1)
    require_device("cu_seqlens", cu_seqlens, x.device)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise BindingError(f"cu_seqlens: data type {cu_seqlens.dtype}; expected int32 or int64")
    if x.shape[0] != 1 or cu_seqlens.shape[0] < 1:
        raise BindingError(
            f"cu_seqlens: shape {tuple(cu_seqlens.shape)} with x {tuple(x.shape)}; expected "
            "(N + 1,) with a batch of 1"
        )
    if x.device.type != "cpu" or is_traced(cu_seqlens):
        return
    # On a CPU the sums are here; on a GPU they are never waited for.
    sums = [0, *cu_seqlens.tolist(), x.shape[1]]
    if any(one > other for one, other in itertools.pairwise(sums)):
        raise BindingError(
            f"cu_seqlens: got {sums[1:-1]}; expected running sums, none below the one before it, "
            f"from 0 up to x's {x.shape[1]} tokens"
        )


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
    kept = (d if needs else None for d, needs in zip(grads, ctx.needs_input_grad, strict=False))
    return *kept, None, None


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
