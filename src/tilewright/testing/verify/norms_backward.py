"""Gradients of RMSNorm and LayerNorm over the last axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import normalization as oracle
from tilewright.testing.detectors.subject import Tensors, named_results
from tilewright.testing.verify.case import Case, Family, label, long

_RMS_SIGNATURE = """\
f(dy, x, weight, *, inverse, eps=1e-5, out=None) -> (dx, dweight)
  dy, x (..., N), any strides; weight (N,); dx like x, dweight like weight
  y = x / sqrt(mean(x^2) + eps) * weight, over the last axis
  inverse  (..., 1) float32, 1 / sqrt(mean(x^2) + eps) as a forward pass saved it; leave it out if
           you compute it again
  out      (dx, dweight), to write into"""
_LAYER_SIGNATURE = """\
f(dy, x, weight, *, mean, inverse, eps=1e-5, out=None) -> (dx, dweight, dbias)
  dy, x (..., N), any strides; weight (N,); dx like x, dweight and dbias like weight
  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis, biased variance
  mean, inverse  (..., 1) float32, as a forward pass saved them; leave them out if you compute them
  out      (dx, dweight, dbias), to write into"""
_EPS = 1e-5
Reference = Callable[[Tensors], dict[str, torch.Tensor]]


def _names(centered: bool) -> tuple[str, ...]:
    return ("dx", "dweight", "dbias") if centered else ("dx", "dweight")


def _statistics(x: torch.Tensor, centered: bool) -> dict[str, torch.Tensor]:
    found = oracle.forward(x, None, None, axes=(x.dim() - 1,), epsilon=_EPS, centered=centered)
    inverse = {"inverse": found.inv_variance}
    return inverse if found.mean is None else {"mean": found.mean, **inverse}


def _expected(centered: bool, rows: slice | None = None) -> Reference:
    """``rows`` keeps the sums of the weight's gradient to a part of the rows."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        x, weight = given["x"], given["weight"]
        saved = _statistics(x, centered)
        saved = {name: given.get(name, value) for name, value in saved.items()}

        def gradients(part: slice) -> Any:
            dy, rows_of_x = (t.reshape(-1, t.shape[-1])[part] for t in (given["dy"], x))
            stats = {n: t.reshape(-1, 1)[part] for n, t in saved.items()}
            return oracle.backward(
                dy,
                rows_of_x,
                weight.reshape(1, -1),
                stats.get("mean"),
                stats["inverse"],
                axes=(1,),
            )

        whole = gradients(slice(None))
        summed = whole if rows is None else gradients(rows)
        results = {"dx": whole.dx.reshape(x.shape), "dweight": summed.dscale.reshape(weight.shape)}
        if centered:
            results["dbias"] = summed.dbias.reshape(weight.shape)
        return results

    return reference


def _without_inner(centered: bool) -> Reference:
    """dx without what x does to the statistics."""

    def reference(given: Tensors) -> dict[str, torch.Tensor]:
        saved = _statistics(given["x"], centered)
        inverse = given.get("inverse", saved["inverse"]).double()
        direct = given["dy"].double() * given["weight"].double() * inverse
        return {**_expected(centered)(given), "dx": direct}

    return reference


def _wrong(given: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "dy one row shorter": {**given, "dy": given["dy"][:-1]},
        "a weight one shorter": {**given, "weight": given["weight"][:-1]},
    }


