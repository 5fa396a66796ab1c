"""Run the L0 and L1 tests against each mutant, and say which mutants no test notices.

    python test/mutation/run.py mutants.json --jobs 16 --output results.csv

Each job works in a copy of the tree of its own. A mutant is killed if its tests fail, crash, or
take longer than the limit. The exit status is 1 if less than 90% are killed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 240
WANTED_SHARE = 0.9


def copy_tree(folder: Path) -> Path:
    """A copy of what the tests need, without bytecode."""
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__", ".venv", ".git", "results")
    for name in ("src", "test", "examples", "docs", "benchmark"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def judge(mutant: dict[str, Any], trees: queue.Queue[Path]) -> dict[str, Any]:
    """Apply, test, restore."""
    tree = trees.get()
    path = tree / mutant["file"]
    original = path.read_text()
    started = time.monotonic()
    try:
        path.write_text(mutant["code"])
        outcome, evidence = run_tests(tree, mutant["tests"].split())
    finally:
        path.write_text(original)
        trees.put(tree)
    shown = {name: mutant[name] for name in ("file", "operator", "occurrence", "change")}
    seconds = f"{time.monotonic() - started:.0f}"
    return {**shown, "outcome": outcome, "seconds": seconds, "evidence": evidence}


def run_tests(tree: Path, tests: list[str]) -> tuple[str, str]:
    """(killed, timeout or survived; the failing test)."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    environment |= {"TILEWRIGHT_NO_ISOLATION": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "L0 or L1", "-k", "not triton and not memory", *tests]
    try:
        child = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "killed", f"over {LIMIT_SECONDS} s"
    if child.returncode == 0:
        return "survived", ""
    lines = child.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "killed", (failed or lines[-1:] or ["no output"])[0][:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mutants", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=10**6, help="start no mutant after this")
    arguments = parser.parse_args()
    mutants = json.loads(arguments.mutants.read_text())
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(arguments.jobs):
            place = Path(folder) / str(number)
            place.mkdir()
            trees.put(copy_tree(place))
        baseline = {test for mutant in mutants for test in mutant["tests"].split()}
        tree = trees.get()
        outcome, evidence = run_tests(tree, sorted(baseline)) if arguments.jobs else ("", "")
        trees.put(tree)
        if outcome != "survived":
            print(f"the tests fail without any mutant: {evidence}")
            return 2
        results = []
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            pending = [pool.submit(judge, mutant, trees) for mutant in mutants]
            for future in concurrent.futures.as_completed(pending):
                results.append(future.result())
                if time.monotonic() - started > arguments.seconds:
                    for waiting in pending:
                        waiting.cancel()
                    break
            results += [f.result() for f in pending if f.done() and not f.cancelled()]
    results = list({(r["file"], r["operator"], r["occurrence"]): r for r in results}.values())
    results.sort(key=lambda result: (result["outcome"] == "killed", result["file"]))
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(results[0]))
        writer.writeheader()
        writer.writerows(results)
    killed = sum(result["outcome"] == "killed" for result in results)
    print(f"{killed} of {len(results)} mutants killed in {time.monotonic() - started:.0f} s")
    for result in results:
        if result["outcome"] == "survived":
            print(f"survived: {result['file']}: {result['operator']}: {result['change']}")
    return 0 if killed >= WANTED_SHARE * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
