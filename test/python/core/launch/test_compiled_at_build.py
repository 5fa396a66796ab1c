"""What is compiled when: at build, all that a call may need by the declaration, and no more."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.artifact import compiler_forbidden, counters, reset_counters
from tilewright.artifact.code import KernelCode
from tilewright.engines.compiled import code_cache, executable
from tilewright.engines.triton.engine import ENGINE
from tilewright.planning.built import BuiltPlan
from tilewright.planning.plans import Plan

pytestmark = pytest.mark.L0

PHASE = tw.norm_forward_phase.INFERENCE
DEVICE = torch.device("cuda", 0)
# Far apart, and multiples of 16.
STEP_BYTES = 2**24


def norm(graph: Any, tensor: Callable[..., Any]) -> Any:
    x, scale = tensor("x", (8, 64)), tensor("scale", (1, 64))
    return graph.rmsnorm(PHASE, x, scale, None, graph.tensor_scalar(1e-6))[0]


def norm_backward(graph: Any, tensor: Callable[..., Any]) -> Any:
    dim, one = (8, 64), (1, 64)
    given = tensor("grad", dim), tensor("x", dim), tensor("scale", one), tensor("inverse", (8, 1))
    dx, dscale, _ = graph.rmsnorm_backward(*given, False)
    dscale.set_output(True).set_data_type("float32")
    return dx


def rope(graph: Any, tensor: Callable[..., Any]) -> Any:
    return graph.rope(tensor("x", (1, 2, 8, 64)), tensor("freqs", (1, 1, 8, 64)))


def chain(graph: Any, tensor: Callable[..., Any]) -> Any:
    return graph.mul(graph.swish(tensor("gate", (8, 64))), tensor("up", (8, 64)))


def attention(graph: Any, tensor: Callable[..., Any]) -> Any:
    # In 32 bits: kernels of 16 bits read through tensor maps, which take the driver to make.
    given = [tensor(name, (1, 2, 64, 64)).set_data_type("float32") for name in "qkv"]
    return graph.sdpa(*given, is_inference=True, attn_scale=0.125)[0].set_data_type("float32")


FAMILIES = pytest.mark.parametrize(
    "declare", [norm, norm_backward, rope, chain, attention], ids=lambda each: each.__name__
)


@pytest.fixture
def build(fake_driver: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BuiltPlan]:
    """Return a function (declare, alignment=0) that builds the first plan for a made-up GPU.

    The driver and the compiler are not there; what the compiler is asked for is counted.
    """

    def compiled(spec: Any, target: tuple[int, int]) -> KernelCode:
        return KernelCode(spec.name, b"code", 128, 0, target)

    properties = types.SimpleNamespace(name="", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(executable, "kernel_code", code_cache.kernel_code)
    monkeypatch.setattr(code_cache, "compile_kernel", compiled)
    monkeypatch.setattr(code_cache, "_memory", {})
    loaded = lambda *facts: types.SimpleNamespace(function=0x1000)  # noqa: E731
    monkeypatch.setattr(executable, "load_module", loaded)
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    reset_counters()

    def made(declare: Callable[..., Any], alignment: int = 0) -> BuiltPlan:
        graph = tw.Graph(declare.__name__, "bfloat16", "float32")

        def tensor(name: str, dim: tuple[int, ...]) -> Any:
            return graph.tensor(dim, name=name, alignment_value=alignment)

        declare(graph, tensor).set_output(True)
        for result in graph.tensors:
            if result.is_output:
                result.alignment_value = alignment
        graph.validate()
        knobs = ENGINE.propose(graph, DEVICE)[0].knobs
        plan = Plan(1, "triton", knobs, 1.0, frozenset(), frozenset())
        return BuiltPlan(graph, plan, DEVICE)

    return made


def pack(built: BuiltPlan, skip_bytes: int = 0) -> dict[int, int]:
    """Made-up addresses of every operand, ``skip_bytes`` behind a multiple of 16."""
    slots = [slot for slot in built.binder.slots if slot.value is None]
    return {slot.uid: STEP_BYTES * (i + 1) + skip_bytes for i, slot in enumerate(slots)}


def workspace(built: BuiltPlan) -> int | None:
    return 2**40 if built.workspace_bytes else None


@FAMILIES
@pytest.mark.parametrize("alignment", [0, 4])
def test_calls_at_any_address_never_meet_the_compiler(
    alignment: int, declare: Any, build: Any, fake_driver: Any
) -> None:
    # L3, L12: nothing is promised of addresses, so kernels for all of them are there after build.
    built = build(declare, alignment)
    with compiler_forbidden():
        for skip_bytes in (0, 4):
            built.execute(pack(built, skip_bytes), workspace(built))
            built.bind(pack(built, skip_bytes), workspace(built)).launch()
            # Two launches of half of the kernels.
            assert len(fake_driver.take()) == counters().compiles > 0


@FAMILIES
def test_addresses_that_are_excluded_are_not_compiled_for(
    declare: Any, build: Any, fake_driver: Any
) -> None:
    built = build(declare, alignment=16)
    with compiler_forbidden():
        built.execute(pack(built), workspace(built))
    assert len(fake_driver.take()) == counters().compiles
    with pytest.raises(tw.BindingError, match="not a multiple of 16 bytes"):
        built.execute(pack(built, 4), workspace(built))
    assert fake_driver.take() == []
