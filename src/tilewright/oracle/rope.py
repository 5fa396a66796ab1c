"""Rotary position embedding with half-split pairs, and its adjoint.

With h = R / 2 and the angles f of a position, for i < h:
out[i] = s * (x[i] cos f[i] - x[i + h] sin f[i]) and
out[i + h] = s * (x[i + h] cos f[i + h] + x[i] sin f[i + h]); past R, out = s * x.

Source: Su et al. 2021 (arXiv:2104.09864), in the half-split order of GPT-NeoX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.oracle.formats import to_float64
from tilewright.oracle.registry import reference

__all__ = ["backward", "forward"]


def _angles(freqs: torch.Tensor, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine (..., R) of the float32 angles, in float64."""
    angles = to_float64(to_float64(freqs).to(torch.float32))
    if angles.shape[-1] * 2 == rotary:
        angles = torch.cat((angles, angles), dim=-1)
    if angles.shape[-1] < rotary:
        raise ValueError(f"freqs: {angles.shape[-1]} angles for a rotary dim of {rotary}")
    angles = angles[..., :rotary]
    return torch.cos(angles), torch.sin(angles)


def forward(
    x: torch.Tensor, freqs: torch.Tensor, *, output_scale: float = 1.0, rope_dim: int = 0
) -> torch.Tensor:
    """Rotate x (B, H, S, D); float64.

    Args:
        freqs: Angles in radians, (B or 1, 1, S, R) or (.., R / 2), rounded to float32 first.
        output_scale: Factor on everything, the unrotated tail included.
        rope_dim: R, even; 0 stands for D.
    """
    values = to_float64(x)
    rotary = rope_dim or values.shape[-1]
    half = rotary // 2
    cos, sin = _angles(freqs, rotary)
    first, second = values[..., :half], values[..., half:rotary]
    parts = (
        first * cos[..., :half] - second * sin[..., :half],
        second * cos[..., half:] + first * sin[..., half:],
        values[..., rotary:],
    )
    return torch.cat(parts, dim=-1) * output_scale


def backward(
    dy: torch.Tensor, freqs: torch.Tensor, *, output_scale: float = 1.0, rope_dim: int = 0
) -> torch.Tensor:
    """The adjoint of `forward`: dx of dy, both (B, H, S, D)."""
    values = to_float64(dy)
    rotary = rope_dim or values.shape[-1]
    half = rotary // 2
    cos, sin = _angles(freqs, rotary)
    first, second = values[..., :half], values[..., half:rotary]
    parts = (
        first * cos[..., :half] + second * sin[..., half:],
        second * cos[..., half:] - first * sin[..., :half],
        values[..., rotary:],
    )
    return torch.cat(parts, dim=-1) * output_scale


def _attributes(operation: Any) -> dict[str, Any]:
    scale = getattr(operation, "output_scale", None)
    return {
        "output_scale": 1.0 if scale is None else float(scale),
        "rope_dim": int(getattr(operation, "rope_dim", 0) or 0),
    }


@reference("rope")
def _rope(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"out": forward(inputs["input"], inputs["freqs"], **_attributes(operation))}


@reference("rope_backward")
def _rope_backward(operation: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    gradient = inputs["dY"] if "dY" in inputs else inputs["input"]
    return {"out": backward(gradient, inputs["freqs"], **_attributes(operation))}
