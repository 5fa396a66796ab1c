"""Convolution (a cross-correlation) and its two gradients, with 1 to 3 spatial axes.

With p = pre_padding, q = post_padding, s = stride, d = dilation on a spatial axis, image extent I
and filter extent R, as in ONNX's Conv and cuDNN's convolution:

    out[n, k, i] = sum over c, r of image[n, g + c, s i - p + d r] filter[k, c, r]
    extent of out = (I + p + q - d (R - 1) - 1) // s + 1

Elements outside the image are 0. Declared axes are N, C, spatial for images and K, C / groups,
spatial for filters, whatever the strides. An image with ``groups`` times the filter's channels is
convolved group by group; g is the first channel of k's group.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import ClassVar

from tilewright.errors import GraphError
from tilewright.graph.builder import Builder
from tilewright.graph.operation import Operation, operation_kind
from tilewright.graph.tensor import Tensor
from tilewright.records import record

Extents = int | Sequence[int] | None


@record(frozen=True, kw_only=True, eq=False)
class Convolution(Operation):
    """What the three directions share. Attributes have one entry a spatial axis."""

    # The ports of the forward's image, filter and result.
    image_port: ClassVar[str] = ""
    filter_port: ClassVar[str] = ""
    result_port: ClassVar[str] = ""

    pre_padding: tuple[int, ...] = ()
    post_padding: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()

    def check(self) -> None:
        """The three dims fit one another by the formula of the module."""
        expected = self._result_dim()
        self.require_dim(
            self.result_port,
            expected,
            f"the convolution of {self.image_port} {self._tensor(self.image_port).dim} with "
            f"{self.filter_port} {self._tensor(self.filter_port).dim}",
        )

    def settle(self, rank: int) -> None:
        """Expand omitted attributes and single numbers to one entry a spatial axis."""
        for name, default in (
            ("pre_padding", 0),
            ("post_padding", 0),
            ("stride", 1),
            ("dilation", 1),
        ):
            given: tuple[int, ...] = getattr(self, name) or (default,)
            if len(given) == 1:
                given *= rank - 2
            if len(given) != rank - 2:
                self.fail(
                    f"{name} is {given}; expected {rank - 2} entries, one a spatial axis of rank "
                    f"{rank}"
                )
            low = 0 if name.endswith("padding") else 1
            if min(given) < low:
                self.fail(f"{name} is {given}; expected at least {low} on each axis")
            # The record is frozen for its users; this completes it before anybody reads it.
            object.__setattr__(self, name, given)

    def _require_ranks(self, first: str, second: str) -> None:
        self.require_rank(first, 3, 5, "two axes and 1 to 3 spatial ones")
        a, b = self._tensor(first), self._tensor(second)
        if a.rank != b.rank:
            self.fail(
                f"tensor {b.label()} ({second}) has rank {b.rank}; expected {a.rank}: image, "
                "filter and result have the same rank"
            )
        self.settle(a.rank)

    def _tensor(self, port: str) -> Tensor:
        return self.inputs.get(port) or self.outputs[port]

    def _require_set_dim(self, why: str) -> None:
        out = self.outputs["out"]
        if not out.dim:
            self.fail(f"tensor {out.label()} (out) has no dim; call set_dim: {why}")

    def _result_dim(self) -> tuple[int, ...]:
        image, weight = self._tensor(self.image_port), self._tensor(self.filter_port)
        if image.rank != weight.rank:
            self.fail(
                f"tensor {weight.label()} ({self.filter_port}) has rank {weight.rank}; expected "
                f"{image.rank}: image, filter and result have the same rank"
            )
        channels, own = image.dim[1], weight.dim[1]
        # No channels at all are one group of none.
        groups = channels // own if own and channels else int(channels == 0)
        if groups * own != channels:
            self.fail(
                f"tensor {weight.label()} ({self.filter_port}) has dim {weight.dim}; expected a "
                f"divisor of {channels} on axis 1: the channels of tensor {image.label()} are "
                "groups times the filter's"
            )
        if weight.dim[0] % groups:
            self.fail(
                f"tensor {weight.label()} ({self.filter_port}) has dim {weight.dim}; expected a "
                f"multiple of {groups} on axis 0: each of {groups} groups makes as many channels"
            )
        spatial = []
        for axis in range(image.rank - 2):
            extent, reach = image.dim[2 + axis], weight.dim[2 + axis]
            if reach < 1:
                self.fail(
                    f"tensor {weight.label()} ({self.filter_port}) has dim {weight.dim}; expected "
                    "at least 1 on each spatial axis"
                )
            room = extent + self.pre_padding[axis] + self.post_padding[axis]
            room -= self.dilation[axis] * (reach - 1) + 1
            if room < 0:
                self.fail(
                    f"tensor {weight.label()} ({self.filter_port}) has dim {weight.dim}; with "
                    f"dilation {self.dilation} it is larger than the padded image "
                    f"{image.dim} on axis {2 + axis}"
                )
            spatial.append(room // self.stride[axis] + 1)
        return (image.dim[0], weight.dim[0], *spatial)


@operation_kind("conv_fprop")
@record(frozen=True, kw_only=True, eq=False)
class ConvFprop(Convolution):
    """out (N, K, ...) of image (N, C, ...) and weight (K, C / groups, ...)."""

    required: ClassVar = ("image", "weight")
    produces: ClassVar = ("out",)
    image_port: ClassVar = "image"
    filter_port: ClassVar = "weight"
    result_port: ClassVar = "out"

    def infer(self) -> None:
        """The output's dim by the formula, in the image's axis order."""
        self._require_ranks("image", "weight")
        self.fill("out", self._result_dim(), order_of=self.inputs["image"])


@operation_kind("conv_dgrad")
@record(frozen=True, kw_only=True, eq=False)
class ConvDgrad(Convolution):
    """out, the gradient of the image, of loss (N, K, ...) and filter (K, C / groups, ...)."""

    required: ClassVar = ("loss", "filter")
    produces: ClassVar = ("out",)
    image_port: ClassVar = "out"
    filter_port: ClassVar = "filter"
    result_port: ClassVar = "loss"

    def infer(self) -> None:
        """The image's dim is not determined by loss and filter, so it must be set."""
        self._require_ranks("loss", "filter")
        self._require_set_dim("several image extents give one loss, so it is not inferred")
        self.fill("out", self.outputs["out"].dim, order_of=self.inputs["loss"])


