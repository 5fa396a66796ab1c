"""Scaled dot product attention, forward and backward: which way each call is computed.

ATen's fused function where it means the same (``attention_fused``; ``attention_fused_padded`` for
lengths), else a composition of matrix products a row block at a time (``attention_compose``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.engines.aten.attention_compose import compose_backward, compose_forward
from tilewright.engines.aten.attention_fused import fused_backward, fused_forward
from tilewright.engines.aten.attention_fused_padded import padded_backward, padded_forward
from tilewright.engines.aten.attention_spec import read_spec
from tilewright.engines.aten.registry import Kernel, implements

Operands = Mapping[str, torch.Tensor]


@implements("sdpa")
def prepare_sdpa(operation: Any, device: torch.device) -> Kernel:
    """Attention forward; see ``AttentionSpec`` for what may be declared."""
    spec = read_spec(operation)
    composed = compose_forward(operation, spec, device, device.type == "cpu")
    padded = padded_forward(operation, spec, device)
    return _first_that_serves(padded or fused_forward(operation, spec, device), composed)


@implements("sdpa_backward")
def prepare_sdpa_backward(operation: Any, device: torch.device) -> Kernel:
    """Attention backward, deterministic."""
    spec = read_spec(operation)
    composed = compose_backward(operation, spec, device, device.type == "cpu")
    padded = padded_backward(operation, spec, device)
    return _first_that_serves(padded or fused_backward(operation, spec, device), composed)


def _first_that_serves(
    attempt: Callable[[Operands, Operands], bool] | None, composed: Kernel
) -> Kernel:
    if attempt is None:
        return composed

    def run(inputs: Operands, outputs: Operands) -> None:
        if not attempt(inputs, outputs):
            composed(inputs, outputs)

    return run
