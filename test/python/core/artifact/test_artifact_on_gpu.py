"""A second process, with the compiler forbidden, runs what the first one stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

RUN = """
import dataclasses, json, os, sys, time
import torch
import tilewright as tw
from tilewright.artifact import counters

torch.cuda.init()
torch.zeros(1, device="cuda")
began = time.perf_counter()
generator = torch.Generator().manual_seed(0)
phase = tw.norm_forward_phase.TRAINING
shift = int(os.environ.get("SHIFT", "0"))

def on_gpu(values):
    # At an address that is a multiple of 16 bytes, or elements behind one.
    storage = torch.empty(values.numel() + shift, dtype=torch.bfloat16, device="cuda")
    return storage[shift:].view(values.shape).copy_(values)

x = on_gpu(torch.randn(64, 1024, generator=generator))
scale = on_gpu(torch.randn(1, 1024, generator=generator))
forward = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
source = forward.tensor(x.shape, name="x")
weight = forward.tensor((1, 1024), name="scale")
y, inverse = forward.rmsnorm(phase, source, weight, None, forward.tensor_scalar(1e-6))
y.set_output(True).set_name("y")
inverse.set_output(True).set_name("inverse").set_data_type("float32")
forward.build()
pack = {"x": x, "scale": scale, "y": torch.full_like(x, torch.nan)}
pack["inverse"] = torch.full((64, 1), torch.nan, device="cuda")
forward.execute(pack)
torch.cuda.synchronize()
ended = time.perf_counter()
backward = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
grad, source = (backward.tensor(x.shape, name=name) for name in ("grad", "x"))
weight = backward.tensor((1, 1024), name="scale")
inverse = backward.tensor((64, 1), data_type="float32", name="inverse")
dx, dscale, _ = backward.rmsnorm_backward(grad, source, weight, inverse, False)
dx.set_output(True).set_name("dx")
dscale.set_output(True).set_name("dscale").set_data_type("float32")
backward.build()
for graph in (forward, backward):
    assert graph.selected_engine == "triton", graph.explain()
more = {"grad": x, "x": x, "scale": scale, "inverse": pack["inverse"]}
more["dx"] = torch.full_like(x, torch.nan)
more["dscale"] = torch.full((1, 1024), torch.nan, device="cuda")
workspace = torch.empty(backward.get_workspace_size(), dtype=torch.uint8, device="cuda")
backward.execute(more, workspace)

wide = x.double().requires_grad_()
factor = scale.double().requires_grad_()
reference = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * factor
reference.backward(x.double())

def error(found, wanted):
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()

# Replayed with other numbers in place: the frame reads what is there then.
frame = forward.bind(pack)
x.mul_(-1)
frame.launch()
torch.cuda.synchronize()
print(json.dumps({
    "counters": dataclasses.asdict(counters()),
    "errors": {
        "replayed y": error(-pack["y"], reference),
        "dx": error(more["dx"], wide.grad),
        "dscale": error(more["dscale"], factor.grad),
    },
    "first_norm_ms": (ended - began) * 1e3,
    "imports_triton": "triton" in sys.modules,
}))
"""


def run(environment: dict[str, str], **variables: str) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, env=environment | variables
    )
    assert child.returncode == 0, child.stderr
    result: dict[str, Any] = json.loads(child.stdout)
    return result


def test_norms_from_the_store(child_environment: dict[str, str]) -> None:
    first = run(child_environment)
    assert first["counters"]["compiles"] > 0 and first["counters"]["disk_hits"] == 0
    second = run(child_environment, TILEWRIGHT_FORBID_COMPILER="1")
    assert second["counters"]["compiles"] == 0 and second["counters"]["disk_misses"] == {}
    # Of the plans behind, the code is not even read: every operand here is aligned.
    assert 0 < second["counters"]["disk_hits"] < first["counters"]["compiles"]
    third = run(child_environment, TILEWRIGHT_FORBID_COMPILER="1", SHIFT="1")
    assert third["counters"]["compiles"] == 0 and not third["imports_triton"]
    assert third["counters"]["disk_hits"] == first["counters"]["compiles"]
    assert first["imports_triton"] and not second["imports_triton"]
    for result in (first, second, third):
        errors = result["errors"]
        assert errors["replayed y"] <= 2**-8 and errors["dx"] <= 2**-8
        assert errors["dscale"] <= 1e-5
    # Without the store a third one cannot run.
    environment = child_environment | {"TILEWRIGHT_FORBID_COMPILER": "1", "TILEWRIGHT_CACHE": "0"}
    child = subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, env=environment
    )
    assert child.returncode != 0 and "(looked up: disabled)" in child.stderr
    print({"compiled_ms": first["first_norm_ms"], "stored_ms": second["first_norm_ms"]})
