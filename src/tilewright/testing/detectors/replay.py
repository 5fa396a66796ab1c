"""L9, replay: a bound or captured call reads its operands as they are at each launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from tilewright.testing.detectors.guards import NAN_PATTERN, guarded
from tilewright.testing.detectors.subject import (
    Operands,
    Subject,
    Tensors,
    as_subject,
    named,
)
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting
from tilewright.testing.detectors.wide import different

REPLAY = Rule("L9", "replay freshness")
Expected = Callable[[Tensors], Tensors]


def replay_freshness(
    target: Any,
    operands: Operands,
    expected: Expected | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """Operands that are changed in place after the first launch show in the next one (L9).

    One operand after another is changed; results are poisoned first. On CUDA a call that writes is
    captured in a CUDA Graph and replayed; elsewhere a bound call is launched again, and code that
    returns is called again with the same tensors. ``expected`` (operands -> results) tells the
    right values; by default the code's own, on copies of the operands.
    """
    with contextlib.ExitStack() as owned:
        return _replay_freshness(target, operands, expected, tolerance, owned)


def _replay_freshness(
    target: Any,
    operands: Operands,
    expected: Expected | None,
    tolerance: float | None,
    owned: contextlib.ExitStack,
) -> Verdict:
    subject = as_subject(target)
    given = {name: tensor.clone() for name, tensor in named(operands).items()}
    reference = expected or subject.call
    # Copies stay alive to the end: a new one at an old address would look like the old one to code
    # that remembers addresses.
    alive: list[Tensors] = []
    launch = _launcher(subject, given, owned)
    old = {name: result.clone() for name, result in launch().items()}
    problem = different(old, _fresh(reference, given, alive), tolerance)
    if problem:
        return REPLAY.broken(f"the first launch is wrong already: {problem}")
    shown: list[str] = []
    for name, tensor in given.items():
        kept = tensor.clone()
        subject.change(name, tensor)
        new = _fresh(reference, given, alive)
        if different(old, new, tolerance) is not None:
            shown.append(name)
            got = launch()
            if different(got, new, tolerance) is not None:
                how = "the result is another one"
                if different(got, old, tolerance) is None:
                    how = "the result is that of the old values"
                return REPLAY.broken(f"{name} was changed in place and {how}")
        tensor.copy_(kept)
    if not shown:
        return REPLAY.declined("no change of an operand changes the results")
    return REPLAY.held(f"changes in place of {', '.join(shown)} show in the next launch")


def _fresh(reference: Expected, operands: Tensors, alive: list[Tensors]) -> dict[str, torch.Tensor]:
    copies = {name: tensor.clone() for name, tensor in operands.items()}
    alive.append(copies)
    return {name: result.clone() for name, result in reference(copies).items()}


def _launcher(
    subject: Subject, operands: Tensors, owned: contextlib.ExitStack
) -> Callable[[], dict[str, torch.Tensor]]:
    """What launches the same call on the same buffers again, and gives the results.

    ``owned`` gets what must be given back at the end.
    """
    if subject.declare is None:
        return lambda: subject.call(operands)
    layouts = subject.layouts(operands)
    buffers = {name: guarded(layout, NAN_PATTERN) for name, layout in layouts.items()}
    results = {name: buffer.view for name, buffer in buffers.items()}
    run = subject.declare(operands, results).bind(operands, results)
    if next(iter(results.values())).device.type == "cuda":
        run = _captured(run, owned)

    def launch() -> dict[str, torch.Tensor]:
        for buffer in buffers.values():
            buffer.raw.fill_(NAN_PATTERN)
        run()
        return results

    return launch


def _captured(run: Callable[[], None], owned: contextlib.ExitStack) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # After whatever made the operands: the first run reads offsets and lengths among them.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not left to the garbage collector, which may come inside of a later capture.
    owned.callback(graph.reset)
    # With it goes its workspace, which replays write.
    owned.callback(_keep, run)
    owned.callback(torch.cuda.synchronize)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _keep(run: Callable[[], None]) -> None:
    """Do nothing: who holds a call of this holds the run."""


assert_replay_freshness = asserting(replay_freshness)
