"""The program of `another_process`: it multiplies matrices while it is told to, and then waits.

It reads "busy" and "idle" from its standard input, a line each, and says the same when it is so. It
ends when that input ends, when its parent is gone, and when a busy spell lasts for minutes: nobody
is there to end it then.
"""

from __future__ import annotations

import collections
import os
import queue
import sys
import threading
import time
from typing import Any, NoReturn, Protocol

# A parent that hangs does not keep the device busy for ever.
_SPELL_S = 300.0
_LOOK_S = 0.2
_EXTENT = {"cpu": 256, "cuda": 4096}
# Products that are handed over together, and how many such bursts are under way: the device is
# never without work, and stops soon.
_BURST, _BURSTS = 8, 3


class Work(Protocol):
    """What keeps a device busy."""

    def more(self) -> None:
        """Hand over some more, and wait if much is under way."""
        ...

    def finish(self) -> None:
        """Wait for all of it."""
        ...


class OnCpu:
    """Products of elements by numpy, which is quick to import and takes one thread for them."""

    def __init__(self) -> None:
        import numpy

        self._a = numpy.ones((_EXTENT["cpu"],) * 2, numpy.float32)

    def more(self) -> None:
        """One product."""
        self._out = self._a * self._a

    def finish(self) -> None:
        """Nothing is under way."""


class OnCuda:
    """Products by torch, in half precision, handed over ahead of the device."""

    def __init__(self, device: str) -> None:
        import torch

        self._device = torch.device(device)
        # Numbers that show where they should not be.
        self._a = torch.randn((_EXTENT["cuda"],) * 2, device=device).half()
        self._out = torch.empty_like(self._a)
        self._under_way: collections.deque[Any] = collections.deque()

    def more(self) -> None:
        """A burst of products."""
        import torch

        for _ in range(_BURST):
            torch.matmul(self._a, self._a, out=self._out)
        # One that sleeps while it waits leaves the processor to the calls that are examined.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._under_way.append(event)
        if len(self._under_way) >= _BURSTS:
            self._under_way.popleft().synchronize()

    def finish(self) -> None:
        """Wait for every burst."""
        while self._under_way:
            self._under_way.popleft().synchronize()


def identity(device: str) -> str:
    """What tells the device from others in any process, if anything does; else nothing."""
    if not device.startswith("cuda"):
        return ""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def main(device: str) -> NoReturn:
    """Obey until there is nobody to obey."""
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_look_after_parent, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_hear, args=(told,), daemon=True).start()
    work: Work = OnCuda(device) if device.startswith("cuda") else OnCpu()
    _say(f"ready {identity(device)}".strip())
    while True:
        told.get()
        end = time.monotonic() + _SPELL_S
        work.more()
        work.finish()
        _say("busy")
        while told.empty():
            work.more()
            if time.monotonic() > end:
                sys.exit(f"busy for {_SPELL_S:g} s: nobody said that it is enough")
        told.get()
        work.finish()
        _say("idle")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:
        os._exit(0)


def _hear(told: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        told.put(line.strip())
    # Not by an exception in the other thread, which may be in a call to the driver.
    os._exit(0)


def _look_after_parent(parent: int) -> None:
    """End when the parent has: others that it started may hold this one's input open."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
