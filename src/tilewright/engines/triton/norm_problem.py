"""A normalization as rows and columns: which tensor is what, and how each is stepped through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.dtypes import DataType
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel
from tilewright.engines.triton.assembling import Assembly
from tilewright.engines.triton.norm_fusion import Fusion, normalized_axes
from tilewright.engines.triton.norm_tiles import norm_maximum
from tilewright.engines.triton.rows import Plane, plane
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.launch.prepared import Argument, HostScalar, Scratch
from tilewright.launch.workspace import plan_workspace
from tilewright.torch_dtypes import to_torch

Scratches = tuple[tuple[str, int], ...]
# What joins maxima takes so many at a time; mostly that is all of them.
_MAXIMUM_BLOCK = 16384

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
    fusion: Fusion

    @property
    def is_centred(self) -> bool:
        """True if the mean is subtracted: all but RMS normalization."""
        return not self.operation.kind.startswith("rmsnorm")

    @property
    def is_double(self) -> bool:
        """True if arithmetic is in float64."""
        tensors = (self.tensors["x"], self.operation.inputs["input"])
        return any(tensor.data_type is DataType.DOUBLE for tensor in tensors)

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
            "HAS_Y": "y" in self.tensors,
            "HAS_MEAN": "mean" in self.tensors,
            "HAS_INVERSE": "inverse" in self.tensors,
            "HAS_NEXT_MEAN": "next_mean" in self.tensors,
            "HAS_NEXT_VAR": "next_var" in self.tensors,
            "COMPUTE": self.compute,
        }

    def operands(self, assembly: Assembly, names: Iterable[str]) -> None:
        """Pointers and steps of the named tensors, and the scalars.

        An absent operand keeps its place: x stands in, and the kernel does not look at it.
        """
        stand_in = self.tensors["x"]
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
        for name in self.fused_names.values():
            if name in self.tensors:
                assembly.tensor(name, self.tensors[name], is_aligned=True)
                assembly.steps(name, self.plane.steps[name], self.tensors[name])
        for tensor in self.fusion.scalars:
            kind, value = _scalar(tensor)
            argument = HostScalar(assembly.slots[tensor.uid], value)
            assembly.scalar(self.fused_names[tensor.uid], kind, argument)
        for name in ("epsilon", "momentum"):
            if name in self.operation.inputs:
                assembly.scalar(name, self.compute_name, self._scalar(name, assembly.slots))
            else:
                assembly.constants[name] = 0.0

    @property
    def fused_names(self) -> dict[int, str]:
        """uid -> the kernels' name of what is read, stored or passed beside the norm itself."""
        groups = (("read", self.fusion.reads), ("made", self.fusion.writes))
        names = {
            tensor.uid: f"{stem}_{number}"
            for stem, tensors in groups
            for number, tensor in enumerate(tensors)
        }
        return names | {t.uid: f"number_{n}" for n, t in enumerate(self.fusion.scalars)}

    def maxima(self, assembly: Assembly, programs: int, scratch: Scratches) -> Scratches:
        """``scratch``, and the programs' maxima after it, whose pointers are put in place."""
        kind, size = ("*i64", 8) if self.is_double else ("*i32", 4)
        count = len(self.fusion.maxima)
        scratch = (*scratch, *((f"maximum {n}", programs * size) for n in range(count)))
        pieces = plan_workspace(list(scratch)).pieces[len(scratch) - count :]
        for number, piece in enumerate(pieces):
            assembly.pointer(f"maximum_{number}", kind, Scratch(piece.offset_bytes))
        return scratch

    def maximum_kernels(self, assembly: Assembly, programs: int) -> tuple[PlannedKernel, ...]:
        """The kernels that join the programs' maxima."""
        kernels = []
        for number, item in enumerate(self.fusion.maxima):
            name = f"maximum_{number}"
            own = Assembly(assembly.slots, is_aligned=assembly.is_aligned)
            own.pointer("maximum", assembly.types[name], assembly.arguments[name])
            own.tensor("out", item.outputs["out"])
            own.integer("count", programs, 1)
            block = min(_MAXIMUM_BLOCK, triton.next_power_of_2(programs))
            warps = max(1, min(32, block // 512))
            kernels.append(own.kernel(norm_maximum, (1, 1, 1), warps, BLOCK=block))
        return tuple(kernels)

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
            NotSupportedError: if something over nothing would have to be written.
        """
        made = any(self._is_made(name) for name in self.tensors if name in _OPTIONAL)
        if self.fusion.maxima or (self.plane.rows and made):
            x = self.tensors["x"]
            raise NotSupportedError(
                f"tensor {x.label()} (input) has dim {x.dim}; the kernels have no statistic of "
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


def _scalar(tensor: Tensor) -> tuple[str, int | float | None]:
    """Triton's type of a number that is passed by value, and the number if it is declared."""
    kind = "fp32" if tensor.data_type.is_floating else "i64"
    kind = "fp64" if tensor.data_type is DataType.DOUBLE else kind
    if tensor.value is None:
        return kind, None
    # As the tensor's type holds it.
    value = torch.tensor(tensor.value, device="cpu").to(to_torch(tensor.data_type)).item()
    return kind, int(value) if isinstance(value, bool) else value


def forward_problem(fusion: Fusion) -> NormProblem:
    """The problem of a forward operation and what rides along.

    Raises:
        NotSupportedError: naming the tensor and the rule.
    """
    return _problem(fusion, _FORWARD_PORTS)


def backward_problem(operation: Operation) -> NormProblem:
    """The problem of a backward operation.

    Raises:
        NotSupportedError: naming the tensor and the rule.
    """
    problem = _problem(Fusion(operation, operation.inputs["input"]), _BACKWARD_PORTS)
    for port in ("DX", "DScale", "DBias"):
        tensor = operation.outputs.get(port)
        if tensor is not None and tensor.is_virtual:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) is virtual; the kernels store it"
            )
    return problem


def _problem(fusion: Fusion, names: Mapping[str, str]) -> NormProblem:
    operation = fusion.norm
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
    tensors = {"x": fusion.source}
    for name, port in names.items():
        tensor = operation.inputs.get(port) or operation.outputs.get(port)
        # Results that nobody reads are not written.
        if name != "x" and tensor is not None and not tensor.is_virtual:
            tensors[name] = tensor
    for stem, group in (("read", fusion.reads), ("made", fusion.writes)):
        tensors |= {f"{stem}_{number}": tensor for number, tensor in enumerate(group)}
    dim = operation.inputs["input"].dim
    # Where samples or channels count, rows of a sample follow one another.
    is_free = operation.kind.startswith(("layernorm", "rmsnorm"))
    grounds = plane(tensors, dim, normalized_axes(operation), in_declared_order=not is_free)
    return NormProblem(operation, tensors, grounds, fusion)
