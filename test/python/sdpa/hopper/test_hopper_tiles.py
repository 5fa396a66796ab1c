"""Tiles of queries on Hopper: how they are cut, and dealt to programs, all once and level."""

from __future__ import annotations

import random
from typing import Any

import pytest

import tilewright as tw
from tilewright.engines.hopper import attention, attention_tiles
from tilewright.engines.hopper.attention_spec import read_spec

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


@pytest.mark.parametrize(
    ("rows", "options", "height", "late"),
    [
        (512, {"use_causal_mask": True}, 128, False),
        (1024, {"use_causal_mask": True}, 128, True),
        (8192, {"use_causal_mask": True}, 128, True),
        (8192, {"use_causal_mask": True, "sliding_window_length": 500}, 128, False),
        (8192, {}, 192, True),
        (512, {}, 128, True),
        (8192, {"use_padding_mask": True}, 192, False),
    ],
)
def test_tiles_of_heads_of_64(rows: int, options: dict[str, Any], height: int, late: bool) -> None:
    graph = tw.Graph(
        io_data_type="bfloat16", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    q, k, v = (graph.tensor((2, 4, rows, 64), name=name) for name in "qkv")
    if "use_padding_mask" in options:
        options = options | {
            f"seq_len_{side}": graph.tensor((2, 1, 1, 1), data_type="int32") for side in ("q", "kv")
        }
    graph.sdpa(q, k, v, is_inference=True, **options)[0].set_output(True)
    graph.validate()
    config = attention.choose_config(read_spec(graph.operations[0]))
    assert (config.block_m, config.late) == (height, late)
