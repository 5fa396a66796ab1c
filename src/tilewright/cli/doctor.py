"""``tilewright doctor``: what this machine is, and which engines it can run."""

from __future__ import annotations

import argparse
from typing import Any

from tilewright.cli import options, output
from tilewright.cli.exits import ExitCode, exit_code_of


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine can run",
        description="Tell the machine, the versions, the devices, and which engines are usable. "
        "A small graph is run on the ATen engine; the exit status is 0 unless that fails.",
    )
    options.add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; returns what a failing trial run on the ATen engine means."""
    import torch

    from tilewright.cli import machine

    devices = machine.cuda_devices()
    names = ["cpu", *(f"cuda:{device['index']}" for device in devices)]
    engines, status = _engines(names)
    document = {
        "system": machine.system(),
        "processor": machine.processor(),
        "cores": machine.usable_cores(),
        "memory_bytes": machine.memory_bytes(),
        "versions": machine.versions(),
        "torch_cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "devices": devices,
        "engines": engines,
        "ok": status is ExitCode.OK,
    }
    if arguments.json:
        output.print_json(document)
    else:
        _print(document)
    return status


def _engines(devices: list[str]) -> tuple[list[dict[str, Any]], ExitCode]:
    """Every engine of the table on every device, and the outcome of ATen's trial on the CPU."""
    from tilewright.planning.table import ENGINE_TABLE

    found: list[dict[str, Any]] = []
    status = ExitCode.OK
    for entry in ENGINE_TABLE:
        for device in devices:
            reason, code = _trial(entry.name, entry.module, device)
            found.append(
                {
                    "id": entry.engine_id,
                    "name": entry.name,
                    "summary": entry.summary,
                    "device": device,
                    "usable": reason is None,
                    "reason": reason or "",
                }
            )
            if entry.name == "aten" and device == "cpu":
                status = code
    return found, status


def _trial(name: str, module: str | None, device: str) -> tuple[str | None, ExitCode]:
    """Why an engine is of no use on a device, or None; for ATen a small product is computed."""
    if module is None:
        return "not in this version", ExitCode.DECLINED
    try:
        import torch

        from tilewright.engines.base import load_engine

        unusable = load_engine(module).unusable_reason(torch.device(device))
        if unusable is not None:
            return unusable, ExitCode.DECLINED
        if name != "aten":
            return None, ExitCode.OK
        return _multiply(device)
    except Exception as error:  # whatever is broken here is what the command is for
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return text, exit_code_of(error) or ExitCode.CALL_FAILED


def _multiply(device: str) -> tuple[str | None, ExitCode]:
    import torch

    from tilewright.launch.handles import create_handle
    from tilewright.planning.graph import Graph

    graph = Graph("doctor", io_data_type=torch.float32, handle=create_handle(device))
    a = graph.tensor((1, 2, 2), name="A")
    b = graph.tensor((1, 2, 2), name="B")
    c = graph.matmul(a, b).set_output(True)
    left = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], device=device)
    right = torch.tensor([[[5.0, 6.0], [7.0, 8.0]]], device=device)
    result = torch.full_like(left, torch.nan)
    graph.build()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
    graph.execute({a: left, b: right, c: result}, workspace)
    expected = [[[19.0, 22.0], [43.0, 50.0]]]
    if result.tolist() != expected:
        return f"a 2 x 2 product gives {result.tolist()}, not {expected}", ExitCode.WRONG_RESULT
    return None, ExitCode.OK


def _print(document: dict[str, Any]) -> None:
    memory = document["memory_bytes"]
    shown = "" if memory is None else f", {output.format_bytes(memory)}"
    rows = [
        ("system", document["system"]),
        ("cpu", f"{document['processor']}, {document['cores']} cores{shown}"),
        *((name, version or "not installed") for name, version in document["versions"].items()),
        ("torch's CUDA", document["torch_cuda"] or "none (a CPU build)"),
        *(
            (
                f"cuda:{device['index']}",
                f"{device['name']}, compute capability {device['compute_capability']}, "
                f"{output.format_bytes(device['memory_bytes'])}",
            )
            for device in document["devices"]
        ),
    ]
    output.print_table("machine", ("what", "found"), rows)
    output.print_table(
        "engines",
        ("id", "engine", "device", "usable", "what it is, or why not"),
        [
            (
                engine["id"],
                engine["name"],
                engine["device"],
                "yes" if engine["usable"] else "no",
                engine["reason"] or engine["summary"],
            )
            for engine in document["engines"]
        ],
        numeric=("id",),
    )
