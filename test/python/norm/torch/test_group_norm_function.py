"""ops.group_norm: values and gradients against PyTorch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright import ops
from tilewright.errors import BindingError, NotSupportedError

pytestmark = pytest.mark.L0

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, tol: float) -> None:
    bound = tol * max(expected.abs().max().item(), 1.0)
    error = (actual.double() - expected).abs().max().item()
    assert actual.shape == expected.shape and error <= bound, f"error {error:.3e} over {bound:.3e}"


def check(x: Any, groups: int, weight: Any, bias: Any, generator: torch.Generator) -> None:
    given = [t if t is None else t.detach().requires_grad_() for t in (x, weight, bias)]
    wide = [t if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    y = ops.group_norm(given[0], groups, *given[1:], eps=1e-3)
    # PyTorch's own backward fails for a bias without a weight.
    scale = torch.ones(x.shape[1], dtype=torch.float64) if wide[1] is None else wide[1]
    expected = torch.nn.functional.group_norm(wide[0], groups, scale, wide[2], eps=1e-3)
    tol = TOLERANCE[x.dtype]
    assert y.dtype is x.dtype and y.stride() == torch.empty_like(x).stride()
    close(y, expected.detach(), tol)
    grad = draw(generator, *x.shape, dtype=x.dtype)
    y.backward(grad)
    expected.backward(grad.double())
    for left, right in zip(given, wide, strict=True):
        if left is not None:
            assert left.grad.dtype is left.dtype
            close(left.grad, right.grad, max(tol, TOLERANCE[left.dtype]))
    with torch.no_grad():
        assert torch.equal(ops.group_norm(given[0], groups, *given[1:], eps=1e-3), y)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("shape", "groups"), [((3, 6), 2), ((2, 6, 5), 6), ((2, 4, 3, 5), 1)])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], groups: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = draw(generator, *shape, dtype=dtype)
    weight, bias = (draw(generator, shape[1], dtype=dtype) for _ in range(2))
    for parameters in ((weight, bias), (weight, None), (None, bias), (None, None)):
        check(x, groups, *parameters, generator)


def test_layouts_and_parameters_of_another_type() -> None:
    generator = torch.Generator().manual_seed(2)
    weight, bias = draw(generator, 16)[::2], draw(generator, 8)
    x = draw(generator, 2, 8, 3, 5)
    for view in (
        x.contiguous(memory_format=torch.channels_last),
        draw(generator, 2, 8, 3, 10)[..., ::2],
        draw(generator, 2, 3, 8, 5).transpose(1, 2),
        draw(generator, 2, 8, 1, 2, 1, 3, 2),
    ):
        check(view, 4, weight, bias, generator)
        check(view.bfloat16(), 4, weight, bias, generator)


def test_a_gradient_of_stride_zero() -> None:
    generator = torch.Generator().manual_seed(3)
    x, weight = draw(generator, 2, 4, 3).requires_grad_(), draw(generator, 4).requires_grad_()
    ops.group_norm(x, 2, weight).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    torch.nn.functional.group_norm(wide[0], 2, wide[1]).sum().backward()
    for left, right in zip((x, weight), wide, strict=True):
        close(left.grad, right.grad, 2e-6)


def test_an_output_buffer() -> None:
    generator = torch.Generator().manual_seed(4)
    x, out = draw(generator, 2, 4, 3), torch.full((2, 4, 6), 7.0)
    assert ops.group_norm(x, 2, out=out[..., ::2]).data_ptr() == out.data_ptr()
    assert torch.equal(out[..., ::2], ops.group_norm(x, 2)) and (out[..., 1::2] == 7.0).all()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: ops.group_norm(x, 3), "num_groups: got 3"),
        (lambda x: ops.group_norm(x, 0), "num_groups: got 0"),
        (lambda x: ops.group_norm(x, 2.0), "num_groups: got 2.0"),
        (lambda x: ops.group_norm(x, 2, eps=-1.0), "eps: got -1.0"),
        (lambda x: ops.group_norm(x[0, 0], 1), "x: shape"),
        (lambda x: ops.group_norm(x, 2, torch.ones(3)), "weight: shape"),
        (lambda x: ops.group_norm(x, 2, bias=torch.ones(4).int()), "bias: data type"),
        (lambda x: ops.group_norm(x, 2, out=torch.empty(2, 4)), "out: shape"),
    ],
)
def test_refusals_name_the_argument(call: Any, named: str) -> None:
    with pytest.raises(BindingError, match=named):
        call(torch.zeros(2, 4, 3))


def test_a_second_derivative_is_refused() -> None:
    x = torch.rand(2, 4, 3, requires_grad=True)
    y = ops.group_norm(x, 2, torch.rand(4))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotSupportedError, match="group_norm: a second derivative"):
        torch.autograd.grad(grad.square().sum(), x)
