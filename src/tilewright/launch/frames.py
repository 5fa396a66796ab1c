"""Frames: one call's bound operands, owned by that call alone (L10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.launch.context import device_and_stream
from tilewright.launch.handles import as_stream_pointer


class Frame:
    """Bound operands and the work to do on them. ``launch`` is the hot path."""

    __slots__ = ("_device", "_device_type", "_keep", "_run", "handle", "plan_name")

    def __init__(
        self, run: Callable[[], None], device: torch.device, plan_name: str, keep: Any
    ) -> None:
        self._run = run
        self._device = device
        self._device_type = device.type
        # The caller's buffers stay alive as long as the frame may be launched.
        self._keep = keep
        self.plan_name = plan_name
        # The graph's, if it has one: its stream is asked for at each launch.
        self.handle: Any = None

    def launch(self, stream: Any = None) -> None:
        """Run the plan on the bound operands; reads them as they are now.

        ``stream`` is an int, a torch stream, or None for that of the graph's handle, or the
        device's current one where no handle has any.
        """
        if stream is None and self.handle is not None:
            stream = self.handle.stream
        if stream is None and self._device_type == "cpu":
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    self._run()
            else:
                self._run()
            return
        with (
            device_and_stream(self._device, as_stream_pointer(stream)),
            torch.autocast(self._device_type, enabled=False),
        ):
            self._run()
