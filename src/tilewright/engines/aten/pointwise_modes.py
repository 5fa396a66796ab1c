"""The table of elementwise modes, and their application to tensors.

Formulas, with x the input and g the incoming gradient of a backward mode:

- relu: min(x, upper_clip) where x > lower_clip, else lower_clip + negative_slope (x - lower_clip)
- swish: x sigmoid(swish_beta x); elu: x where x > 0, else elu_alpha (exp x - 1)
- softplus: log(1 + exp(softplus_beta x)) / softplus_beta
- gelu: x Phi(x) by erf; gelu_approx_tanh: its tanh form (Hendrycks and Gimpel, 2016)
- mod: C's fmod; add_square: a + b b; max and min propagate NaN
- logical modes take nonzero, NaN included, as true; they and comparisons give 1 or 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.records import record

Tensor = torch.Tensor
Apply = Callable[["PointwiseParameters", Sequence[Tensor]], Tensor]

# The stubs of these functions leave out their ``out`` argument.
_nn: Any = torch._C._nn
# The overload itself: finding it at each call would cost microseconds.
_gelu_backward_function = torch.ops.aten.gelu_backward.default
# Beyond this beta * x, log(1 + exp(beta x)) is beta x to the last bit of float64.
_SOFTPLUS_LINEAR_FROM = 40.0
# From this magnitude on the gates of gelu and swish are 0 or 1 to the last bit of float64. Held
# to it, an infinite input does not meet a gate of 0, which would make NaN of a finite limit.
_GATE_IS_CONSTANT_FROM = 1e4


@record(frozen=True)
class PointwiseParameters:
    """The scalar attributes of a pointwise operation."""

    negative_slope: float = 0.0
    lower_clip: float = 0.0
    upper_clip: float = math.inf
    swish_beta: float = 1.0
    elu_alpha: float = 1.0
    softplus_beta: float = 1.0
    axis: int = 0

    @classmethod
    def of(cls, source: Any) -> PointwiseParameters:
        """The parameters that ``source`` has as attributes or items; absent or None: default."""
        if isinstance(source, cls):
            return source
        given = {}
        for name in cls.__dataclass_fields__:
            if isinstance(source, Mapping):
                value = source.get(name)
            else:
                value = getattr(source, name, None)
            if value is not None:
                given[name] = value
        return cls(**given)


def apply_pointwise(mode: str, args: Sequence[Tensor], parameters: Any = None) -> Tensor:
    """The result of ``mode`` on tensors of one floating type, in that type.

    Args:
        mode: The operation's mode ("add", "relu", "cmp_eq", "gelu_backward", ...).
        args: The operands in port order; they broadcast against one another.
        parameters: A PointwiseParameters, a mapping, or anything with its attributes.

    Raises:
        NotSupportedError: for an unknown mode, or a number of operands that is not the mode's.
    """
    entry = mode_entry(mode)
    if len(args) != entry.arity:
        raise NotSupportedError(f"pointwise {mode}: {len(args)} operands; it takes {entry.arity}")
    result = entry.apply(PointwiseParameters.of(parameters), args)
    return result.to(args[0].dtype) if entry.is_predicate else result


@record(frozen=True)
class Mode:
    """One row of the table.

    ``direct`` makes, from the parameters, a function of the operands and ``out=``; ``is_exact``
    tells that it also rounds 16-bit types only once, ``is_predicate`` that it gives booleans.
    """

    arity: int
    apply: Apply
    direct: Callable[[PointwiseParameters], Callable[..., Any]] | None = None
    is_exact: bool = False
    is_predicate: bool = False


def mode_entry(mode: str) -> Mode:
    """The row of the table for ``mode``.

    Raises:
        NotSupportedError: if there is none, listing the modes.
    """
    entry = _MODES.get(mode)
    if entry is None:
        raise NotSupportedError(f"pointwise mode {mode!r}; the ATen engine has {sorted(_MODES)}")
    return entry


def index_along(dim: Sequence[int], axis: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0, 1, ... along ``axis``, of shape ``dim`` by expansion."""
    if not -len(dim) <= axis < len(dim):
        raise NotSupportedError(f"gen_index: axis {axis}; the input has rank {len(dim)}")
    shape = [1] * len(dim)
    shape[axis] = dim[axis]
    return torch.arange(dim[axis], dtype=dtype, device=device).reshape(shape).expand(dim)


def _gelu_tanh(p: PointwiseParameters) -> Callable[..., Any]:
    def function(x: Tensor, out: Tensor) -> None:
        _nn.gelu(x.clamp_min(-_GATE_IS_CONSTANT_FROM), approximate="tanh", out=out)

    return function


def _elu(p: PointwiseParameters) -> Callable[..., Any]:
    return lambda x, out: _nn.elu(x, p.elu_alpha, 1.0, 1.0, out=out)


