"""Convolution references: by hand, against torch in float64, and their written-out gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.oracle import assert_close, convolution, evaluate

pytestmark = pytest.mark.L0

_CASES: list[dict[str, Any]] = [
    {"x": (2, 3, 9), "w": (4, 3, 3), "pad": [1], "stride": [2], "dilation": [1]},
    {"x": (2, 4, 7, 6), "w": (6, 2, 3, 2), "pad": [2, 1], "stride": [1, 2], "dilation": [2, 1]},
    {"x": (1, 4, 6, 5), "w": (4, 1, 3, 3), "pad": [0, 3], "stride": [2, 2], "dilation": [1, 2]},
    {
        "x": (1, 2, 4, 5, 6),
        "w": (3, 2, 2, 3, 1),
        "pad": [1, 0, 2],
        "stride": [1, 2, 3],
        "dilation": [2, 1, 1],
    },
    {"x": (2, 2, 5, 5), "w": (2, 2, 1, 1), "pad": [0, 0], "stride": [3, 3], "dilation": [1, 1]},
]


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _torch_convolution(x: torch.Tensor, w: torch.Tensor, case: dict[str, Any]) -> torch.Tensor:
    functions = {
        3: torch.nn.functional.conv1d,
        4: torch.nn.functional.conv2d,
        5: torch.nn.functional.conv3d,
    }
    return functions[x.dim()](
        x,
        w,
        stride=case["stride"],
        padding=case["pad"],
        dilation=case["dilation"],
        groups=x.shape[1] // w.shape[1],
    )


def test_cross_correlation_by_hand() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    w = torch.tensor([[[1.0, 0.0, -1.0]]])
    common: dict[str, Any] = {"stride": [1], "dilation": [1]}
    found = convolution.forward(x, w, pre_padding=[0], post_padding=[0], **common)
    assert found.tolist() == [[[-2.0, -2.0]]]
    # Padding on one side only: zeros before, as a causal convolution has them.
    found = convolution.forward(x, w, pre_padding=[2], post_padding=[0], **common)
    assert found.tolist() == [[[-1.0, -2.0, -2.0, -2.0]]]
    found = convolution.forward(x, w, pre_padding=[0], post_padding=[2], **common)
    assert found.tolist() == [[[-2.0, -2.0, 3.0, 4.0]]]


@pytest.mark.parametrize("case", _CASES, ids=lambda case: "x".join(map(str, case["w"])))
def test_all_three_against_torch(case: dict[str, Any]) -> None:
    x = _randn(*case["x"], seed=1).requires_grad_(True)
    w = _randn(*case["w"], seed=2).requires_grad_(True)
    common = {key: case[key] for key in ("stride", "dilation")}
    y = _torch_convolution(x, w, case)
    found = convolution.forward(
        x.detach(), w.detach(), pre_padding=case["pad"], post_padding=case["pad"], **common
    )
    assert_close(found, y.detach(), tol=1e-13)
    dy = _randn(*y.shape, seed=3)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    found = convolution.data_gradient(
        dy, w.detach(), image_dim=case["x"], pre_padding=case["pad"], **common
    )
    assert_close(found, dx, tol=1e-13, name="dX")
    found = convolution.weight_gradient(
        x.detach(), dy, weight_dim=case["w"], pre_padding=case["pad"], **common
    )
    assert_close(found, dw, tol=1e-13, name="dW")


@pytest.mark.parametrize("padding", [([2, 0], [0, 1]), ([0, 1], [3, 0])])
def test_unequal_paddings_are_adjoint(padding: tuple[list[int], list[int]]) -> None:
    pre, post = padding
    x, w = _randn(2, 2, 6, 5, seed=1), _randn(3, 2, 3, 2, seed=2)
    common: dict[str, Any] = {"stride": [2, 1], "dilation": [1, 2]}
    padded = torch.nn.functional.pad(x, [pre[1], post[1], pre[0], post[0]])
    expected = torch.nn.functional.conv2d(padded, w, stride=[2, 1], dilation=[1, 2])
    y = convolution.forward(x, w, pre_padding=pre, post_padding=post, **common)
    assert_close(y, expected, tol=1e-13)
    dy = _randn(*y.shape, seed=3)
    dx = convolution.data_gradient(dy, w, image_dim=x.shape, pre_padding=pre, **common)
    dw = convolution.weight_gradient(x, dy, weight_dim=w.shape, pre_padding=pre, **common)
    # <dY, Y> is linear in X and in W.
    total = (dy * y).sum()
    assert_close((dx * x).sum(), total, tol=1e-13)
    assert_close((dw * w).sum(), total, tol=1e-13)


def test_graphs_of_all_three_with_channels_last_strides() -> None:
    x = _randn(2, 4, 6, 5, seed=1).contiguous(memory_format=torch.channels_last)
    w = _randn(6, 2, 3, 3, seed=2)
    arguments: dict[str, Any] = {
        "pre_padding": [1, 0],
        "post_padding": [0, 2],
        "stride": [2, 1],
        "dilation": [1, 1],
    }
    graph = DeclaredGraph(io_data_type="DOUBLE")
    image, weight = graph.tensor_like(x), graph.tensor_like(w)
    out = graph.conv_fprop(image, weight, **arguments).set_output(True)
    graph.validate()
    y = evaluate(graph, {image.uid: x, weight.uid: w})[out.uid]
    padded = torch.nn.functional.pad(x, [0, 2, 1, 0])
    assert_close(y, torch.nn.functional.conv2d(padded, w, stride=[2, 1], groups=2), tol=1e-13)
    dy = _randn(*y.shape, seed=3)
    graph = DeclaredGraph(io_data_type="DOUBLE")
    loss, weight, image = graph.tensor_like(dy), graph.tensor_like(w), graph.tensor_like(x)
    dgrad = graph.conv_dgrad(loss, weight, **arguments).set_dim(x.shape).set_output(True)
    wgrad = graph.conv_wgrad(image, loss, **arguments).set_dim(w.shape).set_output(True)
    graph.validate()
    found = evaluate(graph, {loss.uid: dy, weight.uid: w, image.uid: x})
    total = (dy * y).sum()
    assert_close((found[dgrad.uid] * x).sum(), total, tol=1e-13)
    assert_close((found[wgrad.uid] * w).sum(), total, tol=1e-13)


def test_channels_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="channels"):
        convolution.forward(
            _randn(1, 3, 4),
            _randn(2, 2, 1),
            pre_padding=[0],
            post_padding=[0],
            stride=[1],
            dilation=[1],
        )
