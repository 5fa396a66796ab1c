"""FP8 attention on Hopper: drawn operands, a graph, and two references that bound it.

The kernel rounds probabilities at another scale than the operation's formula does (it does not know
a row's sum yet), so two references bound it. Against exact attention, an element is off by at most
half a step of E4M3 in every probability; on average it is as far off as the formula itself. Where
rounding is exact, so is the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attention_on_hopper
import pytest
import torch
from attention_on_hopper import NO_BAND, Tensors

import tilewright as tw
from tilewright.engines.hopper import attention_fp8

FP8 = torch.float8_e4m3fn
# E4M3's code of it.
NAN = 0x7F
CAUSAL, BOTTOM = (None, 0, "top_left"), (None, 0, "bottom_right")
SCALES = {
    "descale_q": 0.5,
    "descale_k": 1.5,
    "descale_v": 0.75,
    "descale_s": 2.0**-8,
    "scale_s": 2.0**8,
    "scale_o": 1.25,
}
# Half a step of E4M3, relative to a probability, and what the tensor cores' sums add.
ROUNDING, SUMS = 2.0**-4, 2.0**-6
# Of the type of O: half a step, relative, and the least step's half.
STEPS = {
    FP8: (2.0**-4, 2.0**-10),
    torch.bfloat16: (2.0**-8, 0.0),
    torch.float16: (2.0**-11, 0.0),
}


def draw(
    seed: int,
    heads: tuple[int, int],
    extents: tuple[int, int],
    sizes: tuple[int, int] = (128, 128),
    *,
    batch: int = 2,
    out: torch.dtype = FP8,
    is_token_major: bool = False,
    **scales: float,
) -> Tensors:
    """q, k, v, scalars, and outputs full of NaN."""
    tensors = attention_on_hopper.draw(
        seed, heads, extents, sizes, batch=batch, dtype=FP8, out=out, is_token_major=is_token_major
    )
    for name, value in {**SCALES, **scales}.items():
        tensors[name] = torch.full((1, 1, 1, 1), value, device="cuda")
    for name in ("amax_s", "amax_o"):
        tensors[name] = torch.full((1, 1, 1, 1), 777.0, device="cuda")
    return tensors


def declare(tensors: Tensors, band: Any = NO_BAND, *, log2: bool = False) -> Any:
    """A built graph over the tensors as they lie; ``band`` is (left, right, alignment)."""
    graph = tw.Graph(io_data_type=FP8, intermediate_data_type="float32")
    outputs = ("o", "stats", "amax_s", "amax_o")
    declared = {
        name: graph.tensor(tensor.shape, tensor.stride(), tensor.dtype, name=name)
        for name, tensor in tensors.items()
        if name not in outputs
    }
    left, right, alignment = band
    options: dict[str, Any] = {"stats_use_log2": log2}
    options["diagonal_alignment"] = getattr(tw.diagonal_alignment, alignment.upper())
    if left is not None:
        options["left_bound"] = left
    if right is not None:
        options["right_bound"] = right
    if "sink" in declared:
        options["sink_token"] = declared["sink"]
    if "seq_len_q" in declared:
        options |= {"use_padding_mask": True}
        options |= {name: declared[name] for name in ("seq_len_q", "seq_len_kv")}
    made = graph.sdpa_fp8(
        *(declared[name] for name in ("q", "k", "v", *SCALES)),
        generate_stats="stats" in tensors,
        attn_scale=tensors["q"].shape[-1] ** -0.5,
        **options,
    )
    for name, tensor in zip(outputs, made, strict=True):
        if tensor is not None and name in tensors:
            given = tensors[name]
            tensor.set_output(True).set_name(name).set_data_type(given.dtype)
            tensor.set_dim(tuple(given.shape)).set_stride(given.stride())
    graph.build()
    assert graph.selected_engine == "hopper", str(graph.explain())
    return graph


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To E4M3, to nearest even, saturating; in float64."""
    return values.float().clamp(-448.0, 448.0).to(FP8).double()


