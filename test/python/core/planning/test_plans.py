"""Plans: listing, naming, barring, replaying (G2), exact devices (G3)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from plan_samples import CPU_ONLY, StubEngine, product
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright as tw
from tilewright.dtypes import DataType
from tilewright.planning.rows import CapabilityRow
from tilewright.planning.table import ENGINE_TABLE

pytestmark = pytest.mark.L0


def test_ids_and_names_are_append_only() -> None:
    assert [(entry.engine_id, entry.name) for entry in ENGINE_TABLE][:4] == [
        (0, "aten"),
        (1, "triton"),
        (2, "hopper"),
        (3, "cudnn"),
    ]
    assert [(knob.name, knob.value) for knob in tw.knob_type][:8] == [
        ("TILE_M", 0),
        ("TILE_N", 1),
        ("TILE_K", 2),
        ("STAGES", 3),
        ("WARPS", 4),
        ("SPLIT_K", 5),
        ("ROW_BLOCK", 6),
    ]


def test_plans_are_listed_named_and_ranked(stub: StubEngine) -> None:
    graph, _ = product()
    assert graph.get_execution_plan_count() == 3
    names = [graph.get_plan_name_at_index(i) for i in range(3)]
    assert names == ["triton:TILE_M=128", "triton:TILE_M=64", "aten"]
    assert [plan.name for plan in graph.plans] == names
    assert graph.get_engine_and_knobs_at_index(0) == (1, {tw.knob_type.TILE_M: 128})
    assert graph.get_knobs_for_engine(1) == [tw.knob_type.TILE_M]
    assert graph.get_knobs_for_engine(0) == []
    assert graph.get_workspace_size_plan_at_index(0) == 1024
    assert graph.get_workspace_size_plan_at_index(2) == 0
    assert graph.selected_engine == "triton"
    with pytest.raises(tw.NotSupportedError, match="no plan has index 3; there are 3"):
        graph.get_plan_name_at_index(3)


def test_a_plan_is_selected_and_run(stub: StubEngine) -> None:
    graph, pack = product()
    graph.select_plan("aten")
    graph.execute(pack)
    assert not stub.launched and torch.allclose(pack["c"], pack["a"] @ pack["b"])
    scratch = torch.empty(1024, dtype=torch.uint8)
    graph.select_plan(1)
    graph.execute(pack, scratch)
    graph.execute_plan_at_index(pack, scratch, index=0)
    assert stub.launched == [((tw.knob_type.TILE_M, 64),), ((tw.knob_type.TILE_M, 128),)]
    with pytest.raises(tw.NotSupportedError, match="no plan 'cublas'; there are: triton"):
        graph.select_plan("cublas")


def test_engine_and_knobs_replay(stub: StubEngine) -> None:
    first, _ = product()
    engine, knobs = first.get_engine_and_knobs_at_index(1)
    second, pack = product()
    second.create_execution_plan(engine, {int(knob): value for knob, value in knobs.items()})
    second.execute(pack, torch.empty(1024, dtype=torch.uint8))
    assert stub.launched == [((tw.knob_type.TILE_M, 64),)]
    with pytest.raises(tw.NotSupportedError, match="no plan with knobs"):
        product()[0].create_execution_plan(1, {tw.knob_type.TILE_M: 999})
    with pytest.raises(tw.NotSupportedError, match="no engine has id 77; known are 0"):
        product()[0].create_execution_plan(77)


def test_barring_by_name_workspace_and_notes(stub: StubEngine) -> None:
    graph, _ = product()
    graph.deselect_engines(["triton"])
    assert graph.selected_engine == "aten"
    assert ("triton:TILE_M=64", "engine 'triton' deselected") in graph.explain().barred
    with pytest.raises(tw.NotSupportedError, match="is barred: engine 'triton' deselected"):
        graph.select_plan(0)
    with pytest.raises(tw.NotSupportedError, match="no engine is named 'nope'"):
        graph.deselect_engines(["nope"])
    graph, _ = product()
    graph.deselect_workspace_greater_than(1000)
    assert graph.selected_engine == "aten"
    graph, _ = product()
    graph.select_behavior_notes([tw.behavior_note.RUNTIME_COMPILATION])
    assert graph.selected_engine == "triton"
    graph, _ = product()
    graph.deselect_behavior_notes([tw.behavior_note.RUNTIME_COMPILATION])
    assert graph.get_behavior_notes() == [tw.behavior_note.ALLOCATES_TEMPORARIES]
    graph.deselect_engines(["aten"])
    with pytest.raises(tw.NotSupportedError, match="no plan"):
        graph.check_support()
    graph, _ = product()
    graph.select_numeric_notes([tw.numeric_note.FLOAT32_COMPUTE])
    assert graph.selected_engine == "aten"
    graph, _ = product()
    graph.deselect_numeric_notes([tw.numeric_note.FLOAT32_COMPUTE])
    assert graph.selected_engine == "triton"
    assert graph.query_tensor_attributes_of_uid(2).name == "b"
    with pytest.raises(tw.GraphError, match="no tensor with uid 77"):
        graph.query_tensor_attributes_of_uid(77)


def test_autotune_selects_and_returns_a_replayable_record(stub: StubEngine) -> None:
    graph, pack = product()
    record = graph.autotune(pack, torch.empty(1024, dtype=torch.uint8))
    assert {plan["name"] for plan in record["plans"]} == {
        "aten",
        "triton:TILE_M=64",
        "triton:TILE_M=128",
    }
    chosen = record["plans"][0]["name"]
    assert [plan["median_us"] for plan in record["plans"]] == sorted(
        plan["median_us"] for plan in record["plans"]
    )
    # As it is, and as JSON keeps it.
    for kept in (record, json.loads(json.dumps(record))):
        again, _ = product()
        again.create_execution_plan(kept["engine"], kept["knobs"])
        assert again._active_plan().plan.name == graph._active_plan().plan.name == chosen
    for name in ("TILE_M", "0", 0, tw.knob_type.TILE_M):
        again, _ = product()
        again.create_execution_plan(1, {name: 64})
        assert again._active_plan().plan.name == "triton:TILE_M=64"
    for name in ("TILE", "99", None):
        with pytest.raises(tw.NotSupportedError, match="no knob is named"):
            product()[0].create_execution_plan(1, {name: 64})


def test_autotune_refuses_a_workspace_that_is_short_for_one_plan(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(graph: Any, device: Any, knobs: Any) -> Any:
        stub.workspace_bytes = 1024 * (knobs == ((tw.knob_type.TILE_M, 64),))
        return StubEngine.build(stub, graph, device, knobs)

    monkeypatch.setattr(stub, "build", build)
    graph, pack = product()
    assert graph.get_workspace_size() == 0  # of the plan that is ranked first
    assert graph.get_autotune_workspace_size() == 1024
    before = pack["c"].fill_(7.0).clone()
    with pytest.raises(tw.BindingError, match="1023 bytes given; the plan needs 1024"):
        graph.autotune(pack, torch.empty(1023, dtype=torch.uint8))
    # Plans that need less have not run either.
    assert stub.launched == [] and torch.equal(pack["c"], before)


def test_explain_tells_every_engine() -> None:
    graph, _ = product()
    explanation = graph.explain()
    assert [verdict.engine_name for verdict in explanation.verdicts] == [
        "aten",
        "triton",
        "hopper",
        "cudnn",
    ]
    assert explanation.verdicts[0].is_taken
    assert all(verdict.reason for verdict in explanation.verdicts[1:])
    assert "runs: aten" in str(explanation)
    assert json.loads(json.dumps(explanation.to_dict()))["selected"] == "aten"


def test_a_decline_names_the_tensor_and_the_rule() -> None:
    graph = tw.Graph(io_data_type="float32")
    a = graph.tensor((4, 4), data_type="bool", name="flags")
    graph.matmul(a, graph.tensor((4, 4))).set_output(True)
    with pytest.raises(tw.NotSupportedError, match=r"tensor 'flags' \(A\) has data type BOOLEAN"):
        graph.build()


@pytest.mark.parametrize("capability", [(8, 6), (9, 1), (10, 3), (13, 0)])
def test_admission_asks_for_the_exact_device(capability: tuple[int, int]) -> None:
    # G3: rows are exact; a future capability between or above the known ones is declined.
    row = CapabilityRow(
        ("matmul",),
        frozenset({DataType.FLOAT}),
        devices=frozenset({"cuda"}),
        compute_capabilities=frozenset({(8, 0), (9, 0), (10, 0)}),
    )
    graph, _ = product()
    graph.validate()
    operation = graph.operations[0]
    known = tw.DeviceProperties("cuda", 0, "stub", (9, 0), 132)
    assert row.decline_reason(operation, known) is None
    future = tw.DeviceProperties("cuda", 0, "stub", capability, 132)
    reason = row.decline_reason(operation, future)
    assert reason is not None and "the row takes exactly sm_80, sm_90, sm_100" in reason
    assert "the row takes cuda" in (row.decline_reason(operation, CPU_ONLY) or "")


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: torch.device("meta")])
def test_a_plan_holds_nothing_of_the_modes_it_is_built_under(mode: Any) -> None:
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    x = graph.tensor((1, 2, 3, 4), name="x")
    half = graph.mul(x, graph.tensor_scalar(0.5))
    graph.sdpa(half, x, x, attn_scale=1.0, use_alibi_mask=True)[0].set_output(True).set_name("y")
    with mode():
        graph.build()
    pack = {"x": torch.rand(1, 2, 3, 4), "y": torch.full((1, 2, 3, 4), torch.nan)}
    graph.execute(pack, torch.empty(graph.get_workspace_size(), dtype=torch.uint8))
    assert pack["y"].isfinite().all()


@pytest.mark.parametrize("modes", ["zzz", [3], 7, [tw.heur_mode.A, "B+"]])
def test_modes_and_handles_that_are_none_are_named(modes: Any) -> None:
    graph, _ = product()
    with pytest.raises(tw.GraphError, match=r"heur_modes: got .*; expected a sequence of"):
        graph.build(modes)
    graph.build(["A", tw.heur_mode.FALLBACK])
    other = tw.Graph(io_data_type="float32", handle="cpu")
    other.relu(other.tensor((4,))).set_output(True)
    with pytest.raises(tw.BindingError, match="handle: got str; expected what"):
        other.build()
    with pytest.raises(tw.GraphError, match="policy: got 'EVERY'; expected a build_plan_policy"):
        graph.build_plans("EVERY")
    graph.build_plans("ALL")
    for_none, _ = product(device_property="sm_90")
    with pytest.raises(tw.BindingError, match="device_property: got str; expected what"):
        for_none.explain()


def test_a_record_that_is_none_is_refused(stub: StubEngine) -> None:
    graph, pack = product()
    for knobs, message in (
        ({"TILE_M": "x"}, "knob TILE_M: got 'x'; expected an integer"),
        ({"TILE_M": 64.5}, "knob TILE_M: got 64.5"),
        ({"TILE_M": None}, "knob TILE_M: got None"),
        ([1], "knobs: got .1.; expected a mapping"),
        ({"TILE_M": 32}, "engine 'triton' has no plan with knobs {TILE_M: 32}"),
    ):
        with pytest.raises(tw.NotSupportedError, match=message):
            graph.create_execution_plan(1, knobs)
    for index in ("aten", None, 1.0, -1, 3):
        with pytest.raises(tw.NotSupportedError, match=f"no plan has index {index!r}; there are 3"):
            graph.get_plan_name_at_index(index)
    graph.create_execution_plan(1, {"TILE_M": "64"})
    assert graph.get_engine_and_knobs_at_index(1) == (1, {tw.knob_type.TILE_M: 64})
    graph.deselect_engines(["triton", "aten"])
    with pytest.raises(tw.NotSupportedError, match="barred aten"):
        graph.autotune(pack, torch.empty(1024, dtype=torch.uint8))


def test_planning_is_one_shot() -> None:
    graph, _ = product()
    graph.create_execution_plans([tw.heur_mode.A])
    with pytest.raises(tw.GraphError, match="planning is one-shot"):
        graph.create_execution_plans([tw.heur_mode.A])
    with pytest.raises(tw.GraphError, match="is validated and can no longer change"):
        graph.tensor((1,))
    with pytest.raises(tw.GraphError, match="is validated and can no longer change"):
        graph.tensors[0].set_dim((1, 2))


def test_serialize_keeps_the_graph_and_the_plan(stub: StubEngine) -> None:
    graph, pack = product()
    graph.select_plan("aten")
    data = graph.serialize()
    again = tw.Graph()
    again.deserialize(data)
    assert again.key() == graph.key() and again.selected_engine == "aten"
    again.execute({1: pack["a"], 2: pack["b"], 3: pack["c"]})
    assert torch.allclose(pack["c"], pack["a"] @ pack["b"])
    handle = tw.create_handle("cpu")
    third = tw.Graph()
    third.deserialize(handle, data)
    assert third.handle is handle
    for hostile in (b"", b"[]", b"{}", b'{"graph": 3}', b"\xff", '{"graph": {}, "plan": 1}'):
        with pytest.raises(tw.GraphError):
            tw.Graph().deserialize(hostile)
