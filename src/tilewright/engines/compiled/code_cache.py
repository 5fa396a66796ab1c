"""Kernel code by key: first this process's memory, then the store, then the compiler."""

from __future__ import annotations

import threading
from typing import Any

from tilewright.artifact.code import KernelCode
from tilewright.artifact.counting import count, count_miss
from tilewright.artifact.environment import environment
from tilewright.artifact.forbidding import require_compiler
from tilewright.artifact.key import KernelKey
from tilewright.artifact.location import current_store
from tilewright.engines.compiled.compiler import KernelSpec, compile_kernel
from tilewright.engines.compiled.kernel_source import source_digest

_lock = threading.Lock()
_memory: dict[str, KernelCode] = {}


def kernel_code(spec: KernelSpec, compute_capability: tuple[int, int]) -> tuple[str, KernelCode]:
    """(digest, code) of a kernel for a target.

    Raises:
        LaunchError: if it has to be compiled and the compiler is forbidden.
        NotSupportedError: if the compiler cannot serve it.
    """
    key = key_of(spec, compute_capability)
    digest = key.digest()
    with _lock:
        code = _memory.get(digest)
        if code is not None:
            count("memory_hits")
        else:
            code = _memory[digest] = _stored_or_compiled(spec, key)
        return digest, code


def stored_code(digest: str) -> KernelCode | None:
    """The code whose key has this digest, from memory or the store; None if neither has it."""
    with _lock:
        code = _memory.get(digest)
        if code is not None:
            count("memory_hits")
            return code
        store = current_store()
        if store is not None:
            code = store.load_digest(digest)[0]
            if code is not None:
                _memory[digest] = code
        return code


def is_stored(digest: str) -> bool:
    """True if memory or the store has an entry of this name; it is not read."""
    if digest in _memory:
        return True
    store = current_store()
    return store is not None and store.touch(digest)


def key_of(spec: KernelSpec, compute_capability: tuple[int, int]) -> KernelKey:
    """The key of a kernel for a target. Needs no GPU, and works under the interpreter."""
    return KernelKey(
        kernel=spec.name,
        source=source_digest(spec.function),
        types=spec.types,
        constants=tuple((name, _plain(value)) for name, value in spec.constants),
        aligned=spec.aligned,
        warps=spec.warps,
        stages=spec.stages,
        target=compute_capability,
        environment=_environment(),
        max_registers=spec.max_registers,
    )


def forget() -> None:
    """Empty this process's memory of code; loaded kernels stay loaded, the store stays as it is."""
    with _lock:
        _memory.clear()


def _stored_or_compiled(spec: KernelSpec, key: KernelKey) -> KernelCode:
    store = current_store()
    if store is None:
        reason = "disabled"
        count_miss(reason)
    else:
        code, reason = store.load(key)
        if code is not None:
            return code
    require_compiler(key.kernel, key.target, reason)
    code = compile_kernel(spec, key.target)
    count("compiles")
    if store is not None:
        store.save(key, code, _manifest(key))
    return code


def _plain(value: Any) -> Any:
    """A constant in a key's terms; what has no exact text form is left, and the key refuses it."""
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        return _plain(value.value)
    if isinstance(value, tl.dtype):
        return ("triton dtype", str(value))
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if hasattr(value, "fn"):
        return ("triton function", source_digest(value))
    return value


def _environment() -> tuple[tuple[str, str], ...]:
    import triton
    from triton._C import libtriton

    settings = libtriton.get_cache_invalidating_env_vars()
    return environment("triton", str(triton.__version__), settings)


def _manifest(key: KernelKey) -> dict[str, str]:
    """What made the code, for people: the key's environment, and the tools as Triton names them."""
    from triton.backends import backends
    from triton.backends.nvidia.compiler import get_ptxas

    major, minor = key.target
    return {
        **dict(key.environment),
        "target": f"sm_{major}{minor}",
        "ptxas": str(get_ptxas(major * 10 + minor).version),
        "backends": " ".join(sorted(backends)),
    }
