"""Convolutions of 1 to 3 spatial axes as a sum over filter taps.

Y[n, k, o] = sum over c, r of X[n, c, o * stride + r * dilation - pre] * W[k, c, r], a
cross-correlation, with X zero outside its extents. Grouped if X has more channels than W: group j
of the output channels sees group j of the input channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["data_gradient", "forward", "weight_gradient"]

Extents = Sequence[int]


def _taps(
    filter_extents: Extents, out_extents: Extents, stride: Extents, dilation: Extents
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each filter tap, and the slices of the padded input that it meets."""
    for tap in itertools.product(*(range(extent) for extent in filter_extents)):
        starts = [index * step for index, step in zip(tap, dilation, strict=True)]
        yield (
            tap,
            tuple(
                slice(start, start + (count - 1) * step + 1, step)
                for start, count, step in zip(starts, out_extents, stride, strict=True)
            ),
        )


def _reach(
    filter_extents: Extents, out_extents: Extents, stride: Extents, dilation: Extents
) -> list[int]:
    """Extent of the padded input that the outputs read."""
    return [
        (count - 1) * step + (extent - 1) * spread + 1
        for extent, count, step, spread in zip(
            filter_extents, out_extents, stride, dilation, strict=True
        )
    ]


def _padded(x: torch.Tensor, pre: Extents, extents: Extents) -> torch.Tensor:
    """A zero tensor with the given spatial extents, holding x shifted by `pre`."""
    out = x.new_zeros((*x.shape[:2], *extents))
    target, source = [slice(None)] * 2, [slice(None)] * 2
    for axis, (before, extent) in enumerate(zip(pre, extents, strict=True)):
        count = max(0, min(x.shape[2 + axis], extent - before))
        target.append(slice(before, before + count))
        source.append(slice(0, count))
    out[tuple(target)] = x[tuple(source)]
    return out


