"""Plan records: a second process needs no Triton; whatever is wrong with a record is a miss."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tilewright as tw
from tilewright.artifact import compiler_forbidden, counters, reset_counters
from tilewright.artifact.environment import installed_version, unloaded_environment
from tilewright.artifact.store import read_record
from tilewright.dtypes import DataType
from tilewright.engines.base import Proposal
from tilewright.engines.compiled import plan_records
from tilewright.engines.compiled.plan_records import record_keys
from tilewright.engines.compiled.resolved import ResolvedKernel, ResolvedPlan
from tilewright.graph import json_form
from tilewright.graph.enums import behavior_note, knob_type
from tilewright.launch.prepared import Constant, HostScalar, Operand, Scratch
from tilewright.launch.tensor_maps import TensorMap

PACKAGE = "tilewright.engines.triton"
WARPS = ((knob_type.WARPS, 4),)


def norm(rows: int = 8, width: int = 64, name: str = "norm", operand: str = "x") -> Any:
    graph = tw.Graph(name, "bfloat16", "float32")
    x, scale = graph.tensor((rows, width), name=operand), graph.tensor((1, width), name="scale")
    epsilon = graph.tensor_scalar(1e-6)
    y, _ = graph.rmsnorm(tw.norm_forward_phase.INFERENCE, x, scale, None, epsilon)
    y.set_output(True).set_name("y")
    graph.validate()
    return graph


def keys(graph: Any = None, target: tuple[int, int] = (9, 0), sm_count: int = 132) -> Any:
    chosen = norm() if graph is None else graph
    return record_keys(PACKAGE, "normalization", chosen, target, sm_count)


def made_up() -> ResolvedPlan:
    """A plan with every kind of argument, and another one behind it."""
    box = TensorMap(3, "q", DataType.BFLOAT16, (2, 3, 64), (192, 64, 1), (1, 64, 64), 128)
    arguments = (
        *(Operand(0), Operand(1, 64), Scratch(256), HostScalar(2, 0.1), HostScalar(2)),
        *(Constant(2**40), Constant(float("inf")), Constant(1e-5), box),
    )
    types = ("*bf16", "*bf16", "*fp32", "fp32", "fp32", "i64", "fp32", "fp32", "map")
    first = ResolvedKernel("a" * 64, types, (3, 2, 1), arguments)
    second = ResolvedKernel("b" * 64, ("*bf16",), (1, 1, 1), (Operand(0),), is_early=True)
    third = ResolvedKernel("c" * 64, ("*bf16",), (8, 1, 1), (Operand(0),), cluster=8)
    general = ResolvedPlan((second, third))
    return ResolvedPlan((first, second), (("shares", 1024),), (0, 1), general)


PROPOSALS = [
    Proposal(WARPS, 1.5, frozenset({behavior_note.RUNTIME_COMPILATION})),
    Proposal((), 2.0),
]


@pytest.mark.L0
def test_what_is_stored_comes_back() -> None:
    plan_records.save_plan(keys(), WARPS, made_up())
    plan_records.save_proposals(keys(), PROPOSALS)
    assert plan_records.load_plan(keys(), WARPS) == made_up()
    assert plan_records.load_proposals(keys()) == PROPOSALS
    now = counters()
    assert now.record_writes == 2 and now.record_hits == 2 and now.record_misses == {}
    assert now.writes == now.disk_hits == 0, "code is counted apart"


@pytest.mark.L0
def test_names_are_not_in_the_key_and_facts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_records.save_plan(keys(), WARPS, made_up())
    assert plan_records.load_plan(keys(norm(name="other", operand="h")), WARPS) == made_up()
    reset_counters()
    for other in (keys(norm(rows=9)), keys(target=(8, 0)), keys(sm_count=131)):
        assert plan_records.load_plan(other, WARPS) is None
    assert plan_records.load_plan(keys(), ((knob_type.WARPS, 8),)) is None
    assert plan_records.load_plan(dataclasses.replace(keys(), family="rope"), WARPS) is None
    assert plan_records.load_proposals(keys()) is None
    with monkeypatch.context() as patch:
        patch.setattr(plan_records, "sources_digest", lambda files: "edited")
        assert plan_records.load_plan(keys(), WARPS) is None
    for name in ("TRITON_DEFAULT_FP_FUSION", "DISABLE_LLVM_OPT", "LLVM_IR_ENABLE_DUMP"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert plan_records.load_plan(keys(), WARPS) is None, name
    with monkeypatch.context() as patch:
        patch.setattr("triton.__version__", "3.6.99", raising=False)
        patch.setitem(sys.modules, "triton", sys.modules.get("triton") or _with_version("3.6.99"))
        assert plan_records.load_plan(keys(), WARPS) is None
    assert counters().record_hits == 0 and set(counters().record_misses) == {"absent", "stale"}
    assert counters().record_misses["stale"] == 1
    assert plan_records.load_plan(keys(), WARPS) == made_up()


def forget_sources() -> None:
    """As a process that has not looked at them."""
    plan_records.sources_digest.cache_clear()
    plan_records._file_digest.cache_clear()


def _with_version(version: str) -> Any:
    import types

    module = types.ModuleType("triton")
    module.__version__ = version  # type: ignore[attr-defined]
    return module


@pytest.mark.L0
def test_an_edit_of_a_source_makes_a_record_stale(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_records.save_plan(keys(), WARPS, made_up())
    ((file, _),) = store.records()
    names = read_record(file.path, file.path.stem)["sources"]["files"]
    assert "engines/compiled/plan_records.py" in names and "launch/prepared.py" in names
    assert "graph/operations/normalization.py" in names and "cli/main.py" not in names
    # The same files elsewhere: what they hold counts, not where they are or when they came.
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(plan_records._root()) / name, tmp_path / name)
    monkeypatch.setattr(plan_records, "_root", lambda: str(tmp_path))
    forget_sources()
    assert plan_records.load_plan(keys(), WARPS) == made_up()
    edited = tmp_path / "launch/prepared.py"
    content = edited.read_text()
    for change in (content + "# edited\n", None):
        edited.unlink() if change is None else edited.write_text(change)
        forget_sources()
        assert plan_records.load_plan(keys(), WARPS) is None
    assert counters().record_misses == {"stale": 2}
    edited.write_text(content)
    forget_sources()
    assert plan_records.load_plan(keys(), WARPS) == made_up()


@pytest.mark.L0
def test_what_a_process_may_not_run_is_not_stored(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A source was written after the process started: it may run the older one.
    monkeypatch.setattr(plan_records, "_STARTED_NS", 0)
    plan_records.save_plan(keys(), WARPS, made_up())
    assert store.files() == []


@pytest.mark.L0
def test_a_decline_is_told_of_the_tensors_it_names_only() -> None:
    plan_records.save_decline(keys(), "tensor 'x': no")
    with pytest.raises(tw.NotSupportedError, match="tensor 'x': no"):
        plan_records.load_proposals(keys())
    assert plan_records.load_proposals(keys(norm(operand="other"))) is None


@pytest.mark.L0
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: data[:-1], "torn"),
        (lambda data: data[:20], "torn"),
        (lambda data: b"", "torn"),
        (lambda data: data + b" ", "torn"),
        (lambda data: data.replace(b"132", b"131"), "checksum"),
        (lambda data: b"TWKERNEL" + data[8:], "foreign"),
        (lambda data: data[:8] + b"\x02" + data[9:], "format"),
        (lambda data: None, "absent"),
    ],
    ids=["cut", "head", "empty", "tail", "altered", "code", "version", "gone"],
)
def test_a_damaged_record_is_a_miss(store: Any, spoil: Any, reason: str) -> None:
    plan_records.save_plan(keys(), WARPS, made_up())
    ((file, wrong),) = store.records()
    assert wrong == ""
    data = spoil(file.path.read_bytes())
    file.path.unlink() if data is None else file.path.write_bytes(data)
    assert [wrong for _, wrong in store.records()] == ([] if data is None else [reason])
    assert plan_records.load_plan(keys(), WARPS) is None
    assert counters().record_misses == {reason: 1}
    # It is replaced by the next process that makes the plan.
    plan_records._written.clear()
    plan_records.save_plan(keys(), WARPS, made_up())
    assert plan_records.load_plan(keys(), WARPS) == made_up()


@pytest.mark.L0
@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"kernels": 3}, {"kernels": [{}]}, {"proposals": [{"knobs": 1}]}, "text", 7],
    ids=str,
)
def test_a_whole_record_of_another_form_is_a_miss(store: Any, document: Any) -> None:
    for knobs in (WARPS, None):
        store.save_record(keys().facts(knobs), document)
    assert plan_records.load_plan(keys(), WARPS) is None
    assert plan_records.load_proposals(keys()) is None


@pytest.mark.L0
def test_another_graphs_record_under_this_name_is_a_miss(store: Any) -> None:
    plan_records.save_plan(keys(), WARPS, made_up())
    plan_records.save_plan(keys(norm(rows=9)), WARPS, made_up())
    first, second = (file.path for file, _ in store.records())
    second.write_bytes(first.read_bytes())
    found = [plan_records.load_plan(keys(norm(rows=rows)), WARPS) for rows in (8, 9)]
    assert sorted(plan is None for plan in found) == [False, True]
    assert counters().record_misses == {"other key": 1}


@pytest.mark.L0
def test_records_live_and_leave_with_the_store(
    store: Any, make_key: Callable[..., Any], make_code: Callable[..., Any]
) -> None:
    plan_records.save_plan(keys(), WARPS, made_up())
    store.save(make_key(), make_code(), {})
    assert {file.path.suffix for file in store.files()} == {".twk", ".twp"}
    assert len(list(store.entries())) == len(list(store.records())) == 1
    assert store.remove(store.files()) == 2 and store.files() == []


@pytest.mark.L0
def test_the_version_is_read_as_triton_states_it(run_python: Callable[..., str]) -> None:
    stated = run_python(
        "import sys\n"
        "from tilewright.artifact.environment import installed_version\n"
        "stated = installed_version('triton')\n"
        "assert 'triton' not in sys.modules\n"
        "import triton\n"
        "print(stated == triton.__version__ == installed_version('triton'))"
    )
    assert stated == "True\n" and installed_version("no_such_package") == ""


# What Triton 3.6 and 3.7 say that their code depends on, one of each prefix.
SETTINGS = """ALLOW_LHS_TMEM_LAYOUT_CONVERSION AMDGCN_USE_BUFFER_OPS DISABLE_PTXAS_OPT
LLVM_PASS_PLUGIN_PATH MLIR_ENABLE_DUMP NVPTX_ENABLE_DUMP TRITON_F32_DEFAULT USE_IR_LOC
PTXAS_OPTIONS"""


@pytest.mark.L0
@pytest.mark.parametrize("name", SETTINGS.split())
def test_a_setting_of_the_compiler_is_in_the_key(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = unloaded_environment("triton")
    monkeypatch.setenv(name, "an odd value")
    assert unloaded_environment("triton") != before


@pytest.mark.L2
def test_every_setting_that_triton_names_is_in_the_key(
    run_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The names are in its library's text; the key takes them by their prefixes, unloaded.
    named = json.loads(
        run_python(
            "import json, os, re\n"
            "from pathlib import Path\n"
            "import triton\n"
            "from triton._C import libtriton\n"
            "text = Path(libtriton.__file__).read_bytes()\n"
            "words = set(re.findall(rb'[A-Z][A-Z0-9_]{5,50}', text))\n"
            "os.environ.update({word.decode(): '1' for word in words if b'_' in word})\n"
            "print(json.dumps(sorted(libtriton.get_cache_invalidating_env_vars())))"
        )
    )
    assert "DISABLE_LLVM_OPT" in named
    before = unloaded_environment("triton")
    for name in named:
        with monkeypatch.context() as patch:
            patch.setenv(name, "an odd value")
            assert unloaded_environment("triton") != before, name


# Plans for a device that is not there, and launches through a driver that is not there.
SECOND = """
import json, sys, types
import torch
properties = types.SimpleNamespace(
    name="fake", major=9, minor=0, multi_processor_count=int(sys.argv[1])
)
torch.cuda.get_device_properties = lambda device=None: properties
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda index: 7
import tilewright as tw
from tilewright.artifact import counters
from tilewright.launch import cuda_driver, driver_launch
from tilewright.launch.handles import Handle
launched = []
def launch(config, function, parameters, extra):
    import ctypes
    where, size = extra._obj[1], ctypes.c_size_t.from_address(extra._obj[3]).value
    launched.append([list(config._obj.grid), ctypes.string_at(where, size).hex()])
    return 0