def expected(tensors: Tensors, band: Any = NO_BAND) -> dict[str, torch.Tensor]:
    """In float64, head by head: O without and with rounded probabilities, what bounds their
    difference, Stats and the largest probability."""
    q, k, v = tensors["q"], tensors["k"], tensors["v"]
    scale = {name: tensors[name].double().item() for name in SCALES}
    factor = q.shape[-1] ** -0.5 * scale["descale_q"] * scale["descale_k"]
    product = scale["descale_s"] * scale["descale_v"] * scale["scale_s"]
    rows, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    left, right, alignment = band
    found: dict[str, list[torch.Tensor]] = {
        name: [] for name in ("exact", "formula", "weight", "stats", "peak")
    }
    for b in range(q.shape[0]):
        length_q = int(tensors["seq_len_q"][b]) if "seq_len_q" in tensors else rows
        length_kv = int(tensors["seq_len_kv"][b]) if "seq_len_kv" in tensors else keys
        row = torch.arange(rows, device="cuda")[:, None]
        column = torch.arange(keys, device="cuda")[None, :]
        shifted = row + (length_kv - length_q if alignment == "bottom_right" else 0)
        hidden = (row >= length_q) | (column >= length_kv)
        if left is not None:
            hidden = hidden | (column <= shifted - left)
        if right is not None:
            hidden = hidden | (column > shifted + right)
        for h in range(q.shape[1]):
            scores = q[b, h].double() @ k[b, h // group].double().T * factor
            scores = scores.masked_fill(hidden, -torch.inf)
            if "sink" in tensors:
                sink = tensors["sink"][0, h].double().expand(rows, 1)
                scores = torch.cat((scores, sink), 1)
            total = torch.logsumexp(scores, 1, keepdim=True)
            p = torch.where(total == -torch.inf, 0.0, (scores - total).exp()).nan_to_num(0.0)
            p, values = p[:, :keys], v[b, h // group].double().nan_to_num(0.0)
            peak = p.amax(1, keepdim=True)
            formula = rounded(p * scale["scale_s"]) / scale["scale_s"]
            # Probabilities below the least number that E4M3 holds fully lose a fixed amount.
            lost = 2.0**-18 * peak * values.abs().sum(0)
            found["exact"].append(p @ values * product)
            found["formula"].append(formula @ values * product)
            found["weight"].append(((ROUNDING + SUMS) * (p @ values.abs()) + lost) * product)
            found["stats"].append(torch.where(row >= length_q, -torch.inf, total))
            found["peak"].append(peak)
    shape = q.shape[:3]
    return {name: torch.stack(parts).view(*shape, -1) for name, parts in found.items()}


def check(tensors: Tensors, band: Any = NO_BAND, *, log2: bool = False) -> dict[str, float]:
    """Everything that a call made; gives how far off it was."""
    want = expected(tensors, band)
    scale_o = tensors["scale_o"].double().item()
    o = tensors["o"].double()
    exact, formula = want["exact"] * scale_o, want["formula"] * scale_o
    relative, least = STEPS[tensors["o"].dtype]
    rounding = relative * exact.abs() + least
    assert torch.isfinite(o).all()
    error = (o - exact).abs()
    excess = error - want["weight"] * scale_o - (1 + 2 * ROUNDING) * rounding
    assert excess.max() <= 0, f"beyond the bound by {excess.max():.3g}"
    own = (o - exact).norm()
    plain = (formula - exact).norm()
    allowed = 1.25 * plain + rounding.norm() + 1e-6 * exact.norm()
    assert own <= allowed, (
        f"off by {own:.4g}, the formula by {plain:.4g}, O's type {rounding.norm()}"
    )
    if "stats" in tensors:
        wanted = attention_on_hopper.in_reach(want["stats"], log2=log2)
        got = tensors["stats"].double()
        assert torch.equal(got == -torch.inf, wanted == -torch.inf)
        difference = torch.where(got == wanted, 0.0, got - wanted).abs().amax((0, 2, 3))
        # The tensor cores' sums keep 13 bits of a head's largest score.
        largest = torch.where(wanted == -torch.inf, 0.0, wanted).abs().amax((0, 2, 3))
        allowed = 1e-3 * largest.clamp(min=1.0)
        assert (difference <= allowed).all(), f"Stats off by {difference}, at most {allowed}"
    if "amax_s" in tensors:
        peak = want["peak"].max().item()
        assert tensors["amax_s"].item() == pytest.approx(peak, rel=2e-3)
    if "amax_o" in tensors:
        # The largest of what was stored, before O's type rounded it.
        stored = tensors["amax_o"].item() * scale_o
        largest = o.abs().max().item()
        assert stored == pytest.approx(largest, rel=relative * 1.01, abs=least * 1.01)
    return {
        "own": float(own / exact.norm()),
        "plain": float(plain / exact.norm()),
        "bound": float((error / (want["weight"] * scale_o + rounding)).nan_to_num(0.0).max()),
    }


# Consumers, and whether they are made for many blocks.
TILES = [(2, False), (2, True), (3, False), (3, True)]


def force(monkeypatch: pytest.MonkeyPatch, warpgroups: int, is_long: bool) -> None:
    """Have every plan use such consumers, whatever the lengths."""
    choose = attention_fp8.choose_config
    monkeypatch.setattr(
        attention_fp8,
        "choose_config",
        lambda spec: replace(choose(spec), warpgroups=warpgroups, is_long=is_long),
    )


# Sizes, bands and types of O are kernels of their own, which take seconds to compile: the smoke run
# has few.
EACH_SIZE = pytest.mark.parametrize(
    "size",
    [pytest.param(128, marks=pytest.mark.L0), pytest.param(64, marks=pytest.mark.L1)],
)
BANDS = [NO_BAND, CAUSAL, BOTTOM, (None, 60, "top_left"), (None, 100, "bottom_right")]
EXTENTS = [
    (17, 1),
    (64, 64),
    (128, 128),
    (192, 384),
    (300, 333),
    (333, 100),
    (513, 1024),
]
