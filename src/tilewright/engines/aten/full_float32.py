"""Convolutions of float32 operands in float32, where PyTorch's settings would have TF32.

PyTorch lets cuDNN round float32 operands of convolutions to TF32 (10 bits of fraction) unless it
is told otherwise, by a setting of the process. What a graph computes is declared, and is no matter
of such a setting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

Given = TypeVar("Given")
Made = TypeVar("Made")

# One that changes the setting at a time: each puts back what it found.
_CHANGING = threading.RLock()


def in_full_float32(function: Callable[[Given], Made], given: Given) -> Made:
    """``function(given)``, with TF32 off in convolutions while it runs.

    Convolutions that other threads start meanwhile are in float32 too.
    """
    of_convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    with _CHANGING:
        found = of_convolutions.fp32_precision
        if found == "tf32":
            of_convolutions.fp32_precision = "ieee"
            try:
                return function(given)
            finally:
                of_convolutions.fp32_precision = found
    # Nothing to change, and so nobody to wait for.
    return function(given)
