"""Pointwise operations, forward and backward, by mode name.

`FORWARD[mode](inputs, parameters)` and `BACKWARD[mode](gradient, x, parameters)` take float64
tensors. Formulas: GELU by erf (Hendrycks and Gimpel 2016) and its tanh approximation; ELU, softplus
and swish with their usual one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["BACKWARD", "FORWARD", "Parameters", "evaluate"]


@dataclass(frozen=True)
class Parameters:
    """The parameters of parametric modes; others ignore them."""

    negative_slope: float = 0.0
    lower_clip: float = 0.0
    upper_clip: float = float("inf")
    swish_beta: float = 1.0
    elu_alpha: float = 1.0
    softplus_beta: float = 1.0
    axis: int = 0


Forward = Callable[[Sequence[torch.Tensor], Parameters], torch.Tensor]
Backward = Callable[[torch.Tensor, torch.Tensor, Parameters], torch.Tensor]

_GELU_LINEAR = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    # exp of a non-positive number only, so that it cannot overflow.
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


def _normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _normal_density(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)


def _below_clip(x: torch.Tensor, p: Parameters) -> torch.Tensor:
    """lower + slope * (x - lower), where slope 0 gives lower at -inf too."""
    if p.negative_slope == 0.0:
        return torch.where(torch.isnan(x), x, p.lower_clip)
    return p.lower_clip + p.negative_slope * (x - p.lower_clip)


def _relu(x: torch.Tensor, p: Parameters) -> torch.Tensor:
    above = torch.where(x > p.upper_clip, p.upper_clip, x)
    return torch.where(x > p.lower_clip, above, _below_clip(x, p))


def _softplus(x: torch.Tensor, beta: float) -> torch.Tensor:
    scaled = beta * x
    positive = torch.where(scaled > 0, scaled, torch.where(torch.isnan(scaled), scaled, 0.0))
    return (positive + torch.log1p(torch.exp(-scaled.abs()))) / beta


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(_GELU_LINEAR * (x + _GELU_CUBIC * x * x * x)))


def _at_limits(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value` with the limits of x * gate(x) at -inf (0) and +inf (inf), not 0 * inf."""
    value = torch.where(x == float("-inf"), 0.0, value)
    return torch.where(x == float("inf"), x, value)


def _swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    gate = _sigmoid(beta * x)
    return torch.where(torch.isinf(x) & (gate == 0), 0.0, x * gate)


def _maximum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    larger = torch.where(a >= b, a, b)
    return torch.where(torch.isnan(a) | torch.isnan(b), float("nan"), larger)


def _minimum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    smaller = torch.where(a <= b, a, b)
    return torch.where(torch.isnan(a) | torch.isnan(b), float("nan"), smaller)


def _unary(function: Callable[[torch.Tensor], torch.Tensor]) -> Forward:
    return lambda inputs, _: function(inputs[0])


