"""ops.conv1d_causal and its decoding step against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.oracle import causal_convolution as oracle

pytestmark = pytest.mark.L0

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def close(actual: Any, expected: Any, tol: float) -> None:
    assert actual.shape == expected.shape
    bound = tol * max(expected.abs().max().item() if expected.numel() else 0.0, 1.0)
    assert expected.numel() == 0 or (actual.double() - expected).abs().max().item() <= bound


def written_out(x: Any, w: Any, b: Any, state: Any, activation: str | None) -> tuple[Any, Any]:
    """Tap by tap in float64, differentiable: (y, final state) of dense sequences."""
    width = w.shape[1]
    line = torch.cat((state.transpose(1, 2), x), 1)
    y = sum(w[:, tap] * line[:, tap : tap + x.shape[1]] for tap in range(width))
    y = y if b is None else y + b
    y = y * torch.sigmoid(y) if activation else y
    return y, line[:, x.shape[1] :].transpose(1, 2)


# Field report 14: width 4 with one and with two tokens, and a gradient of the final state.
@pytest.mark.parametrize("length", [1, 2, 3, 9])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("has_bias", "activation"), [(False, None), (True, "silu")])
def test_values_states_and_gradients(
    length: int, width: int, dtype: torch.dtype, has_bias: bool, activation: str | None
) -> None:
    generator = torch.Generator().manual_seed(length * 10 + width)
    x = draw(generator, 2, length, 5, dtype=dtype)
    w = draw(generator, 5, width, dtype=dtype)
    state = draw(generator, 2, 5, width - 1, dtype=dtype)
    b = draw(generator, 5, dtype=dtype) if has_bias else None
    given = [t for t in (x, w, state, b) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in given]
    y, final = ops.conv1d_causal(
        x, w, b, activation=activation, initial_state=state, return_final_state=True
    )
    expected = oracle.forward(x, w, b, activation=activation, initial_state=state)
    tol = TOLERANCE[dtype]
    close(y, expected.output, tol)
    close(final, expected.final_state, tol)
    bias = wide[3] if has_bias else None
    y_ref, final_ref = written_out(wide[0], wide[1], bias, wide[2], activation)
    dy, dfinal = (torch.randn(t.shape, generator=generator).to(dtype) for t in (y, final))
    torch.autograd.backward([y, final], [dy, dfinal])
    torch.autograd.backward([y_ref, final_ref], [dy.double(), dfinal.double()])
    for tensor, reference in zip(given, wide, strict=True):
        wanted = torch.zeros_like(reference) if reference.grad is None else reference.grad
        close(tensor.grad, wanted, 3 * tol)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_equal_each_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    cu = torch.tensor([0, 1, 1, 6, 9], dtype=dtype)
    x = draw(generator, 1, 11, 4, dtype=torch.float32)
    w = draw(generator, 4, 4, dtype=torch.float32)
    state = draw(generator, 4, 4, 3, dtype=torch.float32)
    y, final = ops.conv1d_causal(x, w, initial_state=state, return_final_state=True, cu_seqlens=cu)
    expected = oracle.forward(x, w, initial_state=state, cu_seqlens=cu)
    close(y, expected.output, 1e-5)
    close(final, expected.final_state, 1e-6)
    assert torch.count_nonzero(y[:, 9:]) == 0, "tokens of no sequence"
    (y.square().sum() + final.sum()).backward()
    grads = [t.grad.clone() for t in (x, w, state)]
    for t in (x, w, state):
        t.grad = None
    for b in range(4):
        if cu[b] == cu[b + 1]:
            state[b].sum().backward()
            continue
        part, last = ops.conv1d_causal(
            x[:, cu[b] : cu[b + 1]], w, initial_state=state[b : b + 1], return_final_state=True
        )
        (part.square().sum() + last.sum()).backward()
    for grad, tensor in zip(grads, (x, w, state), strict=True):
        close(grad, tensor.grad.double(), 1e-5)


def test_decoding_step_by_step_equals_the_whole() -> None:
    generator = torch.Generator().manual_seed(4)
    x, w, b = (draw(generator, *s, dtype=torch.float32) for s in ((2, 7, 3), (3, 4), (3,)))
    whole, final = ops.conv1d_causal(x, w, b, activation="silu", return_final_state=True)
    state = torch.zeros(2, 3, 3)
    with torch.no_grad():
        steps = [
            ops.conv1d_causal_update(x[:, t], state, w, b, activation="silu") for t in range(4)
        ]
        steps.append(ops.conv1d_causal_update(x[:, 4:], state, w, b, activation="silu")[:, 0])
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, :5].detach())
    torch.testing.assert_close(state, final.detach())


@pytest.mark.parametrize("wanted", range(4), ids=["x", "state", "weight", "bias"])
def test_a_decoding_step_has_no_gradient_and_says_so(wanted: int) -> None:
    given = [torch.ones(2, 3), torch.zeros(2, 3, 3), torch.ones(3, 4), torch.ones(3)]
    state = given[1]
    given[wanted] = given[wanted].requires_grad_()
    with pytest.raises(tw.NotSupportedError, match="conv1d_causal_update: an operand requires"):
        ops.conv1d_causal_update(*given)
    assert not state.any(), "the state of a refused step stays"
    with torch.no_grad():
        assert torch.equal(ops.conv1d_causal_update(*given), torch.full((2, 3), 2.0))


def test_empty_and_strided() -> None:
    generator = torch.Generator().manual_seed(5)
    w = draw(generator, 3, 4, dtype=torch.float32).detach()
    assert ops.conv1d_causal(torch.zeros(0, 5, 3), w).shape == (0, 5, 3)
    y, final = ops.conv1d_causal(torch.zeros(2, 0, 3), w, return_final_state=True)
    assert y.shape == (2, 0, 3) and final.shape == (2, 3, 3)
    x = draw(generator, 2, 3, 8, dtype=torch.float32).detach()
    x = x.transpose(1, 2)
    close(ops.conv1d_causal(x, w), oracle.forward(x, w).output, 1e-5)
    cu = torch.zeros(3, dtype=torch.int64)
    y, final = ops.conv1d_causal(x[:1, :0], w, cu_seqlens=cu, return_final_state=True)
    assert y.shape == (1, 0, 3) and final.shape == (2, 3, 3)
    # No sequence at all: tokens of none give 0.
    y, final = ops.conv1d_causal(x[:1], w, cu_seqlens=cu[:1], return_final_state=True)
    assert torch.equal(y, torch.zeros(1, 8, 3)) and final.shape == (0, 3, 3)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: ops.conv1d_causal(torch.zeros(2, 3), torch.zeros(3, 4)), "x: shape (2, 3) has 2 axes"),
    (lambda: ops.conv1d_causal(torch.zeros(1, 2, 3), torch.zeros(2, 4)), "expected (3, 4)"),
    (lambda: ops.conv1d_causal(torch.zeros(1, 2, 3), torch.zeros(3, 0)), "W at least 1"),
    (
        lambda: ops.conv1d_causal(torch.zeros(1, 2, 0), torch.zeros(0, 4)),
        "x: shape (1, 2, 0); expected one channel at least",
    ),
    (
        lambda: ops.conv1d_causal_update(
            torch.zeros(2, 3), torch.zeros(2, 3, 3, dtype=torch.int32), torch.zeros(3, 4)
        ),
        "state: data type torch.int32; expected one of",
    ),
    (
        lambda: ops.conv1d_causal(torch.zeros(1, 2, 3), torch.zeros(3, 4), activation="relu"),
        "activation: got 'relu'; accepted are",
    ),
    (
        lambda: ops.conv1d_causal(
            torch.zeros(1, 2, 3), torch.zeros(3, 4), initial_state=torch.zeros(1, 3, 4)
        ),
        "initial_state: shape (1, 3, 4); expected (1, 3, 3)",
    ),
    (
        lambda: ops.conv1d_causal(
            torch.zeros(2, 2, 3), torch.zeros(3, 4), cu_seqlens=torch.tensor([0, 2])
        ),
        "expected (N + 1,) with a batch of 1",
    ),
    *(
        (
            lambda sums=sums: ops.conv1d_causal(
                torch.zeros(1, 5, 3), torch.zeros(3, 4), cu_seqlens=torch.tensor(sums)
            ),
            f"cu_seqlens: got {sums}; expected running sums",
        )
        for sums in ([0, 6], [-1, 5], [0, 4, 2, 5])
    ),
    (
        lambda: ops.conv1d_causal_update(
            torch.zeros(2, 3), torch.zeros(1, 3, 3).expand(2, 3, 3), torch.zeros(3, 4)
        ),
        "state: shape (2, 3, 3) with stride (0, 3, 1), whose elements overlap",
    ),
    (
        lambda: ops.conv1d_causal_update(
            torch.zeros(2, 3), torch.zeros(2, 3, 3, device="meta"), torch.zeros(3, 4)
        ),
        "state: on meta",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(tw.BindingError) as caught:
        call()
    assert message in str(caught.value)
