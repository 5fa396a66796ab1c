"""Counters of where code came from, by level, for this process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import field

from tilewright.records import record


@record(frozen=True)
class Counters:
    """A snapshot. A kernel that is asked for counts once: memory hit, disk hit or disk miss.

    ``disk_misses`` counts by reason: "disabled", "absent", "unreadable", "torn", "foreign",
    "format" (of another version), "checksum", "other key". ``compiles`` counts what the compiler
    finished. ``writes`` are entries stored, ``write_failures`` counts those that could not be, by
    reason, ``removals`` the entries that made room. Plan records are counted apart: hits, misses by
    the same reasons or "stale" (made of other sources), writes.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    compiles: int = 0
    writes: int = 0
    removals: int = 0
    record_hits: int = 0
    record_writes: int = 0
    disk_misses: Mapping[str, int] = field(default_factory=dict)
    record_misses: Mapping[str, int] = field(default_factory=dict)
    write_failures: Mapping[str, int] = field(default_factory=dict)


_lock = threading.Lock()
_counts: Counter[str] = Counter()
_misses: Counter[str] = Counter()
_record_misses: Counter[str] = Counter()
_failures: Counter[str] = Counter()


def counters() -> Counters:
    """The counters as they are now."""
    with _lock:
        return Counters(
            memory_hits=_counts["memory_hits"],
            disk_hits=_counts["disk_hits"],
            compiles=_counts["compiles"],
            writes=_counts["writes"],
            removals=_counts["removals"],
            record_hits=_counts["record_hits"],
            record_writes=_counts["record_writes"],
            disk_misses=dict(_misses),
            record_misses=dict(_record_misses),
            write_failures=dict(_failures),
        )


def reset_counters() -> None:
    """Set every counter to zero. Neither memory nor the store forgets anything."""
    with _lock:
        for counts in (_counts, _misses, _record_misses, _failures):
            counts.clear()


def count(name: str, amount: int = 1) -> None:
    """Add to one of the plain counters."""
    with _lock:
        _counts[name] += amount


def count_miss(reason: str) -> None:
    """Count a kernel that the store did not serve."""
    with _lock:
        _misses[reason] += 1


def count_record_miss(reason: str) -> None:
    """Count a plan record that the store did not serve."""
    with _lock:
        _record_misses[reason] += 1


def count_write_failure(reason: str) -> None:
    """Count an entry that could not be stored."""
    with _lock:
        _failures[reason] += 1
