"""Where the store is, and how large it may grow, as the environment says.

TILEWRIGHT_CACHE=0          no store: nothing is read or written
TILEWRIGHT_CACHE_DIR        its folder; else a folder of the user's cache
TILEWRIGHT_CACHE_MAX_BYTES  the bytes that it may take, 1 GiB if not set
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tilewright.artifact.store import Store
from tilewright.errors import LaunchError

DEFAULT_MAX_BYTES = 1024**3


def is_enabled() -> bool:
    """False if TILEWRIGHT_CACHE is 0."""
    return os.environ.get("TILEWRIGHT_CACHE", "1") != "0"


def cache_folder() -> Path | None:
    """The store's folder, whether it exists or not; None for a user who has no home."""
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen)))
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
        return base / "tilewright" / "Cache" / "kernels"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "tilewright" / "kernels"
    # The XDG base directory specification: a relative path is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else home / ".cache") / "tilewright" / "kernels"


def max_bytes() -> int:
    """The bytes that the store may take.

    Raises:
        LaunchError: if TILEWRIGHT_CACHE_MAX_BYTES is not a count.
    """
    text = os.environ.get("TILEWRIGHT_CACHE_MAX_BYTES")
    if not text:
        return DEFAULT_MAX_BYTES
    if not (text.isascii() and text.isdecimal()):
        raise LaunchError(f"TILEWRIGHT_CACHE_MAX_BYTES is {text!r}; expected a count of bytes")
    return int(text)


def current_store() -> Store | None:
    """The store of this process, or None if it is disabled."""
    folder = cache_folder() if is_enabled() else None
    return None if folder is None else Store(folder, max_bytes())
