"""Autotuning: time every open plan on the caller's buffers and select the fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewright.planning.selection import PlanSelection

_WARM_UP_CALLS = 2
_TIMED_CALLS = 7


def autotune(
    graph: PlanSelection, variant_pack: Mapping[Any, Any], workspace: Any
) -> dict[str, Any]:
    """See ``Graph.autotune``. Waits for the device: this is tuning, not execution."""
    import torch

    frames = {}
    # All are bound before any runs: what does not suit one plan is refused before a write.
    graph._require_plans()
    for index in graph._build_open():
        frames[index] = graph._built[index].bind(variant_pack, workspace, graph.handle)
    if not frames:
        graph.build_plans()  # Which tells why there is none.
    timings: list[tuple[float, int]] = []
    for index, frame in frames.items():
        is_cuda = graph._built[index].device.type == "cuda"
        samples = []
        for call in range(_WARM_UP_CALLS + _TIMED_CALLS):
            start = time.perf_counter()
            frame.launch()
            if is_cuda:
                torch.cuda.synchronize()
            if call >= _WARM_UP_CALLS:
                samples.append((time.perf_counter() - start) * 1e6)
        timings.append((statistics.median(samples), index))
    timings.sort()
    best = timings[0][1]
    graph.select_plan(best)
    engine, knobs = graph.get_engine_and_knobs_at_index(best)
    return {
        "engine": engine,
        "knobs": knobs,
        "plans": [
            {"name": graph.get_plan_name_at_index(index), "median_us": median}
            for median, index in timings
        ],
    }
