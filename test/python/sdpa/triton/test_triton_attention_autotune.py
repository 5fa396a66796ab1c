"""Autotuning attention's plans: all give the same, the fastest is selected, its record replays."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.planning import autotune

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
HEADS, HEADS_KV, KEYS, WIDTH = 4, 2, 300, 16


def declared() -> Any:
    graph = tw.Graph(
        io_data_type="float16",
        intermediate_data_type="float32",
        handle=tw.create_handle(DEVICE),
    )
    q = graph.tensor((1, HEADS, 1, WIDTH), name="q")
    k, v = (graph.tensor((1, HEADS_KV, KEYS, WIDTH), name=name) for name in "kv")
    o, _ = graph.sdpa(q, k, v, is_inference=True, attn_scale=0.25)
    o.set_output(True).set_name("o")
    return graph


def test_every_plan_is_timed_and_the_record_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(autotune, "_WARM_UP_CALLS", 0)
        monkeypatch.setattr(autotune, "_TIMED_CALLS", 1)
    graph = declared()
    graph.create_execution_plans()
    graph.deselect_engines(["aten", "hopper"])
    names = [plan.name for plan in graph.plans if plan.engine_name == "triton"]
    assert len(names) > 2, "keys split into several numbers of runs, and whole"
    generator = torch.Generator().manual_seed(1)
    dims = {"q": (1, HEADS, 1, WIDTH), "k": (1, HEADS_KV, KEYS, WIDTH)}
    dims |= {"v": dims["k"], "o": dims["q"]}
    pack = {n: torch.randn(dim, generator=generator).half().to(DEVICE) for n, dim in dims.items()}
    size = graph.get_autotune_workspace_size()
    assert size > 0
    record = graph.autotune(pack, torch.empty(size, dtype=torch.uint8, device=DEVICE))
    assert sorted(plan["name"] for plan in record["plans"]) == sorted(names)
    results = []
    for text in (json.dumps(record), None):
        again = declared()
        again.create_execution_plans()
        for index, plan in enumerate(again.plans):
            if plan.engine_name != "triton" or (text and plan.name != record["plans"][0]["name"]):
                continue
            if text:
                kept = json.loads(text)
                again.create_execution_plan(kept["engine"], kept["knobs"])
                assert again._active_plan().plan.name == plan.name
            pack["o"].fill_(torch.nan)
            space = torch.empty(size, dtype=torch.uint8, device=DEVICE)
            again.execute_plan_at_index(pack, space, index)
            results.append(pack["o"].cpu().double())
    q, k, v = (pack[name].cpu().double() for name in "qkv")
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    expected = (q @ k.transpose(2, 3) * 0.25).softmax(-1) @ v
    assert len(results) == 1 + len(names)
    for result in results:
        assert (result - expected).abs().max() <= 2**-10
