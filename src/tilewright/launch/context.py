"""Device and stream for the duration of a call (L8), restored whatever happens.

And a plan's own tensors, made as if no mode of the caller were on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils import _python_dispatch

from tilewright.errors import BindingError

# What the driver calls the default stream, beside 0. torch wraps neither: of 0 it makes a stream
# of its pool, and of 1 an error. (2, the thread's own default stream, it takes as any other.)
_DEFAULT_STREAMS = (0, 1)


@contextlib.contextmanager
def device_and_stream(device: torch.device, stream: int | None) -> Iterator[None]:
    """Make ``device`` and ``stream`` current; the caller's are restored on leaving.

    A stream of None is the device's own current stream; 0 and 1 are its default stream. On a CPU
    only None and 0 are streams.

    Raises:
        BindingError: for a stream on a CPU.
    """
    if device.type != "cuda":
        if stream:
            raise BindingError(f"stream {stream:#x} was given for {device}, which has no streams")
        yield
        return
    with torch.cuda.device(device):
        if stream is None:
            yield
            return
        with torch.cuda.stream(_torch_stream(device, stream)):
            yield


def _torch_stream(device: torch.device, stream: int) -> torch.cuda.Stream:
    if stream in _DEFAULT_STREAMS:
        return torch.cuda.default_stream(device)
    # torch leaves this constructor without types.
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """No default device, fake tensor or trace of the caller reaches what is made inside.

    A plan outlives the call that builds it, and with it the constants that it holds.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        if _python_dispatch.is_in_torch_dispatch_mode():
            stack.enter_context(_python_dispatch._disable_current_modes())
        yield
