"""Depthwise causal convolution along time, with its running state and gradients.

y[b, t, c] = act(bias[c] + sum over w of weight[c, w] * x[b, t - W + 1 + w, c]), where positions
before a sequence's start read its initial state (zeros without one). act is the identity or
silu(z) = z * sigmoid(z).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from tilewright.oracle import pointwise
from tilewright.oracle.formats import to_float64

__all__ = ["CausalConvolution", "backward", "forward"]


class CausalConvolution(NamedTuple):
    """`output` (B, T, C) and `final_state` (N, C, W - 1), the last W - 1 inputs; float64."""

    output: torch.Tensor
    final_state: torch.Tensor


def _sequences(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> list[tuple[int, int, int]]:
    if cu_seqlens is None:
        return [(index, 0, x.shape[1]) for index in range(x.shape[0])]
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens: packed sequences have a batch of 1, not {x.shape[0]}")
    sums = [int(entry) for entry in cu_seqlens.reshape(-1).tolist()]
    return [(0, start, end) for start, end in itertools.pairwise(sums)]


def _history(
    x: torch.Tensor, state: torch.Tensor | None, sequence: tuple[int, int, int], width: int
) -> torch.Tensor:
    """The state's inputs and then the sequence's own: (W - 1 + length, C)."""
    batch, start, end = sequence
    if state is None:
        before = x.new_zeros((width - 1, x.shape[2]))
    else:
        before = state.transpose(0, 1)
    return torch.cat((before, x[batch, start:end]))


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> CausalConvolution:
    """Convolve x (B, T, C) with weight (C, W) along T.

    Args:
        bias: (C,).
        activation: None or "silu" ("swish" is the same).
        initial_state: (N, C, W - 1), the inputs before each sequence, oldest first.
        cu_seqlens: N + 1 running sums of lengths of sequences packed along T, with B = 1.
    """
    values, taps = to_float64(x), to_float64(weight)
    output = torch.zeros_like(values)
    states = []
    width = taps.shape[1]
    for number, sequence in enumerate(_sequences(x, cu_seqlens)):
        state = None if initial_state is None else to_float64(initial_state[number])
        history = _history(values, state, sequence, width)
        batch, start, end = sequence
        output[batch, start:end] = _activate(
            _pre_activation(history, taps, bias, end - start), activation
        )
        states.append(history[history.shape[0] - (width - 1) :].transpose(0, 1))
    return CausalConvolution(output, torch.stack(states))


def _pre_activation(
    history: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, length: int
) -> torch.Tensor:
    total = history.new_zeros((length, history.shape[1]))
    for tap in range(taps.shape[1]):
        total = total + taps[:, tap] * history[tap : tap + length]
    return total if bias is None else total + to_float64(bias)


def _activate(z: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation is None:
        return z
    if activation in ("silu", "swish"):
        return pointwise.evaluate("swish", [z])
    raise ValueError(f"activation: {activation!r}; accepted are None and 'silu'")


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    d_output: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    d_final_state: torch.Tensor | None = None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Gradients by name: x, weight, and bias, initial_state if they are given; float64.

    Args:
        d_output: (B, T, C).
        d_final_state: (N, C, W - 1), of a loss that reads the final state; None is 0.

    The other arguments are those of `forward`.
    """
    values, taps = to_float64(x), to_float64(weight)
    width = taps.shape[1]
    gradients = {"x": torch.zeros_like(values), "weight": torch.zeros_like(taps)}
    if bias is not None:
        gradients["bias"] = torch.zeros_like(to_float64(bias))
    if initial_state is not None:
        gradients["initial_state"] = torch.zeros_like(to_float64(initial_state))
    for number, sequence in enumerate(_sequences(x, cu_seqlens)):
        batch, start, end = sequence
        length = end - start
        state = None if initial_state is None else to_float64(initial_state[number])
        history = _history(values, state, sequence, width)
        d_z = to_float64(d_output[batch, start:end])
        if activation is not None:
            z = _pre_activation(history, taps, bias, length)
            d_z = pointwise.evaluate("swish_backward", [d_z, z])
        d_history = torch.zeros_like(history)
        for tap in range(width):
            d_history[tap : tap + length] += taps[:, tap] * d_z
            gradients["weight"][:, tap] += (d_z * history[tap : tap + length]).sum(0)
        if d_final_state is not None:
            last = d_history.shape[0] - (width - 1)
            d_history[last:] += to_float64(d_final_state[number]).transpose(0, 1)
        if bias is not None:
            gradients["bias"] += d_z.sum(0)
        if initial_state is not None:
            gradients["initial_state"][number] = d_history[: width - 1].transpose(0, 1)
        gradients["x"][batch, start:end] = d_history[width - 1 :]
    return gradients
