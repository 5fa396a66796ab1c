"""A normalization as rows and columns: which tensor is what, and how each is stepped through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from tilewright.dtypes import DataType
from tilewright.engines.compiled.planned import KernelPlan
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.rows import Plane, plane
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.operations.normalization import Normalization
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, HostScalar

# A kernel's names of the running statistics.
RUNNING = ("in_mean", "in_var", "next_mean", "next_var")
# Results that are left out where nobody reads them.
_OPTIONAL = frozenset({"mean", "inverse", "next_mean", "next_var"})
# Kernel name -> port.
_FORWARD_PORTS = {
    "x": "input",
    "y": "Y",
    "scale": "scale",
    "bias": "bias",
    "mean": "mean",
    "inverse": "inv_variance",
    "in_mean": "in_running_mean",
    "in_var": "in_running_var",
    "next_mean": "next_running_mean",
    "next_var": "next_running_var",
}
_BACKWARD_PORTS = {
    "x": "input",
    "grad": "grad",
    "dx": "DX",
    "scale": "scale",
    "mean": "mean",
    "inverse": "inv_variance",
    "dscale": "DScale",
    "dbias": "DBias",
}


@dataclass(frozen=True)
class NormProblem:
    """The tensors of a normalization by the kernels' names, and the plane that they lie in."""

    operation: Operation
    tensors: Mapping[str, Tensor]
    plane: Plane

    @property
    def is_centred(self) -> bool:
        """True if the mean is subtracted: all but RMS normalization."""
        return not self.operation.kind.startswith("rmsnorm")

    @property
    def is_double(self) -> bool:
        """True if arithmetic is in float64."""
        return self.tensors["x"].data_type is DataType.DOUBLE

    @property
    def compute(self) -> Any:
        """Triton's type of the arithmetic."""
        return tl.float64 if self.is_double else tl.float32

    @property
    def compute_name(self) -> str:
        """The same, as it is spelled in a signature."""
        return "fp64" if self.is_double else "fp32"

    def flags(self) -> dict[str, Any]:
        """The compile-time flags of a forward kernel."""
        return {
            "IS_CENTRED": self.is_centred,
            "HAS_BIAS": "bias" in self.tensors,
            "HAS_MEAN": "mean" in self.tensors,
            "HAS_INVERSE": "inverse" in self.tensors,
            "HAS_NEXT_MEAN": "next_mean" in self.tensors,
            "HAS_NEXT_VAR": "next_var" in self.tensors,
            "COMPUTE": self.compute,
        }

    def operands(self, assembly: Assembly, names: Iterable[str]) -> None:
        """Pointers and steps of the named tensors, and the scalars.

        An absent operand keeps its place: y (or dx) stands in, and the kernel does not look at it.
        """
        stand_in = self.tensors["y" if "y" in self.tensors else "dx"]
        for name in names:
            tensor = self.tensors.get(name)
            is_statistic = name in ("mean", "inverse") and self._makes_statistics
            pointer = f"{name}_out" if is_statistic else name
            assembly.tensor(pointer, stand_in if tensor is None else tensor, is_aligned=True)
            if tensor is None:
                for suffix in ("outer", "inner", "jump", "step"):
                    assembly.integer(f"{name}_{suffix}", 0)
            else:
                assembly.steps(name, self.plane.steps[name], tensor)
        for name in ("epsilon", "momentum"):
            if name in self.operation.inputs:
                assembly.scalar(name, self.compute_name, self._scalar(name, assembly.slots))
            else:
                assembly.constants[name] = 0.0

    def with_fallback(
        self, aligned: KernelPlan, general: KernelPlan, slots: Mapping[int, int]
    ) -> KernelPlan:
        """``aligned`` where every pointer is a multiple of 16 bytes, else ``general``."""
        if not aligned.kernels:
            return general
        checked = tuple(sorted({slots[tensor.uid] for tensor in self.tensors.values()}))
        return KernelPlan(aligned.kernels, aligned.scratch, checked, general)

    def empty_plan(self) -> KernelPlan:
        """The plan of a shape without elements.

        Raises:
            NotSupportedError: if statistics over nothing would have to be written.
        """
        if self.plane.rows and any(self._is_made(name) for name in self.tensors if name != "y"):
            x = self.tensors["x"]
            raise NotSupportedError(
                f"tensor {x.label()} (input) has dim {x.dim}; the kernels have no statistics of "
                "no element"
            )
        return KernelPlan(())

    @property
    def _makes_statistics(self) -> bool:
        return "inv_variance" in self.operation.produces

    def _is_made(self, name: str) -> bool:
        made = {id(tensor) for tensor in self.operation.outputs.values()}
        return name in self.tensors and id(self.tensors[name]) in made

    def _scalar(self, name: str, slots: Mapping[int, int]) -> Argument:
        tensor = self.operation.inputs[name]
        return HostScalar(slots[tensor.uid], None if tensor.value is None else float(tensor.value))


def forward_problem(operation: Operation) -> NormProblem:
    """The problem of a forward operation.

    Raises:
        NotSupportedError: naming the tensor and the rule.
    """
    problem = _problem(operation, _FORWARD_PORTS)
    y = problem.tensors["y"]
    if y.is_virtual:
        raise NotSupportedError(f"tensor {y.label()} (Y) is virtual; the kernels store it")
    return problem


def backward_problem(operation: Operation) -> NormProblem:
    """The problem of a backward operation.

    Raises:
        NotSupportedError: naming the tensor and the rule.
    """
    problem = _problem(operation, _BACKWARD_PORTS)
    for name in ("dx", "dscale", "dbias"):
        tensor = problem.tensors.get(name)
        if tensor is not None and tensor.is_virtual:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({name}) is virtual; the kernels store it"
            )
    return problem


def _problem(operation: Operation, names: Mapping[str, str]) -> NormProblem:
    peers = [port for port in operation.inputs if port.startswith("peer_stats_")]
    if peers:
        raise NotSupportedError(
            f"tensor {operation.inputs[peers[0]].label()} ({peers[0]}) is given; the kernels run "
            "on one device"
        )
    for port in ("epsilon", "momentum"):
        tensor = operation.inputs.get(port)
        if tensor is not None and not tensor.is_pass_by_value:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) is on the device; expected it passed by value"
            )
    tensors = {}
    for name, port in names.items():
        tensor = operation.inputs.get(port) or operation.outputs.get(port)
        if tensor is not None and not (tensor.is_virtual and name in _OPTIONAL):
            tensors[name] = tensor
    dim = tensors["x"].dim
    if isinstance(operation, Normalization):
        columns = operation.normalized_axes()
    else:
        columns = tuple(axis for axis in range(len(dim)) if axis != 1)
    # Where samples or channels count, rows of a sample follow one another.
    is_free = operation.kind.startswith(("layernorm", "rmsnorm"))
    grounds = plane(tensors, dim, columns, in_declared_order=not is_free)
    return NormProblem(operation, tensors, grounds)
