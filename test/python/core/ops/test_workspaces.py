"""Workspaces of the functions: kept by a thread between calls, never shared by two at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from tilewright import ops
from tilewright.ops import workspaces

pytestmark = pytest.mark.L0


CPU = torch.device("cpu")


@dataclass
class Plan:
    """What a workspace is taken for."""

    workspace_bytes: int
    device: torch.device


@pytest.fixture(autouse=True)
def nothing_kept():
    workspaces._kept.buffer = None
    yield
    workspaces._kept.buffer = None


def take(size: int):
    return workspaces.take_workspace(Plan(size, CPU))


def test_the_next_call_has_the_same_memory() -> None:
    assert take(0) is None
    workspaces.keep_workspace(None)
    first = take(100)
    assert first is not None and first.numel() == 100
    workspaces.keep_workspace(first)
    assert take(60) is first
    workspaces.keep_workspace(first)
    larger = take(101)
    assert larger is not first and larger.numel() == 101


def test_a_call_within_a_call_gets_memory_of_its_own() -> None:
    workspaces.keep_workspace(take(100))
    outer, inner = take(100), take(100)
    assert outer.data_ptr() != inner.data_ptr()


def test_a_large_workspace_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "KEPT_BYTES", 99)
    workspaces.keep_workspace(take(100))
    assert workspaces._kept.buffer is None


def test_threads_do_not_share() -> None:
    """Calls of one plan at once, each with other numbers."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(64, 32, generator=generator) for _ in range(4)]
    weight = torch.randn(64, 32, generator=generator)
    expected = [torch.nn.functional.gelu(x @ weight.t()) for x in inputs]

    def work(index: int) -> int:
        for _ in range(50):
            y = ops.linear(inputs[index], weight, activation="gelu")
            torch.testing.assert_close(y, expected[index], rtol=0, atol=1e-4)
        assert workspaces._kept.buffer is not None
        return workspaces._kept.buffer.data_ptr()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
