"""Device times of calls: interleaved rounds with a cold L2, medians; host time does not count."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
# Clock cycles, about 0.3 ms: longer than any call takes on the host.
_AHEAD = 500_000


def device_ms(calls: dict[str, Call], rounds: int = 30) -> dict[str, float]:
    """Median device milliseconds of each call; every cache line is displaced before each."""
    clear = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            clear.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The device is busy until the call and both events are queued.
            torch.cuda._sleep(_AHEAD)
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in samples.items()}
