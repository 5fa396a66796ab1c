"""Options that several subcommands share, and what they mean. No torch at import."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.exits import fail

if TYPE_CHECKING:
    from tilewright.launch.handles import Handle
    from tilewright.planning.devices import DeviceProperties
    from tilewright.planning.graph import Graph

# Multiprocessors of the common device of each target: A100, H100 and H200, B200, RTX PRO 6000.
SM_COUNTS = {(8, 0): 108, (9, 0): 132, (10, 0): 148, (12, 0): 188}


def add_graph(parser: argparse.ArgumentParser) -> None:
    """The graph file, positional."""
    parser.add_argument(
        "graph", type=Path, metavar="GRAPH.json", help="JSON form of a graph, or a serialized one"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--engine."""
    parser.add_argument("--engine", metavar="NAME", help="take plans of this engine only")


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device."""
    parser.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda or cuda:N (the current GPU, else the CPU)"
    )


def natural(text: str) -> int:
    """An int from 0 up, for argparse."""
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 2**63 - 1")
    return value


def positive(text: str) -> int:
    """An int from 1 up, for argparse."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 up")
    return value


def device_properties_of(text: str) -> DeviceProperties:
    """Synthetic properties: "cpu", or "sm_90" for a CUDA device of compute capability 9.0.

    Raises:
        argparse.ArgumentTypeError: for any other text.
    """
    from tilewright.planning.devices import DeviceProperties

    if text == "cpu":
        return DeviceProperties("cpu", None, "cpu")
    match = re.fullmatch(r"sm_([1-9][0-9]?)([0-9])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor like sm_90 or sm_120")
    target = int(match[1]), int(match[2])
    return DeviceProperties("cuda", 0, text, target, SM_COUNTS.get(target, 0))


def handle_of(arguments: argparse.Namespace) -> Handle | None:
    """A handle on the device of --device, or None for the default one.

    Raises:
        CommandError: if there is no such device here.
    """
    text = arguments.device
    if text is None:
        return None
    if re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", text) is None:
        fail(f"--device {text!r}: expected cpu, cuda or cuda:N")
    import torch

    from tilewright.launch.handles import create_handle

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(text.partition(":")[2] or 0)
    if text.startswith("cuda") and index >= count:
        fail(f"--device {text!r}: this machine has {count} CUDA devices")
    return create_handle(text)


def select_engine(graph: Graph, name: str | None) -> None:
    """Bar every engine but ``name``.

    Raises:
        CommandError: if there is no such engine in the table.
    """
    if name is None:
        return
    from tilewright.planning.table import ENGINE_TABLE

    names = [entry.name for entry in ENGINE_TABLE]
    if name not in names:
        fail(f"--engine {name!r}: there is no such engine; known are {', '.join(names)}")
    graph.deselect_engines([other for other in names if other != name])