def _binary(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Forward:
    return lambda inputs, _: function(inputs[0], inputs[1])


def _index(inputs: Sequence[torch.Tensor], p: Parameters) -> torch.Tensor:
    x = inputs[0]
    axis = p.axis % x.dim()
    counted = torch.arange(x.shape[axis], device=x.device)
    shape = [1] * x.dim()
    shape[axis] = x.shape[axis]
    return counted.reshape(shape).expand(x.shape)


FORWARD: dict[str, Forward] = {
    "abs": _unary(torch.abs),
    "ceil": _unary(torch.ceil),
    "cos": _unary(torch.cos),
    "elu": lambda inputs, p: torch.where(
        inputs[0] > 0, inputs[0], p.elu_alpha * torch.expm1(torch.clamp(inputs[0], max=0.0))
    ),
    "erf": _unary(torch.erf),
    "exp": _unary(torch.exp),
    "floor": _unary(torch.floor),
    "gelu": _unary(lambda x: _at_limits(x, x * _normal_cdf(x))),
    "gelu_approx_tanh": _unary(lambda x: _at_limits(x, _gelu_tanh(x))),
    "identity": _unary(lambda x: x),
    "log": _unary(torch.log),
    "logical_not": _unary(lambda x: x == 0),
    "neg": _unary(torch.neg),
    "reciprocal": _unary(lambda x: 1.0 / x),
    "rsqrt": _unary(lambda x: 1.0 / torch.sqrt(x)),
    "sigmoid": _unary(_sigmoid),
    "sin": _unary(torch.sin),
    "softplus": lambda inputs, p: _softplus(inputs[0], p.softplus_beta),
    "sqrt": _unary(torch.sqrt),
    "tan": _unary(torch.tan),
    "tanh": _unary(torch.tanh),
    "relu": lambda inputs, p: _relu(inputs[0], p),
    "leaky_relu": lambda inputs, p: _relu(inputs[0], p),
    "swish": lambda inputs, p: _swish(inputs[0], p.swish_beta),
    "add": _binary(torch.add),
    "bias": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "scale": _binary(torch.mul),
    "div": _binary(torch.div),
    "add_square": _binary(lambda a, b: a + b * b),
    "max": _binary(_maximum),
    "min": _binary(_minimum),
    "mod": _binary(torch.fmod),
    "pow": _binary(torch.pow),
    "logical_and": _binary(lambda a, b: (a != 0) & (b != 0)),
    "logical_or": _binary(lambda a, b: (a != 0) | (b != 0)),
    "cmp_eq": _binary(torch.eq),
    "cmp_neq": _binary(torch.ne),
    "cmp_gt": _binary(torch.gt),
    "cmp_ge": _binary(torch.ge),
    "cmp_lt": _binary(torch.lt),
    "cmp_le": _binary(torch.le),
    "binary_select": lambda inputs, _: torch.where(inputs[2] != 0, inputs[0], inputs[1]),
    "gen_index": _index,
}


def _relu_slope(x: torch.Tensor, p: Parameters) -> torch.Tensor:
    # Without an upper clip infinity is inside, as leaky_relu has it.
    # A comparison made float64: torch.where of two numbers would be float32.
    inside = ((x < p.upper_clip) | (p.upper_clip == math.inf)).to(torch.float64)
    return torch.where(x > p.lower_clip, inside, p.negative_slope)


def _swish_slope(x: torch.Tensor, p: Parameters) -> torch.Tensor:
    gate = _sigmoid(p.swish_beta * x)
    return torch.where(torch.isinf(x), gate, gate + p.swish_beta * x * gate * (1.0 - gate))


def _elu_slope(x: torch.Tensor, p: Parameters) -> torch.Tensor:
    return torch.where(x > 0, 1.0, p.elu_alpha * torch.exp(torch.clamp(x, max=0.0)))


def _gelu_slope(x: torch.Tensor, _: Parameters) -> torch.Tensor:
    return torch.where(torch.isinf(x), _normal_cdf(x), _normal_cdf(x) + x * _normal_density(x))


def _gelu_tanh_slope(x: torch.Tensor, _: Parameters) -> torch.Tensor:
    bend = torch.tanh(_GELU_LINEAR * (x + _GELU_CUBIC * x * x * x))
    inner = _GELU_LINEAR * (1.0 + 3.0 * _GELU_CUBIC * x * x)
    slope = 0.5 * (1.0 + bend) + 0.5 * x * (1.0 - bend * bend) * inner
    return torch.where(torch.isinf(x), 0.5 * (1.0 + bend), slope)


def _sigmoid_slope(x: torch.Tensor, _: Parameters) -> torch.Tensor:
    gate = _sigmoid(x)
    return gate * (1.0 - gate)


def _tanh_slope(x: torch.Tensor, _: Parameters) -> torch.Tensor:
    bend = torch.tanh(x)
    return 1.0 - bend * bend


def _times(slope: Callable[[torch.Tensor, Parameters], torch.Tensor]) -> Backward:
    return lambda gradient, x, p: gradient * slope(x, p)


BACKWARD: dict[str, Backward] = {
    "relu_backward": _times(_relu_slope),
    "leaky_relu_backward": _times(_relu_slope),
    "swish_backward": _times(_swish_slope),
    "elu_backward": _times(_elu_slope),
    "gelu_backward": _times(_gelu_slope),
    "gelu_approx_tanh_backward": _times(_gelu_tanh_slope),
    "sigmoid_backward": _times(_sigmoid_slope),
    "softplus_backward": _times(lambda x, p: _sigmoid(p.softplus_beta * x)),
    "tanh_backward": _times(_tanh_slope),
}


def evaluate(
    mode: str, inputs: Sequence[torch.Tensor], parameters: Parameters | None = None
) -> torch.Tensor:
    """One pointwise operation on tensors that broadcast against one another.

    Args:
        mode: A key of `FORWARD` or `BACKWARD`. A backward takes the incoming gradient, then the
            forward's input.
        inputs: One to three tensors of any dtype; computed in float64.

    Returns:
        float64; bool from comparisons and logical modes; int64 from gen_index.
    """
    chosen = parameters or Parameters()
    values = [to_float64(tensor) for tensor in inputs]
    if mode in BACKWARD:
        return BACKWARD[mode](values[0], values[1], chosen)
    if mode not in FORWARD:
        raise ValueError(f"mode: {mode!r} is no pointwise mode")
    return FORWARD[mode](values, chosen)


_PARAMETER_NAMES = tuple(Parameters.__dataclass_fields__)


def parameters_of(operation: Any) -> Parameters:
    """The parameters of a pointwise operation record; unset ones keep their defaults."""
    given = {name: getattr(operation, name, None) for name in _PARAMETER_NAMES}
    return Parameters(**{name: value for name, value in given.items() if value is not None})


@reference("pointwise")
def _pointwise(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # A scalar passed by value broadcasts whatever rank it was declared with.
    operands = [
        inputs[port].reshape(()) if operation.inputs[port].is_pass_by_value else inputs[port]
        for port in ("in0", "in1", "in2")
        if port in inputs
    ]
    out = evaluate(operation.mode, operands, parameters_of(operation))
    return {"out": out.broadcast_to(tuple(operation.outputs["out"].dim))}
