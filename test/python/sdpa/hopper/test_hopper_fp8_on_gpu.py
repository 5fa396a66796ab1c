"""FP8 attention on an H100 or H200: values against float64, and the launch contract.

The kernel rounds probabilities at another scale than the operation's formula does (it does not know
a row's sum yet), so two references bound it. Against exact attention, an element is off by at most
half a step of E4M3 in every probability; on average it is as far off as the formula itself. Where
rounding is exact, so is the result.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.cli.checking import OK, check_outputs
from tilewright.engines.hopper import attention_fp8

HAS_GPU = os.path.exists("/dev/nvidiactl")
pytestmark = [
    pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU of compute capability 9.0"),
]

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
# E4M3's code of it.
NAN = 0x7F
NO_BAND = (None, None, "top_left")
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


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


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
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(head_count: int, length: int, width: int) -> torch.Tensor:
        dim = (batch, head_count, length, width)
        if is_token_major:
            dim = (batch, length, head_count, width)
        made = torch.randn(dim, generator=generator, device="cuda").to(FP8)
        return made.transpose(1, 2) if is_token_major else made

    rows, keys = extents
    tensors = {
        "q": make(heads[0], rows, sizes[0]),
        "k": make(heads[1], keys, sizes[0]),
        "v": make(heads[1], keys, sizes[1]),
    }
    for name, value in {**SCALES, **scales}.items():
        tensors[name] = torch.full((1, 1, 1, 1), value, device="cuda")
    like = make(heads[0], rows, sizes[1]).to(out)
    tensors["o"] = torch.full_like(like.float(), torch.nan).to(out)
    tensors["stats"] = torch.full((batch, heads[0], rows, 1), torch.nan, device="cuda")
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
        wanted = want["stats"] / torch.log(torch.tensor(2.0)).item() if log2 else want["stats"]
        got = tensors["stats"].double()
        assert torch.equal(got == -torch.inf, wanted == -torch.inf)
        difference = torch.where(got == wanted, 0.0, got - wanted).abs().max()
        # The tensor cores' sums keep 13 bits of the largest score.
        largest = wanted[wanted.isfinite()].abs().max() if wanted.isfinite().any() else 0.0
        assert difference <= 1e-3 * max(float(largest), 1.0), f"Stats off by {difference:.3g}"
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


@pytest.fixture(params=[0, 2, 3], ids=["chosen", "long", "three"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as the lengths choose them, and those of long ones, by two consumers and by three."""
    if request.param:
        force(monkeypatch, request.param, True)


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


@EACH_SIZE
@pytest.mark.parametrize("band", [NO_BAND, CAUSAL], ids=str)
@pytest.mark.usefixtures("tile")
def test_every_extent(size: int, band: Any) -> None:
    # Tails of both sides, rows that see nothing, grouped heads, both layouts.
    for number, extents in enumerate(EXTENTS):
        heads = (4, 4 >> number % 3)
        tensors = draw(number, heads, extents, (size, size), is_token_major=number % 2 == 1)
        declare(tensors, band).execute(tensors)
        check(tensors, band)


