"""``tilewright run``: execute a graph once, check it against the reference, and time it."""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli import files, options, output
from tilewright.cli.exits import CommandError, ExitCode

if TYPE_CHECKING:
    import torch

    from tilewright.cli.checking import Check
    from tilewright.cli.inputs import InputSet
    from tilewright.planning.graph import Graph

# Without --repeat: so many launches, unless they would take longer than this.
_DEFAULT_REPEATS = 10
_DEFAULT_BUDGET_S = 2.0


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="run a graph, check the result against the float64 reference, and time it",
        description="Run the graph of a JSON file once, check every output against the float64 "
        "reference, and time further launches.",
    )
    options.add_graph(parser)
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE",
        help="safetensors or npz file of inputs, by tensor name or uid; others are drawn",
    )
    parser.add_argument(
        "--seed", type=options.natural, default=0, metavar="N", help="seed of drawn inputs (0)"
    )
    options.add_engine(parser)
    options.add_device(parser)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="safetensors or npz file to write the outputs to",
    )
    options.add_json(parser)
    parser.add_argument(
        "--no-check", action="store_true", help="do not compute the float64 reference"
    )
    parser.add_argument(
        "--repeat",
        type=options.positive,
        metavar="N",
        help=f"timed launches ({_DEFAULT_REPEATS}, or as many as fit in {_DEFAULT_BUDGET_S:g} s)",
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; returns WRONG_RESULT if a check fails, DECLINED if none could be made."""
    for path in (arguments.inputs, arguments.output):
        if path is not None:
            files.check_tensor_suffix(path)
    if arguments.inputs is not None:
        files.check_readable(arguments.inputs)
    if arguments.output is not None:
        files.check_writable(arguments.output)
    # What is wrong with the files is told before torch is imported.
    graph = files.load_graph(arguments.graph, handle=options.handle_of(arguments))
    options.select_engine(graph, arguments.engine)
    graph.build()
    from tilewright.cli import tensor_files
    from tilewright.cli.inputs import make_inputs

    given = {} if arguments.inputs is None else tensor_files.read_tensors(arguments.inputs)
    inputs = make_inputs(graph, given, arguments.seed)
    call = _Call(graph, inputs)
    call.run()
    if arguments.output is not None:
        tensor_files.write_tensors(arguments.output, call.named_outputs(), _metadata(arguments))
    checks: dict[int, Check] = {}
    unchecked = "not asked for (--no-check)"
    declined = False
    if not arguments.no_check:
        checks, unchecked = call.check()
        declined = not checks
    samples = call.time(arguments.repeat)
    document = _report(arguments, call, checks, unchecked, samples)
    if arguments.json:
        output.print_json(document)
    else:
        _print(document)
    if declined:
        raise CommandError(f"no reference to check against: {unchecked}", ExitCode.DECLINED)
    return ExitCode.WRONG_RESULT if document["verdict"] == "wrong" else ExitCode.OK


class _Call:
    """One call's buffers: inputs and poisoned outputs on the plan's device."""

    def __init__(self, graph: Graph, inputs: InputSet) -> None:
        import torch

        from tilewright.cli import storage
        from tilewright.cli.inputs import storage_elements

        self.graph = graph
        self.inputs = inputs
        self.device = graph._torch_device()
        self.results: dict[int, torch.Tensor] = {}
        self._pack: dict[Any, Any] = {}
        for tensor in graph.inputs():
            buffer = inputs.buffers[tensor.uid]
            on_host = tensor.is_pass_by_value
            self._pack[tensor.uid] = buffer if on_host else buffer.to(self.device)
        self._outputs = {}
        for tensor in graph.outputs():
            elements = storage_elements(graph, tensor, inputs.buffers)
            buffer = storage.new_storage(tensor, elements)
            storage.poison(tensor, buffer)
            self._outputs[tensor.uid] = buffer.to(self.device)
        self._pack |= self._outputs
        self._workspace = torch.empty(
            graph.get_workspace_size(), dtype=torch.uint8, device=self.device
        )

    def run(self) -> None:
        """Execute once, and keep the results on the CPU."""
        self.graph.execute(self._pack, self._workspace)
        self._wait()
        from tilewright.cli.storage import is_sparse

        for tensor in self.graph.outputs():
            buffer = self._outputs[tensor.uid]
            # Timed launches write the same buffers; a copy would fill the gaps of sparse ones.
            if self.device.type == "cpu" and not is_sparse(tensor):
                buffer = buffer.clone()
            self.results[tensor.uid] = buffer.cpu()

    def time(self, repeats: int | None) -> list[float]:
        """Microseconds of each of ``repeats`` launches, or of as many as the budget holds."""
        frame = self.graph.bind(self._pack, self._workspace)
        samples: list[float] = []
        deadline = time.perf_counter() + _DEFAULT_BUDGET_S
        for _ in range(repeats or _DEFAULT_REPEATS):
            start = time.perf_counter()
            frame.launch()
            self._wait()
            end = time.perf_counter()
            samples.append((end - start) * 1e6)
            if repeats is None and end > deadline:
                break
        return samples

    def check(self) -> tuple[dict[int, Check], str]:
        """The checks by uid; none, and the reason, where the reference has no such operation."""
        from tilewright.cli.checking import check_outputs
        from tilewright.errors import NotSupportedError

        try:
            return check_outputs(self.graph, self.inputs.buffers, self.results), ""
        except NotSupportedError as error:
            return {}, str(error)

    def named_outputs(self) -> dict[str, torch.Tensor]:
        """Results by name, or by uid where there is no name of its own; dense ones as their dim."""
        from tilewright.cli.storage import logical_view

        tensors = self.graph.outputs()
        names = [tensor.name for tensor in tensors]
        named = {}
        for tensor in tensors:
            result = self.results[tensor.uid]
            if tensor.ragged_offset is None:
                result = logical_view(tensor, result)
            is_unique = bool(tensor.name) and names.count(tensor.name) == 1
            named[tensor.name if is_unique else str(tensor.uid)] = result
        return named

    def operand_bytes(self) -> int:
        """Bytes of the declared elements of all operands, each counted once."""
        import math

        total = 0
        for tensor in (*self.graph.inputs(), *self.graph.outputs()):
            if tensor.ragged_offset is None:
                total += tensor.data_type.span_bytes(math.prod(tensor.dim))
            else:
                buffer = self._pack[tensor.uid]
                total += buffer.numel() * buffer.element_size()
        return total

    def _wait(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def _metadata(arguments: argparse.Namespace) -> dict[str, str]:
    return {"graph": arguments.graph.name, "seed": str(arguments.seed)}


def _report(
    arguments: argparse.Namespace,
    call: _Call,
    checks: dict[int, Check],
    unchecked: str,
    samples: list[float],
) -> dict[str, Any]:
    graph = call.graph
    outputs = []
    for tensor in graph.outputs():
        check = checks.get(tensor.uid)
        outputs.append(
            {
                "name": tensor.name,
                "uid": tensor.uid,
                "dim": list(tensor.dim),
                "data_type": tensor.data_type.name,
                "max_error": None if check is None else check.max_error,
                "tolerance": None if check is None else check.tolerance,
                "verdict": "unchecked" if check is None else check.verdict,
                "detail": unchecked if check is None else check.detail,
            }
        )
    verdicts = {entry["verdict"] for entry in outputs}
    worst = next(v for v in ("wrong", "unchecked", "ok") if v in verdicts)
    return {
        "graph": graph.name,
        "device": str(graph._device_properties()),
        "seed": arguments.seed,
        "plan": graph.explain().to_dict()["selected"],
        "engine": graph.selected_engine,
        "workspace_bytes": graph.get_workspace_size(),
        "operand_bytes": call.operand_bytes(),
        "time_us": statistics.median(samples),
        "launches": len(samples),
        "outputs": outputs,
        "notes": call.inputs.notes,
        "output_file": None if arguments.output is None else str(arguments.output),
        "verdict": worst,
    }


def _print(document: dict[str, Any]) -> None:
    rows = [
        (
            entry["name"] or f"#{entry['uid']}",
            "x".join(str(extent) for extent in entry["dim"]),
            entry["data_type"],
            _number(entry["max_error"]),
            _number(entry["tolerance"]),
            entry["verdict"],
        )
        for entry in document["outputs"]
    ]
    output.print_table(
        f"{document['graph']} on {document['device']}, seed {document['seed']}",
        ("output", "dim", "type", "max error", "tolerance", "verdict"),
        rows,
        numeric=("max error", "tolerance"),
    )
    size = output.format_bytes(document["operand_bytes"])
    output.print_lines(
        [
            f"plan       {document['plan']}",
            f"time       {document['time_us']:.1f} us (median of {document['launches']})",
            f"operands   {size}",
            f"workspace  {output.format_bytes(document['workspace_bytes'])}",
            *(f"note       {note}" for note in document["notes"]),
            *(
                f"{entry['verdict']:<9}  {entry['name'] or '#' + str(entry['uid'])}: "
                f"{entry['detail']}"
                for entry in document["outputs"]
                if entry["detail"]
            ),
        ]
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"
