"""Compiled device code with the facts that launching it needs."""

from __future__ import annotations

from tilewright.records import record


@record(frozen=True)
class KernelCode:
    """Device code and the launch facts that go with it. Plain data: it can be stored."""

    name: str
    image: bytes
    threads: int
    shared_bytes: int
    compute_capability: tuple[int, int]
