"""Times of calls, medians of interleaved rounds: on the device with a cold L2, and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
# Of the multiprocessors' clock, a little more than it makes.
_CYCLES_A_MICROSECOND = 2000


def device_ms(calls: dict[str, Call], rounds: int = 30, host_us: float = 280.0) -> dict[str, float]:
    """Median device milliseconds of each call; every cache line is displaced before each.

    ``host_us`` is an upper bound on the time that any of the calls takes on the host: the device is
    kept busy for so long before a call, so that what is timed does not wait for the host.
    """
    cycles = int(host_us * _CYCLES_A_MICROSECOND)
    clear = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            clear.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The device is busy until the call and both events are queued.
            torch.cuda._sleep(cycles)
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in samples.items()}


def host_us(calls: dict[str, Call], count: int, rounds: int) -> dict[str, float]:
    """Median host microseconds of each call: ``count`` of them a round, rounds interleaved."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - start) / count * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in samples.items()}