def _groups(channels: int, weight: torch.Tensor) -> int:
    if channels % weight.shape[1]:
        raise ValueError(
            f"image has {channels} channels; the filter's {weight.shape[1]} must divide them"
        )
    return int(channels // weight.shape[1])


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(N, C, positions...) as (N, G, C / G, positions)."""
    # An empty batch leaves no extent to infer.
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, x.shape[2:].numel())


def forward(
    image: torch.Tensor,
    weight: torch.Tensor,
    *,
    pre_padding: Extents,
    post_padding: Extents,
    stride: Extents,
    dilation: Extents,
) -> torch.Tensor:
    """Y (N, K, spatial...) in float64 of image (N, C, spatial...) and weight (K, C / G, taps...).

    The extent of Y is `(X + pre + post - dilation * (R - 1) - 1) // stride + 1` on each axis.
    """
    x, w = to_float64(image), to_float64(weight)
    groups = _groups(x.shape[1], w)
    out_extents = [
        (size + before + after - spread * (taps - 1) - 1) // step + 1
        for size, before, after, taps, step, spread in zip(
            x.shape[2:], pre_padding, post_padding, w.shape[2:], stride, dilation, strict=True
        )
    ]
    reach = _reach(w.shape[2:], out_extents, stride, dilation)
    padded = _padded(x, pre_padding, reach)
    out = x.new_zeros((x.shape[0], groups, w.shape[0] // groups, _count(out_extents)))
    for tap, window in _taps(w.shape[2:], out_extents, stride, dilation):
        seen = _by_group(padded[_tail(window)], groups)
        kernel = w[_tail(tap)].reshape(groups, -1, w.shape[1])
        out += torch.einsum("ngcp,gkc->ngkp", seen, kernel)
    return out.reshape(x.shape[0], w.shape[0], *out_extents)


def data_gradient(
    loss: torch.Tensor,
    weight: torch.Tensor,
    *,
    image_dim: Extents,
    pre_padding: Extents,
    stride: Extents,
    dilation: Extents,
) -> torch.Tensor:
    """dX of shape `image_dim`: each tap sends its share of dY back to where it read."""
    dy, w = to_float64(loss), to_float64(weight)
    groups = _groups(image_dim[1], w)
    out_extents = dy.shape[2:]
    reach = _reach(w.shape[2:], out_extents, stride, dilation)
    # Large enough for the image too: what no output reads has gradient 0.
    extents = [
        max(size + before, extent)
        for size, before, extent in zip(image_dim[2:], pre_padding, reach, strict=True)
    ]
    padded = dy.new_zeros((*image_dim[:2], *extents))
    dy_grouped = _by_group(dy, groups)
    for tap, window in _taps(w.shape[2:], out_extents, stride, dilation):
        kernel = w[_tail(tap)].reshape(groups, -1, w.shape[1])
        share = torch.einsum("ngkp,gkc->ngcp", dy_grouped, kernel)
        share = share.reshape(image_dim[0], image_dim[1], *out_extents)
        padded[_tail(window)] += share
    inside = tuple(
        slice(before, before + size)
        for before, size in zip(pre_padding, image_dim[2:], strict=True)
    )
    return padded[_tail(inside)]


def weight_gradient(
    image: torch.Tensor,
    loss: torch.Tensor,
    *,
    weight_dim: Extents,
    pre_padding: Extents,
    stride: Extents,
    dilation: Extents,
) -> torch.Tensor:
    """dW of shape `weight_dim`: each tap correlates dY with what it read."""
    x, dy = to_float64(image), to_float64(loss)
    groups = x.shape[1] // weight_dim[1]
    out_extents = dy.shape[2:]
    padded = _padded(x, pre_padding, _reach(weight_dim[2:], out_extents, stride, dilation))
    dy_grouped = _by_group(dy, groups)
    gradient = x.new_zeros(tuple(weight_dim))
    for tap, window in _taps(weight_dim[2:], out_extents, stride, dilation):
        seen = _by_group(padded[_tail(window)], groups)
        share = torch.einsum("ngkp,ngcp->gkc", dy_grouped, seen)
        gradient[_tail(tap)] = share.reshape(weight_dim[0], weight_dim[1])
    return gradient


def _tail(index: Sequence[Any]) -> tuple[Any, ...]:
    """An index of the spatial axes, behind the first two."""
    return (slice(None), slice(None), *index)


def _count(extents: Extents) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total


def _attributes(operation: Any, spatial: int) -> dict[str, list[int]]:
    def extents(*names: str, default: int) -> list[int]:
        for name in names:
            given = getattr(operation, name, None)
            if isinstance(given, int):
                return [given] * spatial
            if given is not None and len(given):
                return [int(entry) for entry in given]
        return [default] * spatial

    return {
        "pre_padding": extents("pre_padding", "padding", default=0),
        "post_padding": extents("post_padding", "padding", default=0),
        "stride": extents("stride", default=1),
        "dilation": extents("dilation", default=1),
    }


@reference("conv_fprop")
def _fprop(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    image = inputs["image"]
    attributes = _attributes(operation, image.dim() - 2)
    return {"out": forward(image, inputs["weight"], **attributes)}


@reference("conv_dgrad")
def _dgrad(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    weight = inputs["filter"] if "filter" in inputs else inputs["weight"]
    attributes = _attributes(operation, weight.dim() - 2)
    del attributes["post_padding"]
    image_dim = tuple(operation.outputs["out"].dim)
    return {"out": data_gradient(inputs["loss"], weight, image_dim=image_dim, **attributes)}


@reference("conv_wgrad")
def _wgrad(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    image = inputs["image"]
    attributes = _attributes(operation, image.dim() - 2)
    del attributes["post_padding"]
    weight_dim = tuple(operation.outputs["out"].dim)
    gradient = weight_gradient(image, inputs["loss"], weight_dim=weight_dim, **attributes)
    return {"out": gradient}
