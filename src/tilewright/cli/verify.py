"""``tilewright verify``: detectors and oracle cases against our engines or any callable."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli import files, options, output
from tilewright.cli.exits import ExitCode, fail

if TYPE_CHECKING:
    from tilewright.testing.verify.case import Family
    from tilewright.testing.verify.results import Check, Report

# Known without an import of torch; a test holds them to the families that there are.
_FAMILIES = (
    "attention",
    "attention_backward",
    "attention_ragged",
    "attention_paged",
    "rms_norm",
    "layer_norm",
    "rms_norm_backward",
    "layer_norm_backward",
    "matmul",
    "grouped_matmul",
    "convolution",
    "convolution_backward",
    "rope",
    "pointwise",
    "reduction",
    "norms",
    "all",
)
_EPILOG = f"""\
FAMILY is one of: {", ".join(_FAMILIES[:8])},
{", ".join(_FAMILIES[8:15])}, norms (all four), all.
--target names what to examine: package.module:callable or file.py:callable. How it is called:
tilewright verify FAMILY --signature. PyTorch's own functions are
tilewright.testing.verify.adapters:torch_sdpa for attention, and torch_FAMILY for the others.

exit status:
  0  what was taken held, or deviates as the callable says of itself
  1  something is broken
  2  wrong usage
  4  every check was declined
"""
# Lines of evidence that the terminal shows of one finding; the report has all.
_EVIDENCE_LINES = 3
# Findings of one kind that the terminal shows.
_FINDINGS = 8


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="hold an engine, or any callable, to the contract and the references",
        description="Run every detector and every oracle case of a family.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "family", nargs="*", metavar="FAMILY", help="what to examine; all if none is named"
    )
    parser.add_argument(
        "--target", metavar="MODULE:CALLABLE", help="examine this callable, not our engines"
    )
    options.add_engine(parser)
    options.add_device(parser)
    parser.add_argument(
        "--level", choices=("L0", "L1"), default="L0", help="L0 the quick cases (default), L1 all"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="NAME",
        help="only this case; may be given several times",
    )
    parser.add_argument(
        "--seed", type=options.natural, default=0, metavar="N", help="seed of the operands (0)"
    )
    parser.add_argument(
        "--beside",
        action="store_true",
        help="also make long calls while another process has the GPU in their middle",
    )
    parser.add_argument("--json", metavar="FILE", help="write the checks as JSON; - for stdout")
    parser.add_argument(
        "--report", type=Path, metavar="DIR|FILE.html", help="write report.html, with pictures"
    )
    parser.add_argument(
        "--brief", action="store_true", help="no tables: only what is broken or deviates"
    )
    parser.add_argument(
        "--signature", action="store_true", help="print how a family's callable is called, and end"
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; the status is 1 if something is broken, 4 if all was declined."""
    families = _families(arguments)
    if arguments.signature:
        output.print_lines(f"{family.name}\n{family.signature}" for family in families)
        return ExitCode.OK
    if arguments.json not in (None, "-"):
        files.check_writable(Path(arguments.json))
    report = _run(arguments, families)
    if arguments.json == "-":
        output.print_json(report.document())
    else:
        _print(report, is_brief=arguments.brief)
        if arguments.json:
            _write_json(report, Path(arguments.json))
    if arguments.report is not None:
        from tilewright.testing.verify.report_html import write_report

        path = _writing(arguments.report, lambda: write_report(report, arguments.report))
        if arguments.json != "-":
            print(f"report: {path}")
    if report.is_broken:
        return ExitCode.WRONG_RESULT
    return ExitCode.DECLINED if report.is_declined else ExitCode.OK


def _families(arguments: argparse.Namespace) -> list[Family]:
    for name in arguments.family:
        if name not in _FAMILIES:
            fail(f"{name!r}: there is no such family; known are {', '.join(_FAMILIES)}")
    if arguments.target is not None and arguments.engine is not None:
        fail("--target and --engine: a callable has no engine; give one of them")
    from tilewright.testing.verify.families import FAMILIES, GROUPS

    names = [n for name in arguments.family or ["all"] for n in GROUPS.get(name, (name,))]
    families = [FAMILIES[name] for name in dict.fromkeys(names)]
    if arguments.target is not None and len(families) != 1:
        fail(
            f"--target: name one family, one of {', '.join(FAMILIES)}; a callable is of one family"
        )
    return families


