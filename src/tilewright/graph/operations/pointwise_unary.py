"""Methods for elementwise operations on one tensor. ``Pointwise`` has the rules they share."""

from __future__ import annotations

from tilewright.graph.operations.pointwise import PointwiseBuilder
from tilewright.graph.tensor import Tensor


class PointwiseUnaryMethods(PointwiseBuilder):
    """Declares elementwise functions of one tensor; each returns a tensor of the input's dim."""

    def abs(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """|input|, elementwise."""
        return self._pointwise("abs", (input,), compute_data_type, name)

    def ceil(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The smallest integer not below each element."""
        return self._pointwise("ceil", (input,), compute_data_type, name)

    def cos(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The cosine of each element, in radians."""
        return self._pointwise("cos", (input,), compute_data_type, name)

    def erf(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The error function of each element."""
        return self._pointwise("erf", (input,), compute_data_type, name)

    def exp(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """e to the power of each element."""
        return self._pointwise("exp", (input,), compute_data_type, name)

    def floor(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The largest integer not above each element."""
        return self._pointwise("floor", (input,), compute_data_type, name)

    def gelu(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input Phi(input), with the normal distribution function Phi by erf."""
        return self._pointwise("gelu", (input,), compute_data_type, name)

    def gelu_approx_tanh(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """GELU in its tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
        return self._pointwise("gelu_approx_tanh", (input,), compute_data_type, name)

    def identity(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The input itself, converted to the output's data type and layout."""
        return self._pointwise("identity", (input,), compute_data_type, name)

    def log(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The natural logarithm; of 0 it is -inf, of a negative number NaN."""
        return self._pointwise("log", (input,), compute_data_type, name)

    def logical_not(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where the input is 0, else 0."""
        return self._pointwise("logical_not", (input,), compute_data_type, name)

    def neg(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """-input, elementwise."""
        return self._pointwise("neg", (input,), compute_data_type, name)

    def reciprocal(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 / input; of 0 it is an infinity of its sign."""
        return self._pointwise("reciprocal", (input,), compute_data_type, name)

    def rsqrt(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 / sqrt(input); of 0 it is +inf, of a negative number NaN."""
        return self._pointwise("rsqrt", (input,), compute_data_type, name)

    def sigmoid(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 / (1 + exp(-input))."""
        return self._pointwise("sigmoid", (input,), compute_data_type, name)

    def sin(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The sine of each element, in radians."""
        return self._pointwise("sin", (input,), compute_data_type, name)

    def sqrt(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The square root; of a negative number it is NaN."""
        return self._pointwise("sqrt", (input,), compute_data_type, name)

    def tan(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The tangent of each element, in radians."""
        return self._pointwise("tan", (input,), compute_data_type, name)

    def tanh(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The hyperbolic tangent of each element."""
        return self._pointwise("tanh", (input,), compute_data_type, name)

    def elu(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
        elu_alpha: float = 1.0,
    ) -> Tensor:
        """input where it is positive, else elu_alpha (exp(input) - 1)."""
        return self._pointwise("elu", (input,), compute_data_type, name, elu_alpha=elu_alpha)

    def softplus(
        self,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
        softplus_beta: float = 1.0,
    ) -> Tensor:
        """log(1 + exp(softplus_beta input)) / softplus_beta, without overflow."""
        return self._pointwise(
            "softplus", (input,), compute_data_type, name, softplus_beta=softplus_beta
        )

    def swish(
        self,
        input: Tensor,
        swish_beta: float | None = None,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input sigmoid(swish_beta input); swish_beta is 1 by default (SiLU)."""
        return self._pointwise("swish", (input,), compute_data_type, name, swish_beta=swish_beta)

    def relu(
        self,
        input: Tensor,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """Leaky and clipped ReLU; ``Pointwise`` has the formula. By default max(input, 0)."""
        return self._pointwise(
            "relu",
            (input,),
            compute_data_type,
            name,
            negative_slope=negative_slope,
            lower_clip=lower_clip,
            upper_clip=upper_clip,
        )

    def leaky_relu(
        self,
        input: Tensor,
        negative_slope: float,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input where it is positive, else negative_slope input."""
        return self._pointwise(
            "leaky_relu", (input,), compute_data_type, name, negative_slope=negative_slope
        )

    def gen_index(
        self,
        input: Tensor,
        axis: int,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The position of each element along ``axis``, from 0; INT32 unless another type is set."""
        return self._pointwise("gen_index", (input,), compute_data_type, name, axis=axis)
