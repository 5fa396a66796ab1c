"""``tilewright plans``: the ranked plans of a graph, and what would replay each."""

from __future__ import annotations

import argparse
from typing import Any

from tilewright.cli import files, options, output
from tilewright.cli.exits import ExitCode
from tilewright.graph.enums import build_plan_policy


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "plans",
        help="list the ranked plans of a graph",
        description="List the plans of a graph, best first. Every one is built, to tell its "
        "workspace.",
    )
    options.add_graph(parser)
    options.add_engine(parser)
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; raises NotSupportedError if there is no plan."""
    graph = files.load_graph(arguments.graph, handle=options.handle_of(arguments))
    options.select_engine(graph, arguments.engine)
    graph.build_plans(build_plan_policy.ALL)
    barred = {name for name, _ in graph.explain().barred}
    plans = []
    for index, plan in enumerate(graph.plans):
        if plan.name in barred:
            continue
        plans.append(
            {
                "index": index,
                "name": plan.name,
                "engine_id": plan.engine_id,
                "engine": plan.engine_name,
                "knobs": {knob.name: value for knob, value in plan.knobs},
                "workspace_bytes": graph.get_workspace_size_plan_at_index(index),
                "behavior_notes": sorted(note.name for note in plan.behavior_notes),
                "numeric_notes": sorted(note.name for note in plan.numeric_notes),
            }
        )
    document = {
        "graph": graph.name,
        "key": graph.key(),
        "device": str(graph._device_properties()),
        "plans": plans,
    }
    if arguments.json:
        output.print_json(document)
    else:
        _print(document)
    return ExitCode.OK


def _print(document: dict[str, Any]) -> None:
    rows = [
        (
            plan["index"],
            plan["engine_id"],
            plan["engine"],
            ", ".join(f"{knob}={value}" for knob, value in plan["knobs"].items()) or "-",
            output.format_bytes(plan["workspace_bytes"]),
            ", ".join([*plan["behavior_notes"], *plan["numeric_notes"]]) or "-",
        )
        for plan in document["plans"]
    ]
    output.print_table(
        f"plans of {document['graph']} on {document['device']}, best first",
        ("index", "id", "engine", "knobs", "workspace", "notes"),
        rows,
        numeric=("index", "id", "workspace"),
    )