def _run(arguments: argparse.Namespace, families: Sequence[Family]) -> Report:
    from tilewright.cli.machine import versions
    from tilewright.launch.handles import default_device
    from tilewright.planning.table import ENGINE_TABLE
    from tilewright.testing.another_process import AnotherProcess
    from tilewright.testing.verify.results import Report
    from tilewright.testing.verify.running import cases_of, run_family
    from tilewright.testing.verify.subjects import (
        callable_maker,
        does_without,
        engine_maker,
        load_target,
    )

    handle = options.handle_of(arguments)
    device = default_device() if handle is None else handle.device
    keywords: dict[str, Any] = {"level": arguments.level, "seed": arguments.seed, "device": device}
    keywords["names"] = arguments.case
    if arguments.target is not None:
        try:
            target = load_target(arguments.target)
        except ValueError as error:
            fail(f"--target {error}")
        subject, make = arguments.target, callable_maker(target)
        keywords["deviations"] = getattr(target, "verify_deviations", {})
        keywords["left_out"] = does_without(target, families[0])
    else:
        engines = [entry.name for entry in ENGINE_TABLE]
        if arguments.engine is not None and arguments.engine not in engines:
            fail(f"--engine {arguments.engine!r}: expected one of {', '.join(engines)}")
        subject = f"engine {arguments.engine}" if arguments.engine else "our best plan"
        make = engine_maker(arguments.engine, device)
        keywords |= {"is_graph": True, "engine": arguments.engine}
    names, is_beside = arguments.case, arguments.beside
    counts = [
        len(cases_of(family, arguments.level, names, is_beside=is_beside)) for family in families
    ]
    _check_cases(arguments, families)
    checks: list[Check] = []
    with _Progress(sum(counts)) as progress, contextlib.ExitStack() as owned:
        if is_beside:
            keywords["is_beside"] = True
            if device.type == "cuda":
                keywords["other"] = owned.enter_context(AnotherProcess(device))
        for family in families:
            progress.begin(f"{family.name}{', also beside another process' * is_beside}")
            for found in run_family(family, make, **keywords):
                checks += found
                progress.advance(f"{family.name}: {found[0].case}")
    return Report(
        subject,
        tuple(family.name for family in families),
        arguments.level,
        str(device),
        versions(),
        tuple(checks),
    )


def _check_cases(arguments: argparse.Namespace, families: Sequence[Family]) -> None:
    from tilewright.testing.verify.running import cases_of

    every = [c for f in families for c in cases_of(f, arguments.level, is_beside=True)]
    is_long = {case.name: case.is_long for case in every}
    known = sorted(name for name in is_long if arguments.beside or not is_long[name])
    for name in arguments.case:
        if name not in is_long:
            fail(f"--case {name!r}: there is no such case; known are {'; '.join(known)}")
        if name not in known:
            fail(f"--case {name!r}: it is for calls beside another process; give --beside too")


class _Progress:
    """A bar on standard error while it is a terminal, nothing else."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=sys.stderr is None or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, description: str) -> None:
        self._bar.update(self._task, description=description)

    def advance(self, description: str) -> None:
        self._bar.update(self._task, advance=1, description=description)


def _print(report: Report, *, is_brief: bool) -> None:
    from tilewright.testing.verify.results import VALUES, Status

    for family in () if is_brief else report.families:
        checks = [check for check in report.checks if check.family == family]
        _print_rules(family, report.subject, [c for c in checks if c.rule != VALUES])
        rows = [
            (check.case, check.status.value, _first_line(check.text))
            for check in checks
            if check.rule == VALUES
        ]
        output.print_table(
            f"{family}: cases against the float64 reference", ("case", "verdict", "seen"), rows
        )
    for status in (Status.DEVIATES, Status.BROKEN):
        found = _by_novelty([check for check in report.checks if check.status is status])
        for check in found[:_FINDINGS]:
            print(f"{status.value}: {check.family}, {check.case}: {check.rule} ({check.detector})")
            lines = check.text.splitlines()[:_EVIDENCE_LINES]
            output.print_lines(f"    {line.strip()}" for line in lines)
        if len(found) > _FINDINGS:
            print(f"{status.value}: and {len(found) - _FINDINGS} more; --report has all")
    if not any(report.count(s) for s in Status if s is not Status.DECLINED):
        print("nothing was looked at: every check was declined")
    print(", ".join(f"{report.count(status)} {status.value}" for status in Status))


def _by_novelty(checks: Sequence[Check]) -> list[Check]:
    """The first finding of each detector, then the others."""
    seen: set[str] = set()
    first: list[Check] = []
    rest: list[Check] = []
    for check in checks:
        (rest if check.detector in seen else first).append(check)
        seen.add(check.detector)
    return first + rest


def _print_rules(family: str, subject: str, checks: Sequence[Check]) -> None:
    from tilewright.testing.verify.results import worst
    from tilewright.testing.verify.running import RULES

    cases = list(dict.fromkeys(check.case for check in checks))
    if not cases:
        return
    rows = []
    for rule in RULES:
        of_rule = [check for check in checks if check.rule == rule]
        if not of_rule:
            continue
        cells = [worst([c for c in of_rule if c.case == case]) for case in cases]
        # "same" is both the rule and what it checks.
        names = " / ".join(dict.fromkeys(check.detector for check in of_rule))
        rows.append((rule, names, *(cell.value if cell else "" for cell in cells)))
    output.print_table(f"{family}: rules, {subject}", ("rule", "detectors", *cases), rows)


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]


def _write_json(report: Report, path: Path) -> None:
    text = json.dumps(report.document(), indent=2) + "\n"
    _writing(path, lambda: path.write_text(text, encoding="utf-8"))
    print(f"json: {path}")


def _writing(path: Path, write: Any) -> Any:
    try:
        return write()
    except OSError as error:
        fail(f"{path}: cannot be written: {error}")
