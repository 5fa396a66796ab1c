"""Is the device context alive? Asked after every test, since a passing test can end it too.

A kernel's fault is reported by whatever call comes next, so without the question the next test
would be blamed. It is asked only of contexts that exist: nothing here makes one.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class Health(enum.Enum):
    """What a probe found."""

    ALIVE = "alive"
    # One call failed, the next did not: an error that nobody had asked for.
    LEFT_ERROR = "left an error"
    DEAD = "dead"


@dataclass(frozen=True)
class Finding:
    """The state of all contexts of this process, and what tells it."""

    health: Health
    message: str = ""


class Probe(Protocol):
    """A way to ask about the contexts that one library holds."""

    def look(self) -> Finding:
        """Wait for the device and tell its state. Must not make a context."""
        ...


class TorchProbe:
    """Waits for every device on which torch has a context."""

    def look(self) -> Finding:
        """Synchronize; on an error, once more, which tells a dead context from a live one."""
        torch = sys.modules.get("torch")
        if torch is None or not _is_initialized(torch):
            return Finding(Health.ALIVE)
        for device in _devices_in_use(torch):
            error = _synchronize(torch, device)
            if error is None:
                continue
            again = _synchronize(torch, device)
            first_line = str(error).partition("\n")[0]
            if again is None:
                return Finding(
                    Health.LEFT_ERROR,
                    f"the test left an error on CUDA device {device} that it did not look at: "
                    f"{first_line}",
                )
            return Finding(
                Health.DEAD, f"the context of CUDA device {device} is dead: {first_line}"
            )
        return Finding(Health.ALIVE)


PROBES: tuple[Probe, ...] = (TorchProbe(),)


def look() -> Finding:
    """Ask every probe; the first bad finding counts."""
    for probe in PROBES:
        finding = probe.look()
        if finding.health is not Health.ALIVE:
            return finding
    return Finding(Health.ALIVE)


def _is_initialized(torch: Any) -> bool:
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())


def _devices_in_use(torch: Any) -> Iterator[int]:
    has_context = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None)
    for device in range(torch.cuda.device_count()):
        if has_context is None or has_context(device):
            yield device


def _synchronize(torch: Any, device: int) -> Exception | None:
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        return error
    return None
