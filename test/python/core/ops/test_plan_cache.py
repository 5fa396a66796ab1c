"""The functions' plan cache: what its plans are called, and threads that share it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tilewright import ops
from tilewright.ops import plan_cache

pytestmark = pytest.mark.L0


def draw(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def attend(function: Callable[..., Any] = ops.sdpa) -> Any:
    return function(*draw(1, *[(1, 2, 3, 8)] * 3))


def attend_packed() -> Any:
    bounds = torch.tensor([0, 3, 5])
    return ops.sdpa_varlen(*draw(2, *[(5, 2, 8)] * 3), bounds, bounds, 3, 3)


CALLS: dict[str, Callable[[], Any]] = {
    "sdpa": attend,
    "rms_norm": lambda: ops.rms_norm(*draw(3, (2, 8), (8,))),
    "layer_norm": lambda: ops.layer_norm(*draw(4, (2, 8), (8,), (8,))),
    "group_norm": lambda: ops.group_norm(draw(10, (2, 4, 3))[0], 2, *draw(11, (4,), (4,))),
    "linear": lambda: ops.linear(*draw(5, (2, 8), (6, 8)), glu="halves"),
    "rope": lambda: ops.rope(
        draw(6, (1, 2, 3, 8))[0], *(t.detach() for t in draw(7, (3, 4), (3, 4)))
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_is_named_by_what_it_computes(name: str) -> None:
    ops.clear_plan_cache()
    with torch.no_grad():
        CALLS[name]()
    assert [e.graph_name for e in ops.cached_explanations()] == [name]
    ops.clear_plan_cache()
    CALLS[name]().sum().backward()
    explained = ops.cached_explanations()
    assert [e.graph_name for e in explained] == [name, f"{name}_backward"]
    assert all(e.selected is not None for e in explained)
    assert str(explained[0]).startswith(f"graph '{name}' on cpu")


def test_packed_attention_is_attention() -> None:
    ops.clear_plan_cache()
    attend_packed().sum().backward()
    names = [explained.graph_name for explained in ops.cached_explanations()]
    assert names == ["sdpa", "sdpa_backward"]


def test_threads_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """All miss at once, all build, and the first plan stays."""
    ops.clear_plan_cache()
    threads = 4
    barrier = threading.Barrier(threads)
    graph = plan_cache.Graph
    built: list[Any] = []

    def waiting(*args: Any, **kwargs: Any) -> Any:
        barrier.wait(timeout=30)
        built.append(graph(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(plan_cache, "Graph", waiting)
    x, weight = (t.detach() for t in draw(8, (4, 16), (16,)))
    with ThreadPoolExecutor(threads) as pool:
        results = list(pool.map(lambda _: ops.rms_norm(x, weight), range(threads)))
    assert len(built) == threads and plan_cache.plan_count() == 1
    assert all(torch.equal(result, results[0]) for result in results)
    ops.rms_norm(x, weight)
    assert len(built) == threads


def test_threads_and_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "_CAPACITY", 3)
    ops.clear_plan_cache()
    inputs = [t.detach() for t in draw(9, *[(rows, 8) for rows in range(1, 9)])]
    expected = [torch.nn.functional.rms_norm(x, (8,), eps=1e-6) for x in inputs]

    def work(thread: int) -> None:
        for step in range(40):
            index = (step * (thread + 1)) % len(inputs)
            torch.testing.assert_close(ops.rms_norm(inputs[index]), expected[index])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert plan_cache.plan_count() == 3
