"""Plans: listing, naming, barring, replaying (G2), exact devices (G3), overrides (G4)."""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright as tw
from tilewright.dtypes import DataType
from tilewright.engines.base import Proposal
from tilewright.launch.workspace import plan_workspace
from tilewright.planning import graph as graph_module
from tilewright.planning import plans, selection, table
from tilewright.planning.rows import CapabilityRow
from tilewright.planning.table import ENGINE_TABLE, EngineEntry

pytestmark = pytest.mark.L0

CPU_ONLY = tw.DeviceProperties("cpu", None, "cpu")


def product(**keywords: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32", **keywords)
    a, b = graph.tensor((4, 6), name="a", uid=1), graph.tensor((6, 5), name="b", uid=2)
    graph.matmul(a, b).set_output(True).set_name("c").set_uid(3)
    return graph, {"a": torch.rand(4, 6), "b": torch.rand(6, 5), "c": torch.empty(4, 5)}


class StubEngine:
    """Offers two plans of one knob; counts what it runs."""

    def __init__(self, workspace_bytes: int = 0) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.workspace_bytes = workspace_bytes

    def unusable_reason(self, device: Any) -> str | None:
        return None

    def propose(self, graph: Any, device: Any) -> list[Proposal]:
        notes = frozenset({tw.behavior_note.RUNTIME_COMPILATION})
        return [
            Proposal(((tw.knob_type.TILE_M, 64),), 5.0, notes),
            Proposal(((tw.knob_type.TILE_M, 128),), 3.0, notes),
        ]

    def build(self, graph: Any, device: Any, knobs: Any) -> Any:
        def frame(binding: Any, workspace: Any, plan_name: str, keep: Any) -> Any:
            return types.SimpleNamespace(
                plan_name=plan_name, launch=lambda stream=None: self.launched.append(knobs)
            )

        def execute(binding: Any, workspace: Any, stream: Any) -> None:
            self.launched.append(knobs)

        workspace = plan_workspace([("scratch", self.workspace_bytes)])
        return types.SimpleNamespace(
            needs_views=False, workspace=workspace, frame=frame, execute=execute
        )


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubEngine:
    """A second engine, named triton, that takes float32 products on any device."""
    engine = StubEngine(workspace_bytes=1024)
    monkeypatch.setitem(sys.modules, "stub_engine", types.ModuleType("stub_engine"))
    sys.modules["stub_engine"].ENGINE = engine  # type: ignore[attr-defined]
    row = CapabilityRow(("matmul",), frozenset({DataType.FLOAT}))
    entry = EngineEntry(1, "triton", "stub_engine", 30, (row,), "a stub")
    entries = (ENGINE_TABLE[0], entry, *ENGINE_TABLE[2:])
    for module in (table, plans, selection):
        monkeypatch.setattr(module, "ENGINE_TABLE", entries)
    monkeypatch.setattr(
        graph_module, "propose_plans", lambda *a: plans.propose_plans(*a, table=entries)
    )
    return engine


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


def first_cannot_be_built(monkeypatch: pytest.MonkeyPatch, stub: StubEngine, error: Any) -> None:
    build = stub.build

    def declining(graph: Any, device: Any, knobs: Any) -> Any:
        if dict(knobs) == {tw.knob_type.TILE_M: 128}:
            raise error
        return build(graph, device, knobs)

    monkeypatch.setattr(stub, "build", declining)


@pytest.mark.parametrize("way", ["build", "all", "execute", "autotune", "workspace"])
def test_the_next_best_runs_where_the_first_cannot_be_built(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    # What a compiler or a driver declines is not known before; the plan that runs can be named.
    error = tw.NotSupportedError("kernel 'k': this driver does not tell")
    first_cannot_be_built(monkeypatch, stub, error)
    graph, pack = product()
    space = torch.empty(1024, dtype=torch.uint8)
    if way == "build":
        graph.build()
    elif way == "all":
        graph.create_execution_plans()
        graph.build_plans(tw.build_plan_policy.ALL)
    elif way == "autotune":
        names = [each["name"] for each in graph.autotune(pack, space)["plans"]]
        assert sorted(names) == ["aten", "triton:TILE_M=64"]
        return
    elif way == "workspace":
        assert graph.get_autotune_workspace_size() == 1024
    graph.execute(pack, space)
    assert stub.launched == [((tw.knob_type.TILE_M, 64),)]
    assert graph.explain().selected.name == "triton:TILE_M=64"
    assert ("triton:TILE_M=128", f"cannot be built: {error}") in graph.explain().barred
    assert f"barred triton:TILE_M=128: cannot be built: {error}" in str(graph.explain())


def test_a_selected_plan_that_cannot_be_built_is_not_replaced(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # L13.
    first_cannot_be_built(monkeypatch, stub, tw.NotSupportedError("no such target"))
    graph, pack = product()
    graph.select_plan("triton:TILE_M=128")
    every = functools.partial(graph.build_plans, tw.build_plan_policy.ALL)
    for build in (graph.build, every, functools.partial(graph.execute, pack)):
        with pytest.raises(tw.NotSupportedError, match="no such target"):
            build()
    graph, _ = product()
    graph.create_execution_plan(1, {tw.knob_type.TILE_M: 128})
    with pytest.raises(tw.NotSupportedError, match="no such target"):
        graph.build()
    assert stub.launched == []


def test_what_is_no_decline_of_a_plan_is_raised_at_build(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_cannot_be_built(monkeypatch, stub, tw.LaunchError("the compiler is forbidden"))
    with pytest.raises(tw.LaunchError, match="forbidden"):
        product()[0].build()


def test_where_no_plan_can_be_built_every_reason_is_told(
    stub: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declining(graph: Any, device: Any, knobs: Any) -> Any:
        raise tw.NotSupportedError(f"not {dict(knobs)[tw.knob_type.TILE_M]}")

    monkeypatch.setattr(stub, "build", declining)
    graph, _ = product()
    graph.deselect_engines(["aten"])
    with pytest.raises(tw.NotSupportedError, match=r"(?s)no plan.*not 128.*not 64.*runs: nothing"):
        graph.build()


def test_only_a_decline_is_caught(stub: StubEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, device: Any) -> list[Proposal]:
        raise ZeroDivisionError("a bug in an engine")

    monkeypatch.setattr(stub, "propose", broken)
    with pytest.raises(ZeroDivisionError):
        product()[0].build()


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


def test_an_override_reaches_the_executor() -> None:
    # G4: other shapes and strides within one plan; what is computed is the override's.
    graph, _ = product(is_override_shape_enabled=True)
    graph.build()
    storage = torch.rand(9, 8)
    left, right = storage[:, :6], torch.rand(6, 3)
    out = torch.empty(9, 3)
    graph.execute(
        {1: left, 2: right, 3: out},
        override_uids=[1, 2, 3],
        override_shapes=[(9, 6), (6, 3), (9, 3)],
        override_strides=[(8, 1), (3, 1), (3, 1)],
    )
    assert torch.allclose(out, left @ right)


def test_an_override_raises_before_any_write() -> None:
    graph, pack = product(is_override_shape_enabled=True)
    graph.build()
    pack["c"].fill_(7.0)
    for uids, shapes, message in (
        ([1], [(40, 6)], "owns 96 bytes"),
        ([1], [(4, 7)], "expected 7 rows"),
        ([99], [(4, 6)], "no tensor has uid 99"),
        ([1, 2], [(4, 6)], "2 uids, 1 shapes"),
        ([1, 1], [(4, 6), (4, 6)], "expected each once"),
        ([1], [4], "expected a list of uids, and of a tuple of integers for each"),
    ):
        with pytest.raises(tw.BindingError, match=message):
            graph.execute(
                pack,
                override_uids=uids,
                override_shapes=shapes,
                override_strides=[(6, 1)] * len(shapes),
            )
    assert torch.equal(pack["c"], torch.full((4, 5), 7.0))
    plain, pack = product()
    with pytest.raises(tw.BindingError, match="is_override_shape_enabled=True"):
        plain.execute(pack, override_uids=[1], override_shapes=[(4, 6)], override_strides=[(6, 1)])


def test_an_override_takes_the_engines_best_plan_for_its_shapes(stub: StubEngine) -> None:
    graph, pack = product(is_override_shape_enabled=True)
    workspace = torch.empty(1024, dtype=torch.uint8)
    graph.select_plan("triton:TILE_M=64")
    graph.execute(pack, workspace)
    rows = {"override_uids": [1, 3], "override_shapes": [(2, 6), (2, 5)]}
    graph.execute(pack, workspace, **rows)
    assert stub.launched == [((tw.knob_type.TILE_M, 64),), ((tw.knob_type.TILE_M, 128),)]


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


def test_module_functions_of_the_vocabulary() -> None:
    assert tw.backend_version() >= 92200 and tw.backend_version_string().count(".") == 2
    assert tw.get_last_error_string() == ""
    handle = tw.create_handle("cpu")
    tw.set_stream(handle=handle, stream=None)
    assert tw.get_stream(handle) is None
    tw.destroy_handle(handle)
    with pytest.raises(tw.BindingError, match="was destroyed"):
        tw.get_stream(handle)
    assert tw.create_device_properties("cpu").type == "cpu"
    built_count = 0

    @tw.jit(heur_modes=[tw.heur_mode.A])
    @tw.graph_cache(key_fn=lambda handle, a, b: (tuple(a.shape), tuple(b.shape)), maxsize=2)
    def declare(handle: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        nonlocal built_count
        built_count += 1
        with tw.graph(handle, io_data_type="float32") as (graph, _):
            left, right = graph.tensor_like(a), graph.tensor_like(b)
            return graph, [left, right, graph.matmul(left, right).set_output(True)]

    a, b = torch.rand(3, 4), torch.rand(4, 2)
    for _ in range(2):
        graph, uids = declare(tw.create_handle("cpu"), a, b)
        out = torch.empty(3, 2)
        graph.execute(dict(zip(uids, (a, b, out), strict=True)))
        assert torch.allclose(out, a @ b)
    assert built_count == 1
    for size in (3, 4, 5):
        declare(None, torch.rand(size + 5, 4), b)
    declare(None, a, b)
    assert built_count == 5, "the least recently used entry was dropped"


WRONG_HANDLES: dict[str, Callable[[], Any]] = {
    "device: got 'sm_90'; expected what torch.device takes": lambda: tw.create_handle("sm_90"),
    "device: got 'gpu'; expected what": lambda: tw.create_device_properties("gpu"),
    "handle: got str; expected a Handle": lambda: tw.destroy_handle("cpu"),
    "stream: got -1; expected an address": lambda: tw.set_stream(tw.create_handle("cpu"), -1),
    f"stream: got {2**64}; expected": lambda: tw.set_stream(tw.create_handle("cpu"), 2**64),
}


@pytest.mark.parametrize("message", WRONG_HANDLES)
def test_wrong_devices_and_streams_are_named(message: str) -> None:
    with pytest.raises(tw.BindingError) as caught:
        WRONG_HANDLES[message]()
    assert message in str(caught.value)


def test_a_handle_on_cuda_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(tw.BindingError, match="device: got 'cuda', and torch finds no CUDA device"):
        tw.create_handle("cuda")


def test_a_graph_is_a_context_manager_and_a_function() -> None:
    image, weight = torch.rand(1, 2, 5, 5), torch.rand(3, 2, 3, 3)
    with tw.Graph(io_data_type="float32", intermediate_data_type="float32") as graph:
        made = graph.conv_fprop(image, weight, padding=[1, 1], name="conv2d")
        graph.relu(made, name="relu").set_output(True).set_name("result")
        graph.set_io_tuples(["conv2d::weight", "conv2d::image"], ["result"])
    result = graph(weight, image)
    expected = torch.relu(torch.nn.functional.conv2d(image, weight, padding=1))
    assert torch.allclose(result, expected, atol=1e-6)
    with pytest.raises(tw.BindingError, match="1 inputs given; expected 2"):
        graph(weight)
    with pytest.raises(tw.GraphError, match="no tensor named 'nope'"):
        graph.set_io_tuples(["nope"], [])
    for names in (None, "result", [3]):
        with pytest.raises(
            tw.GraphError, match=r"expected a (list of tensors' names|tensor's name)"
        ):
            graph.set_io_tuples(names, [])


def test_methods_of_the_vocabulary_that_are_not_served_decline() -> None:
    graph, _ = product()
    for method in ("populate_cuda_graph", "update_cuda_graph"):
        with pytest.raises(tw.NotSupportedError, match=method):
            getattr(graph, method)(None, {}, None, None)
