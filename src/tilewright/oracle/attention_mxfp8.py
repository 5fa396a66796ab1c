"""References of the kinds sdpa_mxfp8 and sdpa_mxfp8_backward: one power-of-two scale a block of 32.

Every product reads the quantization whose blocks lie along the axis that it sums over. Forward: Q
and K in blocks along the head size, V along the keys. Backward: S from q and k, dP from dO and v,
all along the head size; dV = P^T dO_T, dK = dS^T q_T, dQ = dS k_T along the sequence; D =
rowsum(dO_f16 * o_f16). P and dS are not rounded: that an engine rounds them to 8 bits on the way is
an error of the engine, which its tolerance has to cover.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.oracle import attention
from tilewright.oracle.attention_fp8 import largest
from tilewright.oracle.attention_operands import kv_sources, options_of
from tilewright.oracle.attention_problem import AttentionOptions, HeadSource, Problem
from tilewright.oracle.block_scale import dequantize
from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["MX_BLOCK", "along_depth", "along_sequence"]

MX_BLOCK = 32

Inputs = Mapping[str, torch.Tensor]


def along_depth(inputs: Inputs, port: str) -> torch.Tensor:
    """The values (B, H, S, D) of a port whose blocks lie along the head size."""
    return dequantize(inputs[port], inputs[f"descale_{port}"], (1, 1, 1, MX_BLOCK))


def along_sequence(inputs: Inputs, port: str) -> torch.Tensor:
    """The values (B, H, S, D) of a port whose blocks lie along the sequence."""
    return dequantize(inputs[port], inputs[f"descale_{port}"], (1, 1, MX_BLOCK, 1))


@reference("sdpa_mxfp8")
def _sdpa_mxfp8(operation: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    values = dict(inputs)
    values["k"], values["v"] = along_depth(inputs, "k"), along_sequence(inputs, "v")
    options = options_of(operation, inputs)
    k, v = kv_sources(operation, values, options)
    result = attention.forward(along_depth(inputs, "q"), k, v, **options)
    stats = result.stats
    if getattr(operation, "stats_use_log2", False):
        stats = stats / math.log(2.0)
    return {"O": result.output, "Stats": stats, "Amax_O": largest(result.output)}


@reference("sdpa_mxfp8_backward")
def _sdpa_mxfp8_backward(operation: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    problem = Problem(
        along_depth(inputs, "q"),
        along_depth(inputs, "k"),
        along_depth(inputs, "v"),
        AttentionOptions(**options_of(operation, inputs)),
    )
    products = attention.Products(
        d_k_query=HeadSource.of(along_sequence(inputs, "q_T")),
        d_q_key=HeadSource.of(along_sequence(inputs, "k_T")),
        d_p_gradient=HeadSource.of(along_depth(inputs, "dO")),
        d_v_gradient=HeadSource.of(along_sequence(inputs, "dO_T")),
        dot_gradient=HeadSource.of(inputs["dO_f16"]),
        output=HeadSource.of(inputs["o_f16"]),
        stats=to_float64(inputs["stats"]),
    )
    found = attention.gradients(problem, products)
    outputs: dict[str, torch.Tensor] = {}
    for name, gradient in (("dQ", found.d_q), ("dK", found.d_k), ("dV", found.d_v)):
        outputs[name] = gradient
        outputs[f"amax_{name}"] = largest(gradient)
    if found.d_sink is not None:
        outputs["dSink_token"] = found.d_sink
    return outputs