@operation_kind("conv_wgrad")
@record(frozen=True, kw_only=True, eq=False)
class ConvWgrad(Convolution):
    """out, the gradient of the filter, of image (N, C, ...) and loss (N, K, ...)."""

    required: ClassVar = ("image", "loss")
    produces: ClassVar = ("out",)
    image_port: ClassVar = "image"
    filter_port: ClassVar = "out"
    result_port: ClassVar = "loss"

    def infer(self) -> None:
        """The filter's dim is not determined by image and loss, so it must be set."""
        self._require_ranks("image", "loss")
        self._require_set_dim("several filter extents give one loss, so it is not inferred")
        self.fill("out", self.outputs["out"].dim, order_of=self.inputs["image"])


class ConvolutionMethods(Builder):
    """Declares convolutions and their gradients."""

    def conv_fprop(
        self,
        image: Tensor,
        weight: Tensor,
        padding: Extents = None,
        stride: Extents = None,
        dilation: Extents = None,
        compute_data_type: object = None,
        name: str = "",
        *,
        pre_padding: Extents = None,
        post_padding: Extents = None,
    ) -> Tensor:
        """The convolution of image (N, C, ...) with weight (K, C / groups, ...): (N, K, ...).

        A cross-correlation: the filter is not turned round. Paddings, strides and dilations are in
        elements; ``padding`` stands for ``pre_padding`` and ``post_padding``. A number is for every
        spatial axis, a sequence has one entry an axis. An extent I becomes
        (I + pre + post - dilation (R - 1) - 1) // stride + 1 under a filter of R. An output stride
        that is not set follows the image's axis order.

        Raises:
            GraphError: for both kinds of padding, or at ``validate`` if the dims do not fit.
        """
        before, after = _paddings(padding, pre_padding, post_padding, "conv_fprop")
        operation = self.append(
            ConvFprop,
            {"image": image, "weight": weight},
            name=name,
            compute_data_type=compute_data_type,
            pre_padding=before,
            post_padding=after,
            stride=_extents(stride),
            dilation=_extents(dilation),
        )
        return operation.outputs["out"]

    def conv_dgrad(
        self,
        loss: Tensor,
        filter: Tensor,
        padding: Extents = None,
        stride: Extents = None,
        dilation: Extents = None,
        compute_data_type: object = None,
        name: str = "",
        *,
        pre_padding: Extents = None,
        post_padding: Extents = None,
    ) -> Tensor:
        """The gradient of the image; call ``set_dim`` on it. Arguments as in ``conv_fprop``.

        Raises:
            GraphError: for both kinds of padding, or at ``validate`` if the dims do not fit.
        """
        before, after = _paddings(padding, pre_padding, post_padding, "conv_dgrad")
        operation = self.append(
            ConvDgrad,
            {"loss": loss, "filter": filter},
            name=name,
            compute_data_type=compute_data_type,
            pre_padding=before,
            post_padding=after,
            stride=_extents(stride),
            dilation=_extents(dilation),
        )
        return operation.outputs["out"]

    def conv_wgrad(
        self,
        image: Tensor,
        loss: Tensor,
        padding: Extents = None,
        stride: Extents = None,
        dilation: Extents = None,
        compute_data_type: object = None,
        name: str = "",
        *,
        pre_padding: Extents = None,
        post_padding: Extents = None,
    ) -> Tensor:
        """The gradient of the filter; call ``set_dim`` on it. Arguments as in ``conv_fprop``.

        Raises:
            GraphError: for both kinds of padding, or at ``validate`` if the dims do not fit.
        """
        before, after = _paddings(padding, pre_padding, post_padding, "conv_wgrad")
        operation = self.append(
            ConvWgrad,
            {"image": image, "loss": loss},
            name=name,
            compute_data_type=compute_data_type,
            pre_padding=before,
            post_padding=after,
            stride=_extents(stride),
            dilation=_extents(dilation),
        )
        return operation.outputs["out"]


def _paddings(both: Extents, before: Extents, after: Extents, kind: str) -> tuple[object, object]:
    """The paddings before and after, from one argument for both or one for each."""
    if both is None:
        return _extents(before), _extents(after)
    if before is not None or after is not None:
        raise GraphError(
            f"{kind}: padding is given beside pre_padding or post_padding; expected one or the "
            "other: padding stands for both"
        )
    return _extents(both), _extents(both)


def _extents(given: Extents) -> object:
    """A single number as a sequence of one; what is wrong is left for the attribute's check."""
    if given is None:
        return ()
    try:
        return (operator.index(given),)  # type: ignore[arg-type]
    except TypeError:
        return given
