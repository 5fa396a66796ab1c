"""Detector of hidden draws: shift every global generator, require the same case."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from tilewright.errors import OracleError
from tilewright.testing.compare import assert_bitwise_equal

__all__ = ["assert_unmoved_by_global_state"]

_SEEDS = (20011, 77003)


def assert_unmoved_by_global_state(
    make: Callable[[], Mapping[str, torch.Tensor]],
) -> None:
    """Require that `make` gives the same bits whatever the global generators hold.

    `make` is called twice, with the global generators of torch (CPU), numpy and `random` seeded
    differently; a case must come from its own generator alone, and must not move the global ones.
    Their states are restored.

    Raises:
        OracleError: Bits differ, or a global generator was drawn from.
    """
    kept = _states()
    try:
        found = []
        for seed in _SEEDS:
            torch.default_generator.manual_seed(seed)
            numpy.random.seed(seed)
            random.seed(seed)
            before = _states()
            found.append(dict(make()))
            for name, was, now in zip(("torch", "numpy", "random"), before, _states(), strict=True):
                if str(was) != str(now):
                    raise OracleError(f"the case drew from the global generator of {name}")
    finally:
        torch.set_rng_state(torch.tensor(kept[0], dtype=torch.uint8))
        numpy.random.set_state(kept[1])
        random.setstate(kept[2])
    first, second = found
    if set(first) != set(second):
        raise OracleError(f"tensors are {sorted(first)}, then {sorted(second)}")
    for name, tensor in first.items():
        assert_bitwise_equal(second[name], tensor, name=f"{name} under another global state")


def _states() -> tuple[list[int], Any, Any]:
    state = numpy.random.get_state()
    plain = tuple(part.tolist() if isinstance(part, numpy.ndarray) else part for part in state)
    return torch.get_rng_state().tolist(), plain, random.getstate()
