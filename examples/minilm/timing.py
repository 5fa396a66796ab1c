"""How long the variants take, by turns and by operation.

Everything runs in one thread, and its clock counts the time that the processor spent on that
thread: other work on the machine, which would fall on either variant by chance, does not count.
What shares the memory or the core still slows a thread, for some sweeps and never the other way:
so each batch counts with its least time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.minilm.model import Batch, Variant, embed

OPERATIONS = ("linear", "attention", "activation", "norm", "embedding", "other")
# Stop repeating when it has taken so long, but never before MIN_REPEATS.
BUDGET_S = 45.0
# Of seven times that a batch took, one at least was undisturbed; of four it often was not.
MIN_REPEATS = 7
MAX_REPEATS = 12

clock = time.thread_time


@dataclass(frozen=True)
class Timing:
    """Processor seconds for all sentences, by variant: the sum over batches of the least times."""

    seconds: dict[str, float]
    repeats: int

    def ratio(self, variant: str, baseline: str) -> float:
        """How much longer the variant takes than the baseline."""
        return self.seconds[variant] / self.seconds[baseline]


def embed_all(variant: Variant, batches: Sequence[Batch], count: int) -> torch.Tensor:
    """The embeddings of all sentences, in the order of the list."""
    parts = [embed(variant.model, batch) for batch in batches]
    result = torch.empty(count, parts[0].shape[1])
    for batch, part in zip(batches, parts, strict=True):
        result[batch.positions] = part
    return result


def measure(
    variants: Sequence[Variant], batches: Sequence[Batch], advance: Callable[[float], None]
) -> Timing:
    """Time every batch with every variant by turns, after everything ran once already.

    ``advance`` is told the fraction of the work that each step was.
    """
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    deadline = time.perf_counter() + BUDGET_S
    repeats = 0
    while repeats < MAX_REPEATS and (repeats < MIN_REPEATS or time.perf_counter() < deadline):
        for number, batch in enumerate(batches):
            # Each goes first as often as the other.
            first = (repeats + number) % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                start = clock()
                embed(variant.model, batch)
                samples[variant.name, number].append(clock() - start)
            advance(1.0 / (MAX_REPEATS * len(batches)))
        repeats += 1
    advance(1.0 - repeats / MAX_REPEATS)
    seconds = {
        variant.name: sum(min(samples[variant.name, number]) for number in range(len(batches)))
        for variant in variants
    }
    return Timing(seconds, repeats)


def time_by_operation(variant: Variant, batches: Sequence[Batch]) -> dict[str, float]:
    """Processor seconds by kind of operation: what modules take less what their children take."""
    clocks = _ModuleClock(variant.model)
    with clocks:
        for batch in batches:
            embed(variant.model, batch)
    return {operation: clocks.seconds.get(operation, 0.0) for operation in OPERATIONS}


class _ModuleClock:
    """Hooks on every module that add its own time, without its children's, to its operation."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._model = model
        self._handles: list[Any] = []
        # (when it was entered, what its children took) of the modules that are running.
        self._running: list[list[float]] = []

    def __enter__(self) -> None:
        for module in self._model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: torch.nn.Module, arguments: Any) -> None:
        self._running.append([clock(), 0.0])

    def _leave(self, module: torch.nn.Module, arguments: Any, result: Any) -> None:
        now = clock()
        entered, children = self._running.pop()
        self.seconds[_operation(module)] += now - entered - children
        if self._running:
            self._running[-1][1] += now - entered


def _operation(module: torch.nn.Module) -> str:
    if isinstance(module, torch.nn.Linear):
        return "linear"
    if isinstance(module, torch.nn.LayerNorm):
        return "norm"
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    name = type(module).__name__
    if name.endswith("SelfAttention"):
        return "attention"
    if "GELU" in name or name.endswith("Intermediate"):
        return "activation"
    return "other"
