"""L12 on our engines: a graph's kernels in a store of their own, damaged, and loaded again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import LaunchError
from tilewright.testing.detectors.artifacts import ARTIFACTS, torn_artifacts_are_misses
from tilewright.testing.detectors.verdict import Outcome, Verdict
from tilewright.testing.verify.interpreter import is_interpreting

# The target of kernels that are compiled where there is no device.
_TARGET = "sm_90"
_FOLDER = "TILEWRIGHT_CACHE_DIR"
_CHILD_S = 300.0


def examine_artifacts(
    declaration: bytes, fresh: Callable[[], Any], device: torch.device
) -> Verdict:
    """Compile the plan's kernels, damage each stored file, and load them with no compiler.

    ``declaration`` is the graph as JSON, and ``fresh()`` declares it anew and builds it. Where
    kernels are interpreted they are compiled for sm_90 in processes of their own, the second of
    which has no compiler.
    """
    if fresh().selected_engine == "aten":
        return ARTIFACTS.declined("its plan compiles nothing, so nothing is stored")
    with tempfile.TemporaryDirectory(prefix="tilewright-verify-") as temporary:
        folder = Path(temporary)
        if device.type == "cpu" and is_interpreting():
            return _examine(folder, *_in_children(declaration, folder))
        return _examine(folder, *_here(fresh, folder))


Build = Callable[[], tuple[int, int]]


def _examine(folder: Path, build: Build, build_without_compiler: Build) -> Verdict:
    from tilewright.artifact.store import Store

    compiled, _ = build()
    store = Store(folder, 2**40)
    entries = [(file, entry) for file, entry, _ in store.entries()]
    if not compiled:
        return ARTIFACTS.broken("its plan has kernels, and none was compiled for an empty store")
    if len(entries) != compiled:
        return ARTIFACTS.broken(f"{compiled} kernels were compiled, {len(entries)} stored")
    for file, entry in entries:
        if entry is None:
            return ARTIFACTS.broken(f"{file.path.name}: it cannot be read as it was written")
        asked: Any = _Asked(file.path.stem, entry.facts)
        verdict = torn_artifacts_are_misses(lambda path: store.load(asked)[0], file.path)  # noqa: B023
        if verdict.outcome is not Outcome.HELD:
            return verdict
    try:
        compiled, found = build_without_compiler()
    except LaunchError as error:
        return ARTIFACTS.broken(f"with the compiler forbidden: {error}")
    if compiled or found < len(entries):
        return ARTIFACTS.broken(f"again: {compiled} compiled, {found} of {len(entries)} loaded")
    return ARTIFACTS.held(
        f"{len(entries)} kernels: every damaged form of each is a miss, and all load where the "
        "compiler is forbidden"
    )


@dataclass(frozen=True)
class _Asked:
    """The key of a stored kernel, as its entry tells it."""

    name: str
    stored: Any

    def digest(self) -> str:
        """Names the file."""
        return self.name

    def facts(self) -> Any:
        """What the entry must hold."""
        return self.stored


def _here(fresh: Callable[[], Any], folder: Path) -> tuple[Build, Build]:
    """Builds in this process, each with its memory of code emptied."""
    from tilewright.artifact import compiler_forbidden, counters
    from tilewright.engines.compiled import code_cache

    def build() -> tuple[int, int]:
        with _store_in(folder):
            code_cache.forget()
            before = counters()
            fresh()
            after = counters()
        return after.compiles - before.compiles, after.disk_hits - before.disk_hits

    def without_compiler() -> tuple[int, int]:
        with compiler_forbidden():
            return build()

    return build, without_compiler


def _in_children(declaration: bytes, folder: Path) -> tuple[Build, Build]:
    """Builds by ``tilewright compile`` in processes that do not interpret."""
    path = folder / "graph.json"
    path.write_bytes(declaration)

    def build(**variables: str) -> tuple[int, int]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment |= {_FOLDER: str(folder), "TILEWRIGHT_CACHE": "1", **variables}
        source = str(Path(sys.modules["tilewright"].__path__[0]).parent)
        inherited = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, inherited)))
        command = [sys.executable, "-m", "tilewright", "compile", str(path), "--target", _TARGET]
        done = subprocess.run(
            [*command, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_CHILD_S,
            check=False,
        )
        if done.returncode != 0:
            raise LaunchError((done.stderr.strip() or done.stdout.strip())[-500:])
        told = json.loads(done.stdout)
        return told["compiled"], told["found"]

    return build, lambda: build(TILEWRIGHT_FORBID_COMPILER="1")


@contextlib.contextmanager
def _store_in(folder: Path) -> Iterator[None]:
    names = (_FOLDER, "TILEWRIGHT_CACHE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict(zip(names, (str(folder), "1"), strict=True)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
