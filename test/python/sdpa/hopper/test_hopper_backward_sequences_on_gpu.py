"""Hopper attention's backward over sequences of their own lengths: padded, and packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from needing_hopper import NEEDS_HOPPER

import tilewright as tw

pytestmark = NEEDS_HOPPER

# Empty ones, single ones, tails on either side of a tile, and one that fills its extent.
LENGTHS = {"q": [300, 0, 64, 129, 1, 513], "kv": [300, 50, 0, 200, 77, 513]}
BATCH, LONGEST, MARGIN = len(LENGTHS["q"]), 513, 5
HEADS = {"q": 4, "kv": 2}
BANDS: dict[str, dict[str, Any]] = {
    "open": {},
    "causal": {"use_causal_mask": True},
    "bottom": {"use_causal_mask_bottom_right": True},
    "window": {"use_causal_mask_bottom_right": True, "diagonal_band_left_bound": 70},
}
SIDES = dict.fromkeys(("q", "o", "dO", "stats", "dQ"), "q") | dict.fromkeys(
    ("k", "v", "dK", "dV"), "kv"
)
MARK = 7.0


class Call:
    """A graph over sequences, its buffers, and what each sequence's part of them is."""

    def __init__(
        self, size: int, band: str, *, is_packed: bool, as_sums: bool, seed: int, **given: Any
    ) -> None:
        self.size, self.band, self.is_packed = size, band, is_packed
        self.generator = torch.Generator("cuda").manual_seed(seed)
        self.graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        self.pack: dict[str, torch.Tensor] = {}
        self.starts = {s: torch.tensor([0, *LENGTHS[s]]).cumsum(0) for s in LENGTHS}
        self.sums = {s: self._index(f"sums_{s}", self.starts[s]) for s in LENGTHS}
        options: dict[str, Any] = {"use_padding_mask": True, **BANDS[band], **given}
        for side, lengths in LENGTHS.items():
            if as_sums:
                options[f"cu_seq_len_{side}"] = self.sums[side]
            else:
                made = self._index(f"len_{side}", torch.tensor(lengths))
                options[f"seq_len_{side}"] = made
        tensors = [self._operand(name, size) for name in ("q", "k", "v", "o", "dO")]
        tensors.append(self._operand("stats", 1, torch.float32))
        self.expected = {name: {} for name in ("dQ", "dK", "dV")}
        for b in range(BATCH):
            self._fill(b)
        made = self.graph.sdpa_backward(*tensors, attn_scale=size**-0.5, **options)
        for tensor, name in zip(made, ("dQ", "dK", "dV"), strict=True):
            tensor.set_output(True).set_name(name)
            source = self.pack["q" if name == "dQ" else "k"]
            self.pack[name] = torch.full_like(source, MARK)
            if is_packed:
                dim, stride, unit = self._declared(name, size)
                tensor.set_dim(dim).set_stride(stride)
                tensor.set_ragged_offset(self.sums[SIDES[name]]).set_ragged_offset_multiplier(unit)
        self.graph.build()
        assert self.graph.selected_engine == "hopper", str(self.graph.explain())

    def _index(self, name: str, values: torch.Tensor) -> Any:
        self.pack[name] = values.int().cuda()
        return self.graph.tensor((len(values), 1, 1, 1), data_type="int32", name=name)

    def _declared(self, name: str, width: int) -> tuple[Any, Any, int]:
        heads = HEADS[SIDES[name]]
        unit = heads * width
        return (BATCH, heads, LONGEST, width), (LONGEST * unit, width, unit, 1), unit

    def _operand(self, name: str, width: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        """NaN lies wherever no sequence has an element."""
        lengths, heads = LENGTHS[SIDES[name]], HEADS[SIDES[name]]
        dim = (BATCH, heads, LONGEST, width)
        if self.is_packed:
            dim = (sum(lengths) + MARGIN, heads, width)
        made = torch.randn(dim, generator=self.generator, device="cuda").to(dtype)
        self.pack[name] = made
        if self.is_packed:
            made[sum(lengths) :] = torch.nan
            dim, stride, unit = self._declared(name, width)
            return self.graph.tensor(
                dim,
                stride,
                dtype,
                name=name,
                ragged_offset=self.sums[SIDES[name]],
                ragged_offset_multiplier=unit,
            )
        for b, length in enumerate(lengths):
            made[b, :, length:] = torch.nan
        return self.graph.tensor(made.shape, made.stride(), dtype, name=name)

    def part(self, name: str, b: int) -> torch.Tensor:
        """(heads, length, width) of one sequence."""
        length = LENGTHS[SIDES[name]][b]
        if not self.is_packed:
            return self.pack[name][b, :, :length]
        start = int(self.starts[SIDES[name]][b])
        return self.pack[name][start : start + length].transpose(0, 1)

    def _fill(self, b: int) -> None:
        """What a forward leaves of a sequence, and its gradients, in float64."""
        q, k, v = (self.part(n, b).double().requires_grad_() for n in "qkv")
        group = HEADS["q"] // HEADS["kv"]
        rows, keys = q.shape[1], k.shape[1]
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * self.size**-0.5
        row = torch.arange(rows, device="cuda")[:, None]
        column = torch.arange(keys, device="cuda")[None, :]
        if "bottom" in str(BANDS[self.band]):
            row = row + keys - rows
        seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda")
        if self.band != "open":
            seen &= column <= row
        if self.band == "window":
            seen &= column > row - 70
        sees = seen.any(1, keepdim=True)
        # A row that sees nothing has no softmax: its scores count as 0, and its weights vanish.
        scores = torch.where(seen, scores, torch.where(sees, -torch.inf, 0.0))
        stats = torch.logsumexp(scores, 2, keepdim=True)
        p = (scores - stats).exp() * sees if keys else scores
        o = p @ v.repeat_interleave(group, 0)
        self.part("o", b).copy_(o.detach())
        self.part("stats", b).copy_(torch.where(sees, stats, -torch.inf).detach())
        gradients = torch.autograd.grad(o, (q, k, v), self.part("dO", b).double())
        for name, value in zip(self.expected, gradients, strict=True):
            self.expected[name][b] = value

    def run(self) -> None:
        size = self.graph.get_workspace_size()
        workspace = torch.full((size + 64,), 0xAB, dtype=torch.uint8, device="cuda")
        self.graph.execute(self.pack, workspace)
        assert (workspace[size:] == 0xAB).all()

    def check(self) -> None:
        for name, parts in self.expected.items():
            for b, value in parts.items():
                error = (self.part(name, b).double() - value).abs()
                bound = 2 * torch.finfo(torch.bfloat16).eps
                if error.numel():
                    assert error.max() <= bound * max(1.0, value.abs().max().item()), (name, b)
                if not self.is_packed:
                    assert torch.all(self.pack[name][b, :, value.shape[1] :] == 0.0), (name, b)
            if self.is_packed:
                assert torch.all(self.pack[name][-MARGIN:] == MARK), "the margin keeps its bytes"


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "size", [pytest.param(128, marks=pytest.mark.L0), pytest.param(64, marks=pytest.mark.L1)]
)
def test_sequences_of_their_own_lengths(size: int, is_packed: bool, band: str) -> None:
    # O2, L11: NaN lies behind every sequence, another one's rows follow a packed one.
    call = Call(size, band, is_packed=is_packed, as_sums=size == 128, seed=size)
    call.run()
    call.check()


