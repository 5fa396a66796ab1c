"""Running a Triton plan: prepared driver launches on a GPU, the interpreter on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.artifact.code import KernelCode
from tilewright.engines.compiled.code_cache import kernel_code, stored_code
from tilewright.engines.compiled.compiler import POINTER_ALIGNMENT_BYTES
from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel
from tilewright.engines.compiled.resolved import Codes, ResolvedKernel, ResolvedPlan
from tilewright.errors import NotSupportedError
from tilewright.launch.binder import Binder, Binding, workspace_pointer, workspace_view
from tilewright.launch.cuda_driver import load_module
from tilewright.launch.direct import DirectCalls
from tilewright.launch.frames import Frame
from tilewright.launch.prepared import (
    BlockPool,
    BoundPlan,
    Constant,
    HostScalar,
    KernelFrame,
    KernelLaunch,
    Operand,
    Scratch,
    launch_on,
    require_grid,
)
from tilewright.launch.workspace import WorkspacePlan, plan_workspace


class CudaExecutable:
    """Loaded kernels of one plan on one device. Immutable."""

    needs_views = False
    workspace_alignment_bytes = POINTER_ALIGNMENT_BYTES

    def __init__(self, plan: ResolvedPlan, device: torch.device, codes: Codes) -> None:
        self.workspace: WorkspacePlan = plan_workspace(list(plan.scratch))
        self._device_index = device.index or 0
        self._launches = tuple(
            _load(kernel, codes[kernel.digest], self._device_index) for kernel in plan.kernels
        )
        self._blocks = BlockPool(self._launches, self._device_index)
        self._needs_aligned = plan.needs_aligned
        self._fallback = (
            None if plan.fallback is None else CudaExecutable(plan.fallback, device, codes)
        )

    def frame(self, binding: Binding, workspace: Any, plan_name: str, keep: Any) -> KernelFrame:
        """The parameter blocks of one call."""
        bound = self._bound(binding, workspace)
        return KernelFrame(bound, self._device_index, plan_name, keep)

    def execute(self, binding: Binding, workspace: Any, stream: Any) -> None:
        """Bind and launch at once, in parameter blocks of the plan."""
        chosen = self._for(binding.starts)
        entry = chosen._blocks.take()
        entry[0], bound = None, entry[1]
        bound.fill(binding.starts, binding.stops, binding.views, chosen._scratch(workspace))
        launch_on(bound.run, self._device_index, stream)
        chosen._blocks.give(entry)

    def populate(self, binding: Binding, workspace: Any, cuda_graph: int) -> None:
        """Add one call's kernels to an empty CUDA graph; see ``launch.cuda_graphs``."""
        from tilewright.launch import cuda_graphs

        cuda_graphs.populate(self._bound(binding, workspace), cuda_graph, self._device_index)

    def update(
        self, binding: Binding, workspace: Any, cuda_graph: int, instance: int | None
    ) -> None:
        """Give a populated CUDA graph, and its instance, another call's operands."""
        from tilewright.launch import cuda_graphs

        bound = self._bound(binding, workspace)
        cuda_graphs.update(bound, cuda_graph, self._device_index, instance)

    def _bound(self, binding: Binding, workspace: Any) -> BoundPlan:
        chosen = self._for(binding.starts)
        bound = BoundPlan(chosen._launches, self._device_index)
        bound.fill(binding.starts, binding.stops, binding.views, chosen._scratch(workspace))
        return bound

    def direct_calls(self, binder: Binder) -> DirectCalls:
        """The short way of plain calls; see ``tilewright.launch.direct``."""
        return DirectCalls(binder, self._blocks, self._needs_aligned)

    def _for(self, starts: Sequence[int]) -> CudaExecutable:
        """This plan, or the general one if a pointer is less aligned than this one assumes."""
        if self._fallback is not None:
            for slot in self._needs_aligned:
                if starts[slot] & (POINTER_ALIGNMENT_BYTES - 1):
                    return self._fallback
        return self

    def _scratch(self, workspace: Any) -> int:
        return workspace_pointer(workspace) if self.workspace.size_bytes else 0