def _case(
    name: str,
    dim: tuple[int, ...],
    dtype: torch.dtype,
    centered: bool,
    *,
    grad_dtype: torch.dtype | None = None,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    level: int = 0,
    is_detected: bool = False,
) -> Case:
    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        given = {
            "dy": torch.randn(*dim, generator=generator).to(dtype),
            "x": torch.randn(*dim, generator=generator).to(dtype),
            "weight": (torch.rand(dim[-1], generator=generator) + 0.5).to(grad_dtype or dtype),
        }
        if edit is not None:
            edit(given)
        return {
            **given,
            **{n: t.float() for n, t in _statistics(given["x"], centered).items()},
        }

    guesses: dict[str, Reference] = {
        "dx lacks what x does to the statistics": _without_inner(centered)
    }
    rows = 1
    for extent in dim[:-1]:
        rows *= extent
    if rows > 1:
        for first in {rows - 1, rows // 8 * 8, rows // 4 * 4} - {0, rows}:
            guesses[f"dweight sums over the first {first} rows alone"] = _expected(
                centered, slice(0, first)
            )
    wrong = _wrong if is_detected else None
    return Case(name, make, {}, _expected(centered), level, is_detected, "", guesses, wrong)


def _expanded(given: dict[str, torch.Tensor]) -> None:
    # What the gradient of a sum looks like: one number, no stride.
    given["dy"] = torch.full((), 0.75, dtype=given["dy"].dtype).expand_as(given["dy"])


def _every_second(given: dict[str, torch.Tensor]) -> None:
    given["dy"] = given["dy"].repeat_interleave(2, -1)[..., ::2]


def cases(centered: bool) -> tuple[Case, ...]:
    """Every case of one of the two."""
    single = torch.float32
    found = [
        _case("rows of 19", (3, 5, 19), single, centered, is_detected=True),
        # Of one or two elements LayerNorm's dx is a difference of equal terms, all rounding.
        _case(
            "rows of 5" if centered else "rows of 1", (3, 5, 5 if centered else 1), single, centered
        ),
        _case("one row", (1, 64), single, centered),
        _case("33 rows of 257", (33, 257), single, centered),
        _case("gradient of a sum", (3, 5, 24), single, centered, edit=_expanded),
        _case("gradient with stride 2", (3, 5, 24), single, centered, edit=_every_second),
    ]
    for dtype in (torch.float16, torch.bfloat16):
        name = f"rows of 96, {label(dtype)}, weight float32"
        found.append(_case(name, (2, 5, 96), dtype, centered, grad_dtype=single))
    for dtype in (torch.float32, torch.bfloat16):
        name = f"129 rows of 1023, {label(dtype)}"
        found.append(_case(name, (129, 1023), dtype, centered, grad_dtype=single, level=1))
    found.append(long(_case("long, rows of 4096", (4096, 4096), torch.bfloat16, centered)))
    return tuple(found)


def _invoke(
    function: Callable[..., Any], given: Tensors, options: Mapping[str, Any], out: Any
) -> dict[str, torch.Tensor]:
    keywords: dict[str, Any] = {n: given[n] for n in ("mean", "inverse") if n in given}
    if out is not None:
        keywords["out"] = out
    returned = function(given["dy"], given["x"], given["weight"], **keywords)
    count = len(returned) if isinstance(returned, tuple | list) else 1
    return named_results(returned, _names(count == 3))


def _declare(centered: bool) -> Callable[..., dict[str, Any]]:
    def declare(
        graph: Any, tensors: Mapping[str, Any], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        first = [tensors[name] for name in ("dy", "x", "weight")]
        if centered:
            outputs = graph.layernorm_backward(*first, tensors["mean"], tensors["inverse"])
        else:
            outputs = graph.rmsnorm_backward(*first, tensors["inverse"], False)
        found = dict(zip(_names(True), outputs, strict=True))
        for name in ("dweight", "dbias"):
            if found[name] is not None:
                found[name].set_data_type(tensors["weight"].data_type)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    return declare


def _for_graph(given: Tensors) -> dict[str, torch.Tensor]:
    """The weight with the input's rank."""
    rank = given["x"].dim()
    return {**given, "weight": given["weight"].reshape(*[1] * (rank - 1), -1)}


RMS_NORM_BACKWARD = Family(
    "rms_norm_backward",
    _RMS_SIGNATURE,
    cases(False),
    _invoke,
    lambda given, options: set(),
    _declare(False),
    _for_graph,
    saved=("inverse",),
)
LAYER_NORM_BACKWARD = Family(
    "layer_norm_backward",
    _LAYER_SIGNATURE,
    cases(True),
    _invoke,
    lambda given, options: set(),
    _declare(True),
    _for_graph,
    saved=("mean", "inverse"),
)