def _softplus(p: PointwiseParameters) -> Callable[..., Any]:
    beta = p.softplus_beta
    return lambda x, out: _nn.softplus(x, beta, _SOFTPLUS_LINEAR_FROM, out=out)


def _leaky_relu(p: PointwiseParameters) -> Callable[..., Any]:
    if p.negative_slope == 0:
        # ATen's function would make NaN of 0 * (-inf).
        return lambda x, out: torch.clamp_min(x, 0.0, out=out)
    return lambda x, out: _nn.leaky_relu(x, p.negative_slope, out=out)


def _relu_direct(p: PointwiseParameters) -> Callable[..., Any]:
    if not _relu_is_clamp(p):
        return lambda x, out: out.copy_(_relu(p, (_at_least_float32(x),)))
    if p.upper_clip == math.inf:
        return lambda x, out: torch.clamp_min(x, p.lower_clip, out=out)
    return lambda x, out: torch.clamp(x, p.lower_clip, p.upper_clip, out=out)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.element_size() < 4 else x


def _relu_is_clamp(p: PointwiseParameters) -> bool:
    return p.negative_slope == 0 and p.lower_clip <= p.upper_clip


def _relu(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    (x,) = a
    if _relu_is_clamp(p):
        # The formula would make NaN of 0 * (-inf); clamp keeps NaN and gives lower_clip there.
        return x.clamp(p.lower_clip, p.upper_clip)
    below = p.lower_clip + p.negative_slope * (x - p.lower_clip)
    return torch.where(x > p.lower_clip, x.clamp(max=p.upper_clip), below)


def _relu_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    g, x = a
    below = g * p.negative_slope if p.negative_slope else torch.zeros_like(g)
    inside = g if p.upper_clip == math.inf else torch.where(x < p.upper_clip, g, 0.0)
    return torch.where(x > p.lower_clip, inside, below)


def _leaky_relu_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    g, x = a
    return torch.where(x > 0, g, g * p.negative_slope)


def _swish(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    (x,) = a
    if p.swish_beta == 1.0:
        return torch.nn.functional.silu(x.clamp_min(-_GATE_IS_CONSTANT_FROM))
    gate = torch.sigmoid(p.swish_beta * x)
    return torch.where(gate == 0, 0.0, x * gate)


def _swish_direct(p: PointwiseParameters) -> Callable[..., Any]:
    if p.swish_beta != 1.0:
        return lambda x, out: out.copy_(_swish(p, (_at_least_float32(x),)))

    def function(x: Tensor, out: Tensor) -> None:
        _nn.silu(torch.clamp_min(x, -_GATE_IS_CONSTANT_FROM, out=out), out=out)

    return function


def _swish_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    g, x = a
    z = (p.swish_beta * x).clamp_(-_GATE_IS_CONSTANT_FROM, _GATE_IS_CONSTANT_FROM)
    # 1 - s is sigmoid(-z), which keeps its digits where s is near 1.
    return g * (torch.sigmoid(z) * (1.0 + z * torch.sigmoid(-z)))


def _elu_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    g, x = a
    return torch.where(x > 0, g, g * p.elu_alpha * torch.exp(x.clamp(max=0.0)))


def _gelu_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    return _gelu_gradient(a, "none")


def _gelu_tanh_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    return _gelu_gradient(a, "tanh")


def _gelu_gradient(a: Sequence[Tensor], approximate: str) -> Tensor:
    g, x = a
    x = x.clamp(-_GATE_IS_CONSTANT_FROM, _GATE_IS_CONSTANT_FROM)
    result: Tensor = _gelu_backward_function(g, x, approximate=approximate)
    return result


def _sigmoid_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    g, x = a
    return g * torch.sigmoid(x) * torch.sigmoid(-x)


def _softplus_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    g, x = a
    return g * torch.sigmoid(p.softplus_beta * x)


def _tanh_backward(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    g, x = a
    # 1 - tanh(x)**2 cancels near 1; this product is equal and does not.
    return g * (4.0 * torch.sigmoid(2.0 * x) * torch.sigmoid(-2.0 * x))


def _select(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    return torch.where(a[2] != 0, a[0], a[1])


def _gen_index(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
    return index_along(a[0].shape, p.axis, a[0].dtype, a[0].device)


def _gelu_direct(p: PointwiseParameters) -> Callable[..., Any]:
    limit = _GATE_IS_CONSTANT_FROM

    def function(x: Tensor, out: Tensor) -> None:
        # ATen's oneDNN path overflows in the upper half of the range. Above the limit gelu(x) is
        # x, and below it at least -0.17: the larger of it and of ``above`` is right everywhere.
        above = torch.threshold(x, limit, -1.0)
        if x.element_size() < 4:
            held = x.to(torch.float32, memory_format=torch.contiguous_format)
            held.clamp_(-limit, limit)
            out.copy_(_nn.gelu(held, out=held))
        elif out.is_contiguous():
            # That path leaves an output unwritten whose strides are not the input's (seen with
            # torch 2.13 on a CPU), so one buffer serves for both.
            torch.clamp(x, -limit, limit, out=out)
            _nn.gelu(out, out=out)
        else:
            out.copy_(torch.nn.functional.gelu(x.clamp(-limit, limit)))
        torch.maximum(out, above, out=out)

    return function


def _unary(function: Callable[..., Tensor], *, is_exact: bool = True) -> Mode:
    return Mode(1, lambda p, a: function(a[0]), lambda p: function, is_exact)


def _binary(function: Callable[..., Tensor]) -> Mode:
    return Mode(2, lambda p, a: function(a[0], a[1]), lambda p: function, True)


def _predicate(arity: int, function: Callable[..., Tensor]) -> Mode:
    return Mode(arity, lambda p, a: function(*a), lambda p: function, True, True)


class _Through(torch.autograd.Function):
    """A function with out=, which autograd refuses, and the mode that is its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[..., Any], gradient: Apply, p: PointwiseParameters
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gradient = gradient, p
        result = torch.empty_like(x)
        function(x, out=result)
        return result

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        gradient, p = ctx.gradient
        return gradient(p, (incoming, x)), None, None, None


def _through(
    direct: Callable[[PointwiseParameters], Callable[..., Any]], gradient: Apply, exact: bool
) -> Mode:
    """A unary mode that has only an ATen function with out=."""

    def apply(p: PointwiseParameters, a: Sequence[Tensor]) -> Tensor:
        result: Tensor = _Through.apply(a[0], direct(p), gradient, p)  # type: ignore[no-untyped-call]
        return result

    return Mode(1, apply, direct, exact)


# is_exact=False: ATen's 16-bit kernels of these differ from the float32 result rounded once.
_MODES: dict[str, Mode] = {
    "abs": _unary(torch.abs),
    "ceil": _unary(torch.ceil),
    "cos": _unary(torch.cos),
    "elu": _through(_elu, _elu_backward, True),
    "erf": _unary(torch.erf, is_exact=False),
    "exp": _unary(torch.exp),
    "floor": _unary(torch.floor),
    "gelu": _through(_gelu_direct, _gelu_backward, True),
    "gelu_approx_tanh": _through(_gelu_tanh, _gelu_tanh_backward, True),
    "identity": Mode(1, lambda p, a: a[0]),
    "log": _unary(torch.log),
    "logical_not": _predicate(1, torch.logical_not),
    "neg": _unary(torch.neg),
    "reciprocal": _unary(torch.reciprocal),
    "rsqrt": _unary(torch.rsqrt),
    "sigmoid": _unary(torch.sigmoid),
    "sin": _unary(torch.sin, is_exact=False),
    "softplus": _through(_softplus, _softplus_backward, False),
    "sqrt": _unary(torch.sqrt, is_exact=False),
    "tan": _unary(torch.tan),
    "tanh": _unary(torch.tanh),
    "relu": Mode(1, _relu, _relu_direct, True),
    "leaky_relu": _through(_leaky_relu, _leaky_relu_backward, False),
    "swish": Mode(1, _swish, _swish_direct, True),
    "add": _binary(torch.add),
    "sub": _binary(torch.sub),
    "mul": _binary(torch.mul),
    "div": _binary(torch.div),
    "add_square": Mode(2, lambda p, a: a[0] + a[1] * a[1]),
    "logical_and": _predicate(2, torch.logical_and),
    "logical_or": _predicate(2, torch.logical_or),
    "max": _binary(torch.maximum),
    "min": _binary(torch.minimum),
    "mod": _binary(torch.fmod),
    "pow": _binary(torch.pow),
    "bias": _binary(torch.add),
    "scale": _binary(torch.mul),
    "cmp_eq": _predicate(2, torch.eq),
    "cmp_neq": _predicate(2, torch.ne),
    "cmp_gt": _predicate(2, torch.gt),
    "cmp_ge": _predicate(2, torch.ge),
    "cmp_lt": _predicate(2, torch.lt),
    "cmp_le": _predicate(2, torch.le),
    "binary_select": Mode(3, _select),
    "gen_index": Mode(1, _gen_index),
    "relu_backward": Mode(2, _relu_backward),
    "leaky_relu_backward": Mode(2, _leaky_relu_backward),
    "swish_backward": Mode(2, _swish_backward),
    "elu_backward": Mode(2, _elu_backward),
    "gelu_backward": Mode(2, _gelu_backward),
    "gelu_approx_tanh_backward": Mode(2, _gelu_tanh_backward),
    "sigmoid_backward": Mode(2, _sigmoid_backward),
    "softplus_backward": Mode(2, _softplus_backward),
    "tanh_backward": Mode(2, _tanh_backward),
}
