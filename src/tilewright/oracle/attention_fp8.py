"""References of the kinds sdpa_fp8 and sdpa_fp8_backward: one scale a tensor.

A descale multiplies what is read, a scale multiplies what is then rounded to 8 bits:

    S = attn_scale * (descale_q Q) (descale_k K)^T         P = softmax of it, with dropout
    P8 = round(P * scale_s) to V's type                    Amax_S = max |P|
    O = (P8 descale_s) (descale_v V)                       Amax_O = max |O|, stored O * scale_o

    dV = (P8 descale_s)^T (descale_dO dO)                  D = rowsum(dO O) descale_dO descale_o
    dS = attn_scale * P * (Z * (descale_dO dO) (descale_v V)^T - D)
    dS8 = round(dS * scale_dP) to dO's type                amax_dP = max |dS|
    dQ = (dS8 descale_dP) (descale_k K), dK = (dS8 descale_dP)^T (descale_q Q)

with the maxima before the stored gradients' scales scale_dQ, scale_dK and scale_dV.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.oracle import attention
from tilewright.oracle.attention_operands import kv_sources, options_of, scalar
from tilewright.oracle.attention_operations import draws
from tilewright.oracle.attention_problem import HeadSource, SeededDropout
from tilewright.oracle.formats import format_of, round_to, to_float64
from tilewright.oracle.registry import reference

__all__ = ["Rounding", "largest", "scaled"]

Inputs = Mapping[str, torch.Tensor]


class Rounding:
    """Multiply by a scale, round to a type, multiply by a descale; remembers the largest |value|.

    A type without a format of at most 8 bits (test data in a wide type) is not rounded.
    """

    def __init__(self, data_type: Any, scale: float, descale: float) -> None:
        found = format_of(data_type)
        self.format = found if found is not None and found.bits <= 8 else None
        self.scale, self.descale = scale, descale
        self.amax = 0.0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        self.amax = max(self.amax, float(values.abs().max()) if values.numel() else 0.0)
        scaled_values = values * self.scale
        if self.format is not None:
            scaled_values = round_to(scaled_values, self.format)
        return scaled_values * self.descale


def scaled(source: torch.Tensor | HeadSource, factor: float) -> HeadSource:
    """The same heads times a factor."""
    heads = HeadSource.of(source)
    read: Callable[[int, int], torch.Tensor] = heads.read
    return HeadSource(heads.dim, heads.device, lambda b, h: read(b, h) * factor)


def largest(values: torch.Tensor) -> torch.Tensor:
    """max |values| as (1, 1, 1, 1)."""
    top = values.abs().max() if values.numel() else values.new_zeros(())
    return top.reshape(1, 1, 1, 1)


@reference("sdpa_fp8")
def _sdpa_fp8(operation: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    options = options_of(operation, inputs)
    k, v = kv_sources(operation, inputs, options)
    rounding = Rounding(
        operation.inputs["v"].data_type, scalar(inputs, "scale_s"), scalar(inputs, "descale_s")
    )
    result = attention.forward(
        scaled(inputs["q"], scalar(inputs, "descale_q")),
        scaled(k, scalar(inputs, "descale_k")),
        scaled(v, scalar(inputs, "descale_v")),
        weights_map=rounding,
        **options,
    )
    stats = result.stats
    if getattr(operation, "stats_use_log2", False):
        stats = stats / math.log(2.0)
    outputs = {
        "O": result.output * scalar(inputs, "scale_o"),
        "Stats": stats,
        "score_max": result.row_max,
        "score_sum_exp": result.sum_exp,
        "Amax_S": result.output.new_full((1, 1, 1, 1), rounding.amax),
        "Amax_O": largest(result.output),
    }
    if "rng_dump" in operation.outputs and isinstance(options["dropout"], SeededDropout):
        outputs["rng_dump"] = draws(inputs["q"], k, options["dropout"])
    return outputs


@reference("sdpa_fp8_backward")
def _sdpa_fp8_backward(operation: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    types = {port: record.data_type for port, record in operation.inputs.items()}
    rounded_p = Rounding(types["v"], scalar(inputs, "scale_s"), scalar(inputs, "descale_s"))
    rounded_ds = Rounding(types["dO"], scalar(inputs, "scale_dP"), scalar(inputs, "descale_dP"))
    found = attention.backward(
        scaled(inputs["q"], scalar(inputs, "descale_q")),
        scaled(inputs["k"], scalar(inputs, "descale_k")),
        scaled(inputs["v"], scalar(inputs, "descale_v")),
        scaled(inputs["dO"], scalar(inputs, "descale_dO")),
        output=scaled(inputs["o"], scalar(inputs, "descale_o")),
        stats=to_float64(inputs["stats"]),
        weights_map=rounded_p,
        d_scores_map=rounded_ds,
        **options_of(operation, inputs),
    )
    outputs = {"amax_dP": found.d_q.new_full((1, 1, 1, 1), rounded_ds.amax)}
    for name, gradient in (("dQ", found.d_q), ("dK", found.d_k), ("dV", found.d_v)):
        outputs[name] = gradient * scalar(inputs, f"scale_{name}")
        outputs[f"amax_{name}"] = largest(gradient)
    if found.d_sink is not None:
        outputs["dSink_token"] = found.d_sink
    return outputs
