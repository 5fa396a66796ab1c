"""L12, artifacts persist: a torn, foreign or empty file is a miss, never a crash or a result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

ARTIFACTS = Rule("L12", "torn artifacts are misses")


def torn_artifacts_are_misses(load: Callable[[Path], Any], path: Path) -> Verdict:
    """``load`` gives None for every damaged form of the stored file, and the artifact for itself.

    The file is cut at several lengths, emptied, filled with other bytes, and has single bits
    turned; it is put back afterwards.
    """
    stored = path.read_bytes()
    if load(path) is None:
        return ARTIFACTS.broken("the undamaged file is a miss")
    forms = {"emptied": b"", "foreign": b"\x00garbage\xff" * 8, "longer": stored + b"\x00"}
    for part in (1, 2, 3):
        forms[f"cut at {part}/4"] = stored[: len(stored) * part // 4]
    for position in {0, len(stored) // 2, len(stored) - 1}:
        turned = bytearray(stored)
        turned[position] ^= 0x10
        forms[f"bit turned in byte {position}"] = bytes(turned)
    try:
        for what, content in forms.items():
            path.write_bytes(content)
            try:
                found = load(path)
            except Exception as error:
                return ARTIFACTS.broken(f"{what}: {type(error).__name__}: {error}")
            if found is not None:
                return ARTIFACTS.broken(f"{what}: it was loaded")
    finally:
        path.write_bytes(stored)
    return ARTIFACTS.held(f"{len(forms)} damaged forms are misses")


assert_torn_artifacts_are_misses = asserting(torn_artifacts_are_misses)
