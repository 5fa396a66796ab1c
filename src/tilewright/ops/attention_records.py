"""What one attention call is: its options, its operands, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AttentionOptions:
    """Everything of a call that is no operand. Hashable: it is part of the plan's key.

    ``scale`` is None, for D ** -0.5, only where a trace must not make a number of D. ``max_q`` and
    ``max_kv`` bound the sequence lengths of packed and paged operands; None for dense ones.
    """

    scale: float | None = None
    causal: bool = False
    align: str = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    alibi: bool = False
    soft_cap: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    max_q: int | None = None
    max_kv: int | None = None
    stats_token_major: bool = False


@dataclass(frozen=True)
class Call:
    """One attention call: options, operands by name, and where to run."""

    options: AttentionOptions
    operands: Mapping[str, torch.Tensor]
    engine: str | None
    stream: Any

    @property
    def device(self) -> torch.device:
        """The device of q."""
        return self.operands["q"].device

    @property
    def is_packed(self) -> bool:
        """True for operands of one sequence after another, with prefix sums."""
        return "cu_q" in self.operands