@pytest.mark.L0
@pytest.mark.parametrize("band", ["causal", "window"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_sequences_with_dq_in_a_fixed_order(is_packed: bool, band: str) -> None:
    options = {"use_deterministic_algorithm": True}
    call = Call(128, band, is_packed=is_packed, as_sums=False, seed=2, **options)
    call.run()
    call.check()


@pytest.mark.L0
def test_lengths_are_read_at_each_launch(captured: Any) -> None:
    # L3, L9: no host read of lengths; a replay sees them as they are.
    call = Call(128, "causal", is_packed=False, as_sums=False, seed=1)
    size = call.graph.get_workspace_size()
    frame = call.graph.bind(call.pack, torch.empty(size, dtype=torch.uint8, device="cuda"))
    frame.launch()
    with captured(frame.launch) as recorded:
        for name in ("len_q", "len_kv"):
            call.pack[name].zero_()
        recorded.replay()
        torch.cuda.synchronize()
        for name in ("dQ", "dK", "dV"):
            assert torch.all(call.pack[name] == 0.0), name


@pytest.mark.parametrize("operand", ["k", "v"])
@pytest.mark.parametrize(
    "size", [pytest.param(128, marks=pytest.mark.L0), pytest.param(64, marks=pytest.mark.L1)]
)
def test_padding_is_zeros_whatever_a_key_holds(size: int, operand: str) -> None:
    # L11: a row of padding has weights of 0, and 0 times NaN is NaN.
    call = Call(size, "open", is_packed=False, as_sums=size == 128, seed=3)
    call.pack[operand][:, :, 0] = torch.nan
    call.run()
    for b, length in enumerate(LENGTHS["q"]):
        assert torch.all(call.pack["dQ"][b, :, length:] == 0.0), b
    # Its heads' sequences are spoilt, and no other.
    assert call.part("dQ", 0).isnan().all()


@pytest.mark.L0
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_keys_that_no_row_of_the_sequence_sees_may_hold_nan(size: int, is_packed: bool) -> None:
    # Rows behind the end would see them; their weights are 0, and 0 times NaN is NaN.
    call = Call(size, "causal", is_packed=is_packed, as_sums=False, seed=4)
    for b, rows in enumerate(LENGTHS["q"]):
        for name in ("k", "v"):
            call.part(name, b)[:, rows:] = torch.nan
    call.run()
    call.check()
