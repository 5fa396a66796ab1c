"""``tilewright red``: does a test fail without the fix, by assertion, and pass with it?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli import options, output
from tilewright.cli.exits import ExitCode, fail

if TYPE_CHECKING:
    from tilewright.testing.red import Side

# The end of a run's output tells the failure.
_SHOWN_LINES = 60


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "red",
        help="see a test fail without a fix and pass with it",
        description="Run tests on the unfixed source, where they must fail by assertion, and on "
        "the fixed one, where they must pass. Both are git worktrees of their own, made from the "
        "working tree as it is. The part of the fix in the test's top folder stays in both.",
    )
    parser.add_argument(
        "tests", nargs="+", metavar="TEST", help="node id, from the repository's root"
    )
    parser.add_argument(
        "--fix", required=True, metavar="COMMIT|PATCH", help="a commit, or a patch file"
    )
    parser.add_argument(
        "--raises",
        action="append",
        default=[],
        metavar="NAME",
        help="an exception type besides AssertionError that shows the bug, or 'crash'",
    )
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="limit of each run"
    )
    options.add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; the status is 0 if the test is red, then green."""
    from tilewright.testing import red

    try:
        verdict = red.check(
            arguments.tests,
            arguments.fix,
            repository=Path.cwd(),
            raises=arguments.raises,
            timeout_s=arguments.timeout,
        )
    except red.RedError as error:
        fail(str(error))
    if arguments.json:
        output.print_json(
            {
                "holds": verdict.holds,
                "problems": list(verdict.problems),
                "unfixed": _document(verdict.unfixed),
                "fixed": _document(verdict.fixed),
            }
        )
    else:
        for side in (verdict.unfixed, verdict.fixed):
            _print_side(side)
        for problem in verdict.problems:
            print(f"not shown: {problem}")
        if verdict.holds:
            count = len(verdict.unfixed.failed)
            print(f"RED without the fix ({count} failing by assertion), GREEN with it")
    return ExitCode.OK if verdict.holds else ExitCode.WRONG_RESULT


def _document(side: Side) -> dict[str, Any]:
    return {
        "status": side.status,
        "passed": list(side.passed),
        "failed": [{"test": test, "types": list(types)} for test, types in side.failed],
        "other": list(side.other),
        "output": side.output,
    }


def _print_side(side: Side) -> None:
    lines = side.output.rstrip().splitlines()
    print(f"===== {side.name} source: pytest ended with status {side.status}")
    if len(lines) > _SHOWN_LINES:
        print(f"... {len(lines) - _SHOWN_LINES} lines")
    print("\n".join(lines[-_SHOWN_LINES:]))
