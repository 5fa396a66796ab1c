"""Building graphs: for buffers that torch allocated, and in several processes at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

# At least what torch's allocator gives, in bytes.
ALIGNMENT_BYTES = 16


def declare_aligned(graph: Any) -> Any:
    """Declare the alignment of the graph's buffers, and return it: no other address is planned."""
    for tensor in graph.tensors:
        if not tensor.is_pass_by_value:
            tensor.alignment_value = ALIGNMENT_BYTES
    return graph


def build_aligned(graph: Any) -> Any:
    """Build the graph with the alignment of its buffers declared, and return it."""
    declare_aligned(graph).build()
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


def measured_in_turn(parts: Sequence[Callable[[], Callable[[], Any]]]) -> Iterator[Any]:
    """What each part measures; to be called before CUDA is.

    Parts run at once, each in a process of its own, up to the function that they return: that has
    the device to itself, when all are so far.

    Raises:
        SystemExit: if a part ends without a result.
    """
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for part in parts:
        pipe, theirs = context.Pipe()
        process = context.Process(target=_measure_in_turn, args=(part, theirs))
        process.start()
        # So that the end of the process is the end of the pipe.
        theirs.close()
        pipes.append(pipe)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
            yield pipe.recv()
    except EOFError as error:
        raise SystemExit("a part of the benchmark failed; its error is above") from error
    finally:
        # Those that have measured are at their end; others wait for a turn that does not come.
        for process in processes:
            process.join(1.0)
            process.terminate()


def _measure_in_turn(part: Callable[[], Callable[[], Any]], pipe: Connection) -> None:
    measure = part()
    pipe.send(None)
    pipe.recv()
    pipe.send(measure())
