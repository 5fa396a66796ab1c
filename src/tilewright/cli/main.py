"""``tilewright``: the parser of the command line, and the mapping of errors to exit codes."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence

from tilewright._version import __version__
from tilewright.cli import bench, cache, compile, doctor, explain, plans, red, run, verify
from tilewright.cli.exits import CommandError, ExitCode, exit_code_of

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_EPILOG = """\
exit status:
  0  all went well
  1  a result differs from the float64 reference, or a check did not hold
  2  wrong usage, or a file that cannot be read or written
  3  the graph is wrong
  4  no engine (or no reference) takes the graph
  5  the call was refused, or failed
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; nothing heavy is imported for it."""
    parser = argparse.ArgumentParser(
        prog="tilewright",
        description="Run, inspect and measure graphs of tensor operations.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tilewright {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (run, plans, explain, compile, cache, doctor, bench, verify, red):
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status.

    Raises:
        SystemExit: from argparse, for ``--help``, ``--version`` and wrong usage (status 2).
    """
    arguments = build_parser().parse_args(argv)
    if sys.stdout is None:
        # A process that was started with its standard output closed.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return _execute(arguments)
    return _execute(arguments)


def _execute(arguments: argparse.Namespace) -> int:
    try:
        code = int(arguments.execute(arguments))
        # Here, where a reader that left can still be told from an error.
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output (head, less) went away: nobody is left to tell.
        sys.stdout = None
        return ExitCode.OK
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            # Files of ours raise CommandError, so this is standard output.
            sys.stdout = None
            error = CommandError(f"standard output: cannot be written: {error.strerror}")
        if isinstance(error, ImportError) and "torch" not in sys.modules:
            error = CommandError(f"torch cannot be imported: {error}", ExitCode.CALL_FAILED)
        status = exit_code_of(error)
        if status is None:
            traceback.print_exc()
            print("tilewright: internal error; the traceback above shows where", file=sys.stderr)
            return ExitCode.INTERNAL
        print(f"tilewright {arguments.command}: error: {error}", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
