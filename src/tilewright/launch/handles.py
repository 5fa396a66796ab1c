"""Handles: a device and the stream that work is sent to. With no GPU a handle carries the CPU."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import BindingError


class Handle:
    """A device and an optional stream (an int, as cudaStream_t; None: the current stream)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: int | None = None
        self.is_alive = True

    def __repr__(self) -> str:
        if not self.is_alive:
            return f"Handle(device={self.device}, destroyed)"
        return f"Handle(device={self.device}, stream={self.stream})"

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the device. A stream is this process's own."""
        _require_alive(self)
        return {"device": self.device, "stream": None, "is_alive": True}

    def __getattr__(self, name: str) -> Any:
        # A call asks for the stream alone; a handle without one is found out at no cost to others.
        if name == "stream":
            raise BindingError("handle: it was destroyed")
        raise AttributeError(f"'Handle' object has no attribute {name!r}")


def default_device() -> torch.device:
    """The current CUDA device, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def create_handle(device: Any = None) -> Handle:
    """A handle on ``device`` (anything torch.device takes; default: see ``default_device``).

    Raises:
        BindingError: if ``device`` is no device, or CUDA's and torch finds none.
    """
    return Handle(default_device() if device is None else as_device(device))


def as_device(device: Any) -> torch.device:
    """``device`` as torch's, the current one of CUDA's where no index is given.

    Raises:
        BindingError: if it is no device, or CUDA's and torch finds none.
    """
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BindingError(
            f"device: got {device!r}; expected what torch.device takes, such as 'cpu' or 'cuda:0'"
        ) from error
    if chosen.type == "cuda" and chosen.index is None:
        if not torch.cuda.is_available():
            raise BindingError(f"device: got {device!r}, and torch finds no CUDA device")
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def destroy_handle(handle: Handle) -> None:
    """Mark the handle as gone; a later use raises BindingError."""
    _require_handle(handle)
    handle.is_alive = False
    vars(handle).pop("stream", None)


def set_stream(handle: Handle, stream: Any) -> None:
    """Send later work of ``handle`` to ``stream``: an int, a torch stream, or None."""
    _require_alive(handle)
    handle.stream = as_stream_pointer(stream)


def get_stream(handle: Handle) -> int | None:
    """The stream set on the handle, as an int; None if none was set."""
    _require_alive(handle)
    return handle.stream


def as_stream_pointer(stream: Any) -> int | None:
    """A stream as the int that the driver knows.

    Raises:
        BindingError: if ``stream`` is no int that an address can be, no torch stream and not None.
    """
    if stream is None:
        return None
    if isinstance(stream, int) and not isinstance(stream, bool):
        if not 0 <= stream < 2**64:
            raise BindingError(f"stream: got {stream}; expected an address from 0 to 2**64 - 1")
        return stream
    pointer = getattr(stream, "cuda_stream", None)
    if isinstance(pointer, int):
        return pointer
    raise BindingError(f"stream: got {stream!r}; expected an int, a torch.cuda.Stream, or None")


def _require_alive(handle: Handle) -> None:
    _require_handle(handle)
    if not handle.is_alive:
        raise BindingError("handle: it was destroyed")


def _require_handle(handle: Handle) -> None:
    if not isinstance(handle, Handle):
        raise BindingError(f"handle: got {type(handle).__name__}; expected a Handle")
