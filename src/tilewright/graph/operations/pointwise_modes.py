"""The pointwise modes: how many operands each takes, what they are called, and what they may be.

Names follow cuDNN's public graph vocabulary (its pointwise operations and their arguments).
"""

from __future__ import annotations

import enum

from tilewright.dtypes import DataType
from tilewright.records import record


class PointwiseKind(enum.Enum):
    """What a mode's result depends on, which decides the checks and the result's type."""

    UNARY = "one operand"
    BINARY = "two operands"
    COMPARE = "two operands, giving 1 or 0"
    LOGICAL = "operands that are true where nonzero, giving 1 or 0"
    SELECT = "two operands and a mask"
    INDEX = "the position along an axis, not the operand's values"
    BACKWARD = "an incoming gradient and the forward's operand"


@record(frozen=True)
class PointwiseMode:
    """One row of the table.

    ``arguments`` are the operands' names in the order of the ports in0, in1, in2. ``is_floating``
    modes take floating operands only: their values are not integers even for integer operands.
    ``parameters`` are the attributes that the mode reads. ``result`` is the output's data type
    where the mode decides it; NOT_SET means the graph's default, as for any tensor.
    """

    kind: PointwiseKind
    arguments: tuple[str, ...]
    is_floating: bool = False
    parameters: tuple[str, ...] = ()
    result: DataType = DataType.NOT_SET

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len(self.arguments)


_K = PointwiseKind
_RELU = ("negative_slope", "lower_clip", "upper_clip")


def _unary(*parameters: str, floating: bool = False) -> PointwiseMode:
    return PointwiseMode(_K.UNARY, ("input",), floating, parameters)


def _binary(first: str = "a", second: str = "b", *, floating: bool = False) -> PointwiseMode:
    return PointwiseMode(_K.BINARY, (first, second), floating)


def _compare() -> PointwiseMode:
    return PointwiseMode(_K.COMPARE, ("input", "comparison"))


def _backward(*parameters: str) -> PointwiseMode:
    return PointwiseMode(_K.BACKWARD, ("loss", "input"), True, parameters)


POINTWISE_MODES: dict[str, PointwiseMode] = {
    "abs": _unary(),
    "ceil": _unary(),
    "floor": _unary(),
    "identity": _unary(),
    "neg": _unary(),
    "relu": _unary(*_RELU),
    "leaky_relu": _unary("negative_slope"),
    "cos": _unary(floating=True),
    "elu": _unary("elu_alpha", floating=True),
    "erf": _unary(floating=True),
    "exp": _unary(floating=True),
    "gelu": _unary(floating=True),
    "gelu_approx_tanh": _unary(floating=True),
    "log": _unary(floating=True),
    "reciprocal": _unary(floating=True),
    "rsqrt": _unary(floating=True),
    "sigmoid": _unary(floating=True),
    "sin": _unary(floating=True),
    "softplus": _unary("softplus_beta", floating=True),
    "sqrt": _unary(floating=True),
    "swish": _unary("swish_beta", floating=True),
    "tan": _unary(floating=True),
    "tanh": _unary(floating=True),
    "logical_not": PointwiseMode(_K.LOGICAL, ("input",)),
    "logical_and": PointwiseMode(_K.LOGICAL, ("a", "b")),
    "logical_or": PointwiseMode(_K.LOGICAL, ("a", "b")),
    "add": _binary(),
    "sub": _binary(),
    "mul": _binary(),
    "div": _binary(),
    "add_square": _binary(),
    "max": _binary("input0", "input1"),
    "min": _binary("input0", "input1"),
    "mod": _binary("input0", "input1"),
    "pow": _binary("input0", "input1"),
    "bias": _binary("input", "bias"),
    "scale": _binary("input", "scale"),
    "cmp_eq": _compare(),
    "cmp_neq": _compare(),
    "cmp_gt": _compare(),
    "cmp_ge": _compare(),
    "cmp_lt": _compare(),
    "cmp_le": _compare(),
    "binary_select": PointwiseMode(_K.SELECT, ("input0", "input1", "mask")),
    "gen_index": PointwiseMode(_K.INDEX, ("input",), False, ("axis",), DataType.INT32),
    "relu_backward": _backward(*_RELU),
    "leaky_relu_backward": _backward("negative_slope"),
    "swish_backward": _backward("swish_beta"),
    "elu_backward": _backward("elu_alpha"),
    "softplus_backward": _backward("softplus_beta"),
    "gelu_backward": _backward(),
    "gelu_approx_tanh_backward": _backward(),
    "sigmoid_backward": _backward(),
    "tanh_backward": _backward(),
}
