"""Tiles that no mask lets through cost nothing: the products that a call makes are counted.

Counted under the interpreter. On a GPU time tells: a window's share of the whole is measured by
``benchmark/attention_gpu.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton.engine import interpreting
from tilewright.graph.enums import knob_type
from tilewright.planning.built import BuiltPlan

HAS_GPU = os.path.exists("/dev/nvidiactl")
pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(HAS_GPU, reason="counts under the interpreter, where there is no GPU"),
]

BATCH, ROWS, KEYS, WIDTH = 2, 64, 64, 16
# Rows and keys of a tile. The backward's kernel over rows has tiles of its own.
TILE, TILE_OF_ROWS = 16, 32
TILES = {knob_type.TILE_M: TILE, knob_type.TILE_N: TILE}


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Return a function that tells how many products were made since it was last asked."""
    from triton.runtime.interpreter import InterpreterBuilder

    made = [0]
    product = InterpreterBuilder.create_dot

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        made[0] += 1
        return product(self, *arguments, **options)

    def taken() -> int:
        count, made[0] = made[0], 0
        return count

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted)
    with interpreting():
        yield taken


def lengths(graph: Any, pack: dict[Any, torch.Tensor], values: tuple[int, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {"use_padding_mask": True}
    for side in ("q", "kv"):
        tensor = graph.tensor((BATCH, 1, 1, 1), data_type="int32")
        pack[tensor] = torch.tensor(values, dtype=torch.int32).view(tensor.dim)
        made[f"seq_len_{side}"] = tensor
    return made


def block_mask(graph: Any, pack: dict[Any, torch.Tensor], bits: int) -> dict[str, Any]:
    # One 128 by 128 tile a head.
    tensor = graph.tensor((BATCH, 1, 1, 1), data_type="uint8")
    pack[tensor] = torch.tensor([1, bits], dtype=torch.uint8).view(tensor.dim)
    return {"block_mask": tensor}


MASKS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "open": lambda graph, pack: {},
    "causal": lambda graph, pack: {"use_causal_mask": True},
    # Which sees the first key of a tile and no further, and the last key of the one before it.
    "window": lambda graph, pack: {"use_causal_mask": True, "sliding_window_length": 33},
    "window, one more": lambda graph, pack: {"use_causal_mask": True, "sliding_window_length": 34},
    "lengths": lambda graph, pack: lengths(graph, pack, (32, 16)),
    "block mask": lambda graph, pack: block_mask(graph, pack, 0),
}


def seen(name: str, tile: int) -> int:
    """Tiles of which any row sees any key, in both sequences."""
    count = ROWS // tile
    whole = count * count
    return {
        "open": 2 * whole,
        "causal": count * (count + 1),
        # A tile's own keys, and those of 32 or 33 keys before it.
        "window": 2 * sum(min(i, 32 // tile) + 1 for i in range(count)),
        "window, one more": 2 * sum(min(i, math.ceil(33 / tile)) + 1 for i in range(count)),
        "lengths": (32 // tile) ** 2 + math.ceil(16 / tile) ** 2,
        # The second sequence's only tile is closed.
        "block mask": whole,
    }[name]


def forward(graph: Any, masks: dict[str, Any], tensors: list[Any]) -> list[Any]:
    o, _ = graph.sdpa(*tensors[:3], is_inference=True, attn_scale=0.25, **masks)
    return [o]


def backward(graph: Any, masks: dict[str, Any], tensors: list[Any]) -> list[Any]:
    return list(graph.sdpa_backward(*tensors, attn_scale=0.25, **masks))


def run(make: Any, name: str) -> None:
    graph = tw.Graph(
        io_data_type="float32", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    pack: dict[Any, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    tensors = [graph.tensor((BATCH, 1, ROWS, WIDTH)) for _ in range(5)]
    tensors.append(graph.tensor((BATCH, 1, ROWS, 1)))
    made = make(graph, MASKS[name](graph, pack), tensors)
    for tensor in made:
        tensor.set_output(True)
    graph.create_execution_plans()
    graph.deselect_engines(["aten", "hopper"])
    plan = graph.plans[0]
    tiles = tuple((knob, TILES.get(knob, value)) for knob, value in plan.knobs)
    built = BuiltPlan(graph, replace(plan, knobs=tiles), torch.device("cpu"))
    for tensor in (*graph.inputs(), *graph.outputs()):
        if tensor not in pack:
            pack[tensor] = torch.randn(tensor.dim, generator=generator)
    built.execute(pack, torch.zeros(max(built.workspace_bytes, 1), dtype=torch.uint8))


@pytest.mark.parametrize("name", MASKS)
def test_forward(products: Callable[[], int], name: str) -> None:
    run(forward, name)
    # Scores, and values.
    assert products() == 2 * seen(name, TILE)


@pytest.mark.parametrize("name", MASKS)
def test_backward(products: Callable[[], int], name: str) -> None:
    run(backward, name)
    # The kernel over keys makes four products of a tile, the one over rows three.
    assert products() == 4 * seen(name, TILE) + 3 * seen(name, TILE_OF_ROWS)
