"""What the units of a multiprocessor do under FP8 attention, ours and cuDNN's, by ``ncu``.

    python benchmark/hopper_fp8_counters.py

Needs Nsight Compute's ``ncu`` and leave to read counters. It profiles one launch each of our FP8
kernel, our bfloat16 kernel and cuDNN's FP8 kernel (if its front end is installed) at head size 128
and 8192 keys, full and causal, on the numbers of ``hopper_fp8.py``, with clocks as they come, and
writes benchmark/results/<device>/hopper_fp8_counters.csv. Units are in per cent of what they could
do while a multiprocessor is active, shared memory and the second-level cache of the kernel's time.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from hopper_attention import build, frame
from hopper_fp8 import FP8, build_fp8, cudnn, dim_of, own
from results import Table
from timing import Call

SIZE, LENGTH = 128, 8192
MASKS = {"full": False, "causal": True}
_ACTIVE = ".avg.pct_of_peak_sustained_active"
_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
# Column of the table: (what ncu calls it, in base units; what it is divided by; digits).
METRICS = {
    "us": ("gpu__time_duration.sum", 1e3, 1),
    "ghz": ("sm__cycles_elapsed.avg.per_second", 1e9, 2),
    "cycles_active": ("sm__cycles_active.avg", 1.0, 0),
    "tensor": ("sm__pipe_tensor_cycles_active" + _ACTIVE, 1.0, 1),
    "xu": ("sm__inst_executed_pipe_xu" + _ACTIVE, 1.0, 1),
    "alu": ("sm__inst_executed_pipe_alu" + _ACTIVE, 1.0, 1),
    "fma": ("sm__inst_executed_pipe_fma" + _ACTIVE, 1.0, 1),
    "issue": ("sm__inst_issued" + _ACTIVE, 1.0, 1),
    "shared": ("l1tex__data_pipe_lsu_wavefronts_mem_shared" + _ELAPSED, 1.0, 1),
    "l1": ("l1tex__throughput" + _ELAPSED, 1.0, 1),
    "l2": ("lts__throughput" + _ELAPSED, 1.0, 1),
    "million_instructions": ("sm__inst_executed.sum", 1e6, 1),
    "threads": ("launch__block_size", 1.0, 0),
    "registers": ("launch__registers_per_thread", 1.0, 0),
    "shared_kib": ("launch__shared_mem_per_block_dynamic", 1024.0, 1),
}
# By their names: what else a call launches is not looked at.
KERNELS = "regex:attention.*forward|fprop"


def calls() -> dict[tuple[str, str], Call]:
    """(kernel, mask) to a call of it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(dim_of(SIZE, LENGTH), device="cuda").to(FP8) for _ in range(3))
    wide = [x.to(torch.bfloat16) for x in (q, k, v)]
    made: dict[tuple[str, str], Call] = {}
    for mask, causal in MASKS.items():
        o = torch.zeros(q.shape, device="cuda").to(FP8)
        made["fp8", mask] = own(q, k, v, o, causal)
        made["bf16", mask] = frame(*wide, torch.empty_like(wide[0]), causal).launch
        other = cudnn(q, k, v, torch.zeros_like(o), causal)
        if other is not None:
            made["cudnn", mask] = other
    return made


def launch(path: Path) -> None:
    """Each call once, watched, when all have run twice; what was called goes to a file."""
    made = calls()
    for call in (*made.values(), *made.values()):
        call()
    torch.cuda.synchronize()
    path.write_text("\n".join(" ".join(names) for names in made))
    torch.cuda.cudart().cudaProfilerStart()
    for call in made.values():
        call()
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main() -> None:
    if sys.argv[1:2] == ["--launch"]:
        launch(Path(sys.argv[2]))
        return
    for causal in MASKS.values():
        build_fp8(SIZE, LENGTH, causal)
        build(SIZE, LENGTH, causal)
    with tempfile.TemporaryDirectory() as folder:
        names, log = Path(folder) / "names", Path(folder) / "log"
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "-k", KERNELS]
        command += ["--metrics", ",".join(name for name, _, _ in METRICS.values())]
        command += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        command += [sys.executable, __file__, "--launch", str(names)]
        done = subprocess.run(command, check=False)
        text = log.read_text() if log.exists() else ""
        if done.returncode != 0 or not names.exists():
            raise SystemExit(f"ncu ended with {done.returncode}: {text[-2000:]}")
        called = [line.split() for line in names.read_text().splitlines()]
    _, *found = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    if len(found) != len(called):
        raise SystemExit(f"{len(called)} calls, {len(found)} kernels: {text[-2000:]}")
    table = Table("hopper_fp8_counters", "python benchmark/hopper_fp8_counters.py")
    for (kernel, mask), row in zip(called, found, strict=True):
        columns = {
            column: f"{float(row[name].replace(',', '')) / unit:.{digits}f}"
            for column, (name, unit, digits) in METRICS.items()
        }
        table.add(kernel=kernel, mask=mask, **columns, name=row["Kernel Name"][:60])
    table.write()


if __name__ == "__main__":
    main()
