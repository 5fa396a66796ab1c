"""References of the kinds sdpa and sdpa_backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.oracle import attention
from tilewright.oracle.attention_operands import kv_sources, options_of
from tilewright.oracle.attention_problem import (
    AttentionOptions,
    HeadSource,
    Problem,
    SeededDropout,
)
from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["draws"]

Inputs = Mapping[str, torch.Tensor]


def draws(
    q: torch.Tensor | HeadSource, k: torch.Tensor | HeadSource, dropout: SeededDropout
) -> torch.Tensor:
    """What rng_dump holds (B, Hq, Sq, Skv): 1 where a probability is kept, 0 where it is not."""
    problem = Problem(q, k, k, AttentionOptions(scale=1.0))
    shape = (problem.batch, problem.heads, problem.rows, problem.columns)
    kept = torch.zeros(shape, dtype=torch.float64, device=problem.device)
    for block in problem.blocks():
        at = (block.batch, block.head, slice(block.start, block.end))
        kept[at] = problem.dropout_keep(block, dropout).to(torch.float64)
    return kept


@reference("sdpa")
def _sdpa(operation: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    options = options_of(operation, inputs)
    k, v = kv_sources(operation, inputs, options)
    result = attention.forward(inputs["q"], k, v, **options)
    stats = result.stats
    if getattr(operation, "stats_use_log2", False):
        stats = stats / math.log(2.0)
    outputs = {
        "O": result.output,
        "Stats": stats,
        "score_max": result.row_max,
        "score_sum_exp": result.sum_exp,
    }
    if "rng_dump" in operation.outputs and isinstance(options["dropout"], SeededDropout):
        outputs["rng_dump"] = draws(inputs["q"], k, options["dropout"])
    return outputs


@reference("sdpa_backward")
def _sdpa_backward(operation: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    options = options_of(operation, inputs)
    stats = to_float64(inputs["stats"])
    if getattr(operation, "stats_use_log2", False):
        stats = stats * math.log(2.0)
    gradients = attention.backward(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        inputs["dO"],
        output=inputs["o"],
        stats=stats,
        **options,
    )
    outputs = {"dQ": gradients.d_q, "dK": gradients.d_k, "dV": gradients.d_v}
    if gradients.d_bias is not None:
        outputs["dBias"] = gradients.d_bias
    if gradients.d_sink is not None:
        outputs["dSink_token"] = gradients.d_sink
    if "rng_dump" in operation.outputs and isinstance(options["dropout"], SeededDropout):
        outputs["rng_dump"] = draws(inputs["q"], inputs["k"], options["dropout"])
    return outputs
