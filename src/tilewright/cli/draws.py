"""Random numbers for inputs, drawn on the CPU from a generator of each tensor's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Seeds of neighbouring tensors lie this far apart; any odd number does.
_SEED_STEP = 1_000_003


class Draws:
    """The numbers of one tensor: they depend on the run's seed and the tensor's uid alone."""

    def __init__(self, seed: int, uid: int) -> None:
        self.generator = torch.Generator().manual_seed((seed * _SEED_STEP + uid) % 2**63)

    def normal(self, shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        """Float32 numbers of a normal distribution around 0 with deviation ``scale``."""
        return torch.randn(tuple(shape), generator=self.generator) * scale

    def uniform(self, shape: Sequence[int], low: float, high: float) -> torch.Tensor:
        """Float32 numbers in [low, high)."""
        return torch.rand(tuple(shape), generator=self.generator) * (high - low) + low

    def signed(self, shape: Sequence[int], low: float, high: float) -> torch.Tensor:
        """Float32 numbers of either sign whose magnitudes are in [low, high)."""
        sign = self.integers(shape, 0, 2) * 2 - 1
        return self.uniform(shape, low, high) * sign

    def integers(self, shape: Sequence[int], low: int, high: int) -> torch.Tensor:
        """Int64 numbers in [low, high)."""
        return torch.randint(low, high, tuple(shape), generator=self.generator)

    def permutation(self, count: int) -> torch.Tensor:
        """The numbers below ``count``, int64, in random order."""
        return torch.randperm(count, generator=self.generator)
