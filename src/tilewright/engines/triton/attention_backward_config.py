"""Tiles of attention's backward kernels, and which of them a declaration gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs
from tilewright.engines.triton.attention_config import MIN_BLOCK, power_of_two
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.graph.enums import knob_type

# Row statistics have room for whole tiles of rows.
PADDED_TO = 128


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles (rows by keys), warps and stages of the kernel over keys and of that over rows."""

    keys_rows: int
    keys_keys: int
    keys_warps: int
    keys_stages: int
    rows_rows: int
    rows_keys: int
    rows_warps: int
    rows_stages: int

    def knobs(self) -> Knobs:
        """The kernel over keys; that over rows goes with the declaration."""
        return (
            (knob_type.TILE_M, self.keys_rows),
            (knob_type.TILE_N, self.keys_keys),
            (knob_type.WARPS, self.keys_warps),
            (knob_type.STAGES, self.keys_stages),
        )

    def with_knobs(self, knobs: Mapping[knob_type, int]) -> BackwardConfig:
        """This config with what the knobs say."""
        return replace(
            self,
            keys_rows=knobs.get(knob_type.TILE_M, self.keys_rows),
            keys_keys=knobs.get(knob_type.TILE_N, self.keys_keys),
            keys_warps=knobs.get(knob_type.WARPS, self.keys_warps),
            keys_stages=knobs.get(knob_type.STAGES, self.keys_stages),
        )


def choose_config(spec: AttentionSpec) -> BackwardConfig:
    """The tiles for a declaration, none longer than its sequences."""
    config = _tiles(spec)
    rows, keys = (max(power_of_two(size), MIN_BLOCK) for size in (spec.rows, spec.keys))
    return replace(
        config,
        keys_rows=min(config.keys_rows, rows),
        keys_keys=min(config.keys_keys, keys),
        rows_rows=min(config.rows_rows, rows),
        rows_keys=min(config.rows_keys, keys),
    )


def _tiles(spec: AttentionSpec) -> BackwardConfig:
    """What measured best; see benchmark/attention_backward.md."""
    width = max(power_of_two(spec.depth), power_of_two(spec.depth_v))
    if spec.data_type is DataType.FLOAT:
        if width <= 64:
            return BackwardConfig(32, 32, 4, 1, 32, 32, 4, 1)
        return BackwardConfig(16, 16, 4, 1, 16, 16, 4, 1)
    if width <= 64:
        return BackwardConfig(64, 64, 4, 2, 64, 128, 4, 2)
    if width <= 128:
        # Two stages pay where tiles before the diagonal have a loop of their own.
        return BackwardConfig(64, 64, 4, 2 if spec.is_banded else 1, 64, 64, 4, 2)
    return BackwardConfig(32, 64, 8, 1, 64, 32, 8, 1)
