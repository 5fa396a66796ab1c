"""Calls that another process interrupts: the same bits as a call that has the device to itself.

Two processes have a device in turn, some milliseconds each, so that a call that is under way when
its turn is over is taken off the device in its middle: registers, shared memory and barriers are
put away and put back. Code may be right only where that does not happen.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tilewright.oracle.tolerances import default_tolerance
from tilewright.testing.another_process import AnotherProcess, AnotherProcessError
from tilewright.testing.detectors.allocation import FilledAllocations
from tilewright.testing.detectors.guards import NAN_PATTERN, describe, guarded
from tilewright.testing.detectors.subject import Operands, Subject, Tensors, as_subject, named
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

BESIDE = Rule("beside", "beside another process")
_ALONE_CALLS = 16
# As many calls are handed over together as take about this long, so that one is always under way.
_BATCH_MS, _BATCH_CALLS = 20.0, 32
# A turn of the other process takes about two milliseconds, and clocks may be lower beside it.
_TURN_MS, _SLOWER = 0.5, 1.3
# Clock cycles by which a batch is held back while it is handed over, of a second.
_CYCLES_A_SECOND = 2e9
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Busy(Protocol):
    """Something that has the device in turn with this process during ``busy()``."""

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """A context: in its body, the device is shared."""
        ...


def reason_against(device: torch.device) -> str | None:
    """Why calls on this device cannot be interrupted, or None."""
    if device.type == "cuda":
        return None
    return f"device {device}: needs a GPU, which two processes have in turn"


def beside_another_process(
    target: Any,
    operands: Operands,
    other: Busy | None = None,
    *,
    interruptions: int = 64,
    limit_s: float = 2.0,
    tolerance: float | None = None,
) -> Verdict:
    """Calls that are interrupted by another process have the bits of calls that are not.

    Calls are repeated beside a process that keeps the device busy, until ``interruptions`` of them
    were switched out, or for ``limit_s`` seconds. That is told by their time on the device; calls
    of a millisecond and more are switched out nearly each. Code whose bits differ from call to call
    as it is, is held to ``tolerance * max(|first result|.max(), 1)`` instead, by default that of
    the result's type.

    Args:
        other: what keeps the device busy; an `AnotherProcess` serves many calls of this function.
            None starts one, which takes seconds, and ends it.
    """
    subject, given = as_subject(target), named(operands)
    device = next(iter(given.values())).device
    with contextlib.ExitStack() as owned:
        if other is None:
            reason = reason_against(device)
            if reason is not None:
                return BESIDE.declined(reason)
            other = owned.enter_context(AnotherProcess(device))
        if device.type == "cuda":
            owned.enter_context(torch.cuda.device(device))
        try:
            calls = _Calls(subject, given, device, tolerance)
            return _examined(calls, other, interruptions, limit_s)
        except AnotherProcessError as error:
            return BESIDE.declined(str(error))


@dataclass(frozen=True)
class _Made:
    """Some calls: whether each was interrupted, and by result, whether it differed."""

    slower: tuple[bool, ...] = ()
    differing: dict[str, tuple[bool, ...]] = field(default_factory=dict)

    def __add__(self, other: _Made) -> _Made:
        names = dict.fromkeys((*self.differing, *other.differing))
        return _Made(
            self.slower + other.slower,
            {n: self.differing.get(n, ()) + other.differing.get(n, ()) for n in names},
        )

    @property
    def names(self) -> list[str]:
        """The results that differed in any call."""
        return [name for name, found in self.differing.items() if any(found)]

    def count(self, name: str) -> str:
        """ "3 of 20": in how many calls the result differed."""
        return f"{sum(self.differing.get(name, ()))} of {len(self.slower)}"

    def count_of_slower(self, name: str) -> str:
        """ "3 of the 4": the same of those that were interrupted."""
        both = zip(self.slower, self.differing[name], strict=True)
        return f"{sum(slow and differs for slow, differs in both)} of the {sum(self.slower)}"


def _examined(calls: _Calls, other: Busy, interruptions: int, limit_s: float) -> Verdict:
    alone = calls.repeated(_ALONE_CALLS, limit_s)
    if alone.names:
        calls.allow_rounding()
        alone = calls.repeated(_ALONE_CALLS, limit_s)
    if alone.names:
        # It cannot be seen who else is there: a device that others use too shows the same fault.
        return BESIDE.broken(
            "\n".join(
                f"{name}: in {alone.count(name)} calls of {calls.alone_ms:.3g} ms that nothing of "
                f"this detector was beside, {alone.count_of_slower(name)} that took longer: "
                f"{calls.evidence(name)}; its results are random, or others have the device too"
                for name in alone.names
            )
        )
    beside = _Made()
    try:
        with other.busy():
            end = time.monotonic() + limit_s
            while sum(beside.slower) < interruptions and (
                not beside.slower or time.monotonic() < end
            ):
                beside += calls.batch()
    except AnotherProcessError:
        # Whatever became of it: a difference is one.
        if not beside.names:
            raise
    told = f"calls of {calls.alone_ms:.3g} ms beside another process"
    if beside.names:
        evidence = {name: calls.evidence(name) for name in beside.names}
        again = calls.repeated(len(beside.slower), limit_s)
        return BESIDE.broken(
            "\n".join(
                f"{name}: in {beside.count(name)} {told}, {beside.count_of_slower(name)} that were "
                f"switched out: {evidence[name]}; alone in {again.count(name)} calls"
                for name in beside.names
            )
        )
    told = f"{len(beside.slower)} {told}, {sum(beside.slower)} of them switched out"
    if not any(beside.slower):
        return BESIDE.declined(f"{told}: nothing was shown")
    return BESIDE.held(f"{told}: {calls.what} a call alone")


class _Calls:
    """The same call again and again, its results held against those of the first one.

    What differs is counted on the device, so that no call waits for the host.
    """

    def __init__(
        self, subject: Subject, given: Tensors, device: torch.device, tolerance: float | None
    ) -> None:
        self._device = device
        self._tolerance = tolerance
        self._launch = _launcher(subject, given)
        self._bounds: dict[str, float] | None = None
        self._alone_ms: float | None = None
        self._first = {name: result.clone() for name, result in self._launch().items()}
        # Of each result, what differed in any call; else what it is.
        self._seen = {name: result.clone() for name, result in self._first.items()}
        self._host_s = 0.0
        # The second one compiles nothing, and tells how long a call takes the host.
        self._timed(1)

    @property
    def alone_ms(self) -> float:
        """The shortest time of a call so far."""
        return self._alone_ms or 0.0

    @property
    def what(self) -> str:
        """What the calls have in common with the first one."""
        return "the bits of" if self._bounds is None else "within the tolerance of"

    def allow_rounding(self) -> None:
        """From now on, results differ where they are further from the first than the tolerance."""
        self._bounds = {}
        for name, result in self._first.items():
            size = torch.nan_to_num(_wide(result), 0.0, 0.0, 0.0).abs()
            largest = max(float(size.max()) if size.numel() else 0.0, 1.0)
            tolerance = default_tolerance(result.dtype)
            if self._tolerance is not None:
                tolerance = self._tolerance
            self._bounds[name] = tolerance * largest

    def repeated(self, count: int, limit_s: float) -> _Made:
        """So many calls with the device to itself, or as many as start within the time."""
        made = _Made()
        end = time.monotonic() + limit_s
        while len(made.slower) < count and (not made.slower or time.monotonic() < end):
            made += self.batch(count - len(made.slower))
        return made

    def batch(self, most: int = _BATCH_CALLS) -> _Made:
        """Some calls, handed over together."""
        count = min(most, _BATCH_CALLS)
        if self._alone_ms is None:
            count = min(count, 2)
        elif self._alone_ms > 0:
            count = max(min(count, int(_BATCH_MS / self._alone_ms)), 1)
        elapsed, flags = self._timed(count)
        shortest = min(elapsed)
        # The shortest of all: other processes may be there at any time.
        self._alone_ms = min(shortest, self._alone_ms or shortest)
        limit_ms = _SLOWER * self._alone_ms + _TURN_MS
        return _Made(
            tuple(ms > limit_ms for ms in elapsed),
            {name: tuple(found) for name, found in flags.items()},
        )

    def evidence(self, name: str) -> str:
        """Where the result differed, over all calls, and what it was there."""
        first, seen = self._first[name], self._seen[name]
        where = self._differs(name, seen)
        place = tuple(where.nonzero()[0].tolist())
        return f"{describe(where)}, {seen[place].item():.6g} instead of {first[place].item():.6g}"

    def _timed(self, count: int) -> tuple[list[float], dict[str, list[bool]]]:
        """The milliseconds of each call, and by result, which calls differ."""
        flags: dict[str, list[torch.Tensor]] = {name: [] for name in self._first}
        elapsed: list[Callable[[], float]] = []
        is_cuda = self._device.type == "cuda"
        if is_cuda:
            self._hold_back(count)
        began = time.perf_counter()
        for _ in range(count):
            stop = _stopwatch(is_cuda)
            results = self._launch()
            elapsed.append(stop())
            for name, found in flags.items():
                found.append(self._noted(name, results[name]))
        # What a call takes the host, with some to spare.
        self._host_s = 1.25 * (time.perf_counter() - began) / count
        told = {name: torch.stack(found).tolist() for name, found in flags.items()}
        return [read() for read in elapsed], told

    def _hold_back(self, count: int) -> None:
        """Let the device wait until about so many calls are handed over, then it has no pause."""
        # A call that waits for the device would wait for this too.
        seconds = min(self._host_s * count, _BATCH_MS / 1e3)
        torch.cuda._sleep(int(seconds * _CYCLES_A_SECOND))  # type: ignore[no-untyped-call]

    def _noted(self, name: str, result: torch.Tensor) -> torch.Tensor:
        """Whether the result differs; where it does, it is kept."""
        where = self._differs(name, result)
        seen = _integers(self._seen[name])
        torch.where(where, _integers(result), seen, out=seen)
        return where.any()

    def _differs(self, name: str, result: torch.Tensor) -> torch.Tensor:
        first = self._first[name]
        if self._bounds is None:
            return _integers(result) != _integers(first)
        got, want = _wide(result), _wide(first)
        is_same = (got == want) | (got.isnan() & want.isnan())
        return ~(is_same | ((got - want).abs() <= self._bounds[name]))


def _launcher(subject: Subject, given: Tensors) -> Callable[[], Tensors]:
    """What makes the call, into memory that holds nothing of the call before."""
    if subject.declare is None:

        def call() -> Tensors:
            with FilledAllocations(NAN_PATTERN):
                return subject.call(given)

        return call
    layouts = subject.layouts(given)
    buffers = {name: guarded(layout, NAN_PATTERN) for name, layout in layouts.items()}
    results = {name: buffer.view for name, buffer in buffers.items()}
    run = subject.declare(given, results).bind(given, results)

    def launch() -> Tensors:
        for buffer in buffers.values():
            buffer.raw.fill_(NAN_PATTERN)
        run()
        return results

    return launch


def _stopwatch(is_cuda: bool) -> Callable[[], Callable[[], float]]:
    """Starts now; called, it stops, and gives what reads the milliseconds later."""
    if not is_cuda:
        began = time.perf_counter()

        def stop() -> Callable[[], float]:
            ms = (time.perf_counter() - began) * 1e3
            return lambda: ms

        return stop
    new_event: Any = torch.cuda.Event
    start, end = new_event(enable_timing=True), new_event(enable_timing=True)
    start.record()

    def stop_on_device() -> Callable[[], float]:
        end.record()
        return lambda: float(start.elapsed_time(end))

    return stop_on_device


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size: NaNs compare as what they are."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.element_size() > 2 else tensor.float()


assert_beside_another_process = asserting(beside_another_process)