@pytest.mark.L1
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.usefixtures("tile")
def test_every_band_at_every_extent(band: Any, out: torch.dtype) -> None:
    for number, extents in enumerate(EXTENTS):
        tensors = draw(number, (4, 4 >> number % 3), extents, out=out)
        declare(tensors, band, log2=True).execute(tensors)
        check(tensors, band, log2=True)


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(FP8, marks=pytest.mark.L0),
        pytest.param(torch.bfloat16, marks=pytest.mark.L0),
        pytest.param(torch.float16, marks=pytest.mark.L1),
    ],
    ids=str,
)
@pytest.mark.usefixtures("tile")
def test_equal_scores_average_the_values_and_lone_ones_pick_them(
    out: torch.dtype,
) -> None:
    # Rounding is exact here: every probability is that of the row's maximum, or 0.
    tensors = draw(1, (2, 2), (256, 256), out=out, scale_o=1.0, descale_v=1.0)
    tensors["q"].copy_(torch.zeros_like(tensors["q"].float()).to(FP8))
    declare(tensors, CAUSAL).execute(tensors)
    count = torch.arange(1, 257, device="cuda").double()[:, None]
    want = tensors["v"].double().cumsum(2) / count
    relative, least = STEPS[out]
    error = (tensors["o"].double() - want).abs()
    assert (error <= 1.01 * relative * want.abs() + 1e-3 * want.abs().max() + least).all()
    assert tensors["amax_s"].item() == 1.0
    # Row i has one key that counts, number 37 i mod 128 of the first 128.
    tensors = draw(2, (2, 2), (128, 128), out=out, scale_o=1.0, descale_v=1.0)
    number = torch.arange(128, device="cuda")
    keys = torch.eye(128, device="cuda") * 32.0
    tensors["k"].copy_(keys.expand(2, 2, -1, -1).to(FP8))
    tensors["q"].copy_(keys[(37 * number) % 128].expand(2, 2, -1, -1).to(FP8))
    declare(tensors).execute(tensors)
    picked = tensors["v"].double()[:, :, (37 * number) % 128]
    assert torch.equal(tensors["o"].double(), picked)


