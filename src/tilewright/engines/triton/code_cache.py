"""Kernel code by key: first this process's memory, then the store, then the compiler."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from tilewright.artifact.code import KernelCode
from tilewright.engines.triton.compiler import KernelSpec, compile_kernel

_lock = threading.Lock()
_memory: dict[str, KernelCode] = {}


def kernel_code(spec: KernelSpec, compute_capability: tuple[int, int]) -> tuple[str, KernelCode]:
    """(digest, code) of a kernel for a target."""
    digest = _digest(spec, compute_capability)
    with _lock:
        if digest not in _memory:
            _memory[digest] = compile_kernel(spec, compute_capability)
        return digest, _memory[digest]


def _digest(spec: KernelSpec, compute_capability: tuple[int, int]) -> str:
    facts: list[Any] = [
        spec.function.cache_key,
        spec.types,
        spec.constants,
        sorted(spec.aligned),
        spec.warps,
        spec.stages,
        compute_capability,
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()
