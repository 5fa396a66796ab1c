"""Bits that must not change, on a GPU: of gradients in a fixed order from run to run, whatever is
declared, and of a sequence's results, whatever the sequences beside it are.

On Triton's kernels and on Hopper's. Each case's values are held to the oracle first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import Case

from tilewright import ops

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU")

REPEATS = 50
# Several tiles of rows and of keys, and more programs than multiprocessors with what is drawn.
BASE = Case(heads=(6, 3), sizes=(64, 64), rows=333, keys=470, batch=3)
TRITON = {
    "grouped": replace(BASE, heads=(8, 1), band="causal"),
    "dBias of every score": replace(BASE, bias="full", alibi=True),
    "dBias that sums over rows": replace(BASE, bias="keys", soft_cap="mul", batch=2),
    "dBias that sums over keys": replace(BASE, bias="rows", dtype="float16", batch=2),
    "dBias of heads": replace(BASE, bias="heads", dtype="float16", batch=2),
    "dSink and a window": replace(BASE, sink="float32", band="window", rows=470),
    "packed": replace(BASE, place="ragged", lengths="sums", band="bottom_right", index="int64"),
    "lengths": replace(BASE, lengths="lengths", band="causal", values="hidden_nan"),
    "dropout": replace(BASE, dropout="philox", sizes=(128, 128), batch=2),
    "a mask of kept weights": replace(BASE, dropout="mask", block_mask=True, batch=2),
    "float32": replace(BASE, dtype="float32", sizes=(96, 40), batch=2),
}
HOPPER = {
    "open, 128": replace(BASE, sizes=(128, 128), rows=640, keys=700),
    "causal, 128": replace(BASE, sizes=(128, 128), rows=640, keys=640, band="causal"),
    "packed, 128": replace(TRITON["packed"], sizes=(128, 128), sink="same"),
    "packed, 64": replace(TRITON["packed"], band="band_bottom_right"),
    "lengths, 128": replace(TRITON["lengths"], sizes=(128, 128), dtype="float16"),
    "a window, 64": replace(BASE, band="band", sink="float32"),
    "192 and 128": replace(BASE, sizes=(192, 128), band="causal", heads=(4, 1)),
    "packed, 256": replace(TRITON["packed"], sizes=(256, 256), heads=(2, 1)),
}
SMOKE = ("grouped", "dBias of heads", "packed", "dropout", "packed, 128", "packed, 64")
CASES = [
    pytest.param(engine, case, marks=pytest.mark.L0 if name in SMOKE else pytest.mark.L1, id=name)
    for engine, cases in (("triton", TRITON), ("hopper", HOPPER))
    for name, case in cases.items()
]


def needs(engine: str) -> None:
    if engine == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


@pytest.mark.parametrize(("engine", "case"), CASES)
def test_gradients_in_a_fixed_order_repeat_bit_for_bit(engine: str, case: Case) -> None:
    needs(engine)
    case = backward_case(case)
    declared = DeclaredBackward(case, "cuda", is_deterministic=True, start="promised")

    def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
        graph.create_execution_plans()
        graph.deselect_engines({"hopper", "triton", "aten"} - {engine})
        graph.build()
        assert graph.selected_engine == engine, graph.explain()
        size = max(graph.get_workspace_size(), 1)
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        frame = graph.bind(pack, workspace)
        made = [pack[tensor] for tensor in declared.outputs.values()]
        first: list[torch.Tensor] = []
        for number in range(REPEATS + 1):
            workspace.fill_(0xFF if number % 2 else 0x3B)
            for buffer in made:
                buffer.fill_(torch.nan)
            frame.launch()
            # Bits: NaN where nothing is declared, and either sign of 0.
            found = [buffer.view(torch.uint8).clone() for buffer in made]
            first = first or found
            assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), number

    declared.run(execute)


HEADS, HEADS_KV, ROWS, KEYS, PAGE = 4, 2, 300, 700, 16
WATCHED = (233, 617)
# Of the sequences before and behind it: rows and keys.
OTHERS = (((300, 700), (300, 700)), ((0, 0), (1, 3)), ((64, 129), (0, 700)))


class Batch:
    """Three sequences, of which the second is the same in each."""

    def __init__(self, number: int, size: int, rows: int) -> None:
        before, behind = OTHERS[number]
        self.rows = [min(n, rows) for n in (before[0], WATCHED[0], behind[0])]
        self.keys = [before[1], WATCHED[1], behind[1]]
        self.q = self._drawn(number, HEADS, rows, size)
        self.k, self.v = (self._drawn(number + 10 * n, HEADS_KV, KEYS, size) for n in (1, 2))
        if number == 1:
            # Whatever the others hold.
            self.k[0], self.v[2] = torch.inf, torch.nan

    def _drawn(self, seed: int, heads: int, rows: int, size: int) -> torch.Tensor:
        parts = []
        for index in range(3):
            generator = torch.Generator("cuda").manual_seed(
                7 * heads + rows if index == 1 else seed
            )
            # Keys and values differ from one another, too.
            skipped = seed // 10 if index == 1 else 0
            for _ in range(skipped + 1):
                part = torch.randn(heads, rows, size, generator=generator, device="cuda")
            parts.append(part.bfloat16())
        return torch.stack(parts)

    def lengths(self, which: list[int]) -> torch.Tensor:
        return torch.tensor(which, device="cuda", dtype=torch.int32)

    def packed(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])

    def prefix(self, lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def dense(b: Batch, **options: Any) -> Any:
    o, stats = ops.sdpa(b.q, b.k, b.v, **options)
    return o[1], stats[1]


def padded(b: Batch, **options: Any) -> Any:
    lengths = {"seqlens_q": b.lengths(b.rows), "seqlens_kv": b.lengths(b.keys)}
    o, stats = ops.sdpa(b.q, b.k, b.v, **lengths, **options)
    return o[1], stats[1]


def packed(b: Batch, **options: Any) -> Any:
    q = b.packed(b.q, b.rows)
    k, v = (b.packed(x, b.keys) for x in (b.k, b.v))
    sums = b.prefix(b.rows), b.prefix(b.keys)
    o, stats = ops.sdpa_varlen(q, k, v, *sums, ROWS, KEYS, **options)
    part = slice(b.rows[0], b.rows[0] + b.rows[1])
    return o[part], stats[:, part]


def paged(b: Batch, **options: Any) -> Any:
    entries = -(-KEYS // PAGE)
    room = entries * PAGE - KEYS
    order = torch.randperm(3 * entries, generator=torch.Generator().manual_seed(b.keys[0]))
    pages = []
    for x in (b.k, b.v):
        whole = torch.nn.functional.pad(x, (0, 0, 0, room), value=torch.nan)
        parts = whole.view(3, HEADS_KV, entries, PAGE, -1).permute(0, 2, 3, 1, 4)
        pages.append(torch.empty_like(parts.reshape(3 * entries, PAGE, HEADS_KV, -1)))
        pages[-1][order.cuda()] = parts.reshape(3 * entries, PAGE, HEADS_KV, -1)
    table = order.view(3, entries).int().cuda()
    rows = {"seqlens_q": b.lengths(b.rows)} if b.q.shape[2] > 1 else {}
    o, stats = ops.sdpa_paged(b.q, *pages, table, b.lengths(b.keys), **rows, **options)
    return o[1], stats[1]


def decoded(b: Batch, **options: Any) -> Any:
    o, stats = ops.sdpa_decode(b.q, b.k, b.v, b.lengths(b.keys), **options)
    return o[1], stats[1]


KINDS: dict[str, tuple[Callable[..., Any], int]] = {
    "dense": (dense, ROWS),
    "padded": (padded, ROWS),
    "packed": (packed, ROWS),
    "paged": (paged, ROWS),
    "decoded": (decoded, 1),
    "decoded from pages": (paged, 1),
}
SIZES = [pytest.param(128, marks=pytest.mark.L0)]
SIZES += [pytest.param(size, marks=pytest.mark.L1) for size in (64, 256)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("engine", ["triton", "hopper"])
def test_a_sequence_does_not_depend_on_those_beside_it(engine: str, size: int, kind: str) -> None:
    needs(engine)
    call, rows = KINDS[kind]
    if engine == "hopper" and rows == 1:
        pytest.skip("one row is not for its kernels, on any GPU")
    for causal in (False, True):
        options = {"causal": causal, "return_stats": True, "engine": engine}
        found = [call(Batch(number, size, rows), **options) for number in range(len(OTHERS))]
        assert found[0][0].isfinite().all() and found[0][0].abs().sum() > 1.0
        for o, stats in found[1:]:
            assert torch.equal(o, found[0][0]) and torch.equal(stats, found[0][1])
