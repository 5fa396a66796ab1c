"""``tilewright bench``: our calls against PyTorch's on the same inputs, in one interleaved run."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli import files, options, output
from tilewright.cli.exits import ExitCode, fail

if TYPE_CHECKING:
    from tilewright.cli.subjects import Measurement

# The keys of subjects.SUBJECTS, repeated so that --help needs no torch.
SUBJECT_NAMES = ("matmul-execute", "sdpa", "layer_norm", "rms_norm", "linear")
_DEFAULT_ROUNDS = 30
_COLUMNS = (
    *("subject", "case", "baseline", "ours_us", "baseline_us", "ratio", "overhead_us"),
    *("promise", "kept", "samples"),
)
_FLOAT_COLUMNS = ("ours_us", "baseline_us", "ratio", "overhead_us")


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure against PyTorch on this machine",
        description="Time our calls and PyTorch's in turns on the same inputs, and report medians.",
    )
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="SUBJECT",
        help=f"what to measure (default: all): {', '.join(SUBJECT_NAMES)}",
    )
    parser.add_argument(
        "--rounds",
        type=options.positive,
        default=_DEFAULT_ROUNDS,
        metavar="N",
        help=f"turns of each pair ({_DEFAULT_ROUNDS})",
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write a table, with a header of comment lines"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the ratios (needs matplotlib)"
    )
    options.add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; a missed promise is told, and is no failure of the command."""
    names = list(dict.fromkeys(arguments.subjects)) or list(SUBJECT_NAMES)
    unknown = [name for name in names if name not in SUBJECT_NAMES]
    if unknown:
        fail(f"unknown subject {unknown[0]!r}; known are {', '.join(SUBJECT_NAMES)}")
    for path in (arguments.csv, arguments.png):
        if path is not None:
            files.check_writable(path)
    if arguments.png is not None:
        _require_matplotlib()
    from tilewright.cli.subjects import SUBJECTS, measure

    # Before the measurement, whose own load is no news.
    header = _header(names, arguments.rounds)
    measurements: list[Measurement] = []
    with _progress(len(names), quiet=arguments.json) as advance:
        for name in names:
            for pair in SUBJECTS[name]():
                measurements.append(measure(name, pair, arguments.rounds))
            advance(name)
    if arguments.csv is not None:
        with files.atomic_writer(arguments.csv) as file:
            file.write(csv_text(header, measurements).encode())
    if arguments.png is not None:
        with files.atomic_writer(arguments.png) as file:
            file.write(draw(header, measurements))
    if arguments.json:
        output.print_json({**header, "measurements": [_row(m) for m in measurements]})
    else:
        _print(header, measurements)
    return ExitCode.OK


def csv_text(header: dict[str, Any], measurements: Sequence[Measurement]) -> str:
    """The table as CSV, after comment lines that tell device, versions and command."""
    text = io.StringIO()
    for key, value in header.items():
        text.write(f"# {key}: {value}\n")
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for measurement in measurements:
        row = _row(measurement)
        row |= {key: f"{row[key]:.3f}" for key in _FLOAT_COLUMNS}
        writer.writerow(row)
    return text.getvalue()


def draw(header: dict[str, Any], measurements: Sequence[Measurement]) -> bytes:
    """A PNG of our time over PyTorch's, a bar a case, with the medians beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [f"{m.subject}\n{m.case}" for m in measurements]
    ratios = [m.ratio for m in measurements]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.65 * len(measurements)), dpi=120)
    colours = ["#c44e52" if m.is_kept is False else "#4c72b0" for m in measurements]
    axes.barh(labels, ratios, color=colours)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.axvline(1.0, color="black", linewidth=0.8)
    for index, m in enumerate(measurements):
        promised = f" ({m.promise}: {'kept' if m.is_kept else 'missed'})" if m.promise else ""
        text = f" {m.ours_us:.1f} against {m.theirs_us:.1f} us{promised}"
        axes.text(m.ratio, index, text, va="center", fontsize=8, bbox=behind)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.9 * max(ratios))
    axes.set_xlabel("our time over PyTorch's (median of interleaved rounds)")
    axes.set_title(f"{header['device']}, {header['clock']}\n{header['versions']}", fontsize=8)
    figure.tight_layout()
    image = io.BytesIO()
    # No date or version in the file: equal measurements give equal bytes.
    figure.savefig(image, format="png", metadata={"Software": None})
    pyplot.close(figure)
    return image.getvalue()


def _row(measurement: Measurement) -> dict[str, Any]:
    kept = measurement.is_kept
    return {
        "subject": measurement.subject,
        "case": measurement.case,
        "baseline": measurement.baseline,
        "ours_us": measurement.ours_us,
        "baseline_us": measurement.theirs_us,
        "ratio": measurement.ratio,
        "overhead_us": measurement.overhead_us,
        "promise": measurement.promise,
        "kept": "" if kept is None else "yes" if kept else "no",
        "samples": measurement.samples,
    }


def _header(names: Sequence[str], rounds: int) -> dict[str, Any]:
    from tilewright.cli import machine
    from tilewright.cli.subjects import uses_processor_time

    devices = machine.cuda_devices()
    found = machine.versions()
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    return {
        "device": devices[0]["name"] if devices else machine.describe_cpu(),
        "versions": versions,
        "load": machine.load(),
        "clock": "processor time" if uses_processor_time() else "wall clock",
        "command": f"tilewright bench {' '.join(names)} --rounds {rounds}",
    }


def _print(header: dict[str, Any], measurements: Sequence[Measurement]) -> None:
    rows = [
        (
            m.subject,
            m.case,
            f"{m.ours_us:.2f}",
            f"{m.theirs_us:.2f}",
            f"{m.ratio:.3f}",
            f"{m.overhead_us:+.2f}",
            m.promise and f"{m.promise}: {'kept' if m.is_kept else 'missed'}",
        )
        for m in measurements
    ]
    output.print_table(
        "; ".join(header[key] for key in ("device", "versions", "load", "clock")),
        ("subject", "case", "ours us", "torch us", "ratio", "difference us", "promised"),
        rows,
        numeric=("ours us", "torch us", "ratio", "difference us"),
    )


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal's standard error; nothing elsewhere."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=total)
        yield lambda name: progress.update(task, advance=1, description=name)


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        fail("--png needs matplotlib: pip install 'tilewright[plots]'")
