"""Page tables whose rows lie one after another, on every kernel that reads page numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton import attention, attention_decode_config

REASON = "needs an NVIDIA GPU of compute capability 9.0"
pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason=REASON),
]

HEADS, HEADS_KV, DEPTH, KEYS, POOL = 8, 2, 128, 1024, 400
LENGTHS = (1000, 0, 1, 640, 333)
WILD = 2**30
# The kernel, tokens of a page of K and of V, and rows of queries.
KERNELS = {
    "joined": ("attention_decode_joined", (16, 48), 1),
    "paired": ("attention_decode_paired", (48, 16), 1),
    "direct": ("attention_decode_direct", (1, 16), 2),
    "copies": ("attention_decode", (64, 128), 1),
    "few queries": ("attention_decode", (16, 1), 3),
    "many queries": ("attention_forward", (16, 64), 70),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the kernels, chosen whether it pays or not."""
    # Not at import: asking makes a context on the GPU.
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(REASON)
    name = str(request.param)
    config = attention_decode_config
    is_quick = name in ("joined", "paired", "direct")
    monkeypatch.setattr(config, "pays_in_registers", lambda *_: is_quick)
    monkeypatch.setattr(config, "_joined_runs", lambda *_: 1 if name == "direct" else 8)
    monkeypatch.setattr(config, "_pairs", lambda *_: name == "paired")
    return name


def packed(table: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The used entries of all rows, between entries that name no page, and where rows start."""
    counts = torch.tensor([-(-length // page) for length in LENGTHS])
    rows = [row[:count] for row, count in zip(table, counts.tolist(), strict=True)]
    wild = torch.full((int(counts.sum()) + 64,), WILD, dtype=torch.int32)
    wild[32:-32] = torch.cat(rows)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    return wild.cuda()[32:-32], starts.cuda().view(-1, 1, 1, 1)


def attend(name: str, packed_sides: str) -> torch.Tensor:
    kernel, pages, rows = KERNELS[name]
    generator = torch.Generator().manual_seed(3)
    batch = len(LENGTHS)
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    pack: dict[Any, torch.Tensor] = {}

    def bind(buffer: torch.Tensor, **options: Any) -> Any:
        tensor = graph.tensor(buffer.shape, buffer.stride(), buffer.dtype, **options)
        pack[tensor] = buffer
        return tensor

    def drawn(*dim: int) -> torch.Tensor:
        return torch.randn(dim, generator=generator).bfloat16().cuda()

    q = bind(drawn(batch, HEADS, rows, DEPTH))
    containers, tables = {}, {}
    for side, page in zip("kv", pages, strict=True):
        container = drawn(batch * -(-KEYS // page) + 1, HEADS_KV, page, DEPTH)
        entries = -(-KEYS // page)
        order = torch.randperm(batch * entries, generator=generator).view(batch, entries).int()
        for row, length in zip(order, LENGTHS, strict=True):
            row[-(-length // page) :] = WILD
        containers[side] = bind(container)
        port = f"paged_attention_{side}_table"
        if side not in packed_sides:
            tables[port] = bind(order.cuda().view(batch, 1, entries, 1))
            continue
        buffer, starts = packed(order, page)
        tables[port] = graph.tensor(
            (batch, 1, entries, 1), (1, 1, 1, 1), torch.int32, ragged_offset=bind(starts)
        )
        pack[tables[port]] = buffer
    counts = torch.tensor([[rows] * batch, LENGTHS], dtype=torch.int32).cuda()
    o, _ = graph.sdpa(
        q,
        containers["k"],
        containers["v"],
        is_inference=True,
        use_padding_mask=True,
        seq_len_q=bind(counts[0].view(-1, 1, 1, 1)),
        seq_len_kv=bind(counts[1].view(-1, 1, 1, 1)),
        paged_attention_max_seq_len_kv=KEYS,
        **tables,
    )
    o.set_output(True)
    out = torch.full((batch, HEADS, rows, DEPTH), torch.nan, dtype=torch.bfloat16, device="cuda")
    plans = [plan if plan.engine_name == "triton" else None for plan in graph.plans]
    made = [None if p is None else attention.plan(graph, p.knobs, 132).kernels[0] for p in plans]
    found = [
        None
        if first is None
        else (first.spec.name, any("tensordesc" in kind for _, kind in first.spec.types))
        for first in made
    ]
    graph.select_plan(found.index((kernel, name == "copies")))
    graph.build()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    graph.execute({**pack, o: out}, workspace)
    return out.cpu()


def test_results_are_those_of_dense_tables(kernel: str) -> None:
    expected = attend(kernel, "")
    assert expected[0].isfinite().all() and not expected[1].any() and expected[3].any()
    for packed_sides in ("k", "v", "kv"):
        assert torch.equal(attend(kernel, packed_sides), expected), packed_sides
