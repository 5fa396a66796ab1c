"""``ops.rope`` as one kernel of Triton's: interpreted without a GPU, compiled on one."""

from __future__ import annotations

import os

import pytest
import torch

from tilewright import ops

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted_functions")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, width: int, interleaved: bool
) -> torch.Tensor:
    """In float64, element by element of the definition."""
    y = x.double().clone()
    for pair in range(width // 2):
        at = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + width // 2)
        first, second = (x[..., place].double() for place in at)
        c, s = (table[..., pair].double() for table in (cos, sin))
        y[..., at[0]], y[..., at[1]] = first * c - second * s, second * c + first * s
    return y


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize(
    ("width", "depth", "is_token_major"),
    [(16, 16, False), (16, 16, True), (8, 24, True)],
    ids=["head-major", "token-major", "a part of the head"],
)
def test_values_and_gradients(
    interleaved: bool, width: int, depth: int, is_token_major: bool
) -> None:
    generator = torch.Generator().manual_seed(width + depth)
    batch, heads, length = 2, 3, 5
    x = torch.randn(batch, heads, length, depth, generator=generator)
    if is_token_major:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    angle = torch.randn(length, width // 2, generator=generator) * 3
    x, cos, sin = x.to(DEVICE).requires_grad_(), angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    layout = {"interleaved": interleaved, "rotary_dim": width, "engine": "triton"}
    y = ops.rope(x, cos, sin, **layout)
    wanted = rotated(x.detach(), cos, sin, width=width, interleaved=interleaved)
    assert y.stride() == x.stride()
    assert (y.detach().double() - wanted).abs().max() < 1e-6 * wanted.abs().max()

    gradient = torch.randn(y.shape, generator=generator).to(DEVICE)
    y.backward(gradient)
    wanted = rotated(gradient, cos, -sin, width=width, interleaved=interleaved)
    assert x.grad is not None
    assert (x.grad.double() - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_it_rounds_once() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 2, 33, 32, generator=generator).bfloat16().to(DEVICE)
    angle = torch.randn(33, 16, generator=generator)
    cos, sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
    y = ops.rope(x, cos, sin, engine="triton")
    exact = rotated(x, cos, sin, width=32, interleaved=False)
    # Half a step of bfloat16, and what float32 products are off by.
    assert ((y.double() - exact).abs() <= 2.0**-8 * 1.01 * exact.abs() + 1e-6).all()