@pytest.mark.L0
@pytest.mark.usefixtures("tile")
def test_a_lone_key_is_picked_from_any_block() -> None:
    # Of 1024 keys those numbered 9 i mod 1024 have one number each, and row i's has that one.
    tensors = draw(2, (2, 2), (128, 1024), out=torch.bfloat16, scale_o=1.0, descale_v=1.0)
    number = torch.arange(128, device="cuda")
    lone = 9 * number % 1024
    rows = torch.eye(128, device="cuda") * 32.0
    keys = torch.zeros(1024, 128, device="cuda")
    keys[lone] = rows
    tensors["k"].copy_(keys.expand(2, 2, -1, -1).to(FP8))
    tensors["q"].copy_(rows.expand(2, 2, -1, -1).to(FP8))
    declare(tensors).execute(tensors)
    # What a row saw before its key has a weight of 2^-98.
    assert (tensors["o"].double() - tensors["v"].double()[:, :, lone]).abs().max() < 1e-20
    assert tensors["amax_s"].item() == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    "band",
    [
        pytest.param(CAUSAL, marks=pytest.mark.L0),
        pytest.param(NO_BAND, marks=pytest.mark.L1),
    ],
    ids=str,
)
@pytest.mark.parametrize(("warpgroups", "is_long"), TILES)
def test_every_tile(
    warpgroups: int, is_long: bool, band: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lengths choose among tiles; each is right for all.
    force(monkeypatch, warpgroups, is_long)
    for number, extents in enumerate([*EXTENTS, (2048, 2048)]):
        tensors = draw(number, (4, 4 >> number % 3), extents)
        graph = declare(tensors, band)
        graph.execute(tensors)
        check(tensors, band)
        first = tensors["o"].view(torch.uint8).clone()
        for _ in range(5):
            graph.execute(tensors)
            assert torch.equal(tensors["o"].view(torch.uint8), first)


@pytest.mark.L1
@pytest.mark.parametrize("sizes", [(16, 16), (80, 80), (128, 64), (64, 112)], ids=str)
def test_head_sizes_between_the_kernels(sizes: tuple[int, int]) -> None:
    for band in (NO_BAND, CAUSAL):
        tensors = draw(3, (4, 2), (260, 300), sizes)
        declare(tensors, band).execute(tensors)
        check(tensors, band)


@pytest.mark.L1
@pytest.mark.usefixtures("tile")
def test_sinks_join_the_denominator() -> None:
    for band in (NO_BAND, (None, 10, "bottom_right")):
        tensors = draw(4, (4, 2), (400, 200))
        tensors["sink"] = torch.tensor([-3.0, 0.0, 2.0, 30.0], device="cuda").view(1, 4, 1, 1)
        declare(tensors, band).execute(tensors)
        check(tensors, band)


@pytest.mark.parametrize(
    "band",
    [
        pytest.param(NO_BAND, marks=pytest.mark.L0),
        pytest.param(CAUSAL, marks=pytest.mark.L1),
        pytest.param(BOTTOM, marks=pytest.mark.L1),
    ],
    ids=str,
)
@pytest.mark.usefixtures("tile")
def test_lengths_hide_what_lies_behind_them(band: Any) -> None:
    # NaN behind a length reaches nothing, and the maxima are of what rows see.
    tensors = draw(5, (4, 2), (300, 400), batch=3)
    lengths = {"seq_len_q": (300, 129, 0), "seq_len_kv": (400, 1, 250)}
    for name, values in lengths.items():
        given = torch.tensor(values, dtype=torch.int32, device="cuda").view(3, 1, 1, 1)
        tensors[name] = given
    for b in range(3):
        for name, side in (
            ("q", "seq_len_q"),
            ("k", "seq_len_kv"),
            ("v", "seq_len_kv"),
        ):
            tensors[name].view(torch.uint8)[b, :, lengths[side][b] :] = NAN
    declare(tensors, band).execute(tensors)
    clean = {**tensors}
    for name in "qkv":
        clean[name] = tensors[name].float().nan_to_num(0.0).to(FP8)
    check(clean, band)
    o = tensors["o"].float()
    assert torch.all(o[1, :, 129:] == 0) and torch.all(o[2] == 0)


@pytest.mark.L0
@pytest.mark.usefixtures("tile")
def test_many_tiles_a_program_and_growing_maxima() -> None:
    # More tiles than programs, more blocks than stages, and keys that grow.
    for factor in (1.0, 8.0):
        for band in (NO_BAND, CAUSAL):
            tensors = draw(6, (16, 4), (2048, 2048))
            ramp = torch.linspace(1.0, factor, 2048, device="cuda")[None, None, :, None]
            tensors["k"] = (tensors["k"].float() * ramp.flip(2)).to(FP8)
            declare(tensors, band).execute(tensors)
            check(tensors, band)


@pytest.mark.L0
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("warpgroups", [2, 3])
def test_maxima_that_grow_by_little_and_by_much(
    warpgroups: int, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(monkeypatch, warpgroups, True)
    # Where a score is 2^2.8 above the maximum of before, probabilities are made anew.
    tensors = draw(11, (4, 2), (192, 512))
    level = torch.arange(512, device="cuda") // 64
    level = level if turned else 7 - level
    for name, values in (("q", torch.ones_like(level[:192])), ("k", level)):
        made = torch.zeros(tensors[name].shape, device="cuda")
        made[..., 0] = values
        tensors[name].copy_(made.to(FP8))
    graph = declare(tensors)
    for step in (0.4, 1.4, 2.7, 2.9, 6.0, 40.0, 200.0):
        # In powers of two, from one level to the next.
        scale = SCALES["descale_q"] * 128**-0.5 / math.log(2.0)
        tensors["descale_k"].fill_(step / scale)
        graph.execute(tensors)
        check(tensors)


@pytest.mark.parametrize(
    "band",
    [
        pytest.param(CAUSAL, marks=pytest.mark.L0),
        pytest.param((None, 60, "top_left"), marks=pytest.mark.L1),
        pytest.param((None, 10, "bottom_right"), marks=pytest.mark.L1),
    ],
    ids=str,
)
@pytest.mark.usefixtures("tile")
def test_every_run_gives_the_same_bits(band: Any) -> None:
    # Nothing here is summed in an order of chance, so a difference is a race.
    for extents in ((300, 333), (400, 200), (1024, 1024)):
        tensors = draw(16, (16, 8), extents)
        graph = declare(tensors, band)
        graph.execute(tensors)
        check(tensors, band)
        names = ("o", "stats", "amax_s", "amax_o")
        first = {name: tensors[name].view(torch.uint8).clone() for name in names}
        for _ in range(20):
            graph.execute(tensors)
            for name in names:
                assert torch.equal(tensors[name].view(torch.uint8), first[name]), name


@pytest.mark.L0
def test_verification_against_the_oracle_passes() -> None:
    # As `tilewright verify` does it, which lets 8-bit roundings fall either way. Stats are held to
    # float32 there, which the scores of the tensor cores are not: `check` has their bound.
    tensors = draw(7, (4, 2), (200, 300), descale_q=1.0, descale_k=1.0)
    del tensors["stats"]
    graph = declare(tensors)
    graph.execute(tensors)
    inputs = {t.uid: tensors[t.name].cpu() for t in graph.inputs()}
    outputs = {t.uid: tensors[t.name].cpu() for t in graph.outputs()}
    checks = check_outputs(graph, inputs, outputs)
    assert len(checks) == 3
    for tensor in graph.outputs():
        assert checks[tensor.uid].verdict == OK, (tensor.name, checks[tensor.uid])


@pytest.fixture
def call() -> tuple[Any, Tensors]:
    """A built causal graph and its operands by name."""
    tensors = draw(8, (8, 2), (512, 512))
    return declare(tensors, CAUSAL), tensors


@pytest.mark.L0
def test_replay_reads_buffers_and_scales_as_they_are(call: Any, captured: Any) -> None:
    # L3, L9, B16: values and scales changed in place after capture, and smaller maxima.
    graph, tensors = call
    frame = graph.bind(tensors)
    frame.launch()
    check(tensors, CAUSAL)
    with captured(frame.launch) as recorded:
        generator = torch.Generator("cuda").manual_seed(17)
        for number in range(3):
            for name in "qkv":
                fresh = torch.randn(tensors[name].shape, generator=generator, device="cuda") * 0.5
                tensors[name].copy_(fresh.to(FP8))
            for name in ("descale_q", "descale_k", "descale_v", "scale_o"):
                tensors[name].fill_(SCALES[name] * (0.5, 1.7, 0.1)[number])
            tensors["scale_s"].fill_(2.0 ** (8 - number))
            tensors["o"].copy_(torch.full_like(tensors["o"].float(), torch.nan))
            recorded.replay()
            torch.cuda.synchronize()
            check(tensors, CAUSAL)
    other = draw(9, (8, 2), (512, 512))
    graph.execute(other)
    check(other, CAUSAL)


@pytest.mark.L0
def test_no_probability_saturates_or_vanishes_for_an_extreme_scale(call: Any) -> None:
    # P is rounded at a scale of the kernel's own, whatever scale_s is; both stay factors of O.
    graph, tensors = call
    graph.execute(tensors)
    first = tensors["o"].clone()
    for scale in (2.0**-3, 2.0**14):
        tensors["scale_s"].fill_(scale)
        tensors["descale_s"].fill_(1.0 / scale)
        graph.execute(tensors)
        assert torch.equal(tensors["o"].float(), first.float())


@pytest.mark.L0
def test_a_scale_that_is_negative_shows_and_one_of_zero_is_uniform(call: Any) -> None:
    graph, tensors = call
    tensors["descale_q"].fill_(-1.0)
    graph.execute(tensors)
    assert torch.isnan(tensors["o"].float()).all()
    tensors["descale_q"].fill_(0.0)
    graph.execute(tensors)
    check(tensors, CAUSAL)


@pytest.mark.L0
def test_neither_bind_nor_launch_waits_or_allocates(call: Any) -> None:
    # L2, L3, B22.
    graph, tensors = call
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        graph.bind(tensors).launch()
        graph.execute(tensors)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(tensors, CAUSAL)


@pytest.mark.L0
def test_only_declared_elements_are_written() -> None:
    # L11: margins, gaps between rows and between heads keep their bytes; so do the maxima's
    # neighbours, and outputs that nobody asked for do not exist.
    for extents in ((70, 70), (128, 130)):
        tensors = draw(12, (3, 3), extents)
        rows = extents[0]
        room = torch.full((2, 3, rows + 9, 160), 7.0, device="cuda").to(FP8)
        notes = torch.full((2, 3, rows + 9, 4), 7.0, device="cuda")
        maxima = torch.full((2, 3), 7.0, device="cuda")
        tensors["o"] = room[:, :, 3 : 3 + rows, 16:144]
        tensors["stats"] = notes[:, :, 2 : 2 + rows, 1:2]
        tensors["amax_s"] = maxima[0, 1].view(1, 1, 1, 1)
        tensors["amax_o"] = maxima[1, 1].view(1, 1, 1, 1)
        declare(tensors, CAUSAL).execute(tensors)
        check(tensors, CAUSAL)
        for name in ("o", "stats", "amax_s", "amax_o"):
            tensors[name].copy_(torch.full_like(tensors[name].float(), 7.0))
        assert (
            torch.all(room.float() == 7.0) and torch.all(notes == 7.0) and torch.all(maxima == 7.0)
        )
    bare = draw(12, (3, 3), (128, 130))
    del bare["stats"], bare["amax_s"], bare["amax_o"]
    declare(bare, CAUSAL).execute(bare)
    check(bare, CAUSAL)


@pytest.mark.L0
def test_a_tail_reads_no_other_head_and_counts_in_no_maximum() -> None:
    # What lies behind a head, another's rows or foreign bytes, never reaches it, as NaN either.
    tensors = draw(13, (2, 2), (100, 100))
    for name in "qkv":
        given = tensors[name]
        room = torch.full((2, 2, 128, 128), torch.nan, device="cuda").to(FP8)
        room[:, :, :100] = given
        tensors[name] = room[:, :, :100]
    for band in (NO_BAND, CAUSAL):
        declare(tensors, band).execute(tensors)
        check(tensors, band)


@EACH_SIZE
@pytest.mark.parametrize(("warpgroups", "is_long"), TILES)
def test_what_a_hidden_key_or_value_holds_reaches_no_row(
    size: int, warpgroups: int, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A probability of 0 times NaN is NaN: such tiles are computed again.
    force(monkeypatch, warpgroups, is_long)
    tensors = draw(14, (2, 2), (600, 600), (size, size), batch=1)
    clean = {name: tensor.clone() for name, tensor in tensors.items()}
    at = 300
    tensors["v"].view(torch.uint8)[0, 0, at, 3] = NAN
    tensors["k"].view(torch.uint8)[0, 1, at] = NAN
    declare(tensors, CAUSAL).execute(tensors)
    want = expected(clean, CAUSAL)
    exact = want["exact"] * SCALES["scale_o"]
    relative, least = STEPS[FP8]
    bound = want["weight"] * SCALES["scale_o"] + 1.01 * relative * exact.abs() + least
    got = tensors["o"].double()
    sees = torch.zeros(600, dtype=torch.bool, device="cuda")
    sees[at:] = True
    assert ((got - exact).abs() <= bound)[0, :, ~sees].all()
    others = [column for column in range(size) if column != 3]
    assert ((got - exact).abs() <= bound)[0, 0][:, others].all()
    assert torch.isnan(got[0, 0, sees, 3]).all() and torch.isnan(got[0, 1, sees]).all()
    assert torch.isnan(tensors["amax_o"]).item() and torch.isnan(tensors["amax_s"]).item()


@pytest.mark.L0
def test_hidden_values_that_are_not_finite_leave_the_maxima() -> None:
    # Key 599 is seen by the last row alone, and that one is not there.
    tensors = draw(15, (2, 2), (599, 600), batch=1)
    clean = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in "kv":
        tensors[name].view(torch.uint8)[0, :, 599] = NAN
    declare(tensors, CAUSAL).execute(tensors)
    check({**clean, **{n: tensors[n] for n in ("o", "stats", "amax_s", "amax_o")}}, CAUSAL)


@pytest.mark.L0
def test_a_refused_call_launches_nothing(call: Any) -> None:
    # L1: an address that no tensor map takes, a wrong type, a short buffer.
    graph, tensors = call
    tensors["o"].copy_(torch.full_like(tensors["o"].float(), 7.0))
    odd = torch.zeros(tensors["q"].numel() + 1, device="cuda").to(FP8)[1:]
    for name, wrong in (
        ("q", odd.view(tensors["q"].shape)),
        ("k", tensors["k"].float()),
        ("v", tensors["v"][:, :, :100]),
    ):
        with pytest.raises(tw.BindingError):
            graph.execute({**tensors, name: wrong})
    torch.cuda.synchronize()
    assert torch.all(tensors["o"].float() == 7.0) and tensors["amax_o"].item() == 777.0
