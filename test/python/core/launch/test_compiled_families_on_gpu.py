"""The launch contract on every family of compiled kernels: a family joins by a line in SAMPLES."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from launch_samples import attention as samples
from launch_samples.declaring import Declaring
from launch_samples.norms_and_chains import (
    adalayernorm,
    batchnorm,
    batchnorm_backward,
    batchnorm_backward_of_long_rows,
    batchnorm_inference,
    chain,
    chain_of_the_transpose,
    chain_with_column_sums,
    chain_with_row_sums,
    instancenorm,
    layernorm,
    layernorm_backward,
    layernorm_of_long_rows,
    norm_with_residual_and_amax,
    rmsnorm,
    rmsnorm_backward,
    rmsnorm_backward_of_long_rows,
    rope,
    rope_backward,
)

import tilewright as tw
from tilewright.artifact import compiler_forbidden
from tilewright.launch import cuda_driver
from tilewright.testing.detectors import (
    Outcome,
    frame_independence,
    no_allocation,
    no_synchronization,
    replay_freshness,
    stream_order,
)
from tilewright.testing.detectors.subject import Subject, graph_subject
from tilewright.testing.detectors.wide import different
from tilewright.torch_dtypes import to_torch

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

DECOY, POISON = 3.0, -7.0
# Addresses cut to a negative number land in front of the operand.
MARGIN = 2**31

ANY_ROWS = (23, 200, 1000)
# Of an adaptive norm a program takes as many rows of one sample as it takes at all, or some that
# stand apart, where their number leaves a rest: those are two kernels, and this is the first.
WHOLE_TILES = (16, 200, 1000)

# A family joins here: (what declares a graph, operands whose strides may be anything, numbers of
# rows that the kernels of its plan for 64 take, too).
SAMPLES: list[tuple[Callable[[Declaring], None], tuple[str, ...], tuple[int, ...]]] = [
    (rmsnorm, ("x", "y"), ANY_ROWS),
    (layernorm, ("x", "y"), ANY_ROWS),
    (layernorm_of_long_rows, ("x", "y"), ()),
    (norm_with_residual_and_amax, ("x", "residual", "total", "y"), ()),
    (rmsnorm_backward, ("grad", "x", "dx"), ()),
    (rmsnorm_backward_of_long_rows, ("grad", "x", "dx"), ()),
    (layernorm_backward, ("grad", "x", "dx"), ()),
    (adalayernorm, ("x", "y"), WHOLE_TILES),
    (instancenorm, ("x", "y"), ()),
    (batchnorm, ("x", "y"), ()),
    (batchnorm_inference, ("x", "y"), ()),
    (batchnorm_backward, ("grad", "x", "dx"), ()),
    (batchnorm_backward_of_long_rows, ("grad", "x", "dx"), ()),
    (rope, ("x", "y"), ()),
    (rope_backward, ("dy", "dx"), ()),
    (chain, ("gate", "y"), ()),
    (chain_with_row_sums, ("x", "y"), ()),
    (chain_with_column_sums, ("x",), ()),
    (chain_of_the_transpose, ("x", "y"), ()),
    (samples.attention, ("q", "k", "v", "o"), ()),
    (samples.attention_without_hopper, ("q", "k", "v", "o"), ()),
    (samples.attention_of_whole_tiles, ("q", "k", "v", "o"), ()),
    (samples.attention_of_part_tiles, ("q", "k", "v", "o"), ()),
    (samples.attention_of_wide_heads, ("q", "k", "v", "o"), ()),
    (samples.attention_gated, ("q", "v", "gate", "o"), ()),
    (samples.attention_gated_behind, ("gate", "o"), ()),
    (samples.attention_with_its_draws, ("draws",), ()),
    (samples.attention_padded, ("q", "o"), ()),
    (samples.attention_backward, ("q", "k", "grad", "dq", "dv"), ()),
    (samples.attention_backward_without_hopper, ("q", "k", "v", "o", "grad", "dq", "dk", "dv"), ()),
    (samples.attention_of_every_feature, ("bias",), ()),
    (samples.attention_backward_of_every_feature, ("bias", "dbias"), ()),
    (samples.attention_with_a_sink_on_hopper, ("stats",), ()),
    (samples.attention_backward_with_a_sink_on_hopper, ("stats",), ()),
    (samples.attention_fp8_on_hopper, ("k", "o"), ()),
    (samples.attention_fp8_long_on_hopper, ("q", "v"), ()),
    (samples.attention_fp8_long_and_cut_on_hopper, ("q", "v"), ()),
    (samples.attention_ragged, (), ()),
    (samples.attention_ragged_of_several_tiles, (), ()),
    (samples.attention_backward_ragged, (), ()),
    (samples.attention_decode, ("q", "k", "v", "o"), ()),
    (samples.attention_decode_of_several_tiles, ("q", "k", "v", "o"), ()),
    (samples.attention_decode_in_registers, ("k", "v"), ()),
    (samples.attention_decode_of_pairs_in_registers, ("q", "v"), ()),
    (samples.attention_decode_of_pages_in_registers, (), ()),
    (samples.attention_paged, ("k", "v"), ()),
    (samples.attention_ragged_on_hopper, (), ()),
    (samples.attention_paged_on_hopper, ("k", "v"), ()),
]
EVERY = pytest.mark.parametrize("declare", [row[0] for row in SAMPLES], ids=lambda d: d.__name__)


def built(declare: Callable[[Declaring], None], **options: Any) -> tuple[Any, dict[str, Any]]:
    """A built graph, and operands on the GPU for it."""
    d = Declaring(**options)
    declare(d)
    if "triton" in d.barred and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    d.graph.create_execution_plans()
    d.graph.deselect_engines(("aten", *d.barred))
    d.graph.build()
    assert d.graph.selected_engine != "aten", d.graph.explain()
    generator = torch.Generator().manual_seed(7)
    operands = {}
    for tensor in d.graph.inputs():
        if not tensor.is_pass_by_value:
            values = d.values.get(tensor.name)
            if values is None:
                values = torch.rand(tensor.dim, generator=generator) + 0.5
            operands[tensor.name] = values.to(to_torch(tensor.data_type)).cuda()
    return d.graph, operands


def examined(declare: Callable[[Declaring], None]) -> tuple[Subject, dict[str, Any]]:
    """For detectors: a call leaves NaN in what it does not write, as rows of no sequence."""
    graph, operands = built(declare)
    subject = graph_subject(graph)

    def call(given: Any) -> dict[str, torch.Tensor]:
        results = {
            name: torch.empty_strided(at.dim, at.stride, dtype=at.dtype, device=at.device)
            for name, at in subject.layouts(given).items()
        }
        for result in results.values():
            result.fill_(torch.nan)
        graph.execute({**given, **results}, workspace_of(graph))
        return results

    # A graph that is replayed needs its frame, which owns the workspace, as long as it may run.
    frames: list[Any] = []

    def declared(given: Any, results: Any) -> Any:
        assert subject.declare is not None
        made = subject.declare(given, results)

        def bind(given: Any, results: Any) -> Any:
            frames.append(made.bind(given, results))
            return frames[-1]

        return replace(made, bind=bind)

    return replace(subject, call=call, declare=declared), operands


def outputs_of(graph: Any, pattern: float = POISON) -> dict[str, torch.Tensor]:
    return {
        t.name: torch.full(t.dim, pattern, dtype=to_torch(t.data_type), device="cuda")
        for t in graph.outputs()
    }


def workspace_of(graph: Any) -> torch.Tensor:
    return torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")


def results_of(graph: Any, operands: dict[str, Any]) -> dict[str, torch.Tensor]:
    results = outputs_of(graph)
    graph.execute({**operands, **results}, workspace_of(graph))
    torch.cuda.synchronize()
    return results


@EVERY
def test_replay_reads_operands_as_they_are(declare: Any) -> None:
    # L9, B16: captured in a CUDA Graph, each operand changed in place, results poisoned.
    verdict = replay_freshness(*examined(declare))
    assert verdict.outcome is Outcome.HELD, verdict


@EVERY
def test_a_launch_neither_allocates_nor_waits(declare: Any) -> None:
    # L2, L3, B22: bound launches by the detectors, and the whole of execute here.
    graph, operands = built(declare)
    for verdict in (no_allocation(graph, operands), no_synchronization(graph, operands)):
        assert verdict.outcome is Outcome.HELD, verdict
    pack = {**operands, **outputs_of(graph)}
    workspace = workspace_of(graph)
    graph.execute(pack, workspace)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.execute(pack, workspace)
        graph.bind(pack, workspace).launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@EVERY
def test_work_is_ordered_on_the_current_stream(declare: Any) -> None:
    # L8: what a delayed producer writes on the stream is read. On a busy machine the producer may
    # be done when the call returns, which shows nothing.
    subject, operands = examined(declare)
    verdict = stream_order(subject, operands)
    for _ in range(5):
        if verdict.outcome is not Outcome.DECLINED:
            break
        verdict = stream_order(subject, operands)
    assert verdict.outcome is Outcome.HELD, verdict


@EVERY
def test_two_threads_share_a_plan(declare: Any) -> None:
    # L10.
    verdict = frame_independence(*examined(declare))
    assert verdict.outcome is Outcome.HELD, verdict


@EVERY
@pytest.mark.parametrize("way", ["execute", "frame"])
def test_several_streams_at_once(declare: Any, way: str) -> None:
    # L10, B15: distinct buffers, poisoned results, a workspace each, after one serial warm-up.
    graph, operands = built(declare)
    results_of(graph, operands)
    calls = []
    for number in range(6):
        # By float32, as 8-bit numbers have no arithmetic.
        own = {
            name: (t.float() * (1 + number / 8)).to(t.dtype) if t.is_floating_point() else t.clone()
            for name, t in operands.items()
        }
        calls.append((own, outputs_of(graph), workspace_of(graph), torch.cuda.Stream()))
    wanted = [results_of(graph, own) for own, *_ in calls]
    frames = [graph.bind({**own, **results}, space) for own, results, space, _ in calls]
    # The operands were made on another stream.
    torch.cuda.synchronize()
    for _ in range(4):
        for (own, results, space, stream), frame in zip(calls, frames, strict=True):
            if way == "frame":
                frame.launch(stream)
                continue
            with torch.cuda.stream(stream):
                graph.execute({**own, **results}, space)
    torch.cuda.synchronize()
    for (_, results, *_), expected in zip(calls, wanted, strict=True):
        assert different(results, expected) is None


@EVERY
def test_a_thread_that_made_no_call_of_the_runtime_yet(declare: Any) -> None:
    # No context is current there; the launch makes it current and goes on.
    graph, operands = built(declare)
    expected, results = results_of(graph, operands), outputs_of(graph)
    workspace = workspace_of(graph)
    frame = graph.bind({**operands, **results}, workspace)
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream
    failures: list[BaseException] = []

    def work() -> None:
        try:
            frame.launch(stream)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures, failures
    assert different(results, expected) is None


@EVERY
def test_a_bound_frame_and_execute_agree_for_every_alignment(declare: Any) -> None:
    # The short way, the binder's, and the plan without aligned loads give the same.
    graph, operands = built(declare)
    expected = results_of(graph, operands)
    for skip in (0, 1):
        moved = {name: shifted(t, skip) for name, t in operands.items()}
        results = {name: shifted(t, skip) for name, t in outputs_of(graph).items()}
        for pack in ({**moved, **results}, {**moved, **results, None: None}):
            for result in results.values():
                result.fill_(POISON)
            if skip and graph.selected_engine == "hopper":
                # The copy engine takes multiples of 16 bytes: refused, and nothing written.
                with pytest.raises(tw.BindingError, match="tensor map"):
                    graph.execute(pack, workspace_of(graph))
                torch.cuda.synchronize()
                assert all(bool((result == POISON).all()) for result in results.values())
                continue
            graph.execute(pack, workspace_of(graph))
            torch.cuda.synchronize()
            assert different(results, expected) is None, (skip, len(pack))


def test_a_first_call_of_the_plan_behind_may_be_captured(
    monkeypatch: pytest.MonkeyPatch, captured: Any
) -> None:
    # Its kernels are loaded by the first call that needs them, which is no work on a stream.
    monkeypatch.setattr(cuda_driver, "_modules", {})
    graph, operands = built(rmsnorm)
    expected = results_of(graph, operands)
    loaded = len(cuda_driver._modules)
    moved = {name: shifted(t, 1) for name, t in operands.items()}
    results = {name: shifted(t, 1) for name, t in outputs_of(graph).items()}
    with captured(lambda: graph.execute({**moved, **results})) as recorded:
        assert len(cuda_driver._modules) > loaded
        assert all(bool((t == POISON).all()) for t in results.values()), "nothing ran yet"
        recorded.replay()
        torch.cuda.synchronize()
    assert different(results, expected) is None


def shifted(tensor: torch.Tensor, skip: int) -> torch.Tensor:
    """A copy that starts ``skip`` elements after an aligned address."""
    storage = torch.empty(tensor.numel() + skip, dtype=tensor.dtype, device=tensor.device)
    copy = storage[skip:].view(tensor.shape)
    copy.copy_(tensor)
    return copy


@pytest.mark.parametrize(
    ("declare", "numbers"), [pytest.param(d, n, id=d.__name__) for d, _, n in SAMPLES if n]
)
def test_another_number_of_rows_needs_no_compiler(declare: Any, numbers: Any) -> None:
    # B17.
    graph, operands = built(declare)
    results_of(graph, operands)
    for rows in numbers:
        with compiler_forbidden():
            graph, operands = built(declare, rows=rows)
            results = results_of(graph, operands)
        assert all(bool(torch.isfinite(t).all()) for t in results.values())
        assert all(bool((t != POISON).all()) for t in results.values())


def wide_cases() -> Iterator[Any]:
    for declare, names, _ in SAMPLES:
        for name in names:
            yield pytest.param(declare, name, id=f"{declare.__name__}-{name}")


@pytest.mark.parametrize(("declare", "name"), list(wide_cases()))
def test_wide_strides_read_and_write_no_decoy(declare: Any, name: str) -> None:
    # L4, B1: the outermost axis of more than one step reaches past 2^32 elements; every other
    # element of the storage is a valid number that is wrong.
    graph, operands = built(declare)
    expected = results_of(graph, operands)
    tensor = next(t for t in (*graph.inputs(), *graph.outputs()) if t.name == name)
    axis = next(a for a, extent in enumerate(tensor.dim) if extent > 1)
    step = -(-(2**32 + 2**12) // (tensor.dim[axis] - 1) // 64) * 64
    stride = tuple(step if a == axis else s for a, s in enumerate(tensor.stride))
    size = MARGIN + step * (tensor.dim[axis] - 1) + tensor.dim[axis] * tensor.stride[axis]
    try:
        storage = torch.full((size,), DECOY, dtype=to_torch(tensor.data_type), device="cuda")
        view = storage.as_strided(tensor.dim, stride, MARGIN)
        is_same = torch.empty(size, dtype=torch.bool, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip(f"{size * 3} bytes of device memory are not free")
    graph, operands = built(declare, strides={name: stride})
    results = outputs_of(graph)
    if name in results:
        results[name] = view
    else:
        operands[name] = view.copy_(operands[name])
    graph.execute({**operands, **results}, workspace_of(graph))
    torch.cuda.synchronize()
    assert different(results, expected) is None
    if name in results:
        view.fill_(DECOY)
        torch.eq(storage, DECOY, out=is_same)
        assert bool(is_same.all()), "something was written outside of the result"
