"""Methods for the gradients of activations: ``loss`` is the incoming gradient."""

from __future__ import annotations

from tilewright.graph.operations.pointwise import PointwiseBuilder
from tilewright.graph.tensor import Tensor


class PointwiseBackwardMethods(PointwiseBuilder):
    """Declares gradients; ``input`` is the forward's input, and all three dims are the same."""

    def relu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        negative_slope: float | None = None,
        lower_clip: float | None = None,
        upper_clip: float | None = None,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """loss where lower_clip < input < upper_clip, 0 above, negative_slope loss below."""
        return self._pointwise(
            "relu_backward",
            (loss, input),
            compute_data_type,
            name,
            negative_slope=negative_slope,
            lower_clip=lower_clip,
            upper_clip=upper_clip,
        )

    def leaky_relu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        negative_slope: float,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """loss where input is positive, else negative_slope loss."""
        return self._pointwise(
            "leaky_relu_backward",
            (loss, input),
            compute_data_type,
            name,
            negative_slope=negative_slope,
        )

    def tanh_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """loss (1 - tanh(input)^2)."""
        return self._pointwise("tanh_backward", (loss, input), compute_data_type, name)

    def sigmoid_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """loss s (1 - s), with s = sigmoid(input)."""
        return self._pointwise("sigmoid_backward", (loss, input), compute_data_type, name)

    def elu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
        elu_alpha: float = 1.0,
    ) -> Tensor:
        """loss where input is positive, else loss elu_alpha exp(input)."""
        return self._pointwise(
            "elu_backward", (loss, input), compute_data_type, name, elu_alpha=elu_alpha
        )

    def gelu_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """loss (Phi(input) + input phi(input)), with the normal distribution and density."""
        return self._pointwise("gelu_backward", (loss, input), compute_data_type, name)

    def gelu_approx_tanh_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """loss times the derivative of the tanh form of GELU at input."""
        return self._pointwise("gelu_approx_tanh_backward", (loss, input), compute_data_type, name)

    def softplus_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: object = None,
        name: str = "",
        softplus_beta: float = 1.0,
    ) -> Tensor:
        """loss sigmoid(softplus_beta input)."""
        return self._pointwise(
            "softplus_backward", (loss, input), compute_data_type, name, softplus_beta=softplus_beta
        )

    def swish_backward(
        self,
        loss: Tensor,
        input: Tensor,
        compute_data_type: object = None,
        swish_beta: float | None = None,
        name: str = "",
    ) -> Tensor:
        """loss s (1 + b x (1 - s)), with x the input, b swish_beta (1), s = sigmoid(b x)."""
        return self._pointwise(
            "swish_backward", (loss, input), compute_data_type, name, swish_beta=swish_beta
        )
