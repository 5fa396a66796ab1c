"""Run the example graphs with the command line, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Interpreters that run side by side: most of the time is the import of PyTorch.
_PROCESSES = 2
_TIMEOUT_S = 120


@dataclass(frozen=True)
class GraphRun:
    """What ``tilewright run`` said of one graph; ``error`` is empty if it exited with 0."""

    name: str
    plan: str
    max_error: float
    tolerance: float
    time_us: float
    verdict: str
    error: str


def command(path: Path) -> list[str]:
    """The command line for one graph, as a list; `tilewright run PATH` on a prompt."""
    return [sys.executable, "-m", "tilewright.cli.main", "run", str(path), "--json"]


def run_graphs(paths: Sequence[Path]) -> Iterator[GraphRun]:
    """Run every graph and yield what came of it, in the order of ``paths``."""
    with ThreadPoolExecutor(_PROCESSES) as pool:
        yield from pool.map(_run, paths)


def _run(path: Path) -> GraphRun:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command(path),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return _failed(path, f"no answer in {_TIMEOUT_S} s")
    if done.returncode != 0:
        return _failed(path, done.stderr.strip() or f"exit status {done.returncode}")
    said = json.loads(done.stdout)
    # The output that comes closest to its tolerance.
    worst = max(said["outputs"], key=lambda entry: entry["max_error"] / entry["tolerance"])
    return GraphRun(
        name=path.stem,
        plan=said["plan"],
        max_error=worst["max_error"],
        tolerance=worst["tolerance"],
        time_us=said["time_us"],
        verdict=said["verdict"],
        error="" if said["verdict"] == "ok" else worst["detail"],
    )


def _failed(path: Path, error: str) -> GraphRun:
    nothing = float("nan")
    return GraphRun(path.stem, "", nothing, nothing, nothing, "failed", error)
