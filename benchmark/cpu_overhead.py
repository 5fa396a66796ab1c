"""Host time of our calls against PyTorch's on this machine's CPU.

    OMP_NUM_THREADS=1 python benchmark/cpu_overhead.py

runs every subject of `tilewright bench` and writes benchmark/results/cpu/launch.csv and launch.png.
One thread keeps the two sides comparable on a machine that does other work besides. Arguments are
passed on to `tilewright bench`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tilewright.cli.main import main

RESULTS = Path(__file__).resolve().parent / "results/cpu"

if __name__ == "__main__":
    RESULTS.mkdir(parents=True, exist_ok=True)
    files = ["--csv", str(RESULTS / "launch.csv"), "--png", str(RESULTS / "launch.png")]
    sys.exit(main(["bench", *sys.argv[1:], *files]))
