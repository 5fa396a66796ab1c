"""Address space without memory: pages take memory when they are first written."""

from __future__ import annotations

import mmap

import torch

# From this size on storage is mapped page by page.
_MAPPED_BYTES = 2**26


def untouched_bytes(count: int) -> torch.Tensor:
    """``count`` zeroed bytes on the CPU; terabytes are no matter while few pages are touched.

    Raises:
        MemoryError: if the address space has no room, or the system reserves memory for all of it.
    """
    if count < _MAPPED_BYTES:
        return torch.zeros(count, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        return torch.frombuffer(mmap.mmap(-1, count, flags=flags), dtype=torch.uint8)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no room for a buffer of {count} bytes: {error}") from error
