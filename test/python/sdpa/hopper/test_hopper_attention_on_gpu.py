"""Hopper attention on an H100 or H200: values against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_on_hopper import (
    BOTTOM,
    CAUSAL,
    EACH_SIZE,
    NO_BAND,
    SINKS,
    check,
    declare,
    draw,
)
from needing_hopper import NEEDS_HOPPER

from tilewright.oracle import evaluate
from tilewright.testing import assert_close

pytestmark = NEEDS_HOPPER

BANDS = [
    NO_BAND,
    CAUSAL,
    BOTTOM,
    (130, 0, "top_left"),
    (77, 60, "top_left"),
    (50, None, "bottom_right"),
    (None, 100, "bottom_right"),
    (1, 0, "top_left"),
]
EXTENTS = [
    *((17, 1), (64, 64), (128, 128), (192, 384), (300, 333), (333, 100), (513, 1024)),
    (1000, 777),
]


@EACH_SIZE
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_every_band_at_every_extent(size: int, extents: tuple[int, int]) -> None:
    # Tails of both sides, rows that see nothing, grouped heads, both layouts.
    for number, band in enumerate(BANDS):
        tensors = draw(
            number,
            (4, 4 >> number % 3),
            extents,
            (size, size),
            dtype=(torch.bfloat16, torch.float16)[number % 2],
            is_token_major=number % 4 >= 2,
        )
        graph = declare(tensors, band, log2=number % 2 == 1)
        graph.execute(tensors)
        check(tensors, band, log2=number % 2 == 1)


@pytest.mark.L1
@pytest.mark.parametrize(
    "sizes", [(8, 8), (80, 80), (96, 96), (160, 160), (192, 128), (200, 72)], ids=str
)
def test_head_sizes_between_the_kernels(sizes: tuple[int, int]) -> None:
    for extents in ((260, 300), (800, 810)):
        for band in (NO_BAND, CAUSAL):
            tensors = draw(3, (4, 2), extents, sizes)
            declare(tensors, band).execute(tensors)
            check(tensors, band)


@EACH_SIZE
def test_sinks_join_the_denominator(size: int) -> None:
    for band in (NO_BAND, (40, 0, "top_left"), (20, 10, "bottom_right")):
        for sinks in SINKS:
            # Under the last band some rows see nothing.
            tensors = draw(4, (4, 2), (400, 200), (size, size))
            tensors["sink"] = torch.tensor(sinks, device="cuda").view(1, 4, 1, 1)
            declare(tensors, band).execute(tensors)
            check(tensors, band)


@EACH_SIZE
def test_many_tiles_a_program_and_growing_maxima(size: int) -> None:
    # More tiles than programs, more blocks than stages, and keys that grow: every block raises
    # the maximum, by less and by more than what is let go without rescaling.
    for factor in (1.0, 8.0):
        for band in (NO_BAND, CAUSAL):
            tensors = draw(6, (16, 4), (2048, 2048), (size, size))
            ramp = torch.linspace(1.0, factor, 2048, device="cuda")[None, None, :, None]
            tensors["k"] = (tensors["k"] * ramp.flip(2)).to(torch.bfloat16)
            declare(tensors, band).execute(tensors)
            check(tensors, band)


@EACH_SIZE
@pytest.mark.parametrize("scores", ["leaping", "low"])
def test_scores_far_from_those_that_a_row_sees_first(size: int, scores: str) -> None:
    # A block's exponentials start from the maximum before it: scores that leap by more than an
    # exponential can hold, and rows that see nothing at first, and then scores far below 0.
    at = torch.arange(1033, device="cuda")[None, None, :, None]
    for number, band in enumerate(BANDS[:4]):
        tensors = draw(
            number,
            (4, 4 >> number % 3),
            (1000, 1033),
            (size, size),
            dtype=(torch.bfloat16, torch.float16)[number % 2],
            is_token_major=number % 4 >= 2,
        )
        if scores == "leaping":
            tensors["k"].mul_(torch.where((at < 850) & (at % 50 == 7), 60.0, 1.0))
        else:
            tensors["q"].abs_().add_(0.5)
            tensors["k"].abs_().add_(0.5).mul_(-16.0)
        declare(tensors, band, log2=number % 2 == 1).execute(tensors)
        check(tensors, band, log2=number % 2 == 1)


@pytest.mark.parametrize(
    ("extents", "band"),
    [
        pytest.param((1140, 1173), NO_BAND, marks=pytest.mark.L0),
        pytest.param((1100, 1164), CAUSAL, marks=pytest.mark.L0),
        pytest.param((1140, 1152), NO_BAND, marks=pytest.mark.L1),
        pytest.param((300, 333), NO_BAND, marks=pytest.mark.L1),
        pytest.param((1024, 1024), CAUSAL, marks=pytest.mark.L1),
        pytest.param((1200, 900), CAUSAL, marks=pytest.mark.L1),
        pytest.param((900, 1200), BOTTOM, marks=pytest.mark.L1),
        pytest.param((6150, 6400), BOTTOM, marks=pytest.mark.L1),
    ],
    ids=str,
)
def test_late_maxima_at_heads_of_64(extents: tuple[int, int], band: Any) -> None:
    # Tiles of two groups and blocks of 128 keys; of three and of 64 without a band, where rows fill
    # such tiles.
    at = torch.arange(extents[1], device="cuda")[None, None, :, None]
    for scores in ("plain", "leaping", "low"):
        for dtype in (torch.bfloat16, torch.float16):
            tensors = draw(10, (4, 2), extents, dtype=dtype, is_token_major=dtype == torch.float16)
            if scores == "leaping":
                tensors["k"].mul_(torch.where((at < 850) & (at % 50 == 7), 60.0, 1.0))
            elif scores == "low":
                tensors["q"].abs_().add_(0.5)
                tensors["k"].abs_().add_(0.5).mul_(-16.0)
            declare(tensors, band).execute(tensors)
            check(tensors, band)


@pytest.mark.L0
def test_the_oracle_agrees() -> None:
    tensors = draw(7, (4, 2), (100, 200), (64, 64))
    graph = declare(tensors, BOTTOM)
    graph.execute(tensors)
    inputs = {t.uid: tensors[t.name].cpu() for t in graph.inputs()}
    reference = evaluate(graph, inputs)
    for tensor in graph.outputs():
        tol = 1e-3 if tensor.name == "stats" else 1.6e-2
        assert_close(tensors[tensor.name].cpu(), reference[tensor.uid], tol=tol)
