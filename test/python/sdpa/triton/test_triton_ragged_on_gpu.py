"""Packed sequences on a GPU, in Triton's kernels and Hopper's: they start beyond 32 bits, and their
grid waits for no length.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

HEADS, HEADS_KV, ROWS, WIDTH = 4, 2, 150, 64
LENGTHS = (150, 0, 70)
SCALE = WIDTH**-0.5
NAMES = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV, "o": HEADS, "dO": HEADS}
GRADIENTS = {"dQ": "q", "dK": "k", "dV": "v"}


class Packed:
    """A graph over packed operands; sequence b of one starts at row ``starts[name][b]``."""

    def __init__(
        self, starts: dict[str, list[int]], *, is_backward: bool, engine: str = "triton"
    ) -> None:
        self.graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        self.offsets: dict[str, torch.Tensor] = {}
        self.starts = starts
        lengths = torch.tensor(LENGTHS, device="cuda").int().view(-1, 1, 1, 1)
        length = self.graph.tensor(lengths.shape, data_type="int32", name="lengths")
        self.pack = {"lengths": lengths}
        options = {"use_padding_mask": True, "seq_len_q": length, "seq_len_kv": length}
        options |= {"use_causal_mask": True, "attn_scale": SCALE}
        options["max_total_seq_len_q"] = sum(LENGTHS)
        given = NAMES if is_backward else {name: NAMES[name] for name in "qkv"}
        declared = {name: self._declare(name, heads, WIDTH) for name, heads in given.items()}
        if is_backward:
            stats = self._declare("stats", HEADS, 1, "float32")
            made = self.graph.sdpa_backward(*declared.values(), stats, **options)
            results = dict(zip(GRADIENTS, made, strict=True))
        else:
            o, stats = self.graph.sdpa(*declared.values(), generate_stats=True, **options)
            results = {"o": o, "stats": stats}
        for name, tensor in results.items():
            self._output(name, tensor)
        self.graph.create_execution_plans()
        self.graph.deselect_engines({"hopper", "triton", "aten"} - {engine})
        self.graph.build()
        size = max(self.graph.get_workspace_size(), 1)
        self.workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")

    def _layout(self, name: str, heads: int, width: int) -> tuple[Any, Any, Any, int]:
        unit = heads * width
        starts = torch.tensor(self.starts[name], device="cuda").view(-1, 1, 1, 1)
        offsets = self.graph.tensor(starts.shape, data_type="int64", name=f"{name} starts")
        self.pack[f"{name} starts"] = starts
        dim, stride = (len(LENGTHS), heads, ROWS, width), (ROWS * unit, width, unit, 1)
        return dim, stride, offsets, unit

    def _declare(self, name: str, heads: int, width: int, kind: Any = None) -> Any:
        dim, stride, offsets, unit = self._layout(name, heads, width)
        layout = {"ragged_offset": offsets, "ragged_offset_multiplier": unit}
        return self.graph.tensor(dim, stride, kind, name=name, **layout)

    def _output(self, name: str, tensor: Any) -> None:
        heads = heads_of(name)
        width, kind = (1, "float32") if name == "stats" else (WIDTH, "bfloat16")
        dim, stride, offsets, unit = self._layout(name, heads, width)
        tensor.set_output(True).set_name(name).set_dim(dim).set_stride(stride)
        tensor.set_data_type(kind).set_ragged_offset(offsets)
        tensor.set_ragged_offset_multiplier(unit)


def rows_of(buffer: torch.Tensor, starts: list[int], heads: int, width: int) -> list[torch.Tensor]:
    """(length, heads, width) of each sequence, views."""
    flat, unit = buffer.view(-1), heads * width
    return [
        flat[start * unit : (start + length) * unit].view(length, heads, width)
        for start, length in zip(starts, LENGTHS, strict=False)
    ]


def draw(seed: int) -> dict[str, list[torch.Tensor]]:
    """Sequences in bfloat16, what the forward leaves of them, and float64 gradients."""
    generator = torch.Generator("cuda").manual_seed(seed)
    made: dict[str, list[torch.Tensor]] = {name: [] for name in (*NAMES, "stats", *GRADIENTS)}
    for length in LENGTHS:
        leaves = {}
        for name in ("q", "k", "v", "dO"):
            dim = (length, NAMES[name], WIDTH)
            made[name].append(torch.randn(dim, generator=generator, device="cuda").bfloat16())
            leaves[name] = made[name][-1].double().transpose(0, 1).requires_grad_()
        k, v = (leaves[name].repeat_interleave(HEADS // HEADS_KV, 0) for name in "kv")
        scores = leaves["q"] @ k.transpose(1, 2) * SCALE
        hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        o = scores.softmax(-1) @ v
        o.backward(leaves["dO"].detach())
        made["o"].append(o.detach().transpose(0, 1))
        made["stats"].append(scores.logsumexp(-1).detach().transpose(0, 1)[..., None])
        for gradient, name in GRADIENTS.items():
            grad = leaves[name].grad
            assert grad is not None
            made[gradient].append(grad.transpose(0, 1))
    return made


def heads_of(name: str) -> int:
    return NAMES.get(GRADIENTS.get(name, name), HEADS)


def starts_of(name: str, wide: str) -> list[int]:
    """Rows where sequences start, and the end; of ``wide`` the last is 2^32 elements away."""
    last = 2**32 // (heads_of(name) * WIDTH) if name == wide else LENGTHS[0]
    return [0, LENGTHS[0], last, last + LENGTHS[2]]


CASES = [
    *(("triton", False, wide) for wide in ("q", "k", "v", "o")),
    *(("triton", True, wide) for wide in (*NAMES, *GRADIENTS)),
    *(("hopper", False, wide) for wide in ("q", "k", "v", "o")),
]


@pytest.mark.parametrize(("engine", "is_backward", "wide"), CASES)
def test_sequences_that_start_beyond_32_bits(
    engine: str, is_backward: bool, wide: str, large_storage: Callable[..., torch.Tensor]
) -> None:
    # B1: the start truncated to 32 bits is that of the first sequence, which is a valid decoy.
    if engine == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    results = ("dQ", "dK", "dV") if is_backward else ("o", "stats")
    used = (*NAMES, "stats", *GRADIENTS) if is_backward else ("q", "k", "v", "o", "stats")
    starts = {name: starts_of(name, wide) for name in used}
    call, values = Packed(starts, is_backward=is_backward, engine=engine), draw(1)
    for name in used:
        heads = heads_of(name)
        width, dtype = (1, torch.float32) if name == "stats" else (WIDTH, torch.bfloat16)
        count = starts[name][3] * heads * width
        if name == wide:
            buffer = large_storage(2 * count).view(dtype)[:count]
            buffer[: ROWS * heads * width].fill_(3.0)
        else:
            buffer = torch.zeros(count, dtype=dtype, device="cuda")
        for rows, value in zip(
            rows_of(buffer, starts[name], heads, width), values[name], strict=True
        ):
            if name in results:
                rows.fill_(torch.nan)
            else:
                rows.copy_(value)
        call.pack[name] = buffer
    call.graph.execute(call.pack, call.workspace)
    torch.cuda.synchronize()
    for name in results:
        width = 1 if name == "stats" else WIDTH
        found = rows_of(call.pack[name], starts[name], heads_of(name), width)
        for rows, value in zip(found, values[name], strict=True):
            if rows.numel():
                error = (rows.double() - value).abs().max().item()
                assert error <= 2**-6 * max(1.0, value.abs().max().item()), name


@pytest.mark.parametrize("token_major", [False, True])
def test_holes_of_the_capacity_are_zero_and_nothing_waits(token_major: bool) -> None:
    # B19, B22: rows of no sequence are 0 and -inf, in gradients too; no length is read.
    generator = torch.Generator("cuda").manual_seed(4)
    tokens, used = 260, 220
    q, k, v, d_o = (
        torch.randn(tokens, heads, WIDTH, generator=generator, device="cuda").bfloat16()
        for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    prefix = torch.tensor([0, 150, 150, used], device="cuda").int()
    options: dict[str, Any] = {"causal": True, "return_stats": True, "engine": "triton"}
    options["stats_layout"] = "token_major" if token_major else "head_major"

    def call() -> tuple[torch.Tensor, ...]:
        o, stats = ops.sdpa_varlen(*leaves, prefix, prefix, ROWS, ROWS, **options)
        return (o, stats, *torch.autograd.grad(o, leaves, d_o))

    call()
    torch.cuda.synchronize()
    # Whatever is allocated next holds NaN.
    poison = [torch.full((1 << 18,), torch.nan, device="cuda") for _ in range(40)]
    del poison
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, stats, *gradients = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not token_major:
        stats = stats.t()
    assert stats.shape == (tokens, HEADS)
    assert not o[used:].any() and torch.all(stats[used:] == -torch.inf)
    assert torch.isfinite(o).all() and torch.isfinite(stats[:used]).all()
    for gradient in gradients:
        assert not gradient[used:].any() and torch.isfinite(gradient).all()
    values = draw_of(q, k, v)
    assert (o[:used].double() - values).abs().max() <= 2**-6 * values.abs().max()


def draw_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """O of the sequences in float64, one after another."""
    made, start = [], 0
    for length in LENGTHS:
        part = slice(start, start + length)
        keys, values = (
            x[part].double().transpose(0, 1).repeat_interleave(HEADS // HEADS_KV, 0) for x in (k, v)
        )
        scores = q[part].double().transpose(0, 1) @ keys.transpose(1, 2) * SCALE
        hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        made.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
        start += length
    return torch.cat(made).detach()
