"""Hopper attention over sequences of their own lengths: padded, and packed one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needing_hopper import NEEDS_HOPPER

import tilewright as tw
from tilewright import ops

pytestmark = NEEDS_HOPPER

# Empty ones, single ones, tails on either side of a block, and one that fills its extent.
LENGTHS_Q = [300, 0, 64, 129, 1, 513]
LENGTHS_KV = [300, 50, 0, 200, 77, 513]
BATCH, LONGEST, MARGIN = len(LENGTHS_Q), 513, 5
HEADS, HEADS_KV = 4, 2
BANDS = {
    "open": {},
    "causal": {"use_causal_mask": True},
    "bottom": {"use_causal_mask_bottom_right": True},
    "window": {"use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 70},
}


class Call:
    """A graph over sequences, its buffers, and what each sequence's part of them is."""

    def __init__(
        self,
        size: int,
        band: str,
        *,
        is_packed: bool,
        as_sums: bool,
        seed: int,
        longest: int = LONGEST,
    ) -> None:
        self.size, self.band, self.is_packed, self.longest = size, band, is_packed, longest
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        self.pack: dict[str, torch.Tensor] = {}
        self.starts = {
            side: torch.tensor([0, *lengths]).cumsum(0)
            for side, lengths in (("q", LENGTHS_Q), ("kv", LENGTHS_KV))
        }
        sums = {side: self._index(f"sums_{side}", self.starts[side]) for side in ("q", "kv")}
        options: dict[str, Any] = {"use_padding_mask": True, **BANDS[band]}
        for side, lengths in (("q", LENGTHS_Q), ("kv", LENGTHS_KV)):
            if as_sums:
                options[f"cu_seq_len_{side}"] = sums[side]
            else:
                made = self._index(f"len_{side}", torch.tensor(lengths))
                options[f"seq_len_{side}"] = made
        q = self._operand("q", HEADS, LENGTHS_Q, sums["q"])
        k = self._operand("k", HEADS_KV, LENGTHS_KV, sums["kv"])
        v = self._operand("v", HEADS_KV, LENGTHS_KV, sums["kv"])
        o, stats = self.graph.sdpa(q, k, v, generate_stats=True, attn_scale=size**-0.5, **options)
        o.set_output(True).set_name("o")
        stats.set_output(True).set_name("stats").set_data_type("float32")
        self.pack["o"] = torch.full_like(self.pack["q"], 7.0)
        if is_packed:
            unit = HEADS * size
            o.set_dim((BATCH, HEADS, longest, size)).set_stride((longest * unit, size, unit, 1))
            o.set_ragged_offset(sums["q"]).set_ragged_offset_multiplier(unit)
            stats.set_dim((BATCH, HEADS, longest, 1)).set_stride((longest * HEADS, 1, HEADS, 1))
            stats.set_ragged_offset(sums["q"]).set_ragged_offset_multiplier(HEADS)
            self.pack["stats"] = torch.full((sum(LENGTHS_Q) + MARGIN, HEADS, 1), 7.0).cuda()
        else:
            self.pack["stats"] = torch.full((BATCH, HEADS, longest, 1), 7.0).cuda()
        self.graph.build()
        assert self.graph.selected_engine == "hopper", str(self.graph.explain())

    def _index(self, name: str, values: torch.Tensor) -> Any:
        self.pack[name] = values.int().cuda()
        return self.graph.tensor((len(values), 1, 1, 1), data_type="int32", name=name)

    def _operand(self, name: str, heads: int, lengths: list[int], sums: Any) -> Any:
        """NaN lies wherever no sequence has an element."""
        unit = heads * self.size
        if self.is_packed:
            dim = (sum(lengths) + MARGIN, heads, self.size)
        else:
            dim = (BATCH, heads, self.longest, self.size)
        made = torch.randn(dim, generator=self.generator, device="cuda").bfloat16()
        self.pack[name] = made
        if self.is_packed:
            made[sum(lengths) :] = torch.nan
            return self.graph.tensor(
                (BATCH, heads, self.longest, self.size),
                (self.longest * unit, self.size, unit, 1),
                name=name,
                ragged_offset=sums,
                ragged_offset_multiplier=unit,
            )
        for b, length in enumerate(lengths):
            made[b, :, length:] = torch.nan
        return self.graph.tensor(made.shape, made.stride(), name=name)

    def part(self, name: str, b: int) -> torch.Tensor:
        """(heads, length, width) of one sequence, in float64."""
        side = "q" if name in ("q", "o", "stats") else "kv"
        length = (LENGTHS_Q if side == "q" else LENGTHS_KV)[b]
        if not self.is_packed:
            return self.pack[name][b, :, :length].double()
        start = int(self.starts[side][b])
        return self.pack[name][start : start + length].transpose(0, 1).double()

    def check(self) -> None:
        for b in range(BATCH):
            rows, keys = LENGTHS_Q[b], LENGTHS_KV[b]
            q, k, v = (self.part(name, b) for name in "qkv")
            k, v = (x.repeat_interleave(HEADS // HEADS_KV, 0) for x in (k, v))
            scores = q @ k.transpose(1, 2) * self.size**-0.5
            row = torch.arange(rows, device="cuda")[:, None]
            column = torch.arange(keys, device="cuda")[None, :]
            if "bottom" in str(BANDS[self.band]):
                row = row + keys - rows
            if self.band != "open":
                scores = scores.masked_fill(column > row, -torch.inf)
            if self.band == "window":
                scores = scores.masked_fill(column <= row - 70, -torch.inf)
            total = torch.logsumexp(scores, 2, keepdim=True)
            p = torch.where(total == -torch.inf, 0.0, (scores - total).exp()).nan_to_num(0.0)
            error = (self.part("o", b) - p @ v).abs()
            assert error.numel() == 0 or error.max() <= 1.6e-2, b
            got = self.part("stats", b)
            assert torch.equal(got == -torch.inf, total == -torch.inf), b
            gap = torch.where(got == total, 0.0, got - total).abs()
            assert gap.numel() == 0 or gap.max() <= 1e-3, b
            if not self.is_packed:
                assert torch.all(self.pack["o"][b, :, rows:] == 0.0)
                assert torch.all(self.pack["stats"][b, :, rows:] == -torch.inf)
        if self.is_packed:
            for name in ("o", "stats"):
                assert torch.all(self.pack[name][-MARGIN:] == 7.0), "the margin keeps its bytes"


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(128, marks=pytest.mark.L0),
        pytest.param(64, marks=pytest.mark.L1),
        pytest.param(256, marks=pytest.mark.L1),
    ],
)
def test_sequences_of_their_own_lengths(size: int, is_packed: bool, band: str) -> None:
    # O2, L11: NaN lies behind every sequence, another one's rows follow a packed one.
    call = Call(size, band, is_packed=is_packed, as_sums=size == 128, seed=size)
    call.graph.execute(call.pack)
    call.check()


