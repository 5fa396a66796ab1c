"""Lengths, running sums, starts, tables and sinks of any step and type, read at their full width.

Row B21: each is a vector of few elements that a caller cuts out of something else, so that its step
is rarely 1. The same call on compact copies is what a call on views must equal, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.torch_dtypes import to_torch

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
HEADS, HEADS_KV, ROWS, WIDTH, PAGE = 4, 2, 24, 16, 4
LENGTHS_Q, LENGTHS_KV = (24, 0, 7), (13, 24, 24)
BATCH = len(LENGTHS_Q)
# Gives a view of the same elements, of which the first axis, heads or entries lie apart.
Spread = Callable[[torch.Tensor], torch.Tensor]


def draw(*dim: int, seed: int) -> torch.Tensor:
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed))


def on_device(value: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of its whole storage: a view's own copy would be compact."""
    storage = value.as_strided((value.untyped_storage().nbytes() // value.itemsize,), (1,), 0)
    return storage.to(DEVICE).as_strided(value.shape, value.stride(), value.storage_offset())


class Call:
    """A graph whose metadata is laid out by ``spread``."""

    def __init__(self, spread: Spread, index: torch.dtype, sink: torch.dtype) -> None:
        self.graph = tw.Graph(
            io_data_type="float32",
            intermediate_data_type="float32",
            handle=tw.create_handle(DEVICE),
        )
        self.spread, self.index, self.sink = spread, index, sink
        self.pack: dict[Any, torch.Tensor] = {}
        self.likes: dict[Any, Any] = {}

    def plain(self, value: torch.Tensor, **layout: Any) -> Any:
        """An operand as it lies."""
        tensor = self.graph.tensor(value.shape, value.stride(), value.dtype, **layout)
        self.pack[tensor] = value if value.stride()[0] > 2**31 else on_device(value)
        return tensor

    def apart(self, values: Any, dim: tuple[int, ...], dtype: torch.dtype | None = None) -> Any:
        """Metadata, spread."""
        compact = torch.as_tensor(values).to(dtype or self.index).view(dim)
        return self.plain(self.spread(compact))

    def lengths(self, *, sums: bool = False) -> dict[str, Any]:
        made: dict[str, Any] = {"use_padding_mask": True}
        for side, lengths in (("q", LENGTHS_Q), ("kv", LENGTHS_KV)):
            if sums:
                prefix = torch.tensor([0, *lengths]).cumsum(0)
                made[f"cu_seq_len_{side}"] = self.apart(prefix, (BATCH + 1, 1, 1, 1))
            else:
                made[f"seq_len_{side}"] = self.apart(lengths, (BATCH, 1, 1, 1))
        return made

    def packed(self, heads: int, width: int, seed: int, lengths: tuple[int, ...]) -> Any:
        """Tokens one after another, with three of nobody before each sequence."""
        unit = heads * width
        layout = {"ragged_offset": self.starts(lengths), "ragged_offset_multiplier": unit}
        # Room for what a wrong start or length would lead to.
        tokens = draw(sum(lengths) + 3 * BATCH + 3 * ROWS, heads, width, seed=seed)
        stride = (ROWS * unit, width, unit, 1)
        tensor = self.graph.tensor((BATCH, heads, ROWS, width), stride, "float32", **layout)
        self.pack[tensor] = tokens.flatten().to(DEVICE)
        return tensor

    def starts(self, lengths: tuple[int, ...]) -> Any:
        starts = [3]
        for length in lengths:
            starts.append(starts[-1] + length + 3)
        return self.apart(starts, (BATCH + 1, 1, 1, 1), torch.int64)

    def output(self, tensor: Any, like: Any = None) -> None:
        """A result; packed as ``like`` is."""
        tensor.set_output(True)
        self.likes[tensor] = like
        if like is not None:
            tensor.set_dim(like.dim).set_stride(like.stride)
            tensor.set_ragged_offset(like.ragged_offset)
            tensor.set_ragged_offset_multiplier(like.ragged_offset_multiplier)

    def run(self) -> list[torch.Tensor]:
        """The results, in memory that was full of a number."""
        self.graph.create_execution_plans()
        self.graph.deselect_engines(["aten", "hopper"])
        self.graph.build()
        assert self.graph.selected_engine == "triton"
        for tensor, like in self.likes.items():
            shape = tensor.dim if like is None else self.pack[like].shape
            dtype = to_torch(tensor.data_type)
            self.pack[tensor] = torch.full(shape, 7.0, dtype=dtype, device=DEVICE)
        size = max(self.graph.get_workspace_size(), 1)
        self.graph.execute(self.pack, torch.zeros(size, dtype=torch.uint8, device=DEVICE))
        return [self.pack[tensor].cpu() for tensor in self.likes]


def dense(call: Call) -> list[torch.Tensor]:
    q = call.plain(draw(BATCH, HEADS, ROWS, WIDTH, seed=1))
    k, v = (call.plain(draw(BATCH, HEADS_KV, ROWS, WIDTH, seed=seed)) for seed in (2, 3))
    sink = call.apart(draw(HEADS, seed=4), (1, HEADS, 1, 1), call.sink)
    options = {"sink_token": sink, "use_causal_mask_bottom_right": True, **call.lengths()}
    made = call.graph.sdpa(q, k, v, generate_stats=True, attn_scale=0.3, **options)
    for tensor in made:
        call.output(tensor)
    return call.run()


def packed(call: Call) -> list[torch.Tensor]:
    q = call.packed(HEADS, WIDTH, 1, LENGTHS_Q)
    k, v = (call.packed(HEADS_KV, WIDTH, seed, LENGTHS_KV) for seed in (2, 3))
    o, _ = call.graph.sdpa(q, k, v, is_inference=True, attn_scale=0.3, **call.lengths(sums=True))
    call.output(o, q)
    return call.run()


def paged(call: Call) -> list[torch.Tensor]:
    entries = ROWS // PAGE
    q = call.plain(draw(BATCH, HEADS, 1, WIDTH, seed=1))
    k, v = (call.plain(draw(BATCH * entries, HEADS_KV, PAGE, WIDTH, seed=s)) for s in (2, 3))
    options = call.lengths()
    del options["seq_len_q"]
    options["seq_len_q"] = call.apart([1] * BATCH, (BATCH, 1, 1, 1))
    for seed, side in enumerate("kv"):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randperm(BATCH * entries, generator=generator)
        options[f"paged_attention_{side}_table"] = call.apart(table, (BATCH, 1, entries, 1))
    options["paged_attention_max_seq_len_kv"] = ROWS
    o, _ = call.graph.sdpa(q, k, v, is_inference=True, attn_scale=0.3, **options)
    call.output(o)
    return call.run()


def backward(call: Call) -> list[torch.Tensor]:
    q = call.packed(HEADS, WIDTH, 1, LENGTHS_Q)
    k, v = (call.packed(HEADS_KV, WIDTH, seed, LENGTHS_KV) for seed in (2, 3))
    o, d_o = (call.packed(HEADS, WIDTH, seed, LENGTHS_Q) for seed in (4, 5))
    stats = call.packed(HEADS, 1, 6, LENGTHS_Q)
    sink = call.apart(draw(HEADS, seed=7), (1, HEADS, 1, 1), call.sink)
    d_sink = call.graph.tensor(name="dSink")
    options = {"sink_token": sink, "dSink_token": d_sink, "attn_scale": 0.3, **call.lengths()}
    made = call.graph.sdpa_backward(q, k, v, o, d_o, stats, **options)
    d_sink.set_dim((1, HEADS, 1, 1)).set_stride((HEADS, 1, 1, 1)).set_data_type("float32")
    for tensor, like in zip(made, (q, k, v), strict=True):
        call.output(tensor, like)
    call.output(d_sink)
    return call.run()


def scored(call: Call, *, is_backward: bool = False) -> list[torch.Tensor]:
    """A bias, a mask of tiles and a mask of kept weights, spread too."""
    q = call.plain(draw(BATCH, HEADS, ROWS, WIDTH, seed=1))
    k, v = (call.plain(draw(BATCH, HEADS_KV, ROWS, WIDTH, seed=seed)) for seed in (2, 3))
    scores, tiles = (1, HEADS, ROWS, ROWS), (BATCH, HEADS, 1, 1)
    kept = draw(BATCH, 1, ROWS, ROWS, seed=5) > -0.5
    one = torch.full((1, 1, 1, 1), 1.25)
    options: dict[str, Any] = {
        "bias": call.apart(draw(*scores, seed=4), scores, torch.float32),
        "block_mask": call.apart(torch.arange(BATCH * HEADS) % 3 > 0, tiles, torch.uint8),
        "dropout": (call.apart(kept, (BATCH, 1, ROWS, ROWS), torch.float32), call.plain(one)),
        "attn_scale": 0.3,
    }
    if not is_backward:
        o, _ = call.graph.sdpa(q, k, v, is_inference=True, **options)
        call.output(o)
        return call.run()
    o, d_o = (call.plain(draw(BATCH, HEADS, ROWS, WIDTH, seed=seed)) for seed in (6, 7))
    stats = call.plain(draw(BATCH, HEADS, ROWS, 1, seed=8) + 3.0)
    d_bias = call.graph.tensor(name="dBias")
    made = call.graph.sdpa_backward(q, k, v, o, d_o, stats, dBias=d_bias, **options)
    d_bias.set_dim(scores).set_stride((HEADS * ROWS * ROWS, ROWS * ROWS, ROWS, 1))
    for tensor in (*made, d_bias.set_data_type("float32")):
        call.output(tensor)
    return call.run()


def scored_backward(call: Call) -> list[torch.Tensor]:
    return scored(call, is_backward=True)


KINDS = (dense, packed, paged, backward)
SCORED = (scored, scored_backward)


def compact(value: torch.Tensor) -> torch.Tensor:
    return value


def stepped(value: torch.Tensor, step: int = 3) -> torch.Tensor:
    """Every ``step``-th element of each axis of a larger buffer, whose others would be wrong."""
    dim = tuple(step * extent for extent in value.shape)
    view = torch.zeros(dim, dtype=value.dtype)[tuple(slice(1, None, step) for _ in dim)]
    return view.copy_(value)


def doubled(value: torch.Tensor) -> torch.Tensor:
    """Every second one."""
    return stepped(value, 2)


def transposed(value: torch.Tensor) -> torch.Tensor:
    """The last axes in memory come first."""
    return value.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


INT32, INT64 = torch.int32, torch.int64
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VARIANTS = [
    pytest.param(stepped, INT32, BF16, marks=pytest.mark.L0, id="stepped, int32, bfloat16"),
    pytest.param(transposed, INT64, FP16, marks=pytest.mark.L1, id="transposed, int64, float16"),
    pytest.param(stepped, INT64, FP32, marks=pytest.mark.L1, id="stepped, int64, float32"),
    pytest.param(transposed, INT32, FP32, marks=pytest.mark.L1, id="transposed, int32, float32"),
]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
        assert torch.isfinite(got).any() and not torch.all(got == 7.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("spread", "index", "sink"), VARIANTS)
def test_any_step_and_type(kind: Any, spread: Spread, index: Any, sink: Any) -> None:
    assert_same(kind(Call(spread, index, sink)), kind(Call(compact, index, sink)))


@pytest.mark.L0
def test_one_length_for_all_sequences() -> None:
    # A step of 0, as expand gives.
    found = []
    one = torch.full((1, 1, 1, 1), 11, dtype=torch.int32)
    for lengths in (one.repeat(BATCH, 1, 1, 1), one.expand(BATCH, 1, 1, 1)):
        call = Call(compact, torch.int32, torch.float32)
        q = call.plain(draw(BATCH, HEADS, ROWS, WIDTH, seed=1))
        k, v = (call.plain(draw(BATCH, HEADS_KV, ROWS, WIDTH, seed=seed)) for seed in (2, 3))
        options = {f"seq_len_{side}": call.plain(lengths) for side in ("q", "kv")}
        options |= {"use_padding_mask": True, "is_inference": True, "attn_scale": 0.3}
        o, _ = call.graph.sdpa(q, k, v, **options)
        call.output(o)
        found += call.run()
    assert torch.equal(*found)


@pytest.mark.L1
@pytest.mark.parametrize("kind", SCORED)
@pytest.mark.parametrize("spread", [stepped, transposed])
def test_any_step_of_what_changes_scores(kind: Any, spread: Spread) -> None:
    # That elements follow one another is part of a kernel: it may add in another order.
    found, wanted, beside = (kind(Call(each, INT32, FP32)) for each in (spread, doubled, compact))
    assert_same(found, wanted)
    torch.testing.assert_close(found, beside)


@pytest.mark.L0
@pytest.mark.parametrize("kind", [*KINDS, *SCORED])
@pytest.mark.skipif(HAS_GPU, reason="a GPU has no sparse files")
def test_steps_beyond_32_bits(kind: Any, tmp_path: Path) -> None:
    # B1: truncated to 32 bits each element's address is the first one's, a valid decoy.
    made = [0]

    def wide(value: torch.Tensor) -> torch.Tensor:
        axis = next((a for a, extent in enumerate(value.shape) if extent > 1), 0)
        stride = list(torch.empty(value.shape).stride())
        stride[axis] = 2**32
        made[0] += 1
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, stride, strict=True))
        path = str(tmp_path / str(made[0]))
        storage = torch.UntypedStorage.from_file(path, True, span * value.element_size())
        flat = torch.empty(0, dtype=value.dtype).set_(storage)  # type: ignore[call-overload]
        return flat.as_strided(value.shape, stride).copy_(value)

    wanted = kind(Call(compact, torch.int32, torch.float32))
    for got, want in zip(kind(Call(wide, torch.int32, torch.float32)), wanted, strict=True):
        assert torch.equal(got, want)
