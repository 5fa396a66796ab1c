"""Calls beside another process on a GPU: a kernel that sees that it was interrupted, and ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.testing import detectors
from tilewright.testing.another_process import AnotherProcess
from tilewright.testing.detectors import Outcome

triton = pytest.importorskip("triton", reason="the planted kernel is Triton's")
tl: Any = pytest.importorskip("triton.language")
cuda: Any = pytest.importorskip("triton.language.extra.cuda")

# Beside tests of other workers a call alone is none.
pytestmark = [pytest.mark.L1, pytest.mark.needs_gpus(1), pytest.mark.gpu_exclusive]

PROGRAMS, TILE = 64, 256
LOOKS = 30_000
# How late a look at the clock is, in nanoseconds, and one that never is.
LATE, NEVER = 300_000, 2**60
# Warp groups as they are compiled, with the barriers that nothing waits for: see
# tilewright/engines/compiled/unused_barriers.py.
WITH_UNUSED_BARRIERS = """
import torch
import tilewright as tw
from tilewright.engines.compiled import compiler
from tilewright.graph.enums import knob_type
from tilewright.testing import detectors

cure = compiler.without_unused_barriers
has_barriers = []

def left_alone(ptx):
    has_barriers.append(cure(ptx) != ptx)
    return ptx

compiler.without_unused_barriers = left_alone
graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
generator = torch.Generator("cuda").manual_seed(1)
dim = (1, 16, 8192, 128)
given = {n: torch.randn(dim, generator=generator, device="cuda").bfloat16() for n in "qkv"}
inputs = [graph.tensor(dim, name=name) for name in given]
o, _ = graph.sdpa(*inputs, attn_scale=128**-0.5, is_inference=True)
o.set_output(True).set_name("O")
for tensor in (*inputs, o):
    tensor.alignment_value = 16
plans = [(knob_type.ROW_BLOCK not in dict(plan.knobs), index)
         for index, plan in enumerate(graph.plans) if plan.engine_name == "triton"]
graph.select_plan(min(plans)[1])
graph.build()
print(any(has_barriers))
print(detectors.beside_another_process(graph, given))
"""


@triton.jit
def _adds(a, b, out, LOOKS: tl.constexpr, TILE: tl.constexpr, LATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = a + b after many looks at the clock, and NaN where one of them came late."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    last = cuda.globaltimer()
    longest = last - last
    for _ in range(LOOKS):
        now = cuda.globaltimer()
        longest = tl.maximum(longest, now - last)
        last = now
    made = tl.load(a + at) + tl.load(b + at)
    tl.store(out + at, tl.where(longest > LATE, float("nan"), made))


def adds(late: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(a)
        _adds[(PROGRAMS,)](a, b, out, LOOKS, TILE, late)
        return out

    return call


@pytest.fixture
def given() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {n: torch.randn(PROGRAMS * TILE, generator=generator).cuda() for n in "ab"}


def test_a_kernel_that_is_wrong_when_it_was_interrupted(
    given: dict[str, torch.Tensor], another_process: AnotherProcess
) -> None:
    verdict = detectors.beside_another_process(adds(LATE), given, another_process, interruptions=8)
    print(verdict)
    assert verdict.outcome is Outcome.BROKEN, verdict
    assert verdict.text.startswith("out: in ")
    assert "nan instead of" in verdict.text
    assert "; alone in 0 of" in verdict.text


def test_the_same_kernel_that_is_never_late(
    given: dict[str, torch.Tensor], another_process: AnotherProcess
) -> None:
    verdict = detectors.beside_another_process(adds(NEVER), given, another_process, interruptions=8)
    print(verdict)
    assert verdict.outcome is Outcome.HELD, verdict


def test_a_librarys_product(another_process: AnotherProcess) -> None:
    def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.matmul(a, b, out=torch.empty_like(a) if out is None else out)

    generator = torch.Generator("cuda").manual_seed(3)
    pair = [torch.randn(8192, 8192, generator=generator, device="cuda").half() for _ in range(2)]
    verdict = detectors.beside_another_process(product, pair, another_process, interruptions=16)
    print(verdict)
    assert verdict.outcome is Outcome.HELD, verdict


def test_unused_barriers_are_found(
    run_gpu_python: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is compiled so must be nobody else's.
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    printed = run_gpu_python(WITH_UNUSED_BARRIERS, capabilities=[(9, 0)])
    print(printed)
    has_barriers, _, verdict = printed.partition("\n")
    if has_barriers == "False":
        pytest.skip("this Triton makes no such barriers on a GPU")
    # Where other processes are on the device too, it is found without one more.
    assert verdict.startswith("beside beside another process: broken: O: in ")
    assert "nan" in verdict


def test_verify_makes_long_calls_of_ours(tmp_path: Path) -> None:
    from tilewright.cli.main import main

    case, file = "long, head size 128", tmp_path / "checks.json"
    arguments = ["attention", "--beside", "--case", case, "--json", str(file)]
    assert main(["verify", *arguments, "--device", "cuda"]) == 0
    (check,) = json.loads(file.read_text())["checks"]
    print(check["text"])
    assert (check["rule"], check["status"]) == ("beside", "held")
