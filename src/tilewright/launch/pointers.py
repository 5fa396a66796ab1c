"""Torch views of bare pointers. The span is the caller's word: nothing here can check it."""

from __future__ import annotations

import ctypes

import torch


class _CudaArray:
    """Carries the CUDA array interface of an address on a device."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
        }


def bytes_at(pointer: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 view of ``size_bytes`` bytes at ``pointer``; no bytes are read or copied."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_CudaArray(pointer, size_bytes), device=device)
    memory = (ctypes.c_uint8 * size_bytes).from_address(pointer)
    return torch.frombuffer(memory, dtype=torch.uint8)
