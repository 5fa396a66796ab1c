"""The first norm of a process from the store: how long after torch's import it has run.

    python benchmark/artifacts_gpu.py

One process compiles and stores; then processes with the compiler forbidden each import tilewright,
declare, plan, build, load and run one RMSNorm. The clock starts when torch is imported and the
device's context and the operands are there; it stops when the result is. Medians over the
processes, and by step, with the median of the processor time. The package is run from a copy, as
it is installed. Writes benchmark/results/<device>/artifacts.csv.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import Table

PROCESSES = 4
SOURCE = Path(__file__).resolve().parents[1] / "src"

CHILD = """
import json, sys, time
import torch
x = torch.randn(64, 1024, device="cuda").bfloat16()
scale = torch.ones(1, 1024, device="cuda").bfloat16()
y = torch.empty_like(x)
wanted = torch.nn.functional.rms_norm(x.double(), (1024,), scale[0].double(), 1e-6)
torch.cuda.synchronize()
had_triton = "triton" in sys.modules
now = lambda: (time.perf_counter(), time.process_time())
marks = [("", now())]
mark = lambda name: marks.append((name, now()))
import tilewright as tw
tw.Graph
mark("import")
graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
source, weight = graph.tensor(x.shape, name="x"), graph.tensor((1, 1024), name="scale")
phase = tw.norm_forward_phase.INFERENCE
out, _ = graph.rmsnorm(phase, source, weight, None, graph.tensor_scalar(1e-6))
out.set_output(True).set_name("y")
graph.validate()
mark("declare")
graph.create_execution_plans()
mark("plan")
graph.build_plans()
mark("build and load")
graph.execute({"x": x, "scale": scale, "y": y})
torch.cuda.synchronize()
mark("first run")
assert ((y.double() - wanted).abs().max() / wanted.abs().max()).item() < 2**-8
from tilewright.artifact import counters
steps = {name: [(b - a) * 1e3 for a, b in zip(*pair)]
         for name, pair in ((name, (before, at)) for (_, before), (name, at) in
                            zip(marks, marks[1:]))}
print(json.dumps({
    "total": [(b - a) * 1e3 for a, b in zip(marks[0][1], marks[-1][1])],
    **steps,
    "engine": graph.selected_engine,
    "compiles": counters().compiles,
    "imports triton": "triton" in sys.modules and not had_triton,
}))
"""


def run(folder: Path, **variables: str) -> dict[str, Any]:
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    environment["TILEWRIGHT_CACHE_DIR"] = str(folder / "store")
    # As installed: with compiled modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment
    )
    if child.returncode:
        raise SystemExit(child.stderr)
    result: dict[str, Any] = json.loads(child.stdout)
    assert result["engine"] == "triton"
    return result


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SOURCE / "tilewright", folder / "tilewright", ignore=ignored)
        compiled = run(folder)
        stored = [run(folder, TILEWRIGHT_FORBID_COMPILER="1") for _ in range(PROCESSES)]
    assert compiled["compiles"] > 0
    assert all(result["compiles"] == 0 for result in stored)
    table = Table("artifacts", "python benchmark/artifacts_gpu.py")
    for step in ("import", "declare", "plan", "build and load", "first run", "total"):
        times = sorted(result[step][0] for result in stored)
        processor = statistics.median(result[step][1] for result in stored)
        table.add(
            step=step,
            from_store_ms=f"{statistics.median(times):.2f}",
            least_ms=f"{times[0]:.2f}",
            most_ms=f"{times[-1]:.2f}",
            processor_ms=f"{processor:.2f}",
            compiling_ms=f"{compiled[step][0]:.1f}",
            imports_triton="yes" if any(r["imports triton"] for r in stored) else "no",
        )
    table.write()


if __name__ == "__main__":
    main()
