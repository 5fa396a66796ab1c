"""The ATen engine: runs a graph operation by operation with torch's own functions.

Virtual tensors live in the caller's workspace. ATen functions may allocate temporaries of their
own, which the plan's behavior note says (ALLOCATES_TEMPORARIES).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilewright.engines.aten.registry import Kernel, prepare
from tilewright.engines.base import Knobs, Proposal
from tilewright.graph.enums import behavior_note, numeric_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.shapes import span_elements
from tilewright.graph.tensor import Tensor
from tilewright.launch.binder import Binding
from tilewright.launch.frames import Frame
from tilewright.launch.workspace import Piece, WorkspacePlan, plan_workspace
from tilewright.launch.workspace_binding import workspace_view
from tilewright.records import record
from tilewright.torch_dtypes import to_torch

_PROPOSAL = Proposal(
    behavior_notes=frozenset({behavior_note.ALLOCATES_TEMPORARIES}),
    numeric_notes=frozenset({numeric_note.FLOAT32_COMPUTE}),
)


# Module of this package -> the operation kinds that it implements; it is loaded at their first use.
MODULES: dict[str, tuple[str, ...]] = {
    "attention": ("sdpa", "sdpa_backward"),
    "attention_fp8": ("sdpa_fp8", "sdpa_fp8_backward"),
    "attention_mxfp8": ("sdpa_mxfp8", "sdpa_mxfp8_backward"),
    "batchnorm": ("batchnorm", "batchnorm_inference", "batchnorm_backward"),
    "block_scale": ("block_scale_dequantize", "block_scale_quantize"),
    "convolution": ("conv_fprop", "conv_dgrad", "conv_wgrad"),
    "matmul": ("matmul",),
    "moe": ("moe_grouped_matmul", "moe_grouped_matmul_bwd"),
    "normalization": ("layernorm", "instancenorm", "adalayernorm", "rmsnorm"),
    "normalization_backward": (
        "layernorm_backward",
        "instancenorm_backward",
        "adalayernorm_backward",
        "rmsnorm_backward",
    ),
    "pointwise": ("pointwise",),
    "reduction": ("reduction", "genstats"),
    "rope": ("rope", "rope_backward"),
    "shape": ("reshape", "transpose", "slice", "concatenate"),
}
_MODULE_OF = {kind: module for module, kinds in MODULES.items() for kind in kinds}


def _load_kernels(kinds: Iterable[str] = tuple(_MODULE_OF)) -> None:
    for module in dict.fromkeys(_MODULE_OF[kind] for kind in kinds if kind in _MODULE_OF):
        importlib.import_module(f"tilewright.engines.aten.{module}")


class AtenEngine:
    """See ``tilewright.engines.base.Engine``."""

    def unusable_reason(self, device: torch.device) -> str | None:
        """ATen runs wherever torch does."""
        return None

    def propose(self, graph: DeclaredGraph, device: torch.device) -> list[Proposal]:
        """One proposal without knobs; preparing the kernels finds what is declined."""
        _prepare_steps(graph, device)
        return [_PROPOSAL]

    def build(self, graph: DeclaredGraph, device: torch.device, knobs: Knobs) -> AtenExecutable:
        """Prepare a kernel an operation."""
        return AtenExecutable(graph, device)


@record(frozen=True)
class _Step:
    kernel: Kernel
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]


@record(frozen=True)
class _Virtual:
    piece: Piece
    dtype: torch.dtype
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    is_flat: bool


class AtenExecutable:
    """The kernels of a graph in order, and where each finds its operands."""

    needs_views = True

    def __init__(self, graph: DeclaredGraph, device: torch.device) -> None:
        self._device = device
        bound = [*graph.inputs(), *graph.outputs()]
        virtual = graph.virtual_tensors()
        position = {tensor.uid: i for i, tensor in enumerate([*bound, *virtual])}
        sizes = [
            (t.label(), t.data_type.span_bytes(span_elements(t.dim, t.stride))) for t in virtual
        ]
        self.workspace: WorkspacePlan = plan_workspace(sizes)
        itemsizes = (to_torch(t.data_type).itemsize for t in virtual)
        self.workspace_alignment_bytes = max(itemsizes, default=1)
        self._virtual = tuple(
            _Virtual(
                piece,
                to_torch(t.data_type),
                t.dim,
                t.stride,
                t.ragged_offset is not None or t.data_type.is_sub_byte,
            )
            for piece, t in zip(self.workspace.pieces, virtual, strict=True)
        )
        self._steps = tuple(
            _Step(
                kernel,
                tuple(
                    (port, position[tensor.uid]) for port, tensor in _operands(operation).items()
                ),
                tuple((port, position[tensor.uid]) for port, tensor in operation.outputs.items()),
            )
            for operation, kernel in _prepare_steps(graph, device)
        )

    def execute(self, binding: Binding, workspace: Any, stream: Any) -> None:
        """One call at once."""
        self.frame(binding, workspace, "", None).launch(stream)

    def frame(self, binding: Binding, workspace: Any, plan_name: str, keep: Any) -> Frame:
        """One call: each kernel with its operands by port."""
        return Frame(self._work(binding.views, workspace), self._device, plan_name, keep)

    def _work(self, places: list[torch.Tensor], workspace: Any) -> Callable[[], None]:
        if self._virtual:
            scratch = workspace_view(workspace, self.workspace.size_bytes, self._device)
            places = [*places, *(_carve(entry, scratch, self._device) for entry in self._virtual)]
        if len(self._steps) == 1:
            step = self._steps[0]
            kernel = step.kernel
            inputs = {port: places[i] for port, i in step.inputs}
            outputs = {port: places[i] for port, i in step.outputs}
            return lambda: kernel(inputs, outputs)
        calls = [
            (
                step.kernel,
                {port: places[i] for port, i in step.inputs},
                {port: places[i] for port, i in step.outputs},
            )
            for step in self._steps
        ]

        def run() -> None:
            for kernel, inputs, outputs in calls:
                kernel(inputs, outputs)

        return run


def _carve(entry: _Virtual, workspace: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if workspace is None:
        # No bytes are needed: every virtual tensor is empty.
        dim = (0,) if entry.is_flat else entry.dim
        return torch.empty(dim, dtype=entry.dtype, device=device)
    start = entry.piece.offset_bytes
    flat = workspace[start : start + entry.piece.size_bytes].view(entry.dtype)
    return flat if entry.is_flat else flat.as_strided(entry.dim, entry.stride)


def _operands(operation: Operation) -> dict[str, Tensor]:
    """Input tensors by port, and the ragged offsets of every port as "<port>.ragged_offset"."""
    operands = dict(operation.inputs)
    for port, tensor in (*operation.inputs.items(), *operation.outputs.items()):
        if tensor.ragged_offset is not None:
            operands[f"{port}.ragged_offset"] = tensor.ragged_offset
    return operands


def _prepare_steps(graph: DeclaredGraph, device: torch.device) -> list[tuple[Operation, Kernel]]:
    _load_kernels(operation.kind for operation in graph.operations)
    return [(operation, prepare(operation, device)) for operation in graph.operations]


ENGINE = AtenEngine()
