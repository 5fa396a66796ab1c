"""Draws pointwise.csv and rope.csv under benchmark/results/<device>/: bandwidth by subject.

python benchmark/elementwise_plot.py nvidia_h200
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from results import RESULTS


def draw(path: Path, group: str) -> Path:
    """A bar a subject, in groups of column ``group``."""
    with path.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    groups = list(dict.fromkeys(row[group] for row in rows))
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    rates = {(row[group], row["subject"]): float(row["tb_s"]) for row in rows}
    height = 0.8 / len(subjects)
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.25 * len(rows)))
    for number, subject in enumerate(subjects):
        places = [at + height * number for at in range(len(groups))]
        axis.barh(places, [rates[name, subject] for name in groups], height, label=subject)
    axis.set_yticks([at + 0.4 - height / 2 for at in range(len(groups))], groups)
    axis.invert_yaxis()
    axis.set_xlabel("TB/s read and written")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    made = path.with_suffix(".png")
    figure.savefig(made, dpi=120)
    return made


if __name__ == "__main__":
    folder = RESULTS / (sys.argv[1] if len(sys.argv) > 1 else "nvidia_h200")
    for name, column in (("pointwise", "graph"), ("rope", "layout")):
        if (folder / f"{name}.csv").exists():
            print(draw(folder / f"{name}.csv", column))
