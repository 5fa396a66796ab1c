"""Hopper attention on an H100 or H200: values against float64, and the launch contract."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.oracle import evaluate
from tilewright.testing import assert_close

HAS_GPU = os.path.exists("/dev/nvidiactl")
pytestmark = [
    pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU of compute capability 9.0"),
]

Tensors = dict[str, torch.Tensor]
# P is rounded to the input type, O once more: a few units in the last place of the largest.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NO_BAND = (None, None, "top_left")


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def draw(
    seed: int,
    heads: tuple[int, int],
    extents: tuple[int, int],
    sizes: tuple[int, int] = (64, 64),
    *,
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    is_token_major: bool = False,
) -> Tensors:
    """q, k, v, and outputs full of NaN."""
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
    tensors["o"] = torch.full_like(make(heads[0], rows, sizes[1]), torch.nan)
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
        wanted = stats / torch.log(torch.tensor(2.0)).item() if log2 else stats
        got = tensors["stats"].double()
        assert torch.equal(got == -torch.inf, wanted == -torch.inf)
        difference = torch.where(got == wanted, 0.0, got - wanted).abs().max()
        assert difference <= 1e-3


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
        tensors = draw(4, (4, 2), (400, 200), (size, size))
        tensors["sink"] = torch.tensor([-3.0, 0.0, 2.0, 30.0], device="cuda").view(1, 4, 1, 1)
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


@pytest.fixture
def call() -> tuple[Any, Tensors]:
    """A built causal graph and its operands by name."""
    tensors = draw(8, (8, 2), (512, 512), (128, 128))
    return declare(tensors, CAUSAL), tensors


@pytest.fixture
def sync_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.L0
def test_neither_bind_nor_launch_waits_or_allocates(call: Any, sync_is_an_error: None) -> None:
    # L2, L3, B22.
    graph, tensors = call
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph.bind(tensors).launch()
    graph.execute(tensors)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.set_sync_debug_mode("default")
    check(tensors, CAUSAL)


@pytest.mark.L0
def test_replay_reads_buffers_as_they_are_and_rebinding_uses_others(
    call: Any, captured: Any
) -> None:
    # L9, B16: values changed in place after capture; then other buffers, whose maps are new.
    graph, tensors = call
    frame = graph.bind(tensors)
    frame.launch()
    with captured(frame.launch) as recorded:
        for _ in range(2):
            for name in "qkv":
                tensors[name].normal_()
            tensors["o"].fill_(torch.nan)
            recorded.replay()
            torch.cuda.synchronize()
            check(tensors, CAUSAL)
    other = draw(9, (8, 2), (512, 512), (128, 128))
    graph.execute(other)
    check(other, CAUSAL)
    tensors["o"].fill_(torch.nan)
    graph.execute(tensors)
    check(tensors, CAUSAL)


@pytest.mark.L0
def test_concurrent_frames_on_several_streams(call: Any) -> None:
    # L10, B15.
    graph, tensors = call
    graph.execute(tensors)
    packs = [draw(10 + i, (8, 2), (512, 512), (128, 128)) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in packs]
    torch.cuda.synchronize()
    frames = [graph.bind(pack) for pack in packs]
    for _ in range(5):
        for frame, stream in zip(frames, streams, strict=True):
            frame.launch(stream)
    torch.cuda.synchronize()
    for pack in packs:
        check(pack, CAUSAL)


@pytest.mark.L0
@pytest.mark.parametrize("way", ["execute", "bind"])
def test_a_threads_first_call_makes_its_tensor_maps(call: Any, way: str) -> None:
    # A thread that made no call of the CUDA runtime has no context, which the driver asks for.
    graph, tensors = call
    graph.execute(tensors)
    tensors["o"].fill_(torch.nan)
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    failures: list[Exception] = []

    def first() -> None:
        try:
            if way == "execute":
                graph.execute(other)
            else:
                graph.bind(other).launch()
        except tw.TilewrightError as error:
            failures.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert not failures, str(failures[0])
    torch.cuda.synchronize()
    check(other, CAUSAL)


@pytest.mark.L0
@pytest.mark.parametrize("port", ["q", "k", "v", "o", "stats"])
def test_strides_beyond_32_bits_are_addressed(port: str) -> None:
    # B1, L4: the address truncated to 32 bits holds a decoy inside the allocation.
    tensors = draw(11, (2, 2), (70, 70), (64, 64), batch=1)
    given = tensors[port]
    step = 2**32 + 64
    span = step + given[0, 0].numel()
    try:
        storage = torch.empty(span, dtype=given.dtype, device="cuda")
    except torch.OutOfMemoryError:
        pytest.skip("16 GiB of device memory are not free")
    storage[: 64 + given[0, 0].numel() + 64].fill_(777.0)
    wide = storage.as_strided(given.shape, (2 * step, step, given.stride(2), given.stride(3)))
    wide.copy_(given)
    tensors[port] = wide
    declare(tensors, CAUSAL).execute(tensors)
    check(tensors, CAUSAL)
    if port in ("o", "stats"):
        rest = storage[given[0, 0].numel() :][:64]
        assert torch.all(rest == 777.0), "nothing landed at the narrow address"


@pytest.mark.L0
def test_only_declared_elements_are_written() -> None:
    # L11: margins, gaps between rows and between heads keep their bytes.
    for extents in ((70, 70), (128, 130)):
        tensors = draw(12, (3, 3), extents, (64, 64))
        rows = extents[0]
        room = torch.full((2, 3, rows + 9, 96), 7.0, dtype=torch.bfloat16, device="cuda")
        notes = torch.full((2, 3, rows + 9, 4), 7.0, device="cuda")
        tensors["o"] = room[:, :, 3 : 3 + rows, 16:80]
        tensors["stats"] = notes[:, :, 2 : 2 + rows, 1:2]
        declare(tensors, CAUSAL).execute(tensors)
        check(tensors, CAUSAL)
        tensors["o"].fill_(7.0)
        tensors["stats"].fill_(7.0)
        assert torch.all(room == 7.0) and torch.all(notes == 7.0)


@pytest.mark.L0
def test_a_tail_reads_no_other_head() -> None:
    # What lies behind a head, another's rows or foreign bytes, never reaches it, as NaN either.
    tensors = draw(13, (2, 2), (100, 100), (64, 64))
    for name in "qkv":
        given = tensors[name]
        room = torch.full((2, 2, 128, 64), torch.nan, dtype=given.dtype, device="cuda")
        room[:, :, :100] = given
        tensors[name] = room[:, :, :100]
    for band in (NO_BAND, CAUSAL):
        declare(tensors, band).execute(tensors)
        check(tensors, band)


@EACH_SIZE
@pytest.mark.parametrize("left", [None, 130])
def test_what_a_hidden_key_or_value_holds_reaches_no_row(size: int, left: int | None) -> None:
    # A probability of 0 times NaN or infinity is NaN: such tiles are computed again.
    band = (left, 0, "top_left")
    tensors = draw(14, (2, 2), (600, 600), (size, size), batch=1)
    wanted, _ = expected(tensors, band)
    at, last = 300, 600 if left is None else 300 + 130
    tensors["v"][0, 0, at, 3] = torch.nan
    tensors["v"][0, 0, at, 5] = torch.inf
    tensors["k"][0, 1, at] = torch.nan
    declare(tensors, band).execute(tensors)
    got = tensors["o"].double()
    sees = torch.zeros(600, dtype=torch.bool, device="cuda")
    sees[at:last] = True
    bound = TOLERANCE[torch.bfloat16]
    assert (got - wanted)[0, :, ~sees].abs().max() <= bound
    others = [column for column in range(size) if column not in (3, 5)]
    assert (got - wanted)[0, 0][:, others].abs().max() <= bound
    assert torch.isnan(got[0, 0, sees, 3]).all() and torch.isinf(got[0, 0, sees, 5]).all()
    assert torch.isnan(got[0, 1, sees]).all()


@pytest.mark.L0
def test_a_refused_call_launches_nothing(call: Any) -> None:
    # L1: an address that no tensor map takes, a wrong type, a short buffer.
    graph, tensors = call
    tensors["o"].fill_(7.0)
    odd = torch.zeros(tensors["q"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    for name, wrong in (
        ("q", odd.view(tensors["q"].shape)),
        ("k", tensors["k"].float()),
        ("v", tensors["v"][:, :, :100]),
    ):
        with pytest.raises(tw.BindingError):
            graph.execute({**tensors, name: wrong})
    torch.cuda.synchronize()
    assert torch.all(tensors["o"] == 7.0)
