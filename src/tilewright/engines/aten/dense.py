"""Registration of operations that take dense tensors only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.engines.aten.registry import Kernel, Preparer, implements
from tilewright.errors import NotSupportedError


def implements_dense(*kinds: str) -> Callable[[Preparer], Preparer]:
    """``implements`` for ``kinds`` that decline a ragged tensor on any port."""

    def register(preparer: Preparer) -> Preparer:
        @functools.wraps(preparer)
        def checked(operation: Any, device: torch.device) -> Kernel:
            for port, tensor in (*operation.inputs.items(), *operation.outputs.items()):
                if tensor.ragged_offset is not None:
                    raise NotSupportedError(
                        f"tensor {tensor.label()} ({port}) of {operation.kind} is ragged; the "
                        "ATen engine takes ragged tensors in attention only"
                    )
            return preparer(operation, device)

        return implements(*kinds)(checked)

    return register
