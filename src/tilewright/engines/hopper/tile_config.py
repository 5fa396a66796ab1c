"""How Hopper's attention cuts and masks its tiles, and the knobs that tell of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.hopper.declared import Declared
from tilewright.graph.enums import behavior_note, knob_type

WARPGROUP_ROWS = 64
# Registers a thread at the forward's entry, by warpgroups of consumers: with the producer's four
# warps' worth they fill the file of 65536, and ``setmaxnreg`` shares them out anew.
ENTRY_REGISTERS = {2: 168, 3: 128}
Config = TypeVar("Config", bound="TileConfig")


@dataclass(frozen=True)
class TileConfig:
    """A tile has 64 query rows for each of ``warpgroups``, and takes ``block_n`` keys a step.

    ``stages`` blocks of keys and values are in flight; ``q_slots`` tiles of Q have room.
    ``by_cost``: causal tiles are dealt by their length.
    """

    block_n: int = 128
    warpgroups: int = 2
    stages: int = 2
    q_slots: int = 2
    by_cost: bool = True

    @property
    def block_m(self) -> int:
        """Query rows of a tile."""
        return WARPGROUP_ROWS * self.warpgroups


def padded(head_size: int) -> int:
    """The width of a head in shared memory; the copies fill up with zeros."""
    return 64 if head_size <= 64 else 128 if head_size <= 128 else 256


def proposal(config: TileConfig) -> Proposal:
    """The configuration as a plan whose knobs tell the tile."""
    knobs = (
        (knob_type.TILE_M, config.block_m),
        (knob_type.TILE_N, config.block_n),
        (knob_type.STAGES, config.stages),
    )
    return Proposal(knobs, 1.0, frozenset({behavior_note.RUNTIME_COMPILATION}))


def with_knobs(config: Config, knobs: Knobs) -> Config:
    """The configuration with the tile that the knobs tell."""
    given = dict(knobs)
    return replace(
        config,
        warpgroups=given.get(knob_type.TILE_M, config.block_m) // WARPGROUP_ROWS,
        block_n=given.get(knob_type.TILE_N, config.block_n),
        stages=given.get(knob_type.STAGES, config.stages),
    )


def mask_constants(spec: Declared, config: TileConfig) -> dict[str, bool]:
    """Which masks exist, and whether blocks after the first can need the one on the right."""
    has_left, has_right = spec.left is not None, spec.right is not None
    # Bounds that follow from lengths, or are no multiple of a block, cut several blocks.
    is_aligned = (
        spec.right is not None
        and not spec.shifts
        and config.block_n % config.block_m == 0
        and spec.right % config.block_n == 0
    )
    has_tail = spec.keys % config.block_n != 0 or spec.has_lengths
    return {
        "HAS_LEFT": has_left,
        "HAS_RIGHT": has_right,
        "BOTTOM_RIGHT": spec.shifts,
        "RIGHT_LOOP": has_right and not is_aligned,
        "FIRST_MASKED": spec.is_banded or has_tail,
        "REPAIRS": spec.is_banded,
    }


def cost_grows(spec: Declared) -> bool:
    """True if tiles cost more the later their rows are, as under a causal mask."""
    return spec.right is not None and spec.left is None and spec.rows <= 2 * spec.keys
