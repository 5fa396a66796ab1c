"""Pointwise references: hand values, edges, and gradients against float64 autograd."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES
from tilewright.oracle import assert_close, evaluate, pointwise

pytestmark = pytest.mark.L0

_INF, _NAN = math.inf, math.nan


def _tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_every_mode_of_the_vocabulary_has_a_reference() -> None:
    known = {*pointwise.FORWARD, *pointwise.BACKWARD}
    assert set(POINTWISE_MODES) <= known
    assert known <= set(POINTWISE_MODES) | {"bias", "scale"}


@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [
        ("abs", [-2.0, -0.0], [2.0, 0.0]),
        ("ceil", [1.2, -1.2], [2.0, -1.0]),
        ("floor", [1.2, -1.2], [1.0, -2.0]),
        ("neg", [2.0, -3.0], [-2.0, 3.0]),
        ("reciprocal", [4.0, -0.5], [0.25, -2.0]),
        ("rsqrt", [4.0, 0.0], [0.5, _INF]),
        ("sqrt", [9.0, -1.0], [3.0, _NAN]),
        ("exp", [0.0, math.log(2.0)], [1.0, 2.0]),
        ("log", [math.e, 0.0], [1.0, -_INF]),
        ("sin", [math.pi / 6, 0.0], [0.5, 0.0]),
        ("cos", [0.0, math.pi / 3], [1.0, 0.5]),
        ("tan", [math.pi / 4, 0.0], [1.0, 0.0]),
        ("tanh", [math.log(2.0), -_INF], [0.6, -1.0]),
        ("erf", [0.0, _INF], [0.0, 1.0]),
        ("identity", [1.5, _NAN], [1.5, _NAN]),
        ("sigmoid", [0.0, math.log(3.0), -800.0, 800.0], [0.5, 0.75, 0.0, 1.0]),
        ("logical_not", [0.0, 2.0, -0.0], [1.0, 0.0, 1.0]),
        # erf(1 / sqrt(2)) = 0.6826894921370859.
        ("gelu", [1.0, -1.0, -_INF, _INF], [0.841344746068543, -0.158655253931457, 0.0, _INF]),
        ("gelu_approx_tanh", [1.0, 0.0, -_INF], [0.8411919906082768, 0.0, 0.0]),
        ("relu", [-1.0, 0.0, 2.0, -_INF, _NAN], [0.0, 0.0, 2.0, 0.0, _NAN]),
    ],
)
def test_unary_by_hand(mode: str, given: list[float], expected: list[float]) -> None:
    found = pointwise.evaluate(mode, [_tensor(*given)])
    assert_close(found, _tensor(*expected), tol=1e-15)


@pytest.mark.parametrize(
    ("mode", "first", "second", "expected"),
    [
        ("add", [1.0], [2.0], [3.0]),
        ("sub", [1.0], [2.0], [-1.0]),
        ("mul", [3.0], [2.0], [6.0]),
        ("div", [3.0, 1.0], [2.0, 0.0], [1.5, _INF]),
        ("add_square", [1.0], [-3.0], [10.0]),
        ("mod", [7.0, -7.0, 7.0], [3.0, 3.0, -3.0], [1.0, -1.0, 1.0]),
        ("pow", [2.0, -2.0, 0.0], [3.0, 2.0, 0.0], [8.0, 4.0, 1.0]),
        ("max", [1.0, _NAN, 1.0], [2.0, 1.0, _NAN], [2.0, _NAN, _NAN]),
        ("min", [1.0, _NAN, 1.0], [2.0, 1.0, _NAN], [1.0, _NAN, _NAN]),
        ("logical_and", [2.0, 0.0], [-1.0, 1.0], [1.0, 0.0]),
        ("logical_or", [2.0, 0.0], [0.0, 0.0], [1.0, 0.0]),
        ("cmp_eq", [1.0, _NAN], [1.0, _NAN], [1.0, 0.0]),
        ("cmp_neq", [1.0, _NAN], [1.0, _NAN], [0.0, 1.0]),
        ("cmp_gt", [2.0, 1.0], [1.0, 1.0], [1.0, 0.0]),
        ("cmp_ge", [2.0, 1.0], [1.0, 1.0], [1.0, 1.0]),
        ("cmp_lt", [2.0, 1.0], [1.0, 1.0], [0.0, 0.0]),
        ("cmp_le", [2.0, 1.0], [1.0, 1.0], [0.0, 1.0]),
    ],
)
def test_binary_by_hand(
    mode: str, first: list[float], second: list[float], expected: list[float]
) -> None:
    found = pointwise.evaluate(mode, [_tensor(*first), _tensor(*second)])
    assert_close(found.to(torch.float64), _tensor(*expected), tol=1e-15)


def test_parameters_by_hand() -> None:
    parameters = pointwise.Parameters(negative_slope=0.1, lower_clip=-1.0, upper_clip=2.0)
    x = _tensor(-3.0, -1.0, 0.5, 2.0, 9.0, _INF)
    found = pointwise.evaluate("relu", [x], parameters)
    # Below the lower clip: -1 + 0.1 * (x + 1).
    assert_close(found, _tensor(-1.2, -1.0, 0.5, 2.0, 2.0, 2.0), tol=1e-15)
    elu = pointwise.evaluate(
        "elu", [_tensor(-math.log(2.0), 3.0)], pointwise.Parameters(elu_alpha=4.0)
    )
    assert_close(elu, _tensor(-2.0, 3.0), tol=1e-15)
    beta = pointwise.Parameters(softplus_beta=2.0)
    soft = pointwise.evaluate("softplus", [_tensor(0.0, 600.0, -_INF)], beta)
    assert_close(soft, _tensor(math.log(2.0) / 2.0, 600.0, 0.0), tol=1e-15)
    swish = pointwise.Parameters(swish_beta=-2.0)
    found = pointwise.evaluate("swish", [_tensor(math.log(3.0) / 2, _INF, -_INF)], swish)
    assert_close(found, _tensor(math.log(3.0) / 8, 0.0, -_INF), tol=1e-15)


def test_binary_select_and_gen_index() -> None:
    a, b = _tensor(1.0, 2.0), _tensor(_NAN, 4.0)
    mask = torch.tensor([True, False])
    assert pointwise.evaluate("binary_select", [a, b, mask]).tolist() == [1.0, 4.0]
    x = torch.zeros(2, 3)
    for axis, expected in ((0, [[0, 0, 0], [1, 1, 1]]), (-1, [[0, 1, 2], [0, 1, 2]])):
        found = pointwise.evaluate("gen_index", [x], pointwise.Parameters(axis=axis))
        assert found.tolist() == expected


@pytest.mark.parametrize("mode", sorted(pointwise.BACKWARD))
def test_gradients_equal_autograd_of_the_forward(mode: str) -> None:
    parameters = pointwise.Parameters(
        negative_slope=0.3,
        lower_clip=-0.4,
        upper_clip=1.1,
        swish_beta=1.7,
        elu_alpha=0.6,
        softplus_beta=2.5,
    )
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(200, generator=generator, dtype=torch.float64)
    gradient = torch.randn(200, generator=generator, dtype=torch.float64)
    leaf = x.clone().requires_grad_(True)
    forward = pointwise.evaluate(mode.removesuffix("_backward"), [leaf], parameters)
    (expected,) = torch.autograd.grad(forward, leaf, gradient)
    found = pointwise.evaluate(mode, [gradient, x], parameters)
    assert_close(found, expected, tol=1e-13)
    # And by differences, which share nothing with the forward's derivative rules.
    ends = [
        pointwise.evaluate(mode.removesuffix("_backward"), [x + step], parameters)
        for step in (1e-6, -1e-6)
    ]
    away = (x + 0.4).abs().minimum((x - 1.1).abs()).minimum(x.abs()) > 1e-5
    slope = (ends[0] - ends[1]) / 2e-6 * gradient
    assert_close(found[away], slope[away], tol=1e-7)


def test_slopes_are_not_rounded_to_float32() -> None:
    parameters = pointwise.Parameters(negative_slope=0.1)
    found = pointwise.evaluate("relu_backward", [_tensor(1.0), _tensor(-1.0)], parameters)
    assert found.item() == 0.1


def test_slopes_at_the_clips() -> None:
    """At the lower clip the slope is that below it, at the upper clip it is 0."""
    parameters = pointwise.Parameters(negative_slope=0.25, lower_clip=-1.0, upper_clip=2.0)
    x = _tensor(-1.0, 0.0, 2.0)
    found = pointwise.evaluate("relu_backward", [torch.ones_like(x), x], parameters)
    assert found.tolist() == [0.25, 1.0, 0.0]


@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        ("gelu", 0.0, 1.0),
        ("gelu_approx_tanh", 0.0, 1.0),
        ("swish", 0.0, 1.0),
        ("relu", 0.0, 1.0),
        ("softplus", 0.0, 1.0),
        ("tanh", 0.0, 0.0),
        ("sigmoid", 0.0, 0.0),
        ("elu", 0.0, 1.0),
    ],
)
def test_slopes_at_infinity(mode: str, low: float, high: float) -> None:
    found = pointwise.evaluate(f"{mode}_backward", [_tensor(1.0, 1.0), _tensor(-_INF, _INF)])
    assert found.tolist() == [low, high]


def test_a_graph_broadcasts_and_compares() -> None:
    graph = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")
    a, b = graph.tensor((2, 3)), graph.tensor((1, 3))
    total = graph.add(a, b)
    more = graph.cmp_gt(total, graph.tensor_scalar(2.5))
    more.set_output(True).set_data_type("BOOLEAN")
    scaled = graph.mul(total, total).set_output(True)
    graph.validate()
    found = evaluate(
        graph,
        {a.uid: torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 5.0]]), b.uid: torch.ones(1, 3)},
    )
    assert found[scaled.uid].tolist() == [[4.0, 9.0, 16.0], [1.0, 0.0, 36.0]]
    assert found[more.uid].tolist() == [[False, True, True], [False, False, True]]
