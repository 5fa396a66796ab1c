"""``tilewright compile``: a graph's kernels into the store, for GPUs that need not be here."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from tilewright.cli import files, options, output
from tilewright.cli.exits import ExitCode, fail

if TYPE_CHECKING:
    from tilewright.planning.graph import Graph


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a graph's kernels into the store, for any target",
        description="Compile every kernel of a graph's Triton plan for the targets given, with no "
        "GPU needed, and keep them in the store.",
    )
    options.add_graph(parser)
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        type=_target_of,
        metavar="TARGET",
        help="a compute capability like sm_90; may be repeated",
    )
    parser.add_argument(
        "--multiprocessors",
        type=options.positive,
        metavar="N",
        help="of the device that will run them, if not the target's common one",
    )
    options.add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand.

    Raises:
        CommandError: if an entry cannot be stored.
        NotSupportedError: if the Triton engine does not take the graph for a target.
    """
    from tilewright.artifact.counting import counters
    from tilewright.artifact.location import current_store

    store = current_store()
    if store is None:
        fail("the store is disabled (TILEWRIGHT_CACHE=0, or no home folder): nowhere to keep code")
    graph = files.load_graph(arguments.graph)
    before = counters()
    kernels = []
    for target in dict.fromkeys(arguments.target):
        kernels += _compile(
            graph, target, arguments.multiprocessors or options.SM_COUNTS.get(target)
        )
    after = counters()
    failures = {
        reason: number - before.write_failures.get(reason, 0)
        for reason, number in after.write_failures.items()
        if number > before.write_failures.get(reason, 0)
    }
    if failures:
        fail(f"{store.folder}: not every kernel could be stored: {', '.join(sorted(failures))}")
    document = {
        "graph": graph.name,
        "folder": str(store.folder),
        "compiled": after.compiles - before.compiles,
        "found": after.disk_hits - before.disk_hits,
        "kernels": kernels,
    }
    if arguments.json:
        output.print_json(document)
    else:
        _print(document)
    return ExitCode.OK


def _compile(graph: Graph, target: tuple[int, int], sm_count: int | None) -> list[dict[str, Any]]:
    from tilewright.errors import NotSupportedError
    from tilewright.graph.operation import walk
    from tilewright.planning.devices import DeviceProperties
    from tilewright.planning.rows import admit
    from tilewright.planning.table import engine_by_name

    name = f"sm_{target[0]}{target[1]}"
    entry = engine_by_name("triton")
    rows = () if entry is None else entry.rows
    device = DeviceProperties("cuda", 0, name, target, sm_count or 0)
    for operation in walk(graph.operations):
        reason = admit(rows, operation, device)
        if reason is not None:
            raise NotSupportedError(f"target {name}: {reason}")
    if sm_count is None:
        fail(f"--target {name}: --multiprocessors is needed; no common device is known")
    try:
        from tilewright.engines.triton.ahead import compile_ahead
    except ImportError as error:
        raise NotSupportedError(f"Triton is not installed: {error}") from error
    return [
        {
            "target": name,
            "kernel": made.code.name,
            "aligned": made.is_aligned,
            "code_bytes": len(made.code.image),
            "threads": made.code.threads,
            "shared_bytes": made.code.shared_bytes,
            "key": made.digest,
        }
        for made in compile_ahead(graph, target, sm_count)
    ]


def _target_of(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"sm_([1-9][0-9]?)([0-9])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like sm_90 or sm_120")
    return int(match[1]), int(match[2])


def _print(document: dict[str, Any]) -> None:
    rows = [
        (
            kernel["target"],
            kernel["kernel"],
            "yes" if kernel["aligned"] else "no",
            output.format_bytes(kernel["code_bytes"]),
            kernel["threads"],
            output.format_bytes(kernel["shared_bytes"]),
            kernel["key"][:12],
        )
        for kernel in document["kernels"]
    ]
    output.print_table(
        f"kernels of {document['graph']}",
        ("target", "kernel", "aligned", "code", "threads", "shared memory", "entry"),
        rows,
        numeric=("code", "threads", "shared memory"),
    )
    output.print_lines(
        [
            f"{document['compiled']} compiled, {document['found']} found, in {document['folder']}",
        ]
    )
