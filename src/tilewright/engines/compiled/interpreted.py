"""A plan of compiled kernels under Triton's interpreter, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.engines.compiled.planned import KernelPlan, PlannedKernel
from tilewright.errors import NotSupportedError
from tilewright.launch.binder import Binding
from tilewright.launch.frames import Frame
from tilewright.launch.prepared import Constant, HostScalar, Operand, Scratch
from tilewright.launch.workspace import WorkspacePlan, plan_workspace
from tilewright.launch.workspace_binding import workspace_view


class InterpretedExecutable:
    """The functions of one plan, interpreted."""

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
        elif isinstance(argument, Scratch):
            # Where no byte is needed there is no workspace, and none of it is read.
            held = torch.empty(0, dtype=torch.uint8, device="cpu") if scratch is None else scratch
            arguments[name] = held[argument.offset_bytes :].view(_SCRATCH_TYPES[kind])
    function, grid = kernel.spec.function, kernel.grid
    return lambda: function[grid](**arguments)


_SCRATCH_TYPES = {
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i32": torch.int32,
    "*i64": torch.int64,
}
