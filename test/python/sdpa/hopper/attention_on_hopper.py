"""Attention on Hopper: drawn operands, a graph, and attention in float64 to hold it to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewright as tw

Tensors = dict[str, torch.Tensor]
# P is rounded to the input type, O once more: a few units in the last place of the largest.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NO_BAND = (None, None, "top_left")


def draw(
    seed: int,
    heads: tuple[int, int],
    extents: tuple[int, int],
    sizes: tuple[int, int] = (64, 64),
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.dtype | None = None,
    is_token_major: bool = False,
) -> Tensors:
    """q, k, v, and outputs full of NaN; ``out`` is the type of O, by default that of q."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(head_count: int, length: int, width: int) -> torch.Tensor:
        dim = (batch, head_count, length, width)
        if is_token_major:
            dim = (batch, length, head_count, width)
        made = torch.randn(dim, generator=generator, device="cuda").to(dtype)
        return made.transpose(1, 2) if is_token_major else made

    rows, keys = extents
    tensors = {
        "q": make(heads[0], rows, sizes[0]),
        "k": make(heads[1], keys, sizes[0]),
        "v": make(heads[1], keys, sizes[1]),
    }
    # By float32, as 8-bit numbers cannot be filled.
    like = make(heads[0], rows, sizes[1]).float()
    tensors["o"] = torch.full_like(like, torch.nan).to(out or dtype)
    tensors["stats"] = torch.full((batch, heads[0], rows, 1), torch.nan, device="cuda")
    return tensors


def declare(tensors: Tensors, band: Any = NO_BAND, *, log2: bool = False) -> Any:
    """A built graph over the tensors as they lie; ``band`` is (left, right, alignment)."""
    graph = tw.Graph(io_data_type=tensors["q"].dtype, intermediate_data_type="float32")
    declared = {
        name: graph.tensor(tensor.shape, tensor.stride(), tensor.dtype, name=name)
        for name, tensor in tensors.items()
        if name not in ("o", "stats")
    }
    left, right, alignment = band
    options: dict[str, Any] = {"stats_use_log2": log2}
    options["diagonal_alignment"] = getattr(tw.diagonal_alignment, alignment.upper())
    if left is not None:
        options["diagonal_band_left_bound"] = left
    if right is not None:
        options["diagonal_band_right_bound"] = right
    if "sink" in declared:
        options["sink_token"] = declared["sink"]
    o, stats = graph.sdpa(
        declared["q"],
        declared["k"],
        declared["v"],
        generate_stats="stats" in tensors,
        attn_scale=tensors["q"].shape[-1] ** -0.5,
        **options,
    )
    outputs = {"o": o} | ({} if stats is None else {"stats": stats})
    for name, tensor in outputs.items():
        given = tensors[name]
        tensor.set_output(True).set_name(name).set_data_type(given.dtype)
        tensor.set_dim(tuple(given.shape)).set_stride(given.stride())
    graph.build()
    assert graph.selected_engine == "hopper", str(graph.explain())
    return graph


def expected(tensors: Tensors, band: Any = NO_BAND) -> tuple[torch.Tensor, torch.Tensor]:
    """O and Stats in float64, head by head."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    left, right, alignment = band
    rows, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    row = torch.arange(rows, device="cuda")[:, None]
    if alignment == "bottom_right":
        row = row + keys - rows
    column = torch.arange(keys, device="cuda")[None, :]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device="cuda")
    if left is not None:
        hidden |= column <= row - left
    if right is not None:
        hidden |= column > row + right
    outs, statistics = [], []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[b, h].double() @ k[b, h // group].double().T * q.shape[-1] ** -0.5
            scores = scores.masked_fill(hidden, -torch.inf)
            if "sink" in tensors:
                sink = tensors["sink"][0, h].double().expand(rows, 1)
                scores = torch.cat((scores, sink), 1)
            total = torch.logsumexp(scores, 1, keepdim=True)
            p = torch.where(total == -torch.inf, 0.0, (scores - total).exp()).nan_to_num(0.0)
            outs.append(p[:, :keys] @ v[b, h // group].double())
            statistics.append(total)
    shape = q.shape[:3]
    return torch.stack(outs).view(*shape, -1), torch.stack(statistics).view(*shape, 1)


def check(tensors: Tensors, band: Any = NO_BAND, *, log2: bool = False) -> None:
    """O within rounding, in the largest and on average; Stats in float32."""
    o, stats = expected(tensors, band)
    error = tensors["o"].double() - o
    bound = TOLERANCE[tensors["o"].dtype]
    assert error.abs().max() <= bound * max(o.abs().max().item(), 1.0)
    assert error.norm() <= 0.5 * bound * o.norm()
    if "stats" in tensors:
        check_stats(tensors["stats"], stats, log2=log2)


def check_stats(stats: torch.Tensor, wanted: torch.Tensor, *, log2: bool = False) -> None:
    """Within 1e-3; from a thousand on, relative to themselves."""
    wanted = in_reach(wanted, log2=log2)
    got = stats.double()
    assert torch.equal(got == -torch.inf, wanted == -torch.inf)
    difference = torch.where(got == wanted, 0.0, got - wanted).abs()
    allowed = 1e-3 * (wanted.abs() / 1e3).clamp(min=1.0)
    # Written so that NaN fails.
    assert ((difference <= allowed) | (got == wanted)).all(), difference.max()


def in_reach(stats: torch.Tensor, *, log2: bool) -> torch.Tensor:
    """Natural Stats in the asked base: numbers no farther from 0 than float32's in base 2 are."""
    farthest = torch.finfo(torch.float32).max * math.log(2.0)
    bounded = torch.where(stats == -torch.inf, stats, stats.clamp(-farthest, farthest))
    return bounded / math.log(2.0) if log2 else bounded


# Of four heads: as scores are; as hidden ones are, and so far from 0 that in base 2 they are no
# number, or that a score is less than what rounding takes from them.
SINKS = [
    (-3.0, 0.0, 2.0, 30.0),
    (-torch.inf, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, 1e12),
    (3e38, -1e12, 2.0**33 + 1024, -3e38),
]


# Each size is kernels of its own, which take seconds to compile: the smoke run has one.
EACH_SIZE = pytest.mark.parametrize(
    "size",
    [
        pytest.param(128, marks=pytest.mark.L0),
        pytest.param(64, marks=pytest.mark.L1),
        pytest.param(256, marks=pytest.mark.L1),
    ],
)
CAUSAL, BOTTOM = (None, 0, "top_left"), (None, 0, "bottom_right")
