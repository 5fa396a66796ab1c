"""FP8 attention on an H100 or H200: values against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_on_hopper import SINKS
from fp8_cases import (
    BANDS,
    BOTTOM,
    CAUSAL,
    EACH_SIZE,
    EXTENTS,
    FP8,
    NAN,
    NO_BAND,
    SCALES,
    STEPS,
    TILES,
    check,
    declare,
    draw,
    force,
)
from needing_hopper import NEEDS_HOPPER

from tilewright.cli.checking import OK, check_outputs

pytestmark = NEEDS_HOPPER


@pytest.fixture(params=[0, 2, 3], ids=["chosen", "long", "three"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles as the lengths choose them, and those of long ones, by two consumers and by three."""
    if request.param:
        force(monkeypatch, request.param, True)


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
        for sinks in SINKS:
            # Under the last band some rows see nothing.
            tensors = draw(4, (4, 2), (400, 200))
            tensors["sink"] = torch.tensor(sinks, device="cuda").view(1, 4, 1, 1)
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
