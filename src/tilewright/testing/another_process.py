"""Another process that keeps a device busy meanwhile, for calls that are to be switched out.

Two processes have a device in turn, some milliseconds each, so a call that is longer is taken off
the device in its middle and put back. The other one multiplies matrices. It starts when it is first
wanted, waits without using the device between two spells, and ends with the body of the ``with``,
with this process however that ends, and where it is not heard of for long.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

from tilewright.errors import TilewrightError
from tilewright.testing import busy_child

# Starting imports torch and makes a context; the rest is quick.
_START_S = 120.0
_ANSWER_S = 30.0
_LEAVE_S = 5.0


class AnotherProcessError(TilewrightError, RuntimeError):
    """The other process did not start, or did not do what it was told; the message says why."""


class AnotherProcess:
    """Keeps ``device`` ("cpu", "cuda", "cuda:1", or torch's) busy during ``busy()``.

    It costs nothing before that. ``command`` takes the place of the program that is run, for tests;
    ``start_s`` and ``answer_s`` are the seconds that it has to start and to do what it is told.
    """

    def __init__(
        self,
        device: Any = "cuda",
        *,
        command: Sequence[str] | None = None,
        start_s: float = _START_S,
        answer_s: float = _ANSWER_S,
    ) -> None:
        self._device = str(device)
        module = [sys.executable, "-m", busy_child.__name__, self._device]
        self._command = list(command or module)
        self._start_s, self._answer_s = start_s, answer_s
        self._child: subprocess.Popen[str] | None = None
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._errors: IO[bytes] | None = None
        self._failure: str | None = None
        self._turn = threading.RLock()
        self._is_busy = False

    def __enter__(self) -> AnotherProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Its number while it runs."""
        child = self._child
        return child.pid if child is not None and child.poll() is None else None

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """The device is in use by the other process from the first line of the body to the last.

        A spell within a spell is part of it; those of several threads come one after another.

        Raises:
            AnotherProcessError: if there is no such process, at the start or at the end.
        """
        with self._turn:
            if self._is_busy:
                yield
                return
            self._start()
            self._ask("busy", self._answer_s)
            self._is_busy = True
            try:
                yield
            except GeneratorExit:
                # The interpreter ends, and its threads hear no answer.
                self.close()
                raise
            except BaseException:
                # What went wrong there matters more than whether this one obeys.
                with contextlib.suppress(AnotherProcessError):
                    self._ask("idle", self._answer_s)
                raise
            finally:
                self._is_busy = False
            self._ask("idle", self._answer_s)

    def close(self) -> None:
        """End it; again and again if need be. The next spell starts another one."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(OSError):
                if child.stdin is not None:
                    child.stdin.close()
            try:
                child.wait(timeout=_LEAVE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _start(self) -> None:
        if self._failure is not None:
            raise AnotherProcessError(self._failure)
        if self._child is not None:
            return
        # The child finds this package where this process has it.
        source = str(Path(busy_child.__file__).resolve().parents[2])
        paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
        # Modules of the folder that this runs in are none of the child's.
        changes = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        # What an earlier one said is not for this one.
        self._said = queue.SimpleQueue()
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **changes},
                text=True,
                errors="replace",
            )
            threading.Thread(target=_listen, args=(self._child, self._said), daemon=True).start()
        except (OSError, RuntimeError) as error:
            self._fail(f"it cannot be started: {error}")
        answer = self._answer("ready", self._start_s)
        here = busy_child.identity(self._device)
        if answer != here:
            self._fail(f"it has the device {answer or 'of no name'}, this one has {here}")

    def _ask(self, what: str, limit_s: float) -> None:
        child = self._child
        if child is None or child.stdin is None:
            raise AnotherProcessError(self._failure or "the other process: it was closed")
        try:
            child.stdin.write(f"{what}\n")
            child.stdin.flush()
        except OSError:
            # Its end is told by its answer, which does not come.
            pass
        self._answer(what, limit_s)

    def _answer(self, wanted: str, limit_s: float) -> str:
        """What it says beside the wanted word."""
        try:
            said = self._said.get(timeout=limit_s)
        except queue.Empty:
            self._fail(f"it did not say {wanted!r} within {limit_s:g} s")
        if said is None:
            self._fail(f"{self._end(min(limit_s, _LEAVE_S))} and did not say {wanted!r}")
        word, _, rest = said.partition(" ")
        if word != wanted:
            self._fail(f"it said {said!r} in place of {wanted!r}")
        return rest

    def _end(self, limit_s: float) -> str:
        """How it came to say no more."""
        if self._child is None:
            return "it was closed"
        try:
            return f"it ended with status {self._child.wait(timeout=limit_s)}"
        except subprocess.TimeoutExpired:
            return "it closed its output"

    def _fail(self, reason: str) -> NoReturn:
        words = self._last_words()
        told = f"; its last words: {words}" if words else ""
        self._failure = f"the other process: {reason}{told}"
        child = self._child
        if child is not None:
            child.kill()
        self.close()
        raise AnotherProcessError(self._failure)

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _listen(child: subprocess.Popen[str], said: queue.SimpleQueue[str | None]) -> None:
    """Hand on what the child says, line by line, and None at its end."""
    if child.stdout is not None:
        with contextlib.suppress(OSError), child.stdout as lines:
            for line in lines:
                said.put(line.strip())
    said.put(None)
