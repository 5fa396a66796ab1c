"""Fixtures for tests of engines: run a graph between guard bytes, compare it with the oracle."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

# With no GPU, Triton kernels run under its interpreter, which must be chosen before its import.
_HAS_GPU = os.path.exists("/dev/nvidiactl")
if not _HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

_GUARD_BYTES = 64
# All ones is NaN in every floating format that has one, so an element left out shows.
_POISON = 0xFF


# What goes before the code of a child that compiles kernels, and behind it.
_COMPILING = """
import json, os
os.environ.pop("TRITON_INTERPRET", None)
from tilewright.engines.compiled.compiler import TARGETS, compile_kernel
told = []

def facts_of(kernel, target):
    names = list(kernel.spec.function.arg_names)
    given = [name for name, _ in kernel.spec.types]
    constants = [name for name, _ in kernel.spec.constants]
    code = compile_kernel(kernel.spec, target)
    return {
        "kernel": kernel.spec.name,
        "target": target,
        "bytes": len(code.image),
        "threads": code.threads,
        "runtime_in_order": given == [name for name in names if name not in constants],
        "all_named": sorted(given + constants) == sorted(names),
        "one_argument_each": len(kernel.arguments) == len(given),
    }
"""
_TELLING = "\nprint(json.dumps(told))\n"


@pytest.fixture
def compiled_facts(run_python: Callable[..., str]) -> Callable[..., list[dict[str, Any]]]:
    """Return a function (code, *arguments) that compiles kernels in a child, with no GPU needed.

    The code appends ``facts_of(kernel, target)``, and what else it tells, to ``told`` for each
    kernel of a plan and each of ``TARGETS``. Checked here of each (B18): compile-time parameters
    are no run-time ones, and the call has one argument for each run-time parameter.
    """

    def compiled(code: str, *arguments: str) -> list[dict[str, Any]]:
        found = json.loads(run_python(_COMPILING + code + _TELLING, *arguments))
        for facts in found:
            facts["target"] = tuple(facts["target"])
            assert facts["bytes"] > 1000 and facts["threads"] % 32 == 0, facts
            assert facts["runtime_in_order"] and facts["all_named"], facts
            assert facts["one_argument_each"], facts
        return list(found)

    return compiled


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Triton's kernels are interpreted, unless there is a GPU to run them."""
    from tilewright.engines.triton.engine import interpreting

    with contextlib.nullcontext() if _HAS_GPU else interpreting():
        yield


@pytest.fixture
def interpreted_functions(interpreted: None) -> Iterator[None]:
    """``interpreted`` for functions on tensors, whose plans are forgotten before and after."""
    from tilewright import ops

    ops.clear_plan_cache()
    yield
    ops.clear_plan_cache()


@pytest.fixture
def captured() -> Callable[[Callable[[], Any]], Any]:
    """Return a context manager (call): the graph that torch captures of it, reset at the end."""
    return _captured


@contextlib.contextmanager
def _captured(call: Callable[[], Any]) -> Iterator[torch.cuda.CUDAGraph]:
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
        yield graph
    finally:
        graph.reset()


@pytest.fixture
def run_guarded() -> Callable[..., dict[Any, torch.Tensor]]:
    """Return a function (graph, feeds, engine="aten") that runs a graph on the CPU.

    The plan is the named engine's, never another's. ``feeds`` maps input tensors to buffers.
    Each output gets a buffer of its declared dim and strides, poisoned, amid poisoned guard
    bytes; guards and stride gaps must keep their poison and inputs their bytes. It returns
    output tensor -> logical values (float64 for packed FP4).
    """
    return _run_guarded


@pytest.fixture
def check_graph() -> Callable[..., dict[Any, torch.Tensor]]:
    """Return a function (graph, feeds, factor=8.0, engine="aten") that also checks the values.

    Each output must differ from the float64 oracle by no more than one rounding to its type
    plus ``factor`` roundings of the arithmetic (float32, or float64 for a float64 output), both
    relative to max(|oracle|.max(), 1). Integer and boolean outputs must be equal.
    """

    def check(
        graph: Any, feeds: Mapping[Any, torch.Tensor], factor: float = 8.0, engine: str = "aten"
    ) -> dict[Any, torch.Tensor]:
        from tilewright.oracle import evaluate

        results = _run_guarded(graph, feeds, engine)
        expected = evaluate(graph, feeds)
        for tensor, actual in results.items():
            _compare(tensor, actual, expected[tensor.uid], factor)
        return results

    return check


