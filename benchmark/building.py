"""Building graphs: for buffers that torch allocated, and in several processes ahead of a run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

# At least what torch's allocator gives, in bytes.
ALIGNMENT_BYTES = 16


def build_aligned(graph: Any) -> Any:
    """Build the graph with the alignment of its buffers declared, and return it.

    So no kernels for other addresses are compiled, which takes half of a benchmark's time to start.
    """
    for tensor in graph.tensors:
        if not tensor.is_pass_by_value:
            tensor.alignment_value = ALIGNMENT_BYTES
    graph.build()
    return graph


def build_ahead(parts: Sequence[Callable[[], Any]]) -> None:
    """Run every part in a process of its own, at once, for what it leaves in the stores on disk.

    Kernels are then compiled on as many processors as there are, and the run itself loads them.
    What a part does that fails is met again by the run. To be called before CUDA is.
    """
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=part) for part in parts]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
