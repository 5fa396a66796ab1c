"""How often a path was taken: for assertions that are inverted when the path is retired.

A test that once required ``taken[old] > 0`` says ``taken[old] == 0`` afterwards, and stays.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType
from typing import Any


@contextlib.contextmanager
def count_taken(*paths: str, gone: Sequence[str] = ()) -> Iterator[Counter[str]]:
    """Count the calls of Python functions, "module:name" or "module:Class.name", in the body.

    However a caller came by the function, by another name or before this began, it counts: calls
    are told by the function's code, in this thread and in threads that start in the body. A name
    in ``gone`` is of a path whose code was removed; it counts as 0 for as long as it stays away.

    Raises:
        LookupError: for a path that is not there, or one in ``gone`` that is.
        TypeError: for what is no Python function.
    """
    codes = {_code(path): path for path in paths}
    for path in gone:
        if _resolve(path) is not None:
            raise LookupError(f"{path} is there again; count it instead of calling it gone")
    taken: Counter[str] = Counter(dict.fromkeys((*paths, *gone), 0))
    lock = threading.Lock()

    def profile(frame: FrameType, event: Any, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            with lock:
                taken[codes[frame.f_code]] += 1
        if before is not None:
            before(frame, event, argument)

    before, before_in_threads = sys.getprofile(), threading.getprofile()
    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        yield taken
    finally:
        sys.setprofile(before)
        threading.setprofile(before_in_threads)


def _code(path: str) -> CodeType:
    found = _resolve(path)
    if found is None:
        raise LookupError(f"{path}: there is no such function; expected module:name")
    code = getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None)
    if not isinstance(code, CodeType):
        raise TypeError(f"{path}: {type(found).__name__} is no Python function")
    return code


def _resolve(path: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found
