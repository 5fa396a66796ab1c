"""Child interpreters on a GPU: the parent decides whether there is one, the child only fails."""

from __future__ import annotations

import os
from collections.abc import Collection

import pytest

from tilewright.testing import placement

# What a child prints when it has come to the end of its code; a child that leaves before, with
# whatever status, has shown nothing.
_END = "tilewright: the child came to its end"


def require_gpu(capabilities: Collection[tuple[int, int]] | None = None) -> None:
    """Skip the test unless this run may use a GPU of one of these compute capabilities, if given.

    The device's capability is asked of the driver, which makes no context.
    """
    if not placement.devices(os.environ):
        pytest.skip("needs 1 GPU, this run may use 0")
    if capabilities is None:
        return
    found = device_capability()
    if found not in capabilities:
        wanted = ", ".join(_name(capability) for capability in sorted(capabilities))
        pytest.skip(f"needs a GPU of compute capability {wanted}, this one has {_name(found)}")


def device_capability() -> tuple[int, int]:
    """The compute capability of the first device."""
    import torch

    return torch.cuda.get_device_capability(0)


def to_its_end(code: str) -> str:
    """The code, followed by a line that says that it ended."""
    return f"{code.rstrip()}\n\nprint({_END!r})\n"


def without_end(printed: str) -> str:
    """What the child printed beside that line.

    Fails the test if the line is not there: the child left early, as one does that skips itself.
    """
    text, end, rest = printed.rpartition(_END + "\n")
    if not end:
        pytest.fail(
            "the child interpreter exited with status 0 before the end of its code\n"
            f"--- stdout\n{printed}",
            pytrace=False,
        )
    return text + rest


def _name(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
