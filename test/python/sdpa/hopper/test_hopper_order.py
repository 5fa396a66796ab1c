"""The order of packed tiles: all of them, the costliest sequences first, head by head."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch
from needing_hopper import needs_hopper

import tilewright as tw
from tilewright.engines.hopper import attention
from tilewright.engines.hopper.attention_order import (
    HEADER,
    SCALE,
    order_bytes,
    order_tiles,
)
from tilewright.engines.hopper.attention_tiles import (
    count_dealt,
    number_dealt,
    tile_of_item,
)

BLOCK = 128
LENGTHS, SUMS = 1, 2


def plain(function: Any) -> Any:
    """A device function of arithmetic alone, as Python."""
    return function.fn


@pytest.mark.L0
@pytest.mark.parametrize(("items", "programs"), [(0, 4), (3, 4), (4, 4), (37, 4), (41, 5)])
def test_items_are_dealt_once_and_evenly(items: int, programs: int) -> None:
    dealt = [
        [
            plain(number_dealt)(step, program, programs)
            for step in range(plain(count_dealt)(program, items, programs))
        ]
        for program in range(programs)
    ]
    assert sorted(itertools.chain(*dealt)) == list(range(items))
    # The costliest first: what one program gets early another makes up for later.
    cost = [sum(items - number for number in own) for own in dealt]
    assert max(cost) - min(cost) <= items


def packed_graph(
    batch: int,
    heads: int,
    longest: int,
    *,
    is_causal: bool = True,
    size: int = 64,
    where: str = "cpu",
) -> Any:
    graph = tw.Graph(
        io_data_type="float16", intermediate_data_type="float32", handle=tw.create_handle(where)
    )
    sums = graph.tensor((batch + 1, 1, 1, 1), data_type="int32", name="sums")
    unit = heads * size
    dim, stride = (batch, heads, longest, size), (longest * unit, size, unit, 1)
    options = {"ragged_offset": sums, "ragged_offset_multiplier": unit}
    q, k, v = (graph.tensor(dim, stride, name=name, **options) for name in "qkv")
    o, _ = graph.sdpa(
        q,
        k,
        v,
        is_inference=True,
        attn_scale=size**-0.5,
        use_causal_mask=is_causal,
        use_padding_mask=True,
        cu_seq_len_q=sums,
        cu_seq_len_kv=sums,
    )
    o.set_output(True).set_name("o").set_dim(dim).set_stride(stride)
    o.set_ragged_offset(sums).set_ragged_offset_multiplier(unit)
    graph.validate()
    return graph


@pytest.mark.L0
def test_many_tiles_of_packed_sequences_are_ordered_by_a_kernel_of_their_own() -> None:
    few = attention.plan(packed_graph(4, 2, 300), (), 132)
    assert len(few.kernels) == 1 and not few.scratch
    many = attention.plan(packed_graph(40, 16, 3000), (), 132)
    first, main = many.kernels
    assert many.scratch == (("order", order_bytes(40, -(-3000 // BLOCK), 16)),)
    assert first.grid == (1, 1, 1) and first.spec.function is order_tiles
    assert dict(main.spec.constants)["RAGGED_Q"] == 2
    # Too many to sort in a moment.
    assert len(attention.plan(packed_graph(4000, 16, 3000), (), 132).kernels) == 1


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs under Triton's interpreter"
)
@pytest.mark.parametrize(
    ("kind", "is_bottom"),
    [
        pytest.param(SUMS, True, marks=pytest.mark.L0),
        pytest.param(SUMS, False, marks=pytest.mark.L1),
        pytest.param(LENGTHS, True, marks=pytest.mark.L1),
    ],
)
def test_the_costliest_sequences_come_first(kind: int, is_bottom: bool) -> None:
    draw = random.Random(kind + 2 * is_bottom)
    batch, rows, keys, left, heads = 23, 3000, 3100, 900, 3
    rows_of = [draw.choice((0, 1, draw.randint(0, rows))) for _ in range(batch)]
    keys_of = [draw.randint(0, keys) for _ in range(batch)]
    given = []
    for lengths in (rows_of, keys_of):
        made = torch.tensor(lengths, dtype=torch.int32)
        given.append(made if kind == LENGTHS else torch.cat((made[:1] * 0, made.cumsum(0).int())))
    tiles = -(-rows // BLOCK)
    order = torch.full((order_bytes(batch, tiles, heads) // 4,), -7, dtype=torch.int32)
    order_tiles[(1,)](
        order, given[0], 1, given[1], 1, rows, keys, left, 0, tiles, batch, heads,
        LENGTHS_Q=kind, LENGTHS_KV=kind, HAS_LEFT=True, HAS_RIGHT=True, BOTTOM_RIGHT=is_bottom,
        BLOCK_M=BLOCK,
    )  # fmt: skip
    own = [-(-length // BLOCK) for length in rows_of]
    assert int(order[0]) == sum(own) and int(order[1]) == 0
    found = []
    for item in range(sum(own) * heads):
        entry = int(order[HEADER + SCALE + item // heads])
        sequence = entry // tiles
        tile, head = plain(tile_of_item)(item, entry % tiles, own[sequence], heads)
        found.append((sequence, head, tile))
    live = [(b, h, m) for b in range(batch) for h in range(heads) for m in range(own[b])]
    assert sorted(found) == live
    # A sequence's items lie together, head by head, the last tile first.
    for (b, h, m), (next_b, next_h, next_m) in itertools.pairwise(found):
        assert next_b != b or (next_h, -next_m) > (h, -m)
    sequences = [b for b, _ in itertools.groupby(found, key=lambda item: item[0])]
    assert len(sequences) == len(set(sequences))

    def seen(b: int) -> int:
        first = (own[b] - 1) * BLOCK
        shift = keys_of[b] - rows_of[b] if is_bottom else 0
        return max(min(keys_of[b], first + BLOCK + shift) - max(first - left + shift + 1, 0), 0)

    costs = [seen(b) * (SCALE - 1) // keys for b in sequences]
    assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]


@pytest.mark.L1
@needs_hopper
@pytest.mark.parametrize(
    ("is_causal", "is_spoiled", "size"),
    [(False, False, 64), (True, False, 64), (True, True, 64), (True, True, 128)],
)
def test_ordered_tiles_give_what_each_sequence_gives(
    is_causal: bool, is_spoiled: bool, size: int
) -> None:
    draw = random.Random(5)
    heads, longest = 16, 800
    lengths = [longest, 0, 1, 128, 129] + [draw.randint(0, 300) for _ in range(35)]
    draw.shuffle(lengths)
    graph = packed_graph(len(lengths), heads, longest, is_causal=is_causal, size=size, where="cuda")
    graph.build()
    assert graph.selected_engine == "hopper" and graph.get_workspace_size() > 0
    generator = torch.Generator("cuda").manual_seed(6)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    dim = (starts[-1] + 7, heads, size)
    pack = {n: torch.randn(dim, generator=generator, device="cuda").half() for n in "qkv"}
    for name in "qkv":
        pack[name][starts[-1] :] = torch.nan
    if is_spoiled:
        # What the last row of a sequence alone may see.
        for end, length in zip(starts[1:], lengths, strict=True):
            if length > 1 and length % 2:
                pack["v"][end - 1] = torch.nan
    pack["o"] = torch.full(dim, 7.0, device="cuda").half()
    pack["sums"] = torch.tensor(starts, device="cuda").int()
    workspace = torch.full((graph.get_workspace_size(),), 0x7F, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        graph.execute(pack, workspace)
    assert torch.all(pack["o"][starts[-1] :] == 7.0), "the margin keeps its bytes"
    for start, end in itertools.pairwise(starts):
        q, k, v = (pack[name][start:end].transpose(0, 1).double() for name in "qkv")
        scores = q @ k.transpose(1, 2) * size**-0.5
        if is_causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        got = pack["o"][start:end].transpose(0, 1).double()
        if is_spoiled and end - start > 1 and (end - start) % 2:
            assert got[:, -1].isnan().all(), (start, end)
            got, scores, v = got[:, :-1], scores[:, :-1, :-1], v[:, :-1]
        error = got - scores.softmax(2) @ v
        assert error.numel() == 0 or error.abs().max() <= 4e-3, (start, end)
