"""Tiles of attention's backward kernels, and which of them a declaration gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.dtypes import DataType
from tilewright.engines.base import Knobs
from tilewright.engines.triton.attention_config import (
    LEAST_SHARED_BYTES,
    MIN_BLOCK,
    power_of_two,
    shared_bytes_of,
)
from tilewright.engines.triton.attention_config import choose_config as forward_config
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.graph.enums import knob_type
from tilewright.launch.tensor_maps import map_decline_reason

# Row statistics have room for whole tiles of rows.
PADDED_TO = 128
# No row or key has this number, nor is its sum with one beyond 32 bits.
_BEYOND_ALL = 2**30


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles (rows by keys), warps and stages of the kernel over keys and of that over rows.

    ``has_maps``: the kernels of ``attention_backward_plain``, whose tiles tensor maps bring.
    ``values_rows``: dV has a kernel of its own, with so many rows a tile; 0 is one kernel for dK
    and dV. ``keys_registers`` and ``rows_registers`` are the most that a thread may have, where
    that lets more programs run. ``bias_tile``: rows and keys of a tile of dBias, of narrow heads.
    """

    keys_rows: int
    keys_keys: int
    keys_warps: int
    keys_stages: int
    rows_rows: int
    rows_keys: int
    rows_warps: int
    rows_stages: int
    has_maps: bool = False
    values_rows: int = 0
    keys_registers: int | None = None
    rows_registers: int | None = None
    bias_tile: int = 64

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


def choose_config(spec: AttentionSpec, sm_count: int) -> BackwardConfig:
    """The tiles for a declaration on a device with so many multiprocessors."""
    mapped = _mapped_tiles(spec)
    # On the devices where tensor maps serve the forward.
    if forward_config(spec, sm_count).has_maps and takes_maps(spec, mapped):
        return mapped
    return general_config(spec, sm_count)


def general_config(spec: AttentionSpec, sm_count: int) -> BackwardConfig:
    """The tiles of the general kernels, none longer than its sequences."""
    config = _tiles(spec, has_room=shared_bytes_of(sm_count) > LEAST_SHARED_BYTES)
    rows, keys = (max(power_of_two(size), MIN_BLOCK) for size in (spec.rows, spec.keys))
    return replace(
        config,
        keys_rows=min(config.keys_rows, rows),
        keys_keys=min(config.keys_keys, keys),
        rows_rows=min(config.rows_rows, rows),
        rows_keys=min(config.rows_keys, keys),
    )


def takes_maps(spec: AttentionSpec, config: BackwardConfig) -> bool:
    """True if the kernels of ``attention_backward_plain`` compute this declaration's products."""
    if spec.changes_scores or spec.has_block_mask or spec.has_philox or spec.has_drop_mask:
        return False
    if spec.left is not None or spec.len_q is not None or spec.len_kv is not None:
        return False
    if spec.data_type is DataType.FLOAT:
        return False
    # Tiles of rows start at a multiple of their size: so long are the statistics of a head.
    tile = max(config.keys_rows, config.values_rows)
    if spec.right is not None and (reach(spec) % tile or config.keys_keys % tile):
        return False
    ports = [spec.ports[port] for port in ("q", "k", "v", "dO")]
    return all(
        tensor.ragged_offset is None and map_decline_reason(tensor) is None for tensor in ports
    )


def reach(spec: AttentionSpec) -> int:
    """How far beyond its own number a row sees keys, without lengths."""
    if spec.right is None:
        return _BEYOND_ALL
    return spec.right + (spec.keys - spec.rows if spec.bottom_right else 0)


def _mapped_tiles(spec: AttentionSpec) -> BackwardConfig:
    """What measured best on an H200; see benchmark/attention_backward.md."""
    width = max(power_of_two(spec.depth), power_of_two(spec.depth_v))
    if width <= 64:
        # Registers for three programs a multiprocessor over keys, and four over rows.
        config = BackwardConfig(64, 64, 4, 2, 64, 64, 4, 3, has_maps=True)
        return replace(config, keys_registers=168, rows_registers=128)
    if width <= 128:
        return BackwardConfig(64, 64, 4, 2, 128, 64, 8, 3, has_maps=True)
    return BackwardConfig(32, 128, 8, 2, 128, 64, 8, 1, has_maps=True, values_rows=64)


def _tiles(spec: AttentionSpec, *, has_room: bool) -> BackwardConfig:
    """What measured best (benchmark/attention_backward.md), or what fits."""
    width = max(power_of_two(spec.depth), power_of_two(spec.depth_v))
    if spec.data_type is DataType.FLOAT:
        if width <= 64:
            return BackwardConfig(32, 32, 4, 1, 32, 32, 4, 1)
        return BackwardConfig(16, 16, 4, 1, 16, 16, 4, 1, bias_tile=64 if has_room else 32)
    if width <= 64:
        return BackwardConfig(64, 64, 4, 2, 64, 128, 4, 2)
    if width <= 128:
        # Two stages pay where tiles before the diagonal have a loop of their own.
        return BackwardConfig(64, 64, 4, 2 if spec.is_banded else 1, 64, 64, 4, 2)
    return BackwardConfig(32, 64 if has_room else 32, 8, 1, 64, 32, 8, 1)
