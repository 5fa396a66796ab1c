"""Draws benchmark/results/<device>/torch.csv, as norms_gpu.py writes it: bandwidth by row length.

python benchmark/norms_plot.py nvidia_h200
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from results import RESULTS

_PANELS = {
    "forward": ("rms_norm", "layer_norm"),
    "backward": ("rms_norm backward", "layer_norm backward"),
}


def draw(path: Path) -> Path:
    with path.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    widths = list(dict.fromkeys(row["width"] for row in rows))
    rates = {(row["subject"], row["width"]): float(row["tb_s"]) for row in rows}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, (title, kinds) in zip(axes, _PANELS.items(), strict=True):
        subjects = ["copy", *(f"{who} {kind}" for kind in kinds for who in ("tilewright", "torch"))]
        for number, subject in enumerate(subjects):
            places = [at + 0.16 * (number - 2) for at in range(len(widths))]
            axis.bar(places, [rates[subject, width] for width in widths], 0.15, label=subject)
        axis.set_xticks(range(len(widths)), widths)
        axis.set_xlabel("elements a row")
        axis.set_title(f"{title}, bfloat16, 16384 rows")
        axis.legend(fontsize=7)
    # Room for the legends above the bars.
    axes[0].set_ylim(0, 1.4 * max(rates.values()))
    axes[0].set_ylabel("TB/s read and written")
    figure.tight_layout()
    made = path.with_name("torch.png")
    figure.savefig(made, dpi=120)
    return made


if __name__ == "__main__":
    print(draw(RESULTS / (sys.argv[1] if len(sys.argv) > 1 else "nvidia_h200") / "torch.csv"))
