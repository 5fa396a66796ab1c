"""Run the L0 and L1 tests against each mutant, and say which mutants no test notices.

    python test/mutation/run.py mutants.json --jobs 16 --output results.csv

Each job works in a copy of the tree of its own. A mutant is killed if its tests fail, crash, or
take longer than the limit. Every set of tests also runs once on the code as it is, and must pass.
The exit status is 1 if less than 90% are killed, 2 if tests fail without a mutant.
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
LIMIT_SECONDS = 110
WANTED_SHARE = 0.9
AS_IT_IS = "none"


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


def as_it_is(tests: str) -> dict[str, Any]:
    """A mutant that changes nothing, to see the tests pass."""
    path = "src/tilewright/_version.py"
    code = (ROOT / path).read_text()
    shown = {"file": path, "operator": AS_IT_IS, "occurrence": 0, "change": tests}
    return {**shown, "code": code, "tests": tests}


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
        unchanged = [as_it_is(tests) for tests in sorted({m["tests"] for m in mutants})]
        pool = concurrent.futures.ThreadPoolExecutor(arguments.jobs)
        pending = [pool.submit(judge, mutant, trees) for mutant in (*unchanged, *mutants)]
        done, late = concurrent.futures.wait(pending, timeout=arguments.seconds)
        pool.shutdown(wait=False, cancel_futures=True)
        results = [future.result() for future in done if not future.cancelled()]
        shutil.rmtree(folder, ignore_errors=True)
    wrong = [r for r in results if r["operator"] == AS_IT_IS and r["outcome"] == "killed"]
    for result in wrong:
        print(f"tests fail without a mutant: {result['change']}: {result['evidence']}")
    results = [result for result in results if result["operator"] != AS_IT_IS]
    print(f"{len(late)} runs were not finished in time")
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
    if wrong:
        return 2
    return 0 if killed >= WANTED_SHARE * len(results) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Runs that are late are left behind.
    os._exit(status)
