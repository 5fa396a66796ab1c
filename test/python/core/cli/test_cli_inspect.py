"""`tilewright plans`, `explain` and `doctor`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright import Graph, norm_forward_phase
from tilewright.planning.table import ENGINE_TABLE

pytestmark = pytest.mark.L0

FileMaker = Callable[..., Path]
Runner = Callable[..., Any]


def fp4_product(graph: Graph) -> None:
    """A product of packed types, which no row admits."""
    a = graph.tensor((1, 4, 4), data_type="FP4_E2M1", name="A")
    graph.matmul(a, graph.tensor((1, 4, 4), name="B")).set_output(True)


def chained(graph: Graph) -> None:
    """Two products, whose intermediate result needs workspace."""
    a, b = graph.tensor((1, 8, 8), name="A"), graph.tensor((1, 8, 8), name="B")
    graph.matmul(graph.matmul(a, b), b).set_output(True)


def rms_norm(graph: Graph) -> None:
    """What kernels for GPUs take, too."""
    x, scale = graph.tensor((8, 64), name="x"), graph.tensor((1, 64), name="scale")
    epsilon = graph.tensor_scalar(1e-5)
    graph.rmsnorm(norm_forward_phase.INFERENCE, x, scale, None, epsilon)[0].set_output(True)


def test_plans_lists_what_replays_each(run: Runner, graph_file: FileMaker) -> None:
    path = graph_file(chained, "chained")
    ran = run("plans", path, "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert document["graph"] == "chained"
    [plan] = document["plans"]
    assert (plan["index"], plan["engine_id"], plan["engine"]) == (0, 0, "aten")
    assert plan["knobs"] == {}
    assert plan["workspace_bytes"] == 8 * 8 * 4
    assert plan["behavior_notes"] == ["ALLOCATES_TEMPORARIES"]
    ran = run("plans", path)
    assert ran.code == 0
    for word in ("aten", "256 B", "ALLOCATES_TEMPORARIES, FLOAT32_COMPUTE"):
        assert word in ran.out


def test_plans_of_an_engine_that_has_none_is_4(run: Runner, graph_file: FileMaker) -> None:
    ran = run("plans", graph_file(), "--engine", "cudnn", "--json")
    assert (ran.code, ran.out) == (4, "")
    assert "no plan" in ran.err


def test_explain_names_every_engine(run: Runner, graph_file: FileMaker) -> None:
    ran = run("explain", graph_file())
    assert (ran.code, ran.err) == (0, "")
    for entry in ENGINE_TABLE:
        assert entry.name in ran.out
    assert "runs: aten" in ran.out


def test_explain_tells_the_reason_where_no_engine_takes_it(
    run: Runner, graph_file: FileMaker
) -> None:
    path = graph_file(fp4_product)
    ran = run("explain", path, "--json")
    assert (ran.code, ran.err) == (4, "")
    document = json.loads(ran.out)
    assert document["selected"] is None
    aten = document["engines"][0]
    assert not aten["taken"]
    assert "tensor 'A'" in aten["reason"]
    assert "FP4_E2M1" in aten["reason"]
    ran = run("explain", path)
    assert ran.code == 4
    assert "runs: nothing" in ran.out


@pytest.mark.parametrize(
    ("target", "device"), [("sm_90", "cuda sm_90"), ("sm_120", "cuda sm_120"), ("cpu", "cpu")]
)
def test_explain_plans_for_a_device_that_is_not_here(
    run: Runner, graph_file: FileMaker, target: str, device: str
) -> None:
    ran = run("explain", graph_file(), "--device-properties", target, "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    assert document["device"] == device
    norm = run("explain", graph_file(rms_norm), "--device-properties", target, "--json")
    taken = {engine["name"] for engine in json.loads(norm.out)["engines"] if engine["taken"]}
    assert taken == ({"aten"} if device == "cpu" else {"aten", "triton"})


def test_doctor_tells_versions_devices_and_engines(run: Runner) -> None:
    ran = run("doctor", "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    assert document["ok"]
    assert {"tilewright", "python", "torch", "triton", "numpy"} <= set(document["versions"])
    assert document["cores"] >= 1
    on_cpu = {e["name"]: e for e in document["engines"] if e["device"] == "cpu"}
    assert set(on_cpu) == {entry.name for entry in ENGINE_TABLE}
    assert on_cpu["aten"]["usable"]
    for entry in ENGINE_TABLE:
        if entry.module is None:
            assert on_cpu[entry.name]["reason"] == "not in this version"
    ran = run("doctor")
    assert ran.code == 0
    for word in ("torch", "aten", "yes", "engines"):
        assert word in ran.out


def test_doctor_tells_no_name_of_the_machine(run: Runner) -> None:
    import platform

    host = platform.node()
    assert host
    assert host not in json.loads(run("doctor", "--json").out).values()


@pytest.mark.parametrize(
    ("error", "code"), [(None, 1), (RuntimeError("no such function"), 5), (MemoryError(), 5)]
)
def test_doctor_fails_only_if_aten_cannot_run(
    run: Runner, broken_matmul: Callable[..., None], error: Exception | None, code: int
) -> None:
    def multiply(inputs: Any, outputs: Any) -> None:
        if error is not None:
            raise error

    broken_matmul(multiply)
    ran = run("doctor", "--json")
    assert ran.code == code
    document = json.loads(ran.out)
    assert not document["ok"]
    assert not document["engines"][0]["usable"]
    assert document["engines"][0]["reason"]