def _run_guarded(
    graph: Any, feeds: Mapping[Any, torch.Tensor], engine: str = "aten"
) -> dict[Any, torch.Tensor]:
    import torch

    from tilewright.oracle import layout
    from tilewright.planning.table import engine_by_name

    entry = engine_by_name(engine)
    assert entry is not None, f"no engine {engine!r}"
    if not graph.is_built:
        graph.create_execution_plan(entry.engine_id)
        graph.build()
    assert graph.selected_engine == engine
    pack: dict[Any, Any] = dict(feeds)
    raws: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
    for tensor in graph.outputs():
        raws[tensor] = _guarded_buffer(tensor)
        pack[tensor] = raws[tensor][1]
    before = {tensor: _bytes_of(buffer) for tensor, buffer in feeds.items()}
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
    graph.execute(pack, workspace)
    for tensor, buffer in feeds.items():
        assert torch.equal(_bytes_of(buffer), before[tensor]), f"input {tensor} was changed"
    for tensor, (raw, _) in raws.items():
        touched = _touched_bits(tensor, raw)
        changed = (raw != _POISON) & ~touched
        assert not changed.any(), f"output {tensor}: bytes outside it were written"
    return {tensor: layout.load(tensor, view) for tensor, (_, view) in raws.items()}


def _guarded_buffer(tensor: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All bytes, and the view of the declared elements amid them."""
    import torch

    from tilewright.graph.shapes import span_elements
    from tilewright.torch_dtypes import to_torch

    size = tensor.data_type.span_bytes(span_elements(tensor.dim, tensor.stride))
    if tensor.reordering_type.name == "F8_128x4":
        size = _tiled_size(tensor)
    raw = torch.full((_GUARD_BYTES + size + _GUARD_BYTES,), _POISON, dtype=torch.uint8)
    flat = raw[_GUARD_BYTES : _GUARD_BYTES + size]
    if tensor.data_type.is_sub_byte:
        return raw, flat
    flat = flat.view(to_torch(tensor.data_type))
    return raw, flat.as_strided(tensor.dim, tensor.stride)


def _tiled_size(tensor: Any) -> int:
    size = 1
    for extent in tensor.dim:
        size *= extent
    return size


def _touched_bits(tensor: Any, raw: torch.Tensor) -> torch.Tensor:
    """Which bytes of ``raw`` hold a declared element."""
    import torch

    from tilewright.graph.shapes import span_elements

    span = span_elements(tensor.dim, tensor.stride)
    elements = torch.zeros(max(span, 1), dtype=torch.bool)
    elements.as_strided(tensor.dim, tensor.stride).fill_(True)
    elements = elements[:span]
    touched = torch.zeros(raw.shape, dtype=torch.bool)
    if tensor.data_type.is_sub_byte:
        padded = torch.zeros(2 * ((span + 1) // 2), dtype=torch.bool)
        padded[:span] = elements
        spread = padded[0::2] | padded[1::2]
    else:
        spread = elements.repeat_interleave(tensor.data_type.bits // 8)
    touched[_GUARD_BYTES : _GUARD_BYTES + spread.numel()] = spread
    return touched


def _bytes_of(buffer: torch.Tensor) -> torch.Tensor:
    import torch

    storage = buffer.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return flat.clone()


def _compare(tensor: Any, actual: torch.Tensor, expected: torch.Tensor, factor: float) -> None:
    import torch

    from tilewright.oracle.formats import format_of, round_to

    got, want = actual.to(torch.float64), expected.to(torch.float64)
    assert got.shape == want.shape, f"{tensor}: shape {got.shape}, expected {want.shape}"
    target = format_of(tensor.data_type)
    if target is None:
        assert torch.equal(got, want), f"{tensor}: {got}, expected {want}"
        return
    assert torch.equal(torch.isnan(got), torch.isnan(want)), f"{tensor}: NaNs differ"
    # What overflows or saturates in the output's type does so in the reference too.
    rounded = round_to(want, target)
    ends = ~torch.isfinite(rounded) | ~torch.isfinite(got)
    same = (got == rounded) | torch.isnan(got)
    assert same[ends].all(), f"{tensor}: infinities differ"
    finite = want[torch.isfinite(want) & ~ends]
    size = max(finite.abs().max().item(), 1.0) if finite.numel() else 1.0
    arithmetic = 2.0**-53 if tensor.data_type.name == "DOUBLE" else 2.0**-24
    bound = (target.epsilon * 0.5 + factor * arithmetic) * min(size, 2.0 * target.max_finite)
    worst = (got - rounded)[~ends].abs().max().item() if (~ends).any() else 0.0
    # ``rounded`` is itself half a spacing from the reference at most.
    limit = bound + 0.5 * target.epsilon * size
    assert worst <= limit, f"{tensor}: off by {worst:.3g}, allowed {limit:.3g}"
