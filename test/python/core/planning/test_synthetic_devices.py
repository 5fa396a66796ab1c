"""G3: admission asks for exact device support. Devices are made up, so any machine tests any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.compiled import engine as compiled_engine
from tilewright.engines.compiled.engine import CompiledEngine
from tilewright.planning.rows import admit
from tilewright.planning.table import ENGINE_TABLE

pytestmark = pytest.mark.L0

# Every compute capability that NVIDIA has named so far, and some that it has not.
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)]
CAPABILITIES += [(12, 1), (13, 0), (99, 9)]
COMPILED = [entry for entry in ENGINE_TABLE if entry.module is not None and entry.name != "aten"]


def norm(**options: Any) -> Any:
    graph = tw.Graph("norm", "bfloat16", "float32", **options)
    x, scale = graph.tensor((8, 64), name="x"), graph.tensor((1, 64), name="scale")
    epsilon = graph.tensor_scalar(1e-5)
    y, _ = graph.rmsnorm(tw.norm_forward_phase.INFERENCE, x, scale, None, epsilon)
    y.set_output(True)
    return graph


def device(capability: tuple[int, int]) -> tw.DeviceProperties:
    return tw.DeviceProperties("cuda", 0, "made up", capability, 132)


@pytest.mark.parametrize("entry", COMPILED, ids=lambda entry: entry.name)
def test_rows_of_compiled_kernels_name_their_targets_exactly(entry: Any) -> None:
    assert entry.rows
    for row in entry.rows:
        assert row.compute_capabilities, f"{row.operations}: a lower bound is no device"
        assert row.compute_capabilities <= {(8, 0), (9, 0), (10, 0), (12, 0)}


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_a_device_is_taken_by_name_and_not_by_age(capability: tuple[int, int]) -> None:
    graph = norm()
    graph.validate()
    triton = next(entry for entry in ENGINE_TABLE if entry.name == "triton")
    reason = admit(triton.rows, graph.operations[0], device(capability))
    if capability in {(8, 0), (9, 0), (10, 0), (12, 0)}:
        assert reason is None
    else:
        assert reason is not None and "takes exactly sm_80, sm_90, sm_100, sm_120" in reason
        assert f"cuda sm_{capability[0]}{capability[1]}" in reason


def test_a_graph_on_a_future_device_is_planned_without_compiled_kernels() -> None:
    graph = norm(device_property=device((13, 0)), handle=tw.create_handle("cpu"))
    graph.create_execution_plans()
    verdicts = {verdict.engine_name: verdict for verdict in graph.explain().verdicts}
    assert not verdicts["triton"].is_taken and "sm_130" in verdicts["triton"].reason
    assert {plan.engine_name for plan in graph.plans} == {"aten"}


def test_a_device_that_is_not_here_is_answered_for_and_nothing_of_it_runs() -> None:
    graph = norm(device_property=device((9, 0)), handle=tw.create_handle("cpu"))
    told = graph.explain()
    verdicts = {verdict.engine_name: verdict for verdict in told.verdicts}
    assert verdicts["triton"].is_taken and verdicts["aten"].is_taken
    assert "no capability row" in verdicts["hopper"].reason
    assert told.selected is not None and told.selected.engine_name == "triton"
    # What is built runs here.
    graph.build()
    assert graph.selected_engine == "aten"
    assert "need an NVIDIA GPU" in dict(graph.explain().barred)[told.selected.name]
    x, scale, y = torch.ones(8, 64).bfloat16(), torch.ones(1, 64).bfloat16(), torch.zeros(8, 64)
    graph.execute({"x": x, "scale": scale, graph.outputs()[0]: y.bfloat16()})
    with pytest.raises(tw.NotSupportedError, match="need an NVIDIA GPU"):
        fresh = norm(device_property=device((9, 0)), handle=tw.create_handle("cpu"))
        fresh.select_plan(0)
        fresh.build()
    unknown = tw.DeviceProperties("cuda", 0, "made up", (9, 0))
    told = norm(device_property=unknown, handle=tw.create_handle("cpu")).explain()
    reasons = {verdict.engine_name: verdict.reason for verdict in told.verdicts}
    assert "sm_count is 0" in reasons["triton"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("", "not installed"),
        ("3.5.1", "older than 3.6"),
        ("3.8.0", "newer than 3.7"),
        ("3.7.1", None),
        ("3.6.0+git1234", None),
    ],
)
def test_a_compiler_that_is_not_known_declines(
    version: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CompiledEngine("tilewright.engines.triton", {}, oldest=(3, 6), newest=(3, 7))
    monkeypatch.setattr(compiled_engine, "installed_version", lambda package: version)
    found = engine.unusable_reason(torch.device("cuda", 0))
    assert (found is None) if reason is None else (found is not None and reason in found)
    assert "need an NVIDIA GPU" in str(engine.unusable_reason(torch.device("cpu")))


WITHOUT_TARGET = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, sys.argv[1])
from kernel_of_this_test import store_one
from tilewright.engines.compiled.compiler import KernelSpec, compile_kernel
from tilewright.errors import NotSupportedError
try:
    compile_kernel(KernelSpec(store_one, (("x", "*fp32"),)), (99, 0))
except NotSupportedError as error:
    print("declined:", error)
"""


def test_a_compiler_without_the_target_declines(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    (tmp_path / "kernel_of_this_test.py").write_text(
        "import triton, triton.language as tl\n\n\n"
        "@triton.jit\ndef store_one(x):\n    tl.store(x, 1.0)\n"
    )
    printed = run_python(WITHOUT_TARGET, str(tmp_path))
    assert "declined: kernel 'store_one': Triton" in printed
    assert "has no target sm_990" in printed


REFUSED = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, sys.argv[1])
from refused_kernel_of_this_test import no_instruction
from tilewright.engines.compiled.compiler import KernelSpec, compile_kernel
from tilewright.errors import NotSupportedError
try:
    compile_kernel(KernelSpec(no_instruction, (("x", "*i32"),)), (9, 0))
except NotSupportedError as error:
    print("declined:", error)
"""


def test_what_the_assembler_gives_up_declines(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    # So that the next plan is built, and a message has one line of the assembler's, not all of its
    # input.
    (tmp_path / "refused_kernel_of_this_test.py").write_text(
        "import triton, triton.language as tl\n\n\n"
        "@triton.jit\ndef no_instruction(x):\n"
        "    made = tl.inline_asm_elementwise('no.instruction $0, $1;', '=r,r', [tl.load(x)],\n"
        "        dtype=tl.int32, is_pure=True, pack=1)\n"
        "    tl.store(x, made)\n"
    )
    told = run_python(REFUSED, str(tmp_path)).splitlines()
    declined = [line for line in told if line.startswith("declined: ")]
    expected = "declined: kernel 'no_instruction': the assembler for sm_90 refuses it: "
    assert len(declined) == 1 and declined[0].startswith(expected), told
    assert len(declined[0]) < 200
