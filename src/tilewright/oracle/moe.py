"""Grouped matrix products of a mixture of experts.

Rows offsets[e] .. offsets[e + 1] - 1 belong to expert e (the last group ends with the rows if there
are only E offsets). Rows in no group are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["forward", "group_bounds", "weight_gradient"]


def group_bounds(
    first_token_offset: torch.Tensor, experts: int, rows: int
) -> list[tuple[int, int]]:
    """First and one-past-last row of each expert's group, within 0 .. rows."""
    starts = [int(entry) for entry in first_token_offset.reshape(-1).tolist()]
    starts = starts[: experts + 1] if len(starts) > experts else [*starts, rows]
    clipped = [max(0, min(entry, rows)) for entry in starts]
    return [(clipped[e], max(clipped[e], clipped[e + 1])) for e in range(experts)]


def forward(
    token: torch.Tensor,
    weight: torch.Tensor,
    first_token_offset: torch.Tensor,
    *,
    token_index: torch.Tensor | None = None,
    mode: str = "NONE",
    out_rows: int | None = None,
) -> torch.Tensor:
    """(1, rows, N) in float64 of token (1, T, K) and weight (E, K, N).

    Args:
        mode: NONE: group row i is token row i and output row i. GATHER: group row i reads token
            row token_index[i]; the output has as many rows as token_index. SCATTER: group row i is
            written to output row token_index[i].
        out_rows: Rows of the output, where the mode does not tell (default T).
    """
    tokens, weights = to_float64(token)[0], to_float64(weight)
    experts = weights.shape[0]
    index = token_index.reshape(-1).to(torch.int64) if token_index is not None else None
    if mode != "NONE" and index is None:
        raise ValueError(f"token_index: mode {mode} needs one")
    rows = tokens.shape[0]
    if mode == "GATHER" and index is not None:
        rows = index.shape[0]
    out = tokens.new_zeros((out_rows if out_rows is not None else rows, weights.shape[2]))
    for expert, (start, end) in enumerate(group_bounds(first_token_offset, experts, rows)):
        if start == end:
            continue
        if mode == "GATHER" and index is not None:
            source = tokens[index[start:end]]
        else:
            source = tokens[start:end]
        product = torch.matmul(source, weights[expert])
        if mode == "SCATTER" and index is not None:
            out[index[start:end]] = product
        else:
            out[start:end] = product
    return out.unsqueeze(0)


def weight_gradient(
    doutput: torch.Tensor, token: torch.Tensor, first_token_offset: torch.Tensor, *, experts: int
) -> torch.Tensor:
    """dweight (E, K, N): token rows transposed times doutput rows of each group."""
    tokens, gradient = to_float64(token)[0], to_float64(doutput)[0]
    out = tokens.new_zeros((experts, tokens.shape[1], gradient.shape[1]))
    for expert, (start, end) in enumerate(
        group_bounds(first_token_offset, experts, tokens.shape[0])
    ):
        out[expert] = torch.matmul(tokens[start:end].transpose(0, 1), gradient[start:end])
    return out


@reference("moe_grouped_matmul")
def _moe(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    (port, record) = next(iter(operation.outputs.items()))
    mode = operation.mode.name
    if mode not in ("NONE", "GATHER", "SCATTER"):
        raise NotSupportedError(f"moe_grouped_matmul: mode {mode} has no reference")
    product = forward(
        inputs["token"],
        inputs["weight"],
        inputs["first_token_offset"],
        token_index=inputs.get("token_index"),
        mode=mode,
        out_rows=int(record.dim[1]),
    )
    return {port: product}


@reference("moe_grouped_matmul_bwd")
def _moe_backward(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    experts = int(operation.outputs["dweight"].dim[0])
    gradient = weight_gradient(
        inputs["doutput"], inputs["token"], inputs["first_token_offset"], experts=experts
    )
    return {"dweight": gradient}
