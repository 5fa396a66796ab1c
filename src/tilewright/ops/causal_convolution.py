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
from tilewright.ops.arguments import (
    compact,
    require_choice,
    require_device,
    require_distinct,
    require_flag,
    require_float,
    require_shape,
    require_tensor,
    require_type_of_x,
)
from tilewright.ops.causal_convolution_call import convolve
from tilewright.ops.custom import forbid_gradient, is_traced
from tilewright.ops.streams import lowered

_ACTIVATIONS = (None, "silu", "swish")


@lowered("x", "weight", "bias")
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

        y[b, t, c] = act(bias[c] + sum over w of weight[c, w] * x[b, t - W + 1 + w, c])

    Args:
        x: (B, T, C), any strides and float type.
        weight: (C, W), of x's dtype, W at least 1; tap W - 1 meets the newest input.
        bias: (C,), of x's dtype; none if None.
        activation: None, or "silu" ("swish" is the same).
        initial_state: (N, C, W - 1), the inputs before each of the N sequences, oldest first.
        return_final_state: also return the last W - 1 inputs, (N, C, W - 1) in x's dtype.
        cu_seqlens: (N + 1,) int32 or int64 running sums of sequences packed along T, with B = 1;
            without it N = B. Tokens of no sequence give 0.
        engine: run this engine or raise.
        stream: where to run; default is the device's current stream.

    Returns:
        y (B, T, C) in x's dtype, or (y, final state). Differentiable in all floating operands.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if no engine takes the call.
    """
    require_float("x", require_tensor("x", x, 3))
    require_flag("return_final_state", return_final_state)
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
        y = convolve(line, weight, bias, activation, engine, stream)
        final = line[:, :, length:]
    else:
        line, taken, ends, is_in = _packed_line(inputs[0], state, cu_seqlens, width)
        whole = convolve(line[None], weight, bias, activation, engine, stream)
        # Column j of the result is of the window that ends at column j + W - 1 of the line.
        y = torch.where(is_in, whole.index_select(2, taken - (width - 1)), whole.new_zeros(()))
        tail = ends[:, None] + torch.arange(1 - width, 0, device=x.device)
        final = line[:, tail.flatten()].view(channels, count, width - 1).transpose(0, 1)
    y = y.transpose(1, 2)
    return (y, final.contiguous()) if return_final_state else y


@lowered("x", "weight", "bias")
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

    ``state`` is (B, C, W - 1), the newest inputs, oldest first; ``weight`` and ``bias`` are as for
    ``conv1d_causal``. Returns y of x's shape and dtype. For inference: nothing is differentiable.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if an operand requires grad, or no engine takes the call.
    """
    require_float("x", require_tensor("x", x))
    if x.dim() not in (2, 3):
        raise BindingError(f"x: shape {tuple(x.shape)}; expected (B, C) or (B, T, C)")
    tokens = x if x.dim() == 3 else x.unsqueeze(1)
    channels, width = _check_weight(weight, bias, x, x.shape[-1])
    require_shape(
        "state", require_tensor("state", state), (x.shape[0], channels, width - 1), "(B, C, W - 1)"
    )
    require_float("state", state)
    require_device("state", state, x.device)
    require_distinct("state", state)
    rule = "a decoding step is for inference"
    forbid_gradient("conv1d_causal_update", rule, x, state, weight, bias)
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
    if channels < 1:
        raise BindingError(f"x: shape {tuple(x.shape)}; expected one channel at least")
    if weight.shape[1] < 1:
        raise BindingError(f"weight: shape {tuple(weight.shape)}; expected (C, W), W at least 1")
    require_shape("weight", weight, (channels, weight.shape[1]), "(C, W) with x's C")
    require_type_of_x(x, weight, bias)
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
