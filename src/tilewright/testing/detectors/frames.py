"""L10, frames are independent: two threads, distinct buffers, interleaved step by step."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.testing.detectors.guards import NAN_PATTERN, guarded
from tilewright.testing.detectors.subject import Operands, Subject, Tensors, as_subject, named
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting
from tilewright.testing.detectors.wide import different

FRAMES = Rule("L10", "frame independence")
# How long a thread waits for its turn; after that both run freely, which is no error.
_TURN_S = 2.0
_FREE_ROUNDS = 20
_FREE_SWITCH_S = 1e-5


class _Turns:
    """Hands control from one thread to the other and back, until one of them is done."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._turn = 0
        self._is_free = False

    def wait(self, me: int) -> None:
        with self._condition:
            if not self._condition.wait_for(
                lambda: self._is_free or self._turn == me, timeout=_TURN_S
            ):
                self._is_free = True

    def hand_over(self, me: int) -> None:
        with self._condition:
            self._turn = 1 - me
            self._condition.notify_all()
        self.wait(me)

    def leave(self) -> None:
        with self._condition:
            self._is_free = True
            self._condition.notify_all()


class _Alternate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands over after each torch operation of this thread."""

    def __init__(self, turns: _Turns, me: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._turns = turns
        self._me = me

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then let the other thread run one."""
        result = func(*args, **(kwargs or {}))
        self._turns.hand_over(self._me)
        return result


def frame_independence(target: Any, operands: Operands, tolerance: float | None = None) -> Verdict:
    """Concurrent calls on distinct buffers give what each gives alone (L10).

    Two threads first take turns after every torch operation, then run freely for some rounds. On
    CUDA each thread has its own stream.
    """
    subject = as_subject(target)
    first = named(operands)
    second = {name: tensor.clone() for name, tensor in first.items()}
    for name, tensor in second.items():
        subject.change(name, tensor)
    sides = (first, second)
    runs = [_runner(subject, side) for side in sides]
    alone = [{name: r.clone() for name, r in run().items()} for run in runs]
    turns = _Turns()

    def alternating(me: int) -> dict[str, torch.Tensor]:
        turns.wait(me)
        try:
            with _Alternate(turns, me), torch.no_grad():
                return runs[me]()
        finally:
            turns.leave()

    with _flags_kept():
        problem = _race(alternating, alone, tolerance, 1)
    if problem is None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(_FREE_SWITCH_S)
        try:
            problem = _race(lambda me: runs[me](), alone, tolerance, _FREE_ROUNDS)
        finally:
            sys.setswitchinterval(before)
    if problem:
        return FRAMES.broken(problem)
    return FRAMES.held("two threads on distinct buffers, in turns and freely, give the same")


@contextlib.contextmanager
def _flags_kept() -> Iterator[None]:
    """Put torch's flags of dispatch modes back: they are of the process, not of a thread.

    Each mode saves them when it is entered; two threads that do not leave in the reverse order
    leave them set.
    """
    flags = {
        name: value
        for name, value in vars(_python_dispatch).items()
        if name.startswith("_is_in") and isinstance(value, bool)
    }
    try:
        yield
    finally:
        for name, value in flags.items():
            setattr(_python_dispatch, name, value)


def _race(
    work: Callable[[int], Tensors],
    alone: list[dict[str, torch.Tensor]],
    tolerance: float | None,
    rounds: int,
) -> str | None:
    problems: list[str] = []
    start = threading.Barrier(2)

    def side(me: int) -> None:
        try:
            start.wait(timeout=30)
            for number in range(rounds):
                found = different(work(me), alone[me], tolerance)
                if found:
                    problems.append(f"thread {me}, round {number}: {found}")
                    return
        except Exception as error:
            problems.append(f"thread {me}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=side, args=(me,), daemon=True) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        if thread.is_alive():
            return "two concurrent calls do not end"
    return problems[0] if problems else None


def _runner(subject: Subject, operands: Tensors) -> Callable[[], dict[str, torch.Tensor]]:
    device = next(iter(operands.values())).device
    run: Callable[[], dict[str, torch.Tensor]]
    if subject.declare is None:

        def run() -> dict[str, torch.Tensor]:
            return subject.call(operands)
    else:
        layouts = subject.layouts(operands)
        buffers = {name: guarded(layout, NAN_PATTERN) for name, layout in layouts.items()}
        results = {name: buffer.view for name, buffer in buffers.items()}
        launch = subject.declare(operands, results).bind(operands, results)

        def run() -> dict[str, torch.Tensor]:
            for buffer in buffers.values():
                buffer.raw.fill_(NAN_PATTERN)
            launch()
            return results

    if device.type != "cuda":
        return run
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_stream() -> dict[str, torch.Tensor]:
        # After whatever made the operands and read the last results, on the stream of that.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            found = run()
        stream.synchronize()
        return found

    return on_stream


assert_frame_independence = asserting(frame_independence)
