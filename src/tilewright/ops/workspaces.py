"""The workspaces of the functions' calls.

On a CPU a call is over when it returns, so the next one of its thread can have the same memory. A
new allocation each time would cost more than the work: the allocator gives large blocks back to the
system, which hands their pages out again one fault at a time.
"""

from __future__ import annotations

import threading

import torch

from tilewright.planning.built import BuiltPlan

# What a thread keeps at most.
KEPT_BYTES = 1 << 24


class _Kept(threading.local):
    buffer: torch.Tensor | None = None


_kept = _Kept()


def take_workspace(built: BuiltPlan) -> torch.Tensor | None:
    """A workspace for one call, or None if the plan needs none.

    On a device it is allocated on the stream that is current.
    """
    size = built.workspace_bytes
    if not size:
        return None
    if built.device.type == "cpu":
        buffer = _kept.buffer
        if buffer is not None and buffer.numel() >= size:
            # Taken away for the call: one within it gets another.
            _kept.buffer = None
            return buffer
    return torch.empty(size, dtype=torch.uint8, device=built.device)


def keep_workspace(workspace: torch.Tensor | None) -> None:
    """Keep the workspace of a call that is over, for the next one of this thread."""
    if workspace is None or workspace.device.type != "cpu" or workspace.numel() > KEPT_BYTES:
        return
    _kept.buffer = workspace
