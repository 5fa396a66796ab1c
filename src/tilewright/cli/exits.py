"""Exit codes of the command line, and the error that carries one. docs/cli.md lists them."""

from __future__ import annotations

import enum
from typing import NoReturn

from tilewright.errors import BindingError, GraphError, LaunchError, NotSupportedError


class ExitCode(enum.IntEnum):
    """What the process's exit status says. Numbers are append-only: scripts test them."""

    OK = 0
    WRONG_RESULT = 1
    USAGE = 2
    GRAPH = 3
    DECLINED = 4
    CALL_FAILED = 5
    INTERNAL = 70
    INTERRUPTED = 130


class CommandError(Exception):
    """An error that one line explains; the process ends with ``code``."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


def fail(message: str, code: ExitCode = ExitCode.USAGE) -> NoReturn:
    """Raise ``CommandError``."""
    raise CommandError(message, code)


def exit_code_of(error: BaseException) -> ExitCode | None:
    """The exit code that an exception means, or None if it is a bug of ours."""
    if isinstance(error, CommandError):
        return error.code
    if isinstance(error, GraphError):
        return ExitCode.GRAPH
    if isinstance(error, NotSupportedError):
        return ExitCode.DECLINED
    if isinstance(error, BindingError | LaunchError | MemoryError) or is_out_of_memory(error):
        return ExitCode.CALL_FAILED
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's errors that say that memory could not be had."""
    if not isinstance(error, RuntimeError):
        return False
    # The CPU allocator raises a plain RuntimeError; only its text tells.
    text = str(error)
    return (
        type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
        or "Storage size calculation overflowed" in text
        or "not enough memory" in text
    )
