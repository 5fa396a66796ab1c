"""Operations that move elements and compute nothing: reshape, slice, transpose, concatenate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.oracle.formats import format_of, to_float64
from tilewright.oracle.registry import reference

__all__: list[str] = []


@reference("reshape")
def _reshape(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Row-major order of the declared axes; a VIEW_ONLY reshape has strides that say the same.
    return {"out": inputs["input"].reshape(tuple(operation.outputs["out"].dim))}


@reference("slice")
def _slice(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = inputs["input"]
    for axis, part in enumerate(operation.slices):
        cut = part if isinstance(part, slice) else slice(*part)
        places = torch.tensor(range(found.shape[axis])[cut], dtype=torch.long, device=found.device)
        found = found.index_select(axis, places)
    return {"out": found}


@reference("transpose")
def _transpose(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"out": inputs["input"].permute(tuple(operation.permutation))}


@reference("concatenate")
def _concatenate(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    parts = [inputs[f"input_{position}"] for position in range(len(operation.inputs))]
    # A virtual operand has float64 values beside buffers of the declared type.
    if any(format_of(part.dtype) is not None for part in parts):
        parts = [to_float64(part) for part in parts]
    return {"out": torch.cat(parts, dim=operation.axis)}
