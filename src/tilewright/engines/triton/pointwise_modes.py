"""A pointwise mode as an expression of a kernel's source text. Pure; needs no Triton.

The names that expressions call are in ``pointwise_functions`` and ``device_math``; a generated
module has them all (``NAMES``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

# What a value is computed and kept in: float32, float64, 64-bit integers.
SINGLE, DOUBLE, WHOLE = "tl.float32", "tl.float64", "tl.int64"
# Comparisons give conditions, which no operand is.
CONDITION = "tl.int1"

_WIDE_INTEGERS = (DataType.INT32, DataType.INT64)
# Modes that stay within the integers where their operands are.
_INTEGER_MODES = frozenset(
    {"identity", "abs", "neg", "add", "sub", "mul", "max", "min", "add_square", "bias", "scale"}
    | {"cmp_eq", "cmp_neq", "cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "binary_select"}
    | {"logical_and", "logical_or", "logical_not", "gen_index"}
)
_CONDITIONS = {
    "logical_not": "{0} == 0",
    "logical_and": "({0} != 0) & ({1} != 0)",
    "logical_or": "({0} != 0) | ({1} != 0)",
    "cmp_eq": "{0} == {1}",
    "cmp_neq": "{0} != {1}",
    "cmp_gt": "{0} > {1}",
    "cmp_ge": "{0} >= {1}",
    "cmp_lt": "{0} < {1}",
    "cmp_le": "{0} <= {1}",
}
_ANY = {
    "identity": "{0}",
    "gen_index": "{0}",
    "abs": "tl.abs({0})",
    "add": "{0} + {1}",
    "bias": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "scale": "{0} * {1}",
    "add_square": "{0} + {1} * {1}",
    "max": "larger({0}, {1})",
    "min": "smaller({0}, {1})",
    "binary_select": "tl.where({2} != 0, {0}, {1})",
}
_FLOATING = {
    "neg": "negative({0})",
    "ceil": "ceil({0})",
    "floor": "floor({0})",
    "sqrt": "root({0})",
    "rsqrt": "inverse_root({0})",
    "reciprocal": "reciprocal({0})",
    "exp": "exp({0})",
    "log": "log({0})",
    "erf": "erf({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "tan": "tan({0})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "gelu": "gelu({0})",
    "gelu_approx_tanh": "gelu_approx_tanh({0})",
    "div": "quotient({0}, {1})",
    "mod": "remainder({0}, {1})",
    "pow": "power({0}, {1})",
    "gelu_backward": "{0} * gelu_slope({1})",
    "gelu_approx_tanh_backward": "{0} * gelu_approx_tanh_slope({1})",
    "sigmoid_backward": "{0} * sigmoid_slope({1})",
    "tanh_backward": "{0} * tanh_slope({1})",
}
# With parameters, written in as literals.
_PARAMETRIC = {
    "elu": "elu({0}, {elu_alpha})",
    "softplus": "softplus({0}, {softplus_beta})",
    "swish": "swish({0}, {swish_beta}, {low}, {high})",
    "relu": "relu({0}, {negative_slope}, {lower_clip}, {upper_clip})",
    "leaky_relu": "relu({0}, {negative_slope}, 0.0, {infinity})",
    "elu_backward": "{0} * elu_slope({1}, {elu_alpha})",
    "softplus_backward": "{0} * softplus_slope({1}, {softplus_beta})",
    "swish_backward": "{0} * swish_slope({1}, {swish_beta})",
    "relu_backward": "{0} * relu_slope({1}, {negative_slope}, {lower_clip}, {upper_clip})",
    "leaky_relu_backward": "{0} * relu_slope({1}, {negative_slope}, 0.0, {infinity})",
}
# From there on the gate of swish is 0 to the last bit of float64.
_GATE_IS_CONSTANT_FROM = 1e4
# IEEE division costs twice the approximate one, whose two last places 16 bits do not show.
_OF_NARROW_RESULTS = {"div": "ratio({0}, {1})"}
_PARAMETERS = (
    "negative_slope",
    "lower_clip",
    "upper_clip",
    "swish_beta",
    "elu_alpha",
    "softplus_beta",
)


def arithmetic_kind(mode: str, operands: Sequence[Tensor], out: Tensor) -> str:
    """What ``mode`` is computed in: whole numbers where it stays within them, else floating."""
    whole = all(t.data_type.is_integer or t.data_type is DataType.BOOLEAN for t in operands)
    if whole and mode in _INTEGER_MODES:
        return WHOLE
    return floating_kind((*operands, out))


def floating_kind(tensors: Sequence[Tensor]) -> str:
    """float64 beside float64 and wide integers, which float32 does not hold; else float32."""
    wide = (DataType.DOUBLE, *_WIDE_INTEGERS)
    return DOUBLE if any(tensor.data_type in wide for tensor in tensors) else SINGLE


def expression(operation: Operation, names: Sequence[str], kind: str) -> tuple[str, str]:
    """(source text, kind of its value) of a pointwise operation on operands of ``kind``.

    ``names`` are the operands in port order, as variables of the kernel.

    Raises:
        NotSupportedError: for a mode that the table does not have.
    """
    mode = operation.mode
    if mode in _CONDITIONS:
        return _CONDITIONS[mode].format(*names), CONDITION
    if kind == WHOLE and mode == "neg":
        return f"0 - {names[0]}", kind
    text = _ANY.get(mode) or _FLOATING.get(mode)
    if kind == SINGLE and operation.outputs["out"].data_type.bits < 32:
        text = _OF_NARROW_RESULTS.get(mode, text)
    if text is not None:
        return text.format(*names), kind
    text = _PARAMETRIC.get(mode)
    if text is None:
        raise NotSupportedError(f"{operation.title()}: generated kernels have no mode {mode!r}")
    given = {name: literal(getattr(operation, name)) for name in _PARAMETERS}
    beta = operation.swish_beta
    edge = _GATE_IS_CONSTANT_FROM / abs(beta) if beta else math.inf
    given["low"] = literal(-edge if beta > 0 else -math.inf)
    given["high"] = literal(edge if beta < 0 else math.inf)
    return text.format(*names, infinity=literal(math.inf), **given), kind


def literal(value: float) -> str:
    """A number as source text that a kernel reads back exactly."""
    if math.isinf(value):
        return 'float("inf")' if value > 0 else 'float("-inf")'
    return repr(float(value))
