"""ops.linear against float64, with every epilogue and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright import ops

pytestmark = pytest.mark.L0

ACTIVATIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def reference(x: Any, w: Any, b: Any, activation: str | None, glu: str | None) -> Any:
    y = x @ w.t()
    y = y if b is None else y + b
    if glu is None:
        return ACTIVATIONS[activation](y)
    if glu == "halves":
        value, gate = y.chunk(2, -1)
    else:
        blocks = y.unflatten(-1, (-1, 2, 32))
        value, gate = blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)
    return value * ACTIVATIONS[activation or "silu"](gate)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "glu"),
    [*((name, None) for name in ACTIVATIONS), (None, "halves"), ("gelu", "interleaved32")],
)
def test_values_and_gradients(
    dtype: torch.dtype, has_bias: bool, activation: str | None, glu: str | None
) -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    x, w, b = draw(2, 3, 24), draw(128, 24), draw(128) if has_bias else None
    wide = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    y = ops.linear(x, w, b, activation=activation, glu=glu)
    expected = reference(*wide, activation, glu)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype)
    y.backward(grad)
    expected.backward(grad.double())
    pairs = [(y, expected.detach())]
    for t, reference_ in zip((x, w, b), wide, strict=True):
        if t is not None and reference_ is not None:
            pairs.append((t.grad, reference_.grad))
    for actual, wanted in pairs:
        assert actual.shape == wanted.shape and actual.dtype is dtype
        bound = TOLERANCE[dtype] * max(wanted.abs().max().item(), 1.0)
        assert (actual.double() - wanted).abs().max().item() <= bound


def test_layouts_out_and_empty() -> None:
    generator = torch.Generator().manual_seed(6)
    w = torch.randn(8, 5, generator=generator)
    wide = torch.randn(4, 9, generator=generator)
    expected = F.linear(wide[:, :5], w)
    torch.testing.assert_close(ops.linear(wide[:, :5], w), expected)
    torch.testing.assert_close(ops.linear(wide[:, :5], w.t().contiguous().t()), expected)
    out = torch.empty(4, 8)
    assert ops.linear(wide[:, :5], w, out=out) is out
    torch.testing.assert_close(out, expected)
    assert ops.linear(torch.zeros(0, 5), w).shape == (0, 8)
    torch.testing.assert_close(ops.linear(torch.zeros(5), w), torch.zeros(8))


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_out_of_another_type_is_rounded_once(
    activation: str | None, generator: torch.Generator
) -> None:
    x, w = (torch.randn(n, 16, generator=generator).bfloat16() for n in (8, 32))
    exact = F.linear(x.double(), w.double())
    exact = exact if activation is None else F.gelu(exact)
    out = ops.linear(x, w, activation=activation, out=torch.empty(8, 32))
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)
    # FP8 saturates, which PyTorch's own conversion to this type does not.
    small = torch.empty(8, 32, dtype=torch.float8_e5m2)
    assert ops.linear(x * 1e4, w * 1e4, out=small).float().abs().max() == 57344


def test_wrong_arguments_are_named() -> None:
    x, w = torch.zeros(3, 5), torch.zeros(8, 5)
    for call, message in (
        (lambda: ops.linear(x, w[:, :4]), "weight: shape (8, 4); expected (8, 5)"),
        (lambda: ops.linear(x, w.double()), "weight: data type torch.float64; expected x's"),
        (lambda: ops.linear(x, w, torch.zeros(7)), "bias: shape (7,); expected (8,)"),
        (lambda: ops.linear(x, w, activation="swoosh"), "activation: got 'swoosh'; accepted are"),
        (lambda: ops.linear(x, w, glu="thirds"), "glu: got 'thirds'; accepted are"),
        (lambda: ops.linear(x, w[:7], glu="halves"), "weight: 7 rows; expected a multiple of 2"),
        (lambda: ops.linear(x, w, glu="interleaved32"), "expected a multiple of 64"),
    ):
        with pytest.raises(tw.BindingError) as caught:
            call()
        assert message in str(caught.value)


def test_a_second_derivative_is_refused() -> None:
    x, w = torch.rand(3, 5, requires_grad=True), torch.rand(4, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(ops.linear(x, w).sum(), x, create_graph=True)
    with pytest.raises(tw.NotSupportedError, match="linear: a second derivative"):
        torch.autograd.grad(grad.square().sum(), w)
    b = torch.rand(4, requires_grad=True)
    y = ops.linear(x.detach(), w.detach(), b, activation="gelu")
    (grad,) = torch.autograd.grad(y.sum(), b, create_graph=True)
    with pytest.raises(tw.NotSupportedError, match="linear: a second derivative"):
        torch.autograd.grad(grad.square().sum(), b)


@pytest.mark.parametrize("glu", [None, "halves", "interleaved32"])
def test_the_gradient_of_a_sum(glu: str | None) -> None:
    generator = torch.Generator().manual_seed(8)
    x, w = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (3, 128))
    w.requires_grad_()
    wide = w.detach().clone().requires_grad_()
    for total in (lambda y: y.sum(), lambda y: y.sum(-1).square().sum()):
        (grad,) = torch.autograd.grad(total(ops.linear(x, w, activation="gelu", glu=glu)), w)
        (expected,) = torch.autograd.grad(total(reference(x, wide, None, "gelu", glu)), wide)
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(2, 0), (2, 3, 0), (0,), (0, 0)])
def test_a_depth_of_zero_leaves_the_bias(shape: tuple[int, ...]) -> None:
    x, w, b = torch.zeros(shape), torch.zeros(4, 0), torch.ones(4, requires_grad=True)
    y = ops.linear(x, w, b)
    assert torch.equal(y, torch.ones(*shape[:-1], 4))
    y.sum().backward()
    assert b.grad is not None and torch.equal(b.grad, torch.full((4,), float(y.numel() // 4)))
