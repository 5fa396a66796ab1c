"""Operations that move elements and compute nothing: reshape, slice, transpose, concatenate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilewright.oracle.registry import reference

__all__ = ["view_storage"]


def view_storage(
    values: torch.Tensor,
    stride: Sequence[int],
    new_dim: Sequence[int],
    new_stride: Sequence[int],
) -> torch.Tensor:
    """What a view with another dim and stride reads from the same storage.

    Args:
        values: Logical values of the tensor that was stored with `stride` (elements).
        new_dim, new_stride: Of the view, which starts at the same element.

    Elements that the source does not cover (gaps) read as 0.
    """
    if values.numel() == 0:
        return values.reshape(tuple(new_dim))
    span = 1 + sum((n - 1) * s for n, s in zip(values.shape, stride, strict=True))
    view = 1 + sum((n - 1) * s for n, s in zip(new_dim, new_stride, strict=True))
    storage = values.new_zeros(max(span, view))
    torch.as_strided(storage, tuple(values.shape), tuple(stride)).copy_(values)
    return torch.as_strided(storage, tuple(new_dim), tuple(new_stride)).clone()


@reference("reshape")
def _reshape(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    source, record = inputs["input"], operation.inputs["input"]
    out = operation.outputs["out"]
    mode = getattr(operation, "reshape_mode", None)
    if getattr(mode, "name", "LOGICAL") == "VIEW_ONLY":
        return {"out": view_storage(source, record.stride, out.dim, out.stride)}
    return {"out": source.reshape(tuple(out.dim))}


@reference("slice")
def _slice(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    index = tuple(part if isinstance(part, slice) else slice(*part) for part in operation.slices)
    return {"out": inputs["input"][index]}


@reference("transpose")
def _transpose(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"out": inputs["input"].permute(tuple(operation.permutation))}


@reference("concatenate")
def _concatenate(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ports = sorted(
        (port for port in inputs if port.startswith("input_") and port[6:].isdecimal()),
        key=lambda port: int(port[6:]),
    )
    return {"out": torch.cat([inputs[port] for port in ports], dim=operation.axis)}
