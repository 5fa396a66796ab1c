"""``tilewright explain``: why each engine takes a graph, or declines it."""

from __future__ import annotations

import argparse
from typing import Any

from tilewright.cli import files, options, output
from tilewright.cli.exits import ExitCode


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "explain",
        help="say which engines take a graph, and why the others do not",
        description="Say of every engine whether it takes the graph, and if not, why.",
    )
    options.add_graph(parser)
    options.add_device(parser)
    parser.add_argument(
        "--device-properties",
        type=options.device_properties_of,
        metavar="TARGET",
        help="plan for a device that need not be here: cpu, or a compute capability like sm_90",
    )
    options.add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; returns DECLINED if no engine takes the graph."""
    graph = files.load_graph(
        arguments.graph,
        handle=options.handle_of(arguments),
        device_property=arguments.device_properties,
    )
    explanation = graph.explain()
    document = explanation.to_dict()
    if arguments.json:
        output.print_json(document)
    else:
        _print(document)
    return ExitCode.OK if explanation.selected is not None else ExitCode.DECLINED


def _print(document: dict[str, Any]) -> None:
    rows = [
        (
            engine["id"],
            engine["name"],
            "taken" if engine["taken"] else "declined",
            engine["reason"] or ", ".join(engine["plans"]),
        )
        for engine in document["engines"]
    ]
    output.print_table(
        f"{document['graph']} on {document['device']}",
        ("id", "engine", "verdict", "plans, or the reason"),
        rows,
        numeric=("id",),
    )
    output.print_lines([f"runs: {document['selected'] or 'nothing'}"])
