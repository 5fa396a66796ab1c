"""A plan of compiled kernels on a GPU: prepared driver launches. On a CPU: see ``interpreted``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewright.artifact.code import KernelCode
from tilewright.engines.compiled.code_cache import is_stored, kernel_code, stored_code
from tilewright.engines.compiled.compiler import POINTER_ALIGNMENT_BYTES
from tilewright.engines.compiled.resolved import Codes, ResolvedKernel, ResolvedPlan
from tilewright.errors import LaunchError
from tilewright.launch.binder import Binder, Binding
from tilewright.launch.cuda_driver import (
    MAX_PORTABLE_CLUSTER,
    allow_wide_clusters,
    load_module,
)
from tilewright.launch.direct import DirectCalls
from tilewright.launch.kernel_frames import BlockPool, BoundPlan, KernelFrame, launch_on
from tilewright.launch.prepared import KernelLaunch, require_grid
from tilewright.launch.workspace import WorkspacePlan, plan_workspace
from tilewright.launch.workspace_binding import workspace_pointer

if TYPE_CHECKING:
    from tilewright.engines.compiled.planned import KernelPlan


class CudaExecutable:
    """Loaded kernels of one plan on one device. Immutable."""

    needs_views = False
    workspace_alignment_bytes = POINTER_ALIGNMENT_BYTES

    def __init__(self, plan: ResolvedPlan, device: torch.device, codes: Codes) -> None:
        # The plan behind is loaded by the first call that needs it: most processes have none.
        self._behind = None if plan.fallback is None else (plan.fallback, device, codes)
        self._fallback: CudaExecutable | None = None
        self.workspace: WorkspacePlan = plan_workspace(list(plan.scratch))
        self._device_index = device.index or 0
        self._launches = tuple(
            _load(kernel, codes[kernel.digest], self._device_index) for kernel in plan.kernels
        )
        self._blocks = BlockPool(self._launches, self._device_index)
        self._needs_aligned = plan.needs_aligned

    def bound_frame(self, bound: BoundPlan, plan_name: str, keep: Any) -> KernelFrame:
        """The frame of a call that the short way has bound."""
        return KernelFrame(bound, self._device_index, plan_name, keep)

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
        if self._behind is not None:
            for slot in self._needs_aligned:
                if starts[slot] & (POINTER_ALIGNMENT_BYTES - 1):
                    if self._fallback is None:
                        # Two threads that come here at once make one each, of one module.
                        self._fallback = CudaExecutable(*self._behind)
                    return self._fallback
        return self

    def _scratch(self, workspace: Any) -> int:
        return workspace_pointer(workspace) if self.workspace.size_bytes else 0


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
        kernels.append(
            ResolvedKernel(
                digest, types, kernel.grid, kernel.arguments, kernel.is_early, kernel.cluster
            )
        )
    behind = None
    if plan.fallback is not None:
        behind, more = resolve(plan.fallback, compute_capability)
        codes |= more
    return ResolvedPlan(tuple(kernels), plan.scratch, plan.needs_aligned, behind), codes


def stored_codes(plan: ResolvedPlan, remake: Callable[[], Codes]) -> Codes | None:
    """The code of every kernel of a stored plan, by digest; None if one is not there.

    Of the plan behind it, the code is read when it is asked for; if it is damaged then, or gone,
    ``remake`` tells the code of all kernels as their family has them.
    """
    codes = _StoredCodes(remake)
    for kernel in plan.kernels:
        code = stored_code(kernel.digest)
        if code is None:
            return None
        codes[kernel.digest] = code
    return codes if all(d in codes or is_stored(d) for d in plan.digests()) else None


class _StoredCodes(dict[str, KernelCode]):
    def __init__(self, remake: Callable[[], Codes]) -> None:
        super().__init__()
        self._remake = remake

    def __missing__(self, digest: str) -> KernelCode:
        code = stored_code(digest) or self._remake().get(digest)
        if code is None:
            raise LaunchError(
                f"the store has lost code of a built plan ({digest[:16]}), and its sources are "
                "not what they were: build the plan again"
            )
        return code


def _load(kernel: ResolvedKernel, code: KernelCode, device_index: int) -> KernelLaunch:
    module = load_module(kernel.digest, code.image, code.name, code.shared_bytes, device_index)
    if kernel.cluster > MAX_PORTABLE_CLUSTER:
        allow_wide_clusters(module.function, code.name, device_index)
    launch = KernelLaunch(
        code.name,
        module.function,
        require_grid(kernel.grid, code.name),
        code.threads,
        code.shared_bytes,
        kernel.types,
        kernel.arguments,
        is_early=kernel.is_early,
        cluster=kernel.cluster,
    )
    if any(encoder.is_flat for _, encoder in launch.maps):
        from tilewright.launch.tensor_maps import nothing

        # Now, since calls allocate nothing.
        nothing(device_index)
    return launch