class InterpretedExecutable:
    """The same kernels under Triton's interpreter, on CPU tensors. For tests without a GPU."""

    needs_views = True

    def __init__(self, plan: KernelPlan, device: torch.device) -> None:
        # Alignment is a matter of the device's loads: the general plan is the one to interpret.
        self._plan = plan if plan.fallback is None else plan.fallback
        self.workspace: WorkspacePlan = plan_workspace(list(self._plan.scratch))
        self._device = device

    def execute(self, binding: Binding, workspace: Any, stream: Any) -> None:
        """One call at once."""
        self.frame(binding, workspace, "", None).launch(stream)

    def frame(self, binding: Binding, workspace: Any, plan_name: str, keep: Any) -> Frame:
        """Calls of the interpreted functions on the operands' views."""
        scratch = workspace_view(workspace, self.workspace.size_bytes, self._device)
        calls = [_interpreted(kernel, binding, scratch) for kernel in self._plan.kernels]

        def run() -> None:
            for call in calls:
                call()

        return Frame(run, self._device, plan_name, keep)


def resolve(
    plan: KernelPlan, compute_capability: tuple[int, int]
) -> tuple[ResolvedPlan, dict[str, KernelCode]]:
    """A family's plan with the code of every kernel, by digest; compiles what is not there.

    Raises:
        LaunchError: if the compiler is needed and forbidden.
        NotSupportedError: if the compiler cannot serve a kernel.
    """
    codes: dict[str, KernelCode] = {}
    kernels = []
    for kernel in plan.kernels:
        digest, codes[digest] = kernel_code(kernel.spec, compute_capability)
        types = tuple(kind for _, kind in kernel.spec.types)
        kernels.append(ResolvedKernel(digest, types, kernel.grid, kernel.arguments))
    behind = None
    if plan.fallback is not None:
        behind, more = resolve(plan.fallback, compute_capability)
        codes |= more
    return ResolvedPlan(tuple(kernels), plan.scratch, plan.needs_aligned, behind), codes


def stored_codes(plan: ResolvedPlan) -> dict[str, KernelCode] | None:
    """The code of every kernel of a stored plan, by digest; None if one is not there."""
    codes: dict[str, KernelCode] = {}
    for digest in plan.digests():
        code = codes.get(digest) or stored_code(digest)
        if code is None:
            return None
        codes[digest] = code
    return codes


def _load(kernel: ResolvedKernel, code: KernelCode, device_index: int) -> KernelLaunch:
    module = load_module(kernel.digest, code.image, code.name, code.shared_bytes, device_index)
    return KernelLaunch(
        code.name,
        module.function,
        require_grid(kernel.grid, code.name),
        code.threads,
        code.shared_bytes,
        kernel.types,
        kernel.arguments,
    )


def _interpreted(
    kernel: PlannedKernel, binding: Binding, scratch: torch.Tensor | None
) -> Callable[[], None]:
    # By name: compile-time arguments may stand between those of run time.
    arguments: dict[str, Any] = dict(kernel.spec.constants)
    for (name, kind), argument in zip(kernel.spec.types, kernel.arguments, strict=True):
        if isinstance(argument, Operand):
            view = binding.views[argument.slot]
            if argument.offset_bytes:
                raise NotSupportedError(f"argument {name!r}: the interpreter takes whole operands")
            arguments[name] = view
        elif isinstance(argument, HostScalar):
            arguments[name] = binding.views[argument.slot].item()
        elif isinstance(argument, Constant):
            arguments[name] = argument.value
        elif isinstance(argument, Scratch) and scratch is not None:
            arguments[name] = scratch[argument.offset_bytes :].view(_SCRATCH_TYPES[kind])
    function, grid = kernel.spec.function, kernel.grid
    return lambda: function[grid](**arguments)


_SCRATCH_TYPES = {
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
