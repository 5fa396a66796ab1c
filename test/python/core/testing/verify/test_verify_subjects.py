"""Our engine and PyTorch's own functions under verify; a broken engine is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.engines.aten import engine as aten_engine
from tilewright.engines.aten import registry
from tilewright.testing.verify import adapters
from tilewright.testing.verify.families import FAMILIES

pytestmark = pytest.mark.L0
Verify = Callable[..., Any]
ADAPTERS = "tilewright.testing.verify.adapters"
HELD = {"L1", "L4", "L5", "L6", "L7", "L9", "L10", "L11", "L13", "same", "values"}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_aten_engine_holds(verify: Verify, family: str) -> None:
    ran = verify(family, "--engine", "aten")
    assert ran.checks("broken") == []
    assert ran.code == 0
    # A function is held to its signature, and names no plan.
    by_function = {"L7", "L13"} if FAMILIES[family].function is not None else set()
    assert ran.rules("held") - {"L2"} == HELD - by_function
    # On a CPU these say why they were not looked at.
    never = {"L3", "L8", "L12"} | by_function
    # The storage bound is of declarations.
    sometimes = {"L2"} | ({"L5"} if by_function else set())
    assert never <= ran.rules("declined") <= never | sometimes


@pytest.mark.parametrize("family", list(FAMILIES))
def test_pytorch_passes_what_it_documents(verify: Verify, family: str) -> None:
    name = {"attention": "torch_sdpa"}.get(family, f"torch_{family}")
    ran = verify(family, "--target", f"{ADAPTERS}:{name}")
    assert ran.checks("broken") == []
    assert ran.code == 0
    assert "values" in ran.rules("held")


def test_where_pytorch_deviates_is_told(verify: Verify) -> None:
    ran = verify("attention", "--target", f"{ADAPTERS}:torch_sdpa")
    cases = {check["case"] for check in ran.checks("deviates")}
    assert {"NaN past the lengths", "mask, NaN in masked values"} <= cases
    assert "deviates: attention, mask, NaN in masked values: values" in ran.out
    assert "NaN in hidden keys or values reaches the result" in ran.out


def test_rows_without_keys_deviate_where_they_are_nan(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    def softmax_only(q: Any, k: Any, v: Any, *, mask: Any = None) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v

    case = "mask, rows without keys"
    monkeypatch.setattr(adapters, "softmax_only", softmax_only, raising=False)
    arguments = ("attention", "--target", f"{ADAPTERS}:softmax_only", "--case", case)
    assert verify(*arguments).code == 1
    softmax_only.verify_deviations = {"rows_without_keys": "NaN there"}  # type: ignore[attr-defined]
    ran = verify(*arguments)
    assert ran.code == 0
    assert [check["case"] for check in ran.checks("deviates")] == [case]


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda y: y * 1.0001,
    "rmsnorm": lambda y: y + 1e-3,
    "rope": lambda y: y.flip(2),
    "add": lambda y: torch.nan_to_num(y) + 1e-4,
}


@pytest.mark.parametrize(
    ("family", "kind"), [("matmul", "matmul"), ("rms_norm", "rmsnorm"), ("rope", "rope")]
)
def test_a_broken_engine_is_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    aten_engine._load_kernels()
    prepare = registry._PREPARERS[kind]

    def broken(operation: Any, device: Any) -> Any:
        kernel = prepare(operation, device)

        def run(inputs: Any, outputs: Any) -> None:
            kernel(inputs, outputs)
            for output in outputs.values():
                output.copy_(WRONG[kind](output.clone()))

        return run

    monkeypatch.setitem(registry._PREPARERS, kind, broken)
    ran = verify(family, "--engine", "aten")
    assert ran.code == 1
    assert "values" in ran.rules("broken")


def test_an_engine_that_leaves_rows_is_found(
    verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    aten_engine._load_kernels()
    prepare = registry._PREPARERS["matmul"]

    def broken(operation: Any, device: Any) -> Any:
        kernel = prepare(operation, device)

        def run(inputs: Any, outputs: Any) -> None:
            last = outputs["C"][..., -1, :].clone()
            kernel(inputs, outputs)
            outputs["C"][..., -1, :] = last

        return run

    monkeypatch.setitem(registry._PREPARERS, "matmul", broken)
    ran = verify("matmul", "--engine", "aten", "--case", "batch of 2, odd extents")
    assert {"values", "L11"} == ran.rules("broken")
