"""Operands and masks of attention in eight bits."""

from __future__ import annotations

import torch

import tilewright

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def draw(seed: int, *shapes: tuple[int, ...]) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def one(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1, 1), value)


MASKS = {
    "none": ({}, {}),
    "causal": ({"use_causal_mask": True}, {"right": 0}),
    "window": (
        {"right_bound": 0, "left_bound": 5, "diagonal_alignment": "BOTTOM_RIGHT"},
        {"right": 0, "left": 5, "bottom_right": True},
    ),
}


def masks(name: str):
    options, rule = MASKS[name]
    if "diagonal_alignment" in options:
        options = {**options, "diagonal_alignment": tilewright.diagonal_alignment.BOTTOM_RIGHT}
    return dict(options), rule
