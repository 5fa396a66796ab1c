"""L3, never wait; L8, stream order: both can be seen on CUDA only."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tilewright.testing.detectors.subject import Operands, as_subject, named
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting
from tilewright.testing.detectors.wide import different

WAITING = Rule("L3", "no synchronization")
STREAM = Rule("L8", "stream order")
# Clock cycles that a producer is delayed by, about 50 ms: work that overtakes it shows.
_DELAY_CYCLES = 100_000_000


def no_synchronization(target: Any, operands: Operands) -> Verdict:
    """A launch makes no call that waits for the device (L3), under torch's debug mode.

    The mode sees waits that go through torch (``item``, ``cpu``, ``nonzero``), not those that code
    makes through the driver.
    """
    subject, given = as_subject(target), named(operands)
    device = next(iter(given.values())).device
    if device.type != "cuda":
        return WAITING.declined("on a CPU the kernel is on the host: there is nothing to wait for")
    launch: Any = lambda: subject.call(given)  # noqa: E731
    if subject.declare is not None:
        results = {
            name: torch.empty_strided(at.dim, at.stride, dtype=at.dtype, device=at.device)
            for name, at in subject.layouts(given).items()
        }
        launch = subject.declare(given, results).bind(given, results)
    launch()
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it does not see everything is in this detector's docstring.
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return WAITING.broken(str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize(device)
    return WAITING.held("a launch made no call that waits, as far as torch sees")


def stream_order(target: Any, operands: Operands, tolerance: float | None = None) -> Verdict:
    """Work is ordered on the current stream (L8): it sees what a delayed producer writes there.

    The current device and stream are the caller's again afterwards.
    """
    subject, given = as_subject(target), named(operands)
    device = next(iter(given.values())).device
    if device.type != "cuda":
        return STREAM.declined(f"device {device} has no streams")
    target_values = {name: tensor.clone() for name, tensor in given.items()}
    for name, tensor in target_values.items():
        subject.change(name, tensor)
    expected = subject.call(target_values)
    buffers = {name: tensor.clone() for name, tensor in given.items()}
    subject.call(buffers)
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(side):
        torch.cuda._sleep(_DELAY_CYCLES)  # type: ignore[no-untyped-call]
        for name, tensor in buffers.items():
            tensor.copy_(target_values[name], non_blocking=True)
        produced = torch.cuda.Event()  # type: ignore[no-untyped-call]
        produced.record(side)
        results = subject.call(buffers)
        is_pending = not produced.query()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        results = {name: result.clone() for name, result in results.items()}
    side.synchronize()
    if current.cuda_stream != side.cuda_stream:
        return STREAM.broken("another stream is current after the call")
    problem = different(results, expected, tolerance)
    if problem:
        return STREAM.broken(f"it did not wait for what its stream had queued: {problem}")
    if not is_pending:
        return STREAM.declined("the producer was done when the call returned: nothing was shown")
    return STREAM.held("it ran after a delayed producer on the current stream")


assert_no_synchronization = asserting(no_synchronization)
assert_stream_order = asserting(stream_order)
