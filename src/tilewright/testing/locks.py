"""Device locks: ``gpu_exclusive`` keeps every other test off its devices.

A device has two lock files. A test holds the device's lock, shared or exclusive, while it runs.
Whoever comes passes the turnstile first, and an exclusive test keeps it while it waits, so that
later shared ones queue up behind it. The kernel drops a lock when its process ends, however it
ends. The files lie in the system's folder for temporary files, by user: runs of one user on one
machine exclude one another too.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def folder() -> Path:
    """Where the lock files are; made if need be."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    path = Path(tempfile.gettempdir()) / f"tilewright-locks-{user}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@contextmanager
def held(devices: Iterable[str], *, exclusive: bool, where: Path | None = None) -> Iterator[None]:
    """Hold the locks of ``devices`` (tokens) during the body; waits as long as it takes."""
    # In one order everywhere, so that two tests of several devices cannot wait for one another.
    names = sorted(set(devices))
    if not names:
        yield
        return
    place = where or folder()
    with ExitStack() as stack:
        for name in names:
            stem = re.sub(r"[^\w.-]", "_", name)
            with _locked(place / f"cuda-{stem}.turnstile", exclusive=True):
                stack.enter_context(_locked(place / f"cuda-{stem}.lock", exclusive=exclusive))
        yield


@contextmanager
def _locked(path: Path, *, exclusive: bool) -> Iterator[None]:
    # Only POSIX has it, and so does every system with the devices in question.
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)
