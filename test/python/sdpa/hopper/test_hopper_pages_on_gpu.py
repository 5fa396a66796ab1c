"""Hopper attention over pages of keys, and with scores that are scaled or capped first, on a GPU.

The reference is float64, a sequence at a time, over keys and values gathered by the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from needing_hopper import NEEDS_HOPPER

import tilewright as tw
from tilewright import ops

pytestmark = NEEDS_HOPPER

HEADS, HEADS_KV = 4, 2
# Empty, tails within a page and at its edge, and more blocks than stages.
LENGTHS_KV = [1000, 0, 1, 128, 129, 777]
LENGTHS_Q = [300, 70, 1, 128, 0, 300]
BATCH, ROWS, KEYS = len(LENGTHS_KV), 300, 1000
NO_PAGE = 2**30


@dataclass
class Variant:
    """One declaration: sizes, page rows of k and v, and what is asked for."""

    size: int = 128
    pages: tuple[int, int] = (16, 16)
    band: str = "open"
    cap: float | None = None
    is_token_major: bool = False
    dtype: torch.dtype = torch.bfloat16
    left: int = 200


class Call:
    """A graph over pages, its buffers, and the sequences that the tables name."""

    def __init__(self, variant: Variant, seed: int) -> None:
        self.variant = variant
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.graph = tw.Graph(io_data_type=variant.dtype, intermediate_data_type="float32")
        self.pack: dict[str, torch.Tensor] = {}
        size = variant.size
        self.pack["q"] = self._normal(BATCH, HEADS, ROWS, size)
        for side, page in zip("kv", variant.pages, strict=True):
            self._container(side, page)
        self.pack["len_q"] = torch.tensor(LENGTHS_Q).int().cuda().view(-1, 1, 1, 1)
        self.pack["len_kv"] = torch.tensor(LENGTHS_KV).int().cuda().view(-1, 1, 1, 1)
        declared = {
            name: self.graph.tensor(x.shape, x.stride(), x.dtype, name=name)
            for name, x in self.pack.items()
        }
        options: dict[str, Any] = {
            "open": {},
            "causal": {"use_causal_mask_bottom_right": True},
            "window": {
                "use_causal_mask_bottom_right": True,
                "sliding_window_length": variant.left,
            },
        }[variant.band]
        if variant.cap is not None:
            options["score_mod"] = soft_cap(variant.cap)
        o, stats = self.graph.sdpa(
            *(declared[name] for name in "qkv"),
            generate_stats=True,
            attn_scale=size**-0.5,
            use_padding_mask=True,
            seq_len_q=declared["len_q"],
            seq_len_kv=declared["len_kv"],
            paged_attention_k_table=declared["table_k"],
            paged_attention_v_table=declared["table_v"],
            paged_attention_max_seq_len_kv=KEYS,
            **options,
        )
        o.set_output(True).set_name("o")
        stats.set_output(True).set_name("stats").set_data_type("float32")
        self.pack["o"] = torch.full_like(self.pack["q"], torch.nan)
        self.pack["stats"] = torch.full((BATCH, HEADS, ROWS, 1), torch.nan, device="cuda")
        self.graph.build()
        assert self.graph.selected_engine == "hopper", str(self.graph.explain())

    def _normal(self, *dim: int) -> torch.Tensor:
        made = torch.randn(dim, generator=self.generator, device="cuda")
        return made.to(self.variant.dtype)

    def _container(self, side: str, page: int) -> None:
        """Pages in random order; NaN in free pages, behind lengths, and no page in free entries."""
        entries = -(-KEYS // page)
        count = BATCH * entries
        dim = (count + 1, HEADS_KV, page, self.variant.size)
        if self.variant.is_token_major:
            made = self._normal(dim[0], dim[2], dim[1], dim[3]).transpose(1, 2)
        else:
            made = self._normal(*dim)
        order = torch.randperm(count, generator=self.generator, device="cuda")
        table = order.int().view(BATCH, 1, entries, 1)
        for b, length in enumerate(LENGTHS_KV):
            used = -(-length // page)
            made[table[b, 0, used:, 0].long()] = torch.nan
            table[b, 0, used:] = NO_PAGE
            if length % page:
                made[table[b, 0, used - 1, 0].long(), :, length % page :] = torch.nan
        self.pack[side], self.pack[f"table_{side}"] = made, table

    def tokens(self, side: str, b: int) -> torch.Tensor:
        """(HEADS, length, size) of one sequence, in float64."""
        pages, length = self.pack[side], int(self.pack["len_kv"][b])
        used = self.pack[f"table_{side}"][b, 0, : -(-length // pages.shape[2]), 0].long()
        rows = pages[used].transpose(0, 1).flatten(1, 2)[:, :length].double()
        return rows.repeat_interleave(HEADS // HEADS_KV, 0)

    def check(self) -> None:
        variant = self.variant
        bound = 1.6e-2 if variant.dtype is torch.bfloat16 else 2e-3
        for b in range(BATCH):
            rows, keys = int(self.pack["len_q"][b]), int(self.pack["len_kv"][b])
            k, v = self.tokens("k", b), self.tokens("v", b)
            scores = self.pack["q"][b, :, :rows].double() @ k.transpose(1, 2) * variant.size**-0.5
            if variant.cap is not None:
                scores = variant.cap * torch.tanh(scores / variant.cap)
            row = torch.arange(rows, device="cuda")[:, None] + keys - rows
            column = torch.arange(keys, device="cuda")[None, :]
            if variant.band != "open":
                scores = scores.masked_fill(column > row, -torch.inf)
            if variant.band == "window":
                scores = scores.masked_fill(column <= row - variant.left, -torch.inf)
            total = torch.logsumexp(scores, 2, keepdim=True)
            p = torch.where(total == -torch.inf, 0.0, (scores - total).exp()).nan_to_num(0.0)
            error = (self.pack["o"][b, :, :rows].double() - p @ v).abs()
            assert error.numel() == 0 or error.max() <= bound, (b, float(error.max()))
            got = self.pack["stats"][b, :, :rows].double()
            assert torch.equal(got == -torch.inf, total == -torch.inf), b
            gap = torch.where(got == total, 0.0, got - total).abs()
            assert gap.numel() == 0 or gap.max() <= 1e-3, (b, float(gap.max()))
            assert torch.all(self.pack["o"][b, :, rows:] == 0.0)
            assert torch.all(self.pack["stats"][b, :, rows:] == -torch.inf)


def soft_cap(cap: float) -> Any:
    def score_mod(graph: Any, score: Any) -> Any:
        given = graph.tensor_scalar(cap)
        return graph.mul(graph.tanh(graph.div(score, given)), given)

    return score_mod


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant(), marks=pytest.mark.L0, id="16"),
        *(
            pytest.param(variant, marks=pytest.mark.L1, id=name)
            for name, variant in {
                "128": Variant(pages=(128, 128), band="causal", is_token_major=True),
                "256 and 64": Variant(pages=(256, 64), band="window"),
                "48 and 24": Variant(pages=(48, 24), band="causal"),
                "8": Variant(pages=(8, 8), size=96),
                "4 and 6": Variant(pages=(4, 6), size=64, band="causal"),
                "1": Variant(pages=(1, 1), is_token_major=True),
                "7 and 1": Variant(pages=(7, 1), size=64),
                "1 and 3, size 72": Variant(pages=(1, 3), size=72),
                "100": Variant(pages=(100, 100), size=256, dtype=torch.float16),
                "size 64": Variant(size=64, pages=(32, 16), band="window", left=70),
                "size 256": Variant(size=256, pages=(16, 32), band="causal"),
                "capped": Variant(size=64, cap=2.0, band="causal"),
                "capped, 128": Variant(cap=20.0, pages=(64, 64), dtype=torch.float16),
            }.items()
        ),
    ],
)
def test_pages(variant: Variant) -> None:
    # O4: NaN wherever no sequence has a token; entries behind a length name no page.
    call = Call(variant, seed=variant.size + variant.pages[0])
    call.graph.execute(call.pack)
    call.check()


@pytest.mark.L0
def test_a_replay_reads_tables_and_lengths_as_they_are(captured: Any) -> None:
    # L3, L9: no host read; pages in another order with the same tokens give the same result.
    call = Call(Variant(), seed=1)
    frame = call.graph.bind(call.pack)
    frame.launch()
    with captured(frame.launch) as recorded:
        torch.cuda.synchronize()
        first = call.pack["o"].clone()
        for side in "kv":
            pages, table = call.pack[side], call.pack[f"table_{side}"]
            order = torch.randperm(len(pages), generator=call.generator, device="cuda")
            pages.copy_(pages[order])
            place = torch.empty_like(order)
            place[order] = torch.arange(len(order), device="cuda")
            named = table < NO_PAGE
            table[named] = place[table[named].long()].int()
        call.pack["o"].fill_(torch.nan)
        recorded.replay()
        torch.cuda.synchronize()
        assert torch.equal(call.pack["o"], first)
        call.pack["len_kv"].copy_(torch.tensor([64, 0, 1, 100, 9, 16]).view(-1, 1, 1, 1))
        recorded.replay()
        torch.cuda.synchronize()
        call.check()


@pytest.mark.L1
def test_what_a_hidden_token_of_a_page_holds_reaches_no_row() -> None:
    # A tile that NaN spoils is computed again, page by page.
    call = Call(Variant(band="causal"), seed=2)
    call.graph.execute(call.pack)
    clean = call.pack["o"].clone()
    pages, token = call.pack["v"], 900
    page = int(call.pack["table_v"][0, 0, token // 16, 0])
    pages[page, 0, token % 16, 3] = torch.nan
    call.graph.execute(call.pack)
    # Row i of sequence 0 sees tokens up to 700 + i.
    got = call.pack["o"]
    assert (got[0, :2, :200].float() - clean[0, :2, :200].float()).abs().max() <= 1.6e-2
    assert torch.isnan(got[0, :2, 200:, 3]).all()
    assert torch.equal(got[1:], clean[1:]) and torch.equal(got[0, 2:], clean[0, 2:])


@pytest.mark.L0
def test_the_function_for_pages_takes_these_kernels() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    q = torch.randn(2, 4, 40, 128, generator=generator, device="cuda").bfloat16()
    k, v = (
        torch.randn(20, 16, 2, 128, generator=generator, device="cuda").bfloat16() for _ in range(2)
    )
    table = torch.randperm(20, generator=generator, device="cuda").view(2, 10).int()
    lengths = torch.tensor([150, 70], device="cuda").int()
    options: dict[str, Any] = {"causal": True, "soft_cap": 15.0}
    o = ops.sdpa_paged(q, k, v, table, lengths, engine="hopper", **options)
    other = ops.sdpa_paged(q, k, v, table, lengths, engine="aten", **options)
    assert (o - other).abs().max() <= 3e-2


def dense(size: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    dims = {"q": (2, 4, 300, size), "k": (2, 2, 400, size), "v": (2, 2, 400, size)}
    pack = {
        name: torch.randn(dim, generator=generator, device="cuda").to(dtype)
        for name, dim in dims.items()
    }
    pack["o"] = torch.full_like(pack["q"], torch.nan)
    pack["stats"] = torch.full((2, 4, 300, 1), torch.nan, device="cuda")
    return pack


@pytest.mark.parametrize(
    ("size", "is_causal"),
    [
        pytest.param(128, True, marks=pytest.mark.L0),
        *(
            pytest.param(size, is_causal, marks=pytest.mark.L1)
            for size in (64, 128, 256)
            for is_causal in (False, True)
            if (size, is_causal) != (128, True)
        ),
    ],
)
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("cap", [None, 0.5, 30.0])
def test_scales_and_caps_that_are_tensors(
    size: int, is_causal: bool, where: str, cap: float | None
) -> None:
    # Scores to ten and more: near the caps, below them, and of either sign of the scale.
    dtype = torch.float16 if size == 64 else torch.bfloat16
    pack = dense(size, dtype, seed=size)
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    declared = {name: graph.tensor(pack[name].shape, name=name) for name in "qkv"}

    def number(name: str, value: float) -> Any:
        if where == "host":
            return graph.tensor_scalar(value)
        pack[name] = torch.full((1, 1, 1, 1), value, device="cuda")
        return graph.tensor((1, 1, 1, 1), data_type="float32", name=name)

    def score_mod(graph: Any, score: Any) -> Any:
        return graph.mul(graph.tanh(graph.div(score, number("in", cap))), number("out", cap))

    scale = -0.3 if where == "host" else 0.3
    o, stats = graph.sdpa(
        *(declared[name] for name in "qkv"),
        generate_stats=True,
        attn_scale=number("scale", scale),
        use_causal_mask=is_causal,
        **({} if cap is None else {"score_mod": score_mod}),
    )
    o.set_output(True).set_name("o")
    stats.set_output(True).set_name("stats").set_data_type("float32")
    graph.build()
    assert graph.selected_engine == "hopper", str(graph.explain())
    for factor in (1.0, -0.5, 0.0) if where == "device" else (1.0,):
        if where == "device":
            pack["scale"].fill_(scale * factor)
        graph.execute(pack)
        q, k, v = (pack[name].double() for name in "qkv")
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * (scale * factor)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if is_causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        total = torch.logsumexp(scores, 3, keepdim=True)
        bound = 1.6e-2 if dtype is torch.bfloat16 else 2e-3
        expected = (scores - total).exp() @ v
        error = (pack["o"].double() - expected).abs().max()
        assert error <= bound * max(float(expected.abs().max()), 1.0), float(error)
        gap = (pack["stats"].double() - total).abs().max()
        assert gap <= 1e-4 * max(float(total.abs().max()), 1.0), float(gap)
