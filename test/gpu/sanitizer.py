"""Run one call of every compiled kernel family under NVIDIA's compute-sanitizer; write a record.

    PYTHONPATH=src python test/gpu/sanitizer.py --record test/gpu/records/DEVICE_sanitizer.json

Needs a CUDA device and compute-sanitizer. memcheck finds accesses outside of allocations (torch's
cache of blocks is off, so neighbours do not hide them), racecheck finds shared memory that threads
use without a barrier, initcheck finds reads of memory that nobody wrote. The samples are those of
test/python/core/launch/test_compiled_families_on_gpu.py. What racecheck says of the tiny kernels of
sanitizer_controls.py is kept beside: it tells which reports, and which silence, mean something.
Reports of racecheck on the words that tell warps their partition, and on nothing else, are counted
apart (partition_words.py tells them by the machine code). The exit status is 0 if there are no
others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from partition_words import line_of_words, reports_by_kind

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "test/python/core/launch/test_compiled_families_on_gpu.py"
CONTROLS = Path(__file__).with_name("sanitizer_controls.py")
TOOLS = ("memcheck", "racecheck", "initcheck")
ERROR_STATUS = 9
_TAIL_CHARS = 1500


def samples() -> Any:
    """The module that declares a sample graph of each family."""
    # As the tests' conftest does.
    sys.path.insert(0, str(SAMPLES.parent))
    return module_of(SAMPLES)


def module_of(path: Path) -> Any:
    """A module that is no part of a package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_sample(name: str) -> None:
    """In the tool's process: build one sample's graph and run it once."""
    module = samples()
    declare = {row[0].__name__: row[0] for row in module.SAMPLES}[name]
    graph, operands = module.built(declare)
    module.results_of(graph, operands)
    from tilewright.engines.compiled import code_cache

    codes = code_cache._memory.values()
    print(line_of_words((c.name, c.image, c.threads // 32, c.shared_bytes) for c in codes))
    print(f"ran on {graph.selected_engine}")


def check(tool: str, name: str, limit_s: float, *, is_control: bool = False) -> dict[str, Any]:
    """One sample, or one control, under one tool."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(ERROR_STATUS)]
    own = [str(CONTROLS), name] if is_control else [__file__, "--sample", name]
    command += [sys.executable, *own]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s
        )
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        text, status = str(error), 124
    summary = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line]
    found: dict[str, Any] = {
        "tool": tool,
        "sample": name,
        "status": status,
        "summary": summary[-1] if summary else "",
        "seconds": round(time.monotonic() - began, 1),
    }
    if status != 0:
        found["output"] = text[-_TAIL_CHARS:]
    if status == ERROR_STATUS and tool == "racecheck":
        found["reports"] = reports_by_kind(text)
    found["clean"] = status == 0 or found.get("reports", {}).get("other") == 0
    return found


def told(rows: Iterable[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows, each printed as it comes."""
    found = []
    for row in rows:
        found.append(row)
        what = f"{row['tool']:10} {row['sample']:28} {row['status']:3} {row['summary']}"
        what += " on partition words alone" if row["clean"] and row["status"] else ""
        print(f"{len(found):3} of {count}: {what}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--sample", help="run this sample here, under no tool")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds a sample and tool")
    arguments = parser.parse_args()
    if arguments.sample:
        run_sample(arguments.sample)
        return 0
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on the path")
    import torch
    import triton

    names = [row[0].__name__ for row in samples().SAMPLES]
    jobs = [(tool, name) for name in names for tool in TOOLS]
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    tiny = module_of(CONTROLS).CONTROLS if is_hopper else ()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = told(pool.map(lambda job: check(*job, arguments.limit), jobs), len(jobs))
        print("controls:")
        controls = told(
            pool.map(lambda name: check("racecheck", name, 40.0, is_control=True), tiny), len(tiny)
        )
    clean = sum(row["clean"] for row in found)
    of_words = sum(row["clean"] and row["status"] != 0 for row in found)
    print(f"{clean} of {len(found)} clean, {of_words} of them but for partition words")
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "command": "PYTHONPATH=src python test/gpu/sanitizer.py --record RECORD.json",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
            "device": torch.cuda.get_device_name(),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "clean": clean,
            "runs": found,
            "controls": controls,
        }
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if clean == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
