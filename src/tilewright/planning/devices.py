"""Facts of a device that admission asks for. Synthetic ones let any machine test any device."""

from __future__ import annotations

from typing import Any

from tilewright.records import record


@record(frozen=True)
class DeviceProperties:
    """A device as planning sees it.

    ``type`` is "cpu" or "cuda"; ``compute_capability`` is the exact (major, minor) of a CUDA
    device, None on a CPU; ``sm_count`` is its number of multiprocessors.
    """

    type: str
    index: int | None = None
    name: str = ""
    compute_capability: tuple[int, int] | None = None
    sm_count: int = 0

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.type
        major, minor = self.compute_capability
        return f"{self.type} sm_{major}{minor}"


def device_properties(device: Any) -> DeviceProperties:
    """The properties of a torch device (queried from the driver once a call)."""
    import torch

    chosen = torch.device(device)
    if chosen.type != "cuda":
        return DeviceProperties(chosen.type, chosen.index, chosen.type)
    found = torch.cuda.get_device_properties(chosen)
    return DeviceProperties(
        "cuda",
        chosen.index,
        found.name,
        (found.major, found.minor),
        found.multi_processor_count,
    )
