"""Methods for elementwise operations on two or three tensors, which broadcast."""

from __future__ import annotations

from tilewright.graph.operations.pointwise import PointwiseBuilder
from tilewright.graph.tensor import Tensor


class PointwiseBinaryMethods(PointwiseBuilder):
    """Declares elementwise functions of two tensors or more; each returns their broadcast dim."""

    def add(
        self,
        a: Tensor,
        b: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """a + b."""
        return self._pointwise("add", (a, b), compute_data_type, name)

    def sub(
        self,
        a: Tensor,
        b: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """a - b."""
        return self._pointwise("sub", (a, b), compute_data_type, name)

    def mul(
        self,
        a: Tensor,
        b: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """a b, elementwise."""
        return self._pointwise("mul", (a, b), compute_data_type, name)

    def div(
        self,
        a: Tensor,
        b: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """a / b; a nonzero number over 0 is an infinity, 0 / 0 NaN."""
        return self._pointwise("div", (a, b), compute_data_type, name)

    def add_square(
        self,
        a: Tensor,
        b: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """a + b b."""
        return self._pointwise("add_square", (a, b), compute_data_type, name)

    def logical_and(
        self,
        a: Tensor,
        b: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where both operands are nonzero, else 0."""
        return self._pointwise("logical_and", (a, b), compute_data_type, name)

    def logical_or(
        self,
        a: Tensor,
        b: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where an operand is nonzero, else 0."""
        return self._pointwise("logical_or", (a, b), compute_data_type, name)

    def max(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The larger operand; NaN where either is NaN."""
        return self._pointwise("max", (input0, input1), compute_data_type, name)

    def min(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The smaller operand; NaN where either is NaN."""
        return self._pointwise("min", (input0, input1), compute_data_type, name)

    def mod(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """The remainder of input0 / input1, with input0's sign (C's fmod)."""
        return self._pointwise("mod", (input0, input1), compute_data_type, name)

    def pow(
        self,
        input0: Tensor,
        input1: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input0 to the power of input1 (C's pow)."""
        return self._pointwise("pow", (input0, input1), compute_data_type, name)

    def bias(
        self,
        input: Tensor,
        bias: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input + bias, the bias broadcasting along axes where it has extent 1."""
        return self._pointwise("bias", (input, bias), compute_data_type, name)

    def scale(
        self,
        input: Tensor,
        scale: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input scale, the scale broadcasting along axes where it has extent 1."""
        return self._pointwise("scale", (input, scale), compute_data_type, name)

    def cmp_eq(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where input == comparison, else 0 (NaN equals nothing)."""
        return self._pointwise("cmp_eq", (input, comparison), compute_data_type, name)

    def cmp_neq(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where input != comparison, else 0 (NaN differs from everything)."""
        return self._pointwise("cmp_neq", (input, comparison), compute_data_type, name)

    def cmp_gt(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where input > comparison, else 0."""
        return self._pointwise("cmp_gt", (input, comparison), compute_data_type, name)

    def cmp_ge(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where input >= comparison, else 0."""
        return self._pointwise("cmp_ge", (input, comparison), compute_data_type, name)

    def cmp_lt(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where input < comparison, else 0."""
        return self._pointwise("cmp_lt", (input, comparison), compute_data_type, name)

    def cmp_le(
        self,
        input: Tensor,
        comparison: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """1 where input <= comparison, else 0."""
        return self._pointwise("cmp_le", (input, comparison), compute_data_type, name)

    def binary_select(
        self,
        input0: Tensor,
        input1: Tensor,
        mask: Tensor,
        compute_data_type: object = None,
        name: str = "",
    ) -> Tensor:
        """input0 where the mask is nonzero, else input1."""
        return self._pointwise("binary_select", (input0, input1, mask), compute_data_type, name)
