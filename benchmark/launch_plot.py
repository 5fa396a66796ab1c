"""Draw results/<device>/launch.csv and launch_routes.csv as one picture, launch.png.

python benchmark/launch_plot.py nvidia_h200
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent / "results"


def rows_of(path: Path) -> list[dict[str, str]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def main(device: str) -> None:
    folder = RESULTS / device
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    for axis, name, label in (
        (axes[0], "launch.csv", "subject"),
        (axes[1], "launch_routes.csv", "route"),
    ):
        rows = [row for row in rows_of(folder / name) if row["host_us"]]
        times = [float(row["host_us"]) for row in rows]
        bars = axis.barh([row[label] for row in rows], times, color="tab:blue")
        axis.bar_label(bars, [f"{value:.1f}" for value in times], padding=2)
        axis.invert_yaxis()
        axis.set_xlabel("host microseconds a call")
        axis.margins(x=0.15)
    axes[0].set_title("a call with three operands")
    axes[1].set_title("a launch by every route")
    figure.suptitle(f"{device}: host time, medians")
    figure.tight_layout()
    figure.savefig(folder / "launch.png", dpi=120)


if __name__ == "__main__":
    main(sys.argv[1])