driver_launch.launch_function = lambda: launch
class Module:
    function = 0x1000
    def __init__(self, *facts):
        pass
cuda_driver.Module = Module
graph = tw.Graph("norm", "bfloat16", "float32", handle=Handle(torch.device("cuda", 0)))
x, scale = graph.tensor((64, 256), name="x"), graph.tensor((1, 256), name="scale")
phase = tw.norm_forward_phase.INFERENCE
y, _ = graph.rmsnorm(phase, x, scale, None, graph.tensor_scalar(1e-6))
y.set_output(True).set_name("y")
graph.build()
graph.execute({"x": 1 << 20, "scale": 1 << 21, "y": 1 << 22})
graph.execute({"x": (1 << 20) + 2, "scale": 1 << 21, "y": 1 << 22})
now = counters()
print(json.dumps({
    "plan": graph.plans[0].name,
    "launched": launched,
    "triton": "triton" in sys.modules,
    "family": "tilewright.engines.triton.normalization" in sys.modules,
    "compiles": now.compiles,
    "hits": now.record_hits,
    "writes": now.record_writes,
}))
"""


@pytest.fixture
def run(child_environment: dict[str, str]) -> Callable[..., dict[str, Any]]:
    """Return a function (sm_count, **variables) that plans, builds and launches in a process."""

    def run_second(sm_count: int = 132, **variables: str) -> dict[str, Any]:
        child = subprocess.run(
            [sys.executable, "-c", SECOND, str(sm_count)],
            capture_output=True,
            text=True,
            env=child_environment | variables,
        )
        assert child.returncode == 0, child.stderr
        result: dict[str, Any] = json.loads(child.stdout)
        return result

    return run_second


@pytest.mark.L1
def test_what_is_compiled_ahead_needs_no_triton_where_it_runs(
    run: Callable[..., dict[str, Any]], child_environment: dict[str, str], tmp_path: Path
) -> None:
    graph = norm(rows=64, width=256)
    (tmp_path / "norm.json").write_text(json_form.to_json(graph))
    command = ["compile", str(tmp_path / "norm.json"), "--target", "sm_90"]
    made = subprocess.run(
        [sys.executable, "-m", "tilewright.cli.main", *command],
        capture_output=True,
        text=True,
        env=child_environment,
    )
    assert made.returncode == 0, made.stderr
    shipped = run(TILEWRIGHT_FORBID_COMPILER="1")
    assert not shipped["triton"] and shipped["hits"] == 2 and len(shipped["launched"]) == 2


@pytest.mark.L0
def test_a_second_process_imports_no_triton(run: Callable[..., dict[str, Any]]) -> None:
    first = run()
    assert first["triton"] and first["family"] and first["compiles"] > 0 and first["writes"] == 2
    assert len(first["launched"]) == 2
    second = run(TILEWRIGHT_FORBID_COMPILER="1")
    assert not second["triton"] and not second["family"]
    assert second["compiles"] == 0 and second["hits"] == 2 and second["writes"] == 0
    assert second["launched"] == first["launched"] and second["plan"] == first["plan"]
    # On another device the plan is made anew; the code, which does not depend on that, is there.
    third = run(131, TILEWRIGHT_FORBID_COMPILER="1")
    assert third["family"] and third["compiles"] == third["hits"] == 0 and third["writes"] == 2


@pytest.mark.L0
def test_nothing_is_stored_when_the_store_is_disabled(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    with compiler_forbidden():
        plan_records.save_plan(keys(), WARPS, made_up())
        assert plan_records.load_plan(keys(), WARPS) is None
    assert store.files() == []
