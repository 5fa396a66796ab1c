"""Draws the results of a device, each picture beside its table.

    python benchmark/pictures.py nvidia_h200 [attention hopper ..]

Needs matplotlib, and no GPU. Without a name it draws all that there are tables for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from results import RESULTS, read_rows

Row = dict[str, str]
Size = tuple[float, float]
# Kernels by their names in tables: what they are called in a picture, and their color in each.
KERNELS = {
    "hopper": ("tilewright hopper", "tab:blue"),
    "tilewright hopper quick": ("tilewright hopper", "tab:blue"),
    "tilewright hopper fixed": ("tilewright hopper, in a fixed order", "lightskyblue"),
    "tilewright triton": ("tilewright triton", "tab:purple"),
    "tilewright triton quick": ("tilewright triton", "tab:purple"),
    "tilewright triton fixed": ("tilewright triton, in a fixed order", "plum"),
    "cudnn": ("cuDNN", "tab:orange"),
    "torch cudnn": ("cuDNN", "tab:orange"),
    "cudnn front end": ("cuDNN by its front end", "gold"),
    "cute": ("FA-cute", "tab:green"),
    "FA-cute": ("FA-cute", "tab:green"),
    "flash": ("PyTorch's flash", "tab:red"),
    "torch flash": ("PyTorch's flash", "tab:red"),
    "fp8": ("tilewright hopper, FP8", "tab:cyan"),
    "bf16": ("tilewright hopper, bfloat16", "tab:blue"),
    "cudnn fp8": ("cuDNN, FP8", "tab:orange"),
}
# The same where one query reads a cache.
DECODERS = {
    "tilewright triton": ("tilewright triton, dense", "tab:purple"),
    "pages of 128": ("tilewright triton, pages of 128", "mediumorchid"),
    "pages of 16": ("tilewright triton, pages of 16", "plum"),
    "torch cudnn": KERNELS["torch cudnn"],
    "cudnn front end": KERNELS["cudnn front end"],
    "torch flash": KERNELS["torch flash"],
    "torch copy": ("a copy of as many bytes in all", "silver"),
}
# Kinds of a table of attention that are neither dense nor decoding.
PACKED = {"ragged": "packed, a heavy tail", "window": "16,384 keys"}
MASKS = {"full": "full", "none": "full", "causal": "causal", "0": "full", "1": "causal"}


def draw_attention(folder: Path) -> Any:
    """Dense cases of the engine for many devices, by length."""
    rows = [row for row in read_rows(folder / "attention.csv") if row["kind"] == "dense"]
    points = [(row["depth"], row["mask"], row["who"], row["length"], row["rate"]) for row in rows]
    return _by_length(points, (12, 6))


def draw_attention_decode(folder: Path) -> Any:
    """Microseconds of a call, a panel a declared length, bars for how long sequences are."""
    rows = [row for row in read_rows(folder / "attention.csv") if row["kind"] == "decode"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    kinds = {"even": "as long as declared", "uneven": "uneven", "quarter": "a quarter each"}
    figure, axes = pyplot.subplots(1, len(lengths), figsize=(12, 4.5))
    for axis, length in zip(axes, lengths, strict=True):
        times: dict[str, dict[str, float]] = {}
        for row in rows:
            kind, _, page = row["mask"].partition(", page ")
            is_ours = row["who"] == "tilewright triton"
            if row["length"] == length and (is_ours or not page):
                name = f"pages of {page}" if page else row["who"]
                times.setdefault(name, {})[kind] = 1e3 * float(row["ms"])
        names = [name for name in DECODERS if name in times]
        _bars(axis, kinds, [(*DECODERS[name], times[name]) for name in names])
        axis.set_title(f"8 sequences, {length} keys declared")
    axes[0].set_ylabel("microseconds")
    axes[-1].legend(fontsize=8)
    figure.suptitle("decoding, 32 query heads on 8 key heads of 128, bfloat16")
    return figure


def draw_attention_packed(folder: Path) -> Any:
    """TFLOP/s of what a mask lets through: packed sequences, and a window beside its triangle."""
    rows = [row for row in read_rows(folder / "attention.csv") if row["kind"] in PACKED]
    cases = {
        (row["kind"], row["mask"]): f"{PACKED[row['kind']]}, {MASKS.get(row['mask'], row['mask'])}"
        for row in rows
    }
    names = list(dict.fromkeys(row["who"] for row in rows))
    figure, axis = pyplot.subplots(figsize=(9, 4.5))
    speeds = [
        {(r["kind"], r["mask"]): float(r["rate"]) for r in rows if r["who"] == n} for n in names
    ]
    _bars(axis, cases, [(*KERNELS[name], found) for name, found in zip(names, speeds, strict=True)])
    axis.set_ylabel("TFLOP/s of visible scores")
    axis.legend(fontsize=8)
    figure.suptitle("head size 128, bfloat16")
    return figure


def _bars(axis: Any, cases: Mapping[Any, str], kernels: Sequence[Any]) -> None:
    """Groups of bars, a group a case, whose labels ``cases`` holds.

    ``kernels`` are (label, color, heights by case), in the order in which their bars lie.
    """
    width = 0.8 / len(kernels)
    for number, (label, color, heights) in enumerate(kernels):
        at = [[*cases].index(case) + number * width for case in heights]
        bars = axis.bar(at, [*heights.values()], width, label=label, color=color)
        axis.bar_label(bars, [f"{height:.0f}" for height in heights.values()], fontsize=7)
    axis.set_xticks([place + 0.4 - width / 2 for place in range(len(cases))], [*cases.values()])


def draw_hopper(folder: Path) -> Any:
    """The grid of head sizes and lengths."""
    rows = [row for row in read_rows(folder / "hopper.csv") if row["case"] == "grid"]
    names = ("hopper", "cudnn", "cute", "flash")
    return _by_length(_points(rows, dict(zip(names, names, strict=True))), (12, 6))


def draw_hopper_fp8(folder: Path) -> Any:
    """The grid in FP8 and in bfloat16."""
    rows = read_rows(folder / "hopper_fp8.csv")
    names = {"fp8": "fp8", "bf16": "bf16", "cudnn": "cudnn fp8"}
    return _by_length(_points(rows, names), (9, 6))


def _points(rows: Sequence[Row], kernels: Mapping[str, str]) -> list[tuple[str, ...]]:
    """What ``_by_length`` takes, of a table that has a column a kernel; kernels by column."""
    return [
        (row["head_size"], row["mask"], kernel, row["length"], row[column])
        for row in rows
        for column, kernel in kernels.items()
        if row[column]
    ]


def _by_length(points: Sequence[tuple[str, ...]], size: Size) -> Any:
    """A panel a head size and mask; points are those two, a kernel, the length and the speed."""
    depths = sorted({int(depth) for depth, *_ in points})
    masks = sorted({mask for _, mask, *_ in points}, key=lambda mask: MASKS[mask] != "full")
    figure, axes = pyplot.subplots(
        len(masks), len(depths), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for line, mask in zip(axes, masks, strict=True):
        for axis, depth in zip(line, depths, strict=True):
            cells = [point[2:] for point in points if point[:2] == (str(depth), mask)]
            for name in dict.fromkeys(name for name, *_ in cells):
                label, color = KERNELS[name]
                lengths, speeds = zip(
                    *((int(x), float(y)) for kernel, x, y in cells if kernel == name), strict=True
                )
                axis.plot(lengths, speeds, marker="o", label=label, color=color)
            ticks = sorted({int(length) for _, length, _ in cells})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set_title(f"head size {depth}, {MASKS[mask]}")
            axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)
    axes[0][len(depths) // 2].legend(loc="lower right", fontsize=8)
    figure.supxlabel("length, 16,384 tokens in all")
    figure.supylabel("TFLOP/s")
    return figure


def draw_attention_backward(folder: Path) -> Any:
    """Bars a case, a panel a length."""
    rows = read_rows(folder / "attention_backward.csv")
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    figure, axes = pyplot.subplots(len(lengths), 1, figsize=(11, 9), sharey=True)
    for axis, length in zip(axes, lengths, strict=True):
        here = [row for row in rows if row["length"] == length]
        cases = sorted(
            {(row["depth"], row["causal"]) for row in here}, key=lambda c: (int(c[0]), c)
        )
        names = sorted({row["who"] for row in here}, key=list(KERNELS).index)
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            speeds = {
                (row["depth"], row["causal"]): float(row["tflop_s"])
                for row in here
                if row["who"] == name
            }
            label, color = KERNELS[name]
            at = [cases.index(case) + number * width for case in speeds]
            axis.bar(at, [*speeds.values()], width, label=label, color=color)
        middle = 0.4 - width / 2
        axis.set_xticks(
            [place + middle for place in range(len(cases))],
            [f"head size {depth}, {MASKS[causal]}" for depth, causal in cases],
        )
        axis.set_title(f"backward, length {length}, 16,384 tokens in all, bfloat16")
        axis.set_ylabel("TFLOP/s")
    # Room for the legend above the bars.
    axes[0].set_ylim(top=1.3 * axes[0].get_ylim()[1])
    axes[0].legend(fontsize=8, ncols=4, loc="upper center")
    return figure


def draw_norms(folder: Path) -> Any:
    """Bandwidth by row length, forward and backward."""
    rows = read_rows(folder / "torch.csv")
    panels = {
        "forward": ("rms_norm", "layer_norm"),
        "backward": ("rms_norm backward", "layer_norm backward"),
    }
    widths = list(dict.fromkeys(row["width"] for row in rows))
    rates = {(row["subject"], row["width"]): float(row["tb_s"]) for row in rows}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for axis, (title, kinds) in zip(axes, panels.items(), strict=True):
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
    return figure


def draw_pointwise(folder: Path) -> Any:
    """Bandwidth, a group of bars a graph."""
    return _by_subject(read_rows(folder / "pointwise.csv"), "graph")


def draw_rope(folder: Path) -> Any:
    """Bandwidth, a group of bars a layout."""
    return _by_subject(read_rows(folder / "rope.csv"), "layout")


def _by_subject(rows: Sequence[Row], group: str) -> Any:
    """A bar a subject, in groups of a column."""
    groups = list(dict.fromkeys(row[group] for row in rows))
    subjects = list(dict.fromkeys(row["subject"] for row in rows))
    rates = {(row[group], row["subject"]): float(row["tb_s"]) for row in rows}
    height = 0.8 / len(subjects)
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.25 * len(rows)))
    for number, subject in enumerate(subjects):
        places = [at + height * number for at in range(len(groups))]
        axis.barh(places, [rates[name, subject] for name in groups], height, label=subject)
    axis.set_yticks([at + 0.4 - height / 2 for at in range(len(groups))], groups)
    axis.invert_yaxis()
    axis.set_xlabel("TB/s read and written")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_launch(folder: Path) -> Any:
    """Host time of calls, and of a launch by every route."""
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5))
    for axis, name, label in (
        (axes[0], "launch.csv", "subject"),
        (axes[1], "launch_routes.csv", "route"),
    ):
        rows = [row for row in read_rows(folder / name) if row["host_us"]]
        times = [float(row["host_us"]) for row in rows]
        bars = axis.barh([row[label] for row in rows], times, color="tab:blue")
        axis.bar_label(bars, [f"{value:.1f}" for value in times], padding=2)
        axis.invert_yaxis()
        axis.set_xlabel("host microseconds a call")
        axis.margins(x=0.15)
    axes[0].set_title("a call with three operands")
    axes[1].set_title("a launch by every route")
    figure.suptitle(f"{folder.name}: host time, medians")
    return figure


# By the name of the picture, which is that of its table but for some.
TABLES = {"attention_decode": "attention", "attention_packed": "attention"}
PICTURES: dict[str, Callable[[Path], Any]] = {
    "attention": draw_attention,
    "attention_decode": draw_attention_decode,
    "attention_packed": draw_attention_packed,
    "attention_backward": draw_attention_backward,
    "hopper": draw_hopper,
    "hopper_fp8": draw_hopper_fp8,
    "launch": draw_launch,
    "pointwise": draw_pointwise,
    "rope": draw_rope,
    "torch": draw_norms,
}
DOTS_AN_INCH = 120


def main(device: str, *names: str) -> None:
    """Draw these of a device, or all that there are tables for."""
    folder = RESULTS / device
    known = [name for name in PICTURES if (folder / f"{TABLES.get(name, name)}.csv").exists()]
    for name in names or known:
        figure = PICTURES[name](folder)
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=DOTS_AN_INCH)
        pyplot.close(figure)
        print(f"{name}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
