"""Keys of stored code: exactly what the code specializes on, and nothing of one call.

A key is a frozen record of facts that are known when a plan is made, so no pointer, stream or
runtime total can be in it: there is no field for one. Its digest is the entry's file name, and
its facts are stored in the entry and compared again at load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tilewright.records import record


@record(frozen=True)
class KernelKey:
    """What one kernel's code depends on.

    ``source`` is a digest of the kernel's source, of every helper that it calls and of the
    constants that they read. ``types`` are (argument, type) in the kernel's order; ``constants``
    the compile-time arguments: None, bool, int, float, str, or tuples of these. ``aligned`` names
    arguments that are multiples of 16. ``target`` is a compute capability. ``environment`` are
    facts of the compiler and of this library (``tilewright.artifact.environment``).
    ``max_registers`` is a thread's limit at entry, if the kernel sets one.
    """

    kernel: str
    source: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: frozenset[str]
    warps: int
    stages: int
    target: tuple[int, int]
    environment: tuple[tuple[str, str], ...]
    max_registers: int | None = None

    def facts(self) -> dict[str, Any]:
        """The key as plain JSON values; equal facts are equal code.

        Raises:
            TypeError: for a constant that has no exact text form. A guess could make two
                different kernels one.
        """
        return {
            "kernel": self.kernel,
            "source": self.source,
            "types": [list(pair) for pair in self.types],
            "constants": {name: _exact(name, value) for name, value in self.constants},
            "aligned": sorted(self.aligned),
            "warps": self.warps,
            "stages": self.stages,
            "target": list(self.target),
            "environment": dict(self.environment),
            "max_registers": self.max_registers,
        }

    def digest(self) -> str:
        """64 hexadecimal digits."""
        return digest_of(self.facts())


def digest_of(facts: Mapping[str, Any]) -> str:
    """The digest of a key's facts."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _exact(name: str, value: Any) -> list[Any]:
    """A constant with its type: 1, 1.0 and True compile to different code."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return [kind.__name__, value]
    if kind is int:
        return ["int", str(value)]
    if kind is float:
        return ["float", value.hex()]
    if kind is tuple:
        return ["tuple", [_exact(name, item) for item in value]]
    raise TypeError(
        f"constant {name!r} is {value!r} of type {kind.__name__}; a key takes None, bool, int, "
        "float, str, and tuples of these"
    )
