"""ops.rope against the rotation written out in float64, and exactly where float32 is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops

pytestmark = pytest.mark.L0


def rotate(x: Any, cos: Any, sin: Any, *, interleaved: bool, width: int) -> Any:
    """Pair by pair."""
    cos, sin = (t if t.dim() == 3 else t.unsqueeze(0) for t in (cos, sin))
    out = x.clone()
    half = width // 2
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[:, None, :, i], sin[:, None, :, i]
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., b] * c + x[..., a] * s
    return out


def tables(length: int, width: int, batch: int | None = None) -> tuple[Any, Any]:
    positions = torch.arange(length, dtype=torch.float32)
    if batch is not None:
        positions = positions + 7 * torch.arange(batch)[:, None]
    angles = positions[..., None] * 10_000 ** (-torch.arange(0, width, 2) / width)
    return torch.cos(angles), torch.sin(angles)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 8, 2])
@pytest.mark.parametrize("batched", [False, True])
def test_values_and_gradients(
    dtype: torch.dtype, interleaved: bool, width: int, batched: bool
) -> None:
    # Field report 13: tables with a batch axis; q and k rotate alike whatever their heads.
    generator = torch.Generator().manual_seed(width)
    cos, sin = tables(5, width, 2 if batched else None)
    for heads in (2, 1):
        x = torch.randn(2, heads, 5, 16, generator=generator).to(dtype).requires_grad_()
        y = ops.rope(x, cos, sin, interleaved=interleaved, rotary_dim=width)
        wide = x.detach().double().requires_grad_()
        expected = rotate(wide, cos.double(), sin.double(), interleaved=interleaved, width=width)
        tol = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
        assert (y.double() - expected).abs().max() <= tol * expected.abs().max()
        grad = torch.randn(x.shape, generator=generator).to(dtype)
        y.backward(grad)
        expected.backward(grad.double())
        assert (x.grad.double() - wide.grad).abs().max() <= tol * wide.grad.abs().max()


def test_large_angles_and_special_values_are_exact() -> None:
    # O8: the tables are used as given; a float32 rotation has one value for each rounding.
    x = torch.tensor([[-0.0, 1.0, torch.inf, torch.nan], [3.0, -2.0, 1e30, 5.0]]).view(1, 1, 2, 4)
    angles = torch.tensor([[0.0, 1e6], [123456.789, -1e9]])
    cos, sin = torch.cos(angles), torch.sin(angles)
    first, second = x[..., :2], x[..., 2:]
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    y = ops.rope(x, cos, sin)
    assert torch.equal(torch.isnan(y), torch.isnan(expected))
    numbers = ~torch.isnan(expected)
    assert torch.equal(y[numbers], expected[numbers])
    assert torch.equal(torch.signbit(y[numbers]), torch.signbit(expected[numbers]))


def test_positions_look_the_tables_up() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 4, 8, generator=generator)
    cos, sin = tables(32, 8)
    positions = torch.tensor([[3, 4, 5, 6], [0, 9, 31, 2]])
    expected = ops.rope(x, cos[positions], sin[positions])
    assert torch.equal(ops.rope(x, cos, sin, positions=positions), expected)
    one = ops.rope(x[:1], cos, sin, positions=positions[0].int())
    assert torch.equal(one, expected[:1])


def test_inplace_and_layouts() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 5, 3, 8, generator=generator).transpose(1, 2)
    cos, sin = tables(5, 8)
    expected = ops.rope(x, cos, sin)
    assert expected.stride() == x.stride()
    kept = x.clone()
    assert ops.rope(x, cos, sin, inplace=True) is x
    assert torch.equal(x, expected) and not torch.equal(x, kept)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 3, 2), (3, 2, 1, 0), (0, 2, 1, 3), (2, 3, 0, 1)])
def test_every_order_of_axes_in_memory(
    order: tuple[int, ...], dtype: torch.dtype, interleaved: bool
) -> None:
    shape, places = (2, 3, 5, 8), [order.index(axis) for axis in range(4)]
    x = torch.randn(*(shape[axis] for axis in order), generator=torch.Generator().manual_seed(4))
    x = x.to(dtype).permute(places)
    for width in (8, 6):
        cos, sin = tables(5, width)
        options = {"interleaved": interleaved, "rotary_dim": width}
        y = ops.rope(x, cos, sin, **options)
        assert y.stride() == x.stride()
        assert torch.equal(y, ops.rope(x.contiguous(), cos, sin, **options))


def test_a_second_derivative_is_the_rotation() -> None:
    # A rotation is linear: dx is one of grad, and so is its gradient. It was None, silently.
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 2, 5, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    cos, sin = (table.double() for table in tables(5, 6))

    def call(x: torch.Tensor) -> torch.Tensor:
        return ops.rope(x, cos, sin, rotary_dim=6)

    assert torch.autograd.gradgradcheck(call, (x,))
    (grad,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad((grad * x.detach()).sum(), x)
    norms = cos.square() + sin.square()
    turned = torch.cat((norms, norms, torch.ones(5, 2)), -1)
    torch.testing.assert_close(again, 2 * turned * x.detach())


def test_wrong_arguments_are_named() -> None:
    x = torch.zeros(2, 1, 5, 8)
    cos, sin = tables(5, 8)
    for call, message in (
        (lambda: ops.rope(x[0], cos, sin), "x: shape (1, 5, 8) has 3 axes; expected 4"),
        (lambda: ops.rope(x, cos.clone().requires_grad_(), sin), "cos: requires grad"),
        (lambda: ops.rope(x, cos, sin.clone().requires_grad_()), "sin: requires grad"),
        (lambda: ops.rope(x, cos[:4], sin), "cos: shape (1, 4, 4); expected (1, 5, 4)"),
        (lambda: ops.rope(x, cos, sin, rotary_dim=3), "rotary_dim: got 3; expected an even"),
        (lambda: ops.rope(x, cos, sin, rotary_dim=10), "rotary_dim: got 10"),
        (lambda: ops.rope(x, cos, sin, positions=torch.zeros(5)), "positions: data type"),
        (
            lambda: ops.rope(x, cos, sin, positions=torch.tensor([0, 5, 1, 2, 3])),
            "positions: from 0 to 5; expected rows of cos, which has 5",
        ),
        (
            lambda: ops.rope(x.requires_grad_(), cos, sin, inplace=True),
            "inplace: given while x requires grad",
        ),
        (
            lambda: ops.rope(torch.zeros(2, 1, 1, 8).expand(2, 1, 5, 8), cos, sin, inplace=True),
            "x: shape (2, 1, 5, 8) with stride (8, 8, 0, 1), whose elements overlap",
        ),
    ):
        with pytest.raises(tw.BindingError) as caught:
            call()
        assert message in str(caught.value)
