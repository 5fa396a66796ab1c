"""Reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import reduction as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, label, long

SIGNATURE = """\
f(mode, x, *, axes, out=None) -> y
  mode     add, mul, min, max, amax (largest magnitude), avg, norm1, norm2, mul_no_zeros
  x        any shape and strides; y has extent 1 on the axes
  axes     a tuple of axes
  out      y, to write into"""

MODES = ("add", "mul", "min", "max", "amax", "avg", "norm1", "norm2", "mul_no_zeros")


def _expected(mode: str, axes: tuple[int, ...]) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    return lambda given: {"y": oracle.reduce(given["x"].double(), mode.upper(), axes)}


def _case(
    mode: str,
    dim: tuple[int, ...],
    axes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "",
    edit: Callable[[torch.Tensor], torch.Tensor] | None = None,
    level: int = 0,
    is_detected: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        x = torch.randn(*dim, generator=generator)
        if mode.startswith("mul"):
            # Products of many stay of the order of 1.
            x = x.sign() * (1.0 + 0.1 * x.abs())
        if mode == "mul_no_zeros":
            x.view(-1)[::3] = 0.0
        x = x.to(dtype)
        return {"x": x if edit is None else edit(x)}

    guesses = {}
    for count in (1, 3):
        if dim[axes[-1]] > count:
            guesses[f"the last {count} of the last axis are left out"] = _without(mode, axes, count)
    title = name or f"{mode}, {label(dtype)}"
    options = {"mode": mode, "axes": axes}
    return Case(
        title, make, options, _expected(mode, axes), level, is_detected, "", guesses, _nothing_wrong
    )


def _nothing_wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """One operand of any type and shape cannot be wrong by itself."""
    return {}


def _without(
    mode: str, axes: tuple[int, ...], count: int
) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        x = given["x"]
        shorter = x.narrow(axes[-1], 0, x.shape[axes[-1]] - count)
        return _expected(mode, axes)({"x": shorter})

    return reference


def _special(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[0] = float("nan")
    x.view(-1)[-1] = float("inf")
    return x


def cases() -> tuple[Case, ...]:
    """Every case."""
    plain = (3, 5, 19)
    found = [_case("add", plain, (2,), name="add, the last axis", is_detected=True)]
    found += [_case(mode, plain, (2,)) for mode in MODES[1:]]
    found += [
        _case("add", plain, (0,), name="add, the first axis"),
        _case("add", plain, (0, 2), name="add, the outer axes"),
        _case("max", plain, (0, 1, 2), name="max, all axes"),
        _case("avg", (2, 1, 7), (1,), name="avg, an axis of one"),
        _case("add", (257,), (0,), name="add, one axis of 257"),
        _case("amax", plain, (1,), name="amax, NaN and infinity", edit=_special),
        _case("add", (4, 6, 5), (2,), name="add, transposed", edit=lambda x: x.transpose(0, 1)),
        _case("add", plain, (2,), torch.float16),
        _case("norm2", plain, (2,), torch.bfloat16),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        found += [_case(mode, (7, 513), (1,), dtype, level=1) for mode in ("add", "max", "norm2")]
    found.append(long(_case("add", (4096, 4096), (1,), torch.bfloat16, name="long, add")))
    return tuple({case.name: case for case in found}.values())


def _invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords: dict[str, Any] = {"axes": options["axes"]}
    if out is not None:
        keywords["out"] = out
    return named_results(function(options["mode"], given["x"], **keywords), ("y",))


def _declare(graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    from tilewright.graph.enums import reduction_mode

    x = tensors["x"]
    made = graph.reduction(x, reduction_mode[options["mode"].upper()])
    made.set_dim([1 if axis in options["axes"] else n for axis, n in enumerate(x.dim)])
    return {"y": made}


REDUCTION = Family("reduction", SIGNATURE, cases(), _invoke, lambda given, options: set(), _declare)