@pytest.mark.L1
@pytest.mark.parametrize("band", ["causal", "bottom"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("size", [64, 128])
def test_sequences_that_may_be_long(size: int, is_packed: bool, band: str) -> None:
    # Other kernels are taken for them: maxima are found late.
    call = Call(size, band, is_packed=is_packed, as_sums=True, seed=5, longest=1500)
    call.graph.execute(call.pack)
    call.check()


@pytest.mark.L0
def test_lengths_are_read_at_each_launch(captured: Any) -> None:
    # L3, L9: no host read of lengths; a replay sees them as they are.
    call = Call(128, "causal", is_packed=False, as_sums=False, seed=1)
    frame = call.graph.bind(call.pack)
    frame.launch()
    with captured(frame.launch) as recorded:
        for name in ("len_q", "len_kv"):
            call.pack[name].zero_()
        recorded.replay()
        torch.cuda.synchronize()
        assert torch.all(call.pack["o"] == 0.0) and torch.all(call.pack["stats"] == -torch.inf)


@pytest.mark.L0
def test_the_function_for_packed_sequences_takes_these_kernels() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    lengths = [200, 70, 0, 130]
    sums = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q = torch.randn(sum(lengths), 4, 128, generator=generator, device="cuda").bfloat16()
    k, v = (
        torch.randn(sum(lengths), 2, 128, generator=generator, device="cuda").bfloat16()
        for _ in range(2)
    )
    o = ops.sdpa_varlen(q, k, v, sums, sums, 200, 200, causal=True, engine="hopper")
    other = ops.sdpa_varlen(q, k, v, sums, sums, 200, 200, causal=True, engine="aten")
    assert (o - other).abs().max() <= 3e-2
