"""FP8 attention on an H100 or H200: the launch contract, scales, and what hidden keys hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_cases import (
    CAUSAL,
    EACH_SIZE,
    FP8,
    NAN,
    NO_BAND,
    SCALES,
    STEPS,
    TILES,
    Tensors,
    check,
    declare,
    draw,
    expected,
    force,
)
from needing_hopper import NEEDS_HOPPER

import tilewright as tw

pytestmark = NEEDS_HOPPER


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
