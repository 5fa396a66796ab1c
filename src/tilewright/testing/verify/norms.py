"""RMSNorm and LayerNorm over the last axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import normalization as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, label, long

SIGNATURE = """\
f(x, weight, bias=None, *, eps=1e-5, out=None) -> y
  x (..., N), any strides; weight and bias (N,); y like x
  {formula}, over the last axis, in float32 or wider
  out      y, to write into"""
_FORMULAS = {
    "rms_norm": "y = x / sqrt(mean(x^2) + eps) * weight + bias",
    "layer_norm": "y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, biased variance",
}
_BLOCKS = (8, 16, 32, 64)


def _expected(
    options: Mapping[str, Any], centered: bool, count: Callable[[int], int] | None = None
) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        x = given["x"]
        epsilon = options.get("eps", 1e-5)
        if count is None:
            result = oracle.forward(
                x,
                given["weight"],
                given.get("bias"),
                axes=(x.dim() - 1,),
                epsilon=epsilon,
                centered=centered,
            )
            return {"y": result.y}
        width = x.shape[-1]
        padded = torch.nn.functional.pad(x.double(), (0, count(width) - width))
        ones = torch.ones(count(width), dtype=torch.float64, device=x.device)
        result = oracle.forward(
            padded, ones, None, axes=(x.dim() - 1,), epsilon=epsilon, centered=centered
        )
        y = result.y[..., :width] * given["weight"].double()
        return {"y": y + given["bias"].double() if "bias" in given else y}

    return reference


def _wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "a weight one shorter": {**given, "weight": given["weight"][:-1]},
        "a weight one longer": {
            **given,
            "weight": torch.cat([given["weight"], given["weight"][:1]]),
        },
    }


def _case(
    name: str,
    dim: tuple[int, ...],
    dtype: torch.dtype,
    centered: bool,
    *,
    bias: bool = False,
    offset: float = 0.0,
    size: float = 1.0,
    level: int = 0,
    is_detected: bool = False,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    **options: Any,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        given = {
            "x": (torch.randn(*dim, generator=generator) * size + offset).to(dtype),
            "weight": (torch.rand(dim[-1], generator=generator) + 0.5).to(dtype),
        }
        if bias:
            given["bias"] = torch.randn(dim[-1], generator=generator).to(dtype)
        if edit is not None:
            edit(given)
        return given

    guesses: dict[str, Any] = {}
    for block in _BLOCKS:
        if dim[-1] % block:

            def whole(width: int, block: int = block) -> int:
                return -(-width // block) * block

            guesses[f"means are over a multiple of {block} elements, zeros past the last"] = (
                _expected(options, centered, whole)
            )
    wrong = _wrong if is_detected else None
    expected = _expected(options, centered)
    return Case(name, make, options, expected, level, is_detected, "", guesses, wrong)


def _strided(given: dict[str, torch.Tensor]) -> None:
    wide = torch.zeros(*given["x"].shape[:-1], given["x"].shape[-1] + 5, dtype=given["x"].dtype)
    wide[..., : given["x"].shape[-1]] = given["x"]
    given["x"] = wide[..., : given["x"].shape[-1]]


def cases(centered: bool) -> tuple[Case, ...]:
    """Every case of one of the two."""
    single = torch.float32
    found = [
        _case("rows of 19", (3, 5, 19), single, centered, is_detected=True),
        _case("with bias", (3, 5, 24), single, centered, bias=True, is_detected=True),
        _case("rows of 1", (3, 5, 1), single, centered),
        _case("one row", (1, 64), single, centered),
        _case("rows of 257", (2, 3, 257), single, centered),
        _case("rows of zeros and small numbers", (4, 32), single, centered, size=1e-6),
        _case("mean far from zero", (4, 64), single, centered, offset=100.0),
        _case("eps given", (4, 32), single, centered, size=0.01, eps=1e-2),
        _case("rows with gaps", (2, 5, 24), single, centered, edit=_strided),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        found.append(_case(f"rows of 96, {label(dtype)}", (2, 5, 96), dtype, centered))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for width in (1023, 4096):
            name = f"rows of {width}, {label(dtype)}"
            found.append(_case(name, (2, 7, width), dtype, centered, bias=True, level=1))
    found.append(long(_case("long, rows of 4096", (8192, 4096), torch.bfloat16, centered)))
    return tuple(found)


def _invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords = dict(options)
    if out is not None:
        keywords["out"] = out
    operands = [given["x"], given["weight"], *([given["bias"]] if "bias" in given else [])]
    return named_results(function(*operands, **keywords), ("y",))


def _keywords(given: Tensors, options: Mapping[str, Any]) -> set[str]:
    return {*options, *({"bias"} & set(given))}


def _declare(centered: bool) -> Callable[..., dict[str, Any]]:
    def declare(
        graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        from tilewright.graph.enums import norm_forward_phase

        method = graph.layernorm if centered else graph.rmsnorm
        outputs = method(
            norm_forward_phase.INFERENCE,
            tensors["x"],
            tensors["weight"],
            tensors.get("bias"),
            float(options.get("eps", 1e-5)),
        )
        return {"y": outputs[0]}

    return declare


def for_graph(given: Tensors) -> dict[str, torch.Tensor]:
    """Weight and bias with the input's rank."""
    rank = given["x"].dim()
    return {
        name: t if name == "x" else t.reshape(*[1] * (rank - 1), -1) for name, t in given.items()
    }


RMS_NORM = Family(
    "rms_norm",
    SIGNATURE.format(formula=_FORMULAS["rms_norm"]),
    cases(False),
    _invoke,
    _keywords,
    _declare(False),
    for_graph,
)
LAYER_NORM = Family(
    "layer_norm",
    SIGNATURE.format(formula=_FORMULAS["layer_norm"]),
    cases(True),
    _invoke,
    _keywords,
    _declare(True),
    for_graph,
)
