"""What happens when a process can run no further test: a protocol and its two strategies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn, Protocol

import pytest

# A worker's own exit status when it leaves on purpose; its note tells why.
LEFT_ON_PURPOSE = 86


class Ending(Protocol):
    """Ends what can be ended so that no later test runs in this process."""

    def end(self, test: str, reason: str) -> NoReturn:
        """Never returns. ``test`` is the node id of the test that made the process unfit."""
        ...


class LeaveWorker:
    """In a worker: leave a note and exit; the controller replaces the worker."""

    def __init__(self, note: Path) -> None:
        self._note = note

    def end(self, test: str, reason: str) -> NoReturn:
        """Exit with no tear-down: it would run on what is broken."""
        # A process with no file descriptor left, for one, cannot say why, but can go.
        try:
            self._note.write_text(reason, encoding="utf-8")
        finally:
            os._exit(LEFT_ON_PURPOSE)


class StopRun:
    """In the only process: stop the run at once."""

    def end(self, test: str, reason: str) -> NoReturn:
        """Stop the run with a message that tells what to do."""
        sys.stdout.flush()
        pytest.exit(
            f"after {test}: {reason}. No worker process to replace, so no later test can run. "
            "Leave out -s, --pdb and -n 0 (and install pytest-xdist) to have one.",
            returncode=pytest.ExitCode.TESTS_FAILED,
        )
