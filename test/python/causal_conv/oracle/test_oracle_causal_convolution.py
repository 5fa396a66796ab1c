"""Causal convolution references: by hand, states, packed sequences, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.oracle import assert_close, causal_convolution

pytestmark = pytest.mark.L0

_TOL = 1e-12


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_by_hand() -> None:
    x = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    weight = torch.tensor([[100.0, 10.0, 1.0]])
    found = causal_convolution.forward(x, weight, torch.tensor([0.5]))
    assert found.output.reshape(-1).tolist() == [1.5, 12.5, 123.5]
    assert found.final_state.tolist() == [[[2.0, 3.0]]]
    state = torch.tensor([[[7.0, 8.0]]])
    found = causal_convolution.forward(x, weight, initial_state=state)
    assert found.output.reshape(-1).tolist() == [781.0, 812.0, 123.0]


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_against_torch_with_gradients_of_output_and_state(
    tokens: int, activation: str | None
) -> None:
    width, channels = 4, 3
    leaves = {
        "x": _randn(2, tokens, channels, seed=1),
        "weight": _randn(channels, width, seed=2),
        "bias": _randn(channels, seed=3),
        "initial_state": _randn(2, channels, width - 1, seed=4),
    }
    for tensor in leaves.values():
        tensor.requires_grad_(True)
    history = torch.cat((leaves["initial_state"], leaves["x"].transpose(1, 2)), -1)
    y = torch.nn.functional.conv1d(
        history, leaves["weight"].unsqueeze(1), leaves["bias"], groups=channels
    )
    y = torch.nn.functional.silu(y) if activation else y
    y, state = y.transpose(1, 2), history[..., -(width - 1) :]
    d_output, d_state = _randn(*y.shape, seed=5), _randn(*state.shape, seed=6)
    expected = torch.autograd.grad((y, state), list(leaves.values()), (d_output, d_state))
    given: dict[str, Any] = {name: t.detach() for name, t in leaves.items()}
    found = causal_convolution.forward(**given, activation=activation)
    assert_close(found.output, y.detach(), tol=_TOL)
    assert_close(found.final_state, state.detach(), tol=_TOL)
    gradients = causal_convolution.backward(
        **given, d_output=d_output, d_final_state=d_state, activation=activation
    )
    for (name, gradient), want in zip(gradients.items(), expected, strict=True):
        assert_close(gradient, want, tol=_TOL, name=name)
    assert (gradients["initial_state"] != 0).any()


def test_one_token_at_a_time_equals_all_at_once() -> None:
    x, weight = _randn(1, 6, 2, seed=1), _randn(2, 4, seed=2)
    whole = causal_convolution.forward(x, weight, activation="silu")
    state = torch.zeros(1, 2, 3, dtype=torch.float64)
    for token in range(6):
        step = causal_convolution.forward(
            x[:, token : token + 1], weight, activation="silu", initial_state=state
        )
        state = step.final_state
        assert_close(step.output[:, 0], whole.output[:, token], tol=_TOL)
    assert_close(state, whole.final_state, tol=_TOL)


def test_packed_sequences_do_not_see_one_another() -> None:
    x, weight, d_output = _randn(1, 7, 2, seed=1), _randn(2, 4, seed=2), _randn(1, 7, 2, seed=3)
    sums = torch.tensor([0, 2, 2, 7])
    found = causal_convolution.forward(x, weight, cu_seqlens=sums)
    gradients = causal_convolution.backward(x, weight, d_output, cu_seqlens=sums)
    total = torch.zeros_like(weight)
    for number, (start, end) in enumerate(((0, 2), (2, 2), (2, 7))):
        alone = causal_convolution.forward(x[:, start:end], weight)
        assert_close(found.output[:, start:end], alone.output, tol=_TOL)
        assert_close(found.final_state[number], alone.final_state[0], tol=_TOL)
        back = causal_convolution.backward(x[:, start:end], weight, d_output[:, start:end])
        assert_close(gradients["x"][:, start:end], back["x"], tol=_TOL)
        total += back["weight"]
    assert_close(gradients["weight"], total, tol=_TOL)
    with pytest.raises(ValueError, match="batch of 1"):
        causal_convolution.forward(_randn(2, 7, 2), weight, cu_seqlens=sums)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation"):
        causal_convolution.forward(_randn(1, 2, 2), _randn(2, 2), activation="gelu")
