"""L2, no hidden allocation; and allocations whose contents are chosen, for code that returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.testing.detectors.guards import Guarded, guard_all, guarded, views
from tilewright.testing.detectors.subject import Layout, Operands, as_subject, named
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

ALLOCATION = Rule("L2", "no allocation")
_aten = torch.ops.aten
_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# What a plan says that works in temporaries of its own.
_NOTE = "ALLOCATES_TEMPORARIES"


class FilledAllocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every ``torch.empty`` of this thread contents and guards.

    What a callable leaves unwritten then holds the pattern, and what it writes outside is seen.
    ``buffers`` has them in order. Allocations inside of torch's own functions are not among them.
    """

    def __init__(self, pattern: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pattern = pattern
        self.buffers: list[Guarded] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace uninitialized memory; everything else runs as it is."""
        made = func(*args, **(kwargs or {}))
        if func not in _EMPTY or made.layout is not torch.strided or made.device.type == "meta":
            return made
        buffer = guarded(Layout.of(made), self.pattern)
        self.buffers.append(buffer)
        return buffer.view


def no_allocation(target: Any, operands: Operands) -> Verdict:
    """A bound call launches without allocating memory (L2).

    On a CPU torch's allocator is watched through its profiler, on CUDA through ``memory_stats``;
    memory that the code gets elsewhere (malloc, cudaMalloc) is not seen. The first launch is a
    warm-up. A plan that says that it allocates is declined, with what was seen.
    """
    subject, given = as_subject(target), named(operands)
    layouts = subject.layouts(given)
    inputs = views(guard_all(given, 0))
    device = next(iter(layouts.values())).device
    if subject.declare is None:
        count, size = counted(lambda: subject.call(inputs), device)
        return ALLOCATION.declined(f"it returns its results, so it allocates: {_seen(count, size)}")
    outputs = {name: guarded(layout, 0).view for name, layout in layouts.items()}
    declared = subject.declare(inputs, outputs)
    launch = declared.bind(inputs, outputs)
    launch()
    count, size = counted(launch, device)
    if not count:
        return ALLOCATION.held("a second launch allocated nothing")
    if _NOTE in declared.notes:
        return ALLOCATION.declined(f"its notes say {_NOTE}: {_seen(count, size)}")
    return ALLOCATION.broken(f"a second launch made {_seen(count, size)}")


def counted(work: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """How many allocations ``work`` makes through torch's allocator, and their bytes in all."""
    if device.type == "cuda":
        before = torch.cuda.memory_stats(device)
        work()
        after = torch.cuda.memory_stats(device)
        count, size = "allocation.all.allocated", "allocated_bytes.all.allocated"
        return after[count] - before[count], after[size] - before[size]
    from torch.profiler import ProfilerActivity, profile

    with (
        _quiet_stderr(),
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as recorded,
    ):
        work()
    events = recorded.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    made = [size for size in sizes if size > 0]
    return len(made), sum(made)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler's library writes notes of its own to the standard error stream."""
    try:
        saved = os.dup(2)
    except OSError:
        yield
        return
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)


def _seen(count: int, size: int) -> str:
    return f"{count} allocation{'' if count == 1 else 's'}, {size} bytes in all"


assert_no_allocation = asserting(no_allocation)
