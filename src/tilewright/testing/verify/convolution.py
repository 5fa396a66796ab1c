"""Convolutions and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilewright.oracle import convolution as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, label, long, packed_strides

SIGNATURE = """\
f(x, weight, *, padding=0, stride=1, dilation=1, out=None) -> y
  x (N, C, spatial...), weight (K, C / groups, taps...), any strides; y (N, K, spatial...), a
  cross-correlation; zeros are around x
  padding, stride, dilation  one number for all spatial axes
  out      y, to write into"""
BACKWARD_SIGNATURE = """\
f(dy, x, weight, *, padding=0, stride=1, dilation=1, out=None) -> (dx, dweight)
  operands as of a convolution, and dy like y; dx like x, dweight like weight
  out      (dx, dweight), to write into"""
NAMES = ("dx", "dweight")
Reference = Callable[[Tensors], dict[str, torch.Tensor]]


def _extents(options: Mapping[str, Any], rank: int) -> dict[str, list[int]]:
    defaults = {"padding": 0, "stride": 1, "dilation": 1}
    return {name: [options.get(name, value)] * rank for name, value in defaults.items()}


def _forward(options: Mapping[str, Any]) -> Reference:
    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        steps = _extents(options, given["x"].dim() - 2)
        padding = steps.pop("padding")
        y = oracle.forward(
            given["x"], given["weight"], pre_padding=padding, post_padding=padding, **steps
        )
        return {"y": y}

    return reference


def _backward(options: Mapping[str, Any]) -> Reference:
    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        dy, x, weight = given["dy"], given["x"], given["weight"]
        steps = _extents(options, x.dim() - 2)
        steps["pre_padding"] = steps.pop("padding")
        dx = oracle.data_gradient(dy, weight, image_dim=tuple(x.shape), **steps)
        dweight = oracle.weight_gradient(x, dy, weight_dim=tuple(weight.shape), **steps)
        return {"dx": dx, "dweight": dweight}

    return reference


def _flipped(reference: Reference) -> Reference:
    """A true convolution: the taps turned round."""

    def turned(given: Tensors) -> dict[str, torch.Tensor]:
        weight = given["weight"]
        axes = list(range(2, weight.dim()))
        found = reference({**given, "weight": weight.flip(axes)})
        return {n: t.flip(axes) if n == "dweight" else t for n, t in found.items()}

    return turned


def _wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "a weight of other channels": {**given, "weight": given["weight"][:, :-1]},
        "a weight in float64": {**given, "weight": given["weight"].double()},
    }


def _case(
    name: str,
    x_dim: Sequence[int],
    weight_dim: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    is_backward: bool,
    is_channels_last: bool = False,
    level: int = 0,
    is_detected: bool = False,
    **options: Any,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        given = {
            "x": torch.randn(*x_dim, generator=generator).to(dtype),
            "weight": torch.randn(*weight_dim, generator=generator).to(dtype),
        }
        if is_backward:
            y = _forward(options)(given)["y"]
            given = {"dy": torch.randn(y.shape, generator=generator).to(dtype), **given}
        if is_channels_last:
            for each, tensor in given.items():
                given[each] = tensor.to(memory_format=torch.channels_last)
        return given

    expected = _backward(options) if is_backward else _forward(options)
    taps = 1
    for extent in weight_dim[2:]:
        taps *= extent
    guesses = {} if taps == 1 else {"the taps are turned round": _flipped(expected)}
    wrong = _wrong if is_detected else None
    return Case(name, make, options, expected, level, is_detected, "", guesses, wrong)


def cases(is_backward: bool) -> tuple[Case, ...]:
    """Every case of one direction."""

    def case(*given: Any, **keywords: Any) -> Case:
        return _case(*given, is_backward=is_backward, **keywords)

    found = [
        case("3 x 3, padded", (2, 3, 5, 7), (4, 3, 3, 3), padding=1, is_detected=True),
        case("1 x 1", (2, 5, 3, 4), (7, 5, 1, 1)),
        case("stride 2", (1, 3, 8, 9), (4, 3, 3, 3), padding=1, stride=2),
        case("stride 2 leaves a column", (1, 2, 6, 6), (3, 2, 3, 3), stride=2),
        case("dilation 2", (1, 3, 9, 8), (2, 3, 3, 3), padding=2, dilation=2),
        case("three groups", (2, 6, 5, 5), (9, 2, 3, 3), padding=1),
        case("a channel a group", (2, 4, 5, 5), (4, 1, 3, 3), padding=1),
        case("channels last", (2, 8, 5, 6), (4, 8, 3, 3), padding=1, is_channels_last=True),
        case("one axis", (2, 3, 11), (4, 3, 4)),
        case("three axes", (1, 2, 4, 5, 3), (3, 2, 2, 3, 2)),
        case("padding beyond the taps", (1, 2, 3, 3), (2, 2, 2, 2), padding=3),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        found.append(case(label(dtype), (2, 8, 5, 6), (4, 8, 3, 3), dtype, padding=1))
    for dtype in (torch.float32, torch.bfloat16):
        name = f"64 channels, {label(dtype)}"
        found.append(case(name, (2, 64, 14, 15), (65, 64, 3, 3), dtype, padding=1, level=1))
    if not is_backward:
        # Operands of a backward come of a forward on a CPU, which takes too long here.
        dims = (32, 256, 56, 56), (256, 256, 3, 3)
        many = case("long, 3 x 3", *dims, torch.bfloat16, padding=1, is_channels_last=True)
        found.append(long(many))
    return tuple(found)


def _invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = dict(options) if out is None else {**options, "out": out}
    names = NAMES if "dy" in given else ("y",)
    return named_results(function(*given.values(), **keywords), names)


def _keywords(given: Tensors, options: Mapping[str, Any]) -> set[str]:
    return set(options)


def _declare(graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    steps = _extents(options, len(tensors["x"].dim) - 2)
    return {"y": graph.conv_fprop(tensors["x"], tensors["weight"], **steps)}


def _declare_backward(
    graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    dy, x, weight = (tensors[name] for name in ("dy", "x", "weight"))
    steps = _extents(options, len(x.dim) - 2)
    dx = graph.conv_dgrad(dy, weight, **steps)
    dweight = graph.conv_wgrad(x, dy, **steps)
    dx.set_dim(x.dim).set_stride(packed_strides(x.dim))
    dweight.set_dim(weight.dim).set_stride(packed_strides(weight.dim))
    return {"dx": dx, "dweight": dweight}


CONVOLUTION = Family("convolution", SIGNATURE, cases(False), _invoke, _keywords, _declare)
CONVOLUTION_BACKWARD = Family(
    "convolution_backward", BACKWARD_SIGNATURE, cases(True), _invoke, _keywords, _declare_backward
)
