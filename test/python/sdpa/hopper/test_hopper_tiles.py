"""How the Hopper kernels deal tiles of queries to programs: every tile once, and level loads."""

from __future__ import annotations

import random

import pytest

from tilewright.engines.hopper import attention_tiles

pytestmark = pytest.mark.L0


@pytest.fixture(autouse=True)
def _plain_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    # Inside kernels the helpers are compiled functions; here they are the Python below them.
    for name in ("pair_rounds", "number_dealt", "count_dealt"):
        monkeypatch.setattr(attention_tiles, name, getattr(attention_tiles, name).fn)


def walked(kind: str, tiles: int, heads: int, programs: int) -> list[list[tuple[int, int]]]:
    """The (tile, head) of every program in order."""
    if kind == "even":
        count, tile = attention_tiles.count_even.fn, attention_tiles.tile_even.fn
        return [
            [tile(step, p, tiles, programs) for step in range(count(p, tiles, heads, programs))]
            for p in range(programs)
        ]
    count, tile = attention_tiles.count_causal.fn, attention_tiles.tile_causal.fn
    return [
        [tile(step, p, tiles, heads, programs) for step in range(count(p, tiles, heads, programs))]
        for p in range(programs)
    ]


@pytest.mark.parametrize("kind", ["even", "causal"])
def test_every_tile_is_walked_once(kind: str) -> None:
    draw = random.Random(5)
    extents = [(draw.randint(1, 20), draw.randint(1, 30), draw.randint(1, 40)) for _ in range(300)]
    for tiles, heads, programs in [*extents, (1, 1, 132), (64, 33, 132), (63, 2, 132)]:
        found = [item for each in walked(kind, tiles, heads, programs) for item in each]
        wanted = [(tile, head) for tile in range(tiles) for head in range(heads)]
        assert sorted(found) == wanted, (tiles, heads, programs)


@pytest.mark.parametrize(
    ("tiles", "heads"), [(4, 512), (8, 256), (16, 128), (43, 64), (64, 32), (128, 16)]
)
def test_causal_loads_are_level(tiles: int, heads: int) -> None:
    loads = [sum(t + 1 for t, _ in each) for each in walked("causal", tiles, heads, 132)]
    assert max(loads) <= 1.04 * sum(loads) / len(loads)
    # Dealt head by head alone, some program has far more.
    plain = [sum(t + 1 for t, _ in each) for each in walked("even", tiles, heads, 132)]
    assert max(plain) > max(loads)
