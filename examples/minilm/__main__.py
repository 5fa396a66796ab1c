"""Embed two hundred sentences with PyTorch and with Tilewright, and compare.

    python -m examples.minilm

The exit status is 0 if the embeddings agree, every ranking of the sentences by similarity is the
same, Tilewright takes about as long, and every example graph gives the right result.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.minilm import compare, graphs, model, report, timing
from tilewright import ops

ROOT = Path(__file__).resolve().parents[2]
MAX_DIFFERENCE = 2e-5
MAX_RATIO = 1.15
BATCH_SIZE = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration and return its exit status: 1 if a check fails, 2 if it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m examples.minilm", description=__doc__)
    parser.add_argument(
        "--report", type=Path, default=ROOT / "demo" / "report.html", help="where to write it"
    )
    parser.add_argument("--no-graphs", action="store_true", help="leave out the example graphs")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    console = Console()
    try:
        folder = model.find_model()
    except FileNotFoundError as error:
        Console(stderr=True).print(f"examples.minilm: {error}", markup=False)
        return 2
    torch.set_num_threads(1)
    sentences = model.read_sentences(ROOT / "examples" / "sentences.txt")
    batches = model.make_batches(folder, sentences, BATCH_SIZE)
    with _progress(console) as progress, torch.inference_mode():
        sections, matrix, by_operation = _compare(progress, folder, sentences, batches)
        if not arguments.no_graphs:
            sections.append(_run_graphs(progress))
    summary = _summary(sentences, batches)
    console.print(summary, markup=False)
    for section in sections:
        _print(console, section)
    report.write_report(arguments.report, summary, sections, matrix, sentences, by_operation)
    failed = [row[0] for section in sections for row in section.rows if "failed" in row]
    verdict = f"failed: {', '.join(failed)}" if failed else "all checks passed"
    console.print(
        f"{verdict}, in {time.perf_counter() - started:.0f} s; report: {_shown(arguments.report)}",
        style="bold red" if failed else "bold green",
        markup=False,
    )
    return 1 if failed else 0


def _compare(
    progress: Progress,
    folder: Path,
    sentences: Sequence[model.Sentence],
    batches: Sequence[model.Batch],
) -> tuple[list[report.Section], torch.Tensor, dict[str, dict[str, float]]]:
    """The checks, the times and the plans; the similarities; the times by operation."""
    task = progress.add_task("loading the model", total=4)
    theirs, ours = variants = model.load_variants(folder)
    progress.update(task, advance=1, description="first embeddings")
    count = len(sentences)
    expected, found = (timing.embed_all(variant, batches, count) for variant in variants)
    progress.update(task, advance=1, description="time by operation")
    by_operation = {}
    for variant in variants:
        by_operation[variant.name] = timing.time_by_operation(variant, batches)
        progress.update(task, advance=1)
    progress.update(task, description="model and time by operation")
    task = progress.add_task("timing by turns", total=1.0)
    timed = timing.measure(variants, batches, lambda part: progress.advance(task, part))
    progress.update(task, completed=1.0)
    matrix = compare.similarities(found)
    sections = [
        _checks(expected, found, timed, theirs, ours),
        _figures(matrix, sentences, timed, ours),
        _plans(),
    ]
    return sections, matrix, by_operation


def _checks(
    expected: torch.Tensor,
    found: torch.Tensor,
    timed: timing.Timing,
    theirs: model.Variant,
    ours: model.Variant,
) -> report.Section:
    difference = (found.double() - expected.double()).abs().max().item()
    ranking = compare.check_rankings(expected, found)
    ratio = timed.ratio(ours.name, theirs.name)
    rows = [
        (
            "largest difference of the embeddings",
            f"{difference:.2e}",
            f"at most {MAX_DIFFERENCE:.0e}",
            # Written so that NaN fails.
            _verdict(difference <= MAX_DIFFERENCE),
        ),
        (
            "rankings of all other sentences by similarity",
            f"{ranking.same} the same, {ranking.ties} but for ties within {compare.TIE:.0e}, "
            f"{ranking.wrong} not; closest gap {ranking.closest_margin:.1e}",
            f"{len(found)} the same, or but for ties",
            _verdict(ranking.same + ranking.ties == len(found)),
        ),
        (
            "processor time, Tilewright's to PyTorch's",
            f"{ratio:.3f}",
            f"at most {MAX_RATIO}",
            _verdict(ratio <= MAX_RATIO),
        ),
    ]
    return report.Section("Checks", ("what", "found", "expected", "verdict"), rows)


def _verdict(holds: bool) -> str:
    return "ok" if holds else "failed"


def _figures(
    matrix: torch.Tensor,
    sentences: Sequence[model.Sentence],
    timed: timing.Timing,
    ours: model.Variant,
) -> report.Section:
    subjects = compare.subject_figures(matrix, sentences)
    rows = [
        (
            f"{name}, all sentences",
            f"{seconds:.3f} s of one processor, {len(sentences) / seconds:.0f} sentences a second",
        )
        for name, seconds in timed.seconds.items()
    ]
    rows += [
        ("how it was timed", f"each batch the least of {timed.repeats} sweeps, by turns"),
        ("norms swapped", f"{ours.norms_swapped} LayerNorm modules"),
        (
            "mean similarity",
            f"{subjects.within:.3f} within a subject, {subjects.across:.3f} across subjects",
        ),
        (
            "nearest sentence is of the same subject",
            f"for {subjects.nearest_of_same_subject} of {len(sentences)}",
        ),
    ]
    return report.Section("Figures", ("what", "found"), rows)


def _plans() -> report.Section:
    """For every engine: how many graphs it ran, and why it declined the others."""
    explanations = ops.cached_explanations()
    runs: collections.Counter[str] = collections.Counter()
    declined: dict[str, collections.Counter[str]] = {}
    for explanation in explanations:
        for verdict in explanation.verdicts:
            reasons = declined.setdefault(verdict.engine_name, collections.Counter())
            if explanation.selected and verdict.engine_name == explanation.selected.engine_name:
                runs[f"{verdict.engine_name}: {explanation.selected.name}"] += 1
            elif not verdict.is_taken:
                reasons[verdict.reason] += 1
    rows = []
    for engine, reasons in declined.items():
        plans = [
            f"{name.split(': ')[1]} ({count} graphs)"
            for name, count in runs.items()
            if name.startswith(f"{engine}: ")
        ]
        rows.append(
            (
                engine,
                ", ".join(plans) or "none",
                "; ".join(f"{reason} ({count})" for reason, count in reasons.items()),
            )
        )
    title = f"Plans of the {len(explanations)} graphs that attention and norms became"
    return report.Section(title, ("engine", "plans that ran", "why it declined (graphs)"), rows)


def _run_graphs(progress: Progress) -> report.Section:
    paths = sorted((ROOT / "examples").glob("*.json"))
    task = progress.add_task("example graphs", total=len(paths))
    rows = []
    for path, run in zip(paths, graphs.run_graphs(paths), strict=True):
        progress.advance(task)
        rows.append(
            (
                path.stem,
                run.plan,
                f"{run.max_error:.1e} of {run.tolerance:.1e}",
                f"{run.time_us:.0f} us",
                "ok" if not run.error else "failed",
                run.error,
            )
        )
    columns = ["graph", "plan", "error of tolerance", "time", "verdict"]
    if any(row[-1] for row in rows):
        columns.append("why")
    else:
        rows = [row[:-1] for row in rows]
    return report.Section(
        "tilewright run examples/GRAPH.json, against the float64 reference", columns, rows
    )


def _summary(sentences: Sequence[model.Sentence], batches: Sequence[model.Batch]) -> str:
    subjects = len({sentence.subject for sentence in sentences})
    tokens = sum(batch.shape[0] * batch.shape[1] for batch in batches)
    padding = sum(batch.padding for batch in batches)
    lengths = [batch.shape[1] for batch in batches]
    return (
        f"all-MiniLM-L6-v2, float32, one thread: {len(sentences)} sentences "
        f"on {subjects} subjects in {len(batches)} batches of {min(lengths)} to {max(lengths)} "
        f"tokens, {100 * padding / tokens:.0f} % of them padding."
    )


def _print(console: Console, section: report.Section) -> None:
    table = Table(title=section.title, title_justify="left", title_style="bold")
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for row in section.rows:
        cells = []
        for text in row:
            style = {"ok": "green", "failed": "bold red"}.get(text)
            cells.append(f"[{style}]{text}[/{style}]" if style else text.replace("[", "\\["))
        table.add_row(*cells)
    console.print(table)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    with Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=not console.is_terminal,
    ) as progress:
        yield progress


def _shown(path: Path) -> str:
    """The path as the reader's folder has it, if it lies below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
