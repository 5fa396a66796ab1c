"""Device and stream for the duration of a call (L8), restored whatever happens.

And a plan's own tensors, made as if no mode of the caller were on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils import _python_dispatch

from tilewright.errors import BindingError


@contextlib.contextmanager
def device_and_stream(device: torch.device, stream: int | None) -> Iterator[None]:
    """Make ``device`` and ``stream`` current; the caller's are restored on leaving.

    A stream of None is the device's own current stream. On a CPU only None and 0 are streams.

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
        # torch leaves this constructor without types.
        external = torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(external):
            yield


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
