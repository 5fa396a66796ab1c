"""What only a GPU shows of attention forward: no wait, replay, streams, wide strides, long rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases.running import select_split

import tilewright as tw
from tilewright import ops

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

GROUP = 4
PAGE = 16


def normal(*dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(dim))
    return torch.randn(dim, generator=generator, device="cuda").bfloat16()


def build(pack: dict[str, torch.Tensor], *, keys: int | None = None, **masks: Any) -> Any:
    """A built graph on operands as they lie: q, k, v, o, maybe lengths and page tables."""
    q = pack["q"]
    graph = tw.Graph(io_data_type=q.dtype, intermediate_data_type="float32")
    declared = {
        name: graph.tensor(tensor.shape, tensor.stride(), tensor.dtype, name=name)
        for name, tensor in pack.items()
        if name not in ("o", "stats")
    }
    if "len_kv" in pack:
        masks |= {"seq_len_q": declared["len_q"], "seq_len_kv": declared["len_kv"]}
        masks["use_padding_mask"] = True
    if "table" in pack:
        masks |= {f"paged_attention_{side}_table": declared["table"] for side in "kv"}
        masks["paged_attention_max_seq_len_kv"] = keys
    o, stats = graph.sdpa(
        *(declared[name] for name in "qkv"),
        attn_scale=q.shape[3] ** -0.5,
        generate_stats="stats" in pack,
        **masks,
    )
    o.set_output(True).set_name("o").set_dim(pack["o"].shape).set_stride(pack["o"].stride())
    if stats is not None:
        stats.set_output(True).set_name("stats")
    graph.deselect_engines(["hopper"])
    select_split(graph)
    graph.build()
    assert graph.selected_engine == "triton"
    return graph


def workspace_of(graph: Any) -> torch.Tensor:
    size = max(graph.get_workspace_size(), 1)
    return torch.full((size,), 0xAB, dtype=torch.uint8, device="cuda")


def expected(pack: dict[str, torch.Tensor], *, causal: bool = False) -> torch.Tensor:
    """Float64, a head at a time, with lengths and pages as ``pack`` holds them now."""
    q, k, v = (pack[name].double() for name in "qkv")
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64, device="cuda")
    for batch in range(q.shape[0]):
        if "table" in pack:
            pages = pack["table"][batch].reshape(-1).long()
            length = int(pack["len_kv"][batch])
            pages = pages[: -(-length // pack["k"].shape[2])]
            keys, values = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k, v))
        else:
            length = int(pack["len_kv"][batch]) if "len_kv" in pack else k.shape[2]
            keys, values = k[batch, :, :length], v[batch, :, :length]
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // keys.shape[0])
            scores = q[batch, head] @ keys[kv].T * q.shape[3] ** -0.5
            if causal:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            if length:
                out[batch, head] = scores.softmax(-1) @ values[kv]
    return out


def check(pack: dict[str, torch.Tensor], **masks: Any) -> None:
    reference = expected(pack, **masks)
    error = (pack["o"].double() - reference).abs().max().item()
    assert error <= 2**-7 * max(1.0, reference.abs().max().item())


def decode_pack(*, paged: bool, batch: int = 4, keys: int = 700) -> dict[str, torch.Tensor]:
    """One query a sequence, groups of four heads, uneven lengths, NaN beyond them."""
    entries = -(-keys // PAGE)
    pack = {"q": normal(batch, 8, 1, 64), "o": torch.full_like(normal(batch, 8, 1, 64), torch.nan)}
    lengths = [keys, 0, 13, keys // 2][:batch]
    pack["len_q"] = torch.ones(batch, 1, 1, 1, dtype=torch.int32, device="cuda")
    pack["len_kv"] = torch.tensor(lengths, dtype=torch.int32, device="cuda").view(-1, 1, 1, 1)
    if paged:
        count = batch * entries
        pack |= {name: normal(count + 1, 2, PAGE, 64, seed=ord(name)) for name in "kv"}
        order = torch.randperm(count, device="cuda").int().view(batch, 1, entries, 1)
        for number, length in enumerate(lengths):
            # Unused entries point at a page of NaN.
            order[number, 0, -(-length // PAGE) :] = count
            if length % PAGE:
                for name in "kv":
                    pack[name][order[number, 0, length // PAGE, 0], :, length % PAGE :] = torch.nan
        for name in "kv":
            pack[name][count] = torch.nan
        pack["table"] = order
        return pack
    for name in "kv":
        pack[name] = normal(batch, 2, keys, 64, seed=ord(name))
        for number, length in enumerate(lengths):
            pack[name][number, :, length:] = torch.nan
    return pack


def clean(pack: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.nan_to_num() if n in "kv" else t for n, t in pack.items()}


@pytest.mark.parametrize("paged", [False, True])
def test_nan_beyond_lengths_and_in_free_slots_stays_there(paged: bool) -> None:
    pack = decode_pack(paged=paged)
    graph = build(pack, keys=700)
    assert graph.get_workspace_size() > 0, "keys are split"
    graph.execute(pack, workspace_of(graph))
    assert torch.isfinite(pack["o"]).all() and not pack["o"][1].any()
    first = pack["o"].clone()
    graph.execute(clean(pack), workspace_of(graph))
    assert torch.equal(pack["o"], first)
    check(clean(pack))


@pytest.mark.parametrize("depth", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_long_rows(depth: int, causal: bool) -> None:
    width = 128 if depth == 192 else depth
    for rows, keys in ((1024, 1024), (1000, 1100), (130, 2049)):
        pack = {"q": normal(1, 4, rows, depth), "k": normal(1, 2, keys, depth, seed=1)}
        pack |= {"v": normal(1, 2, keys, width, seed=2)}
        pack |= {"o": torch.full((1, 4, rows, width), torch.nan, device="cuda").bfloat16()}
        pack["stats"] = torch.full((1, 4, rows, 1), torch.nan, device="cuda")
        graph = build(pack, use_causal_mask=causal)
        graph.execute(pack, workspace_of(graph))
        check(pack, causal=causal)
        assert torch.isfinite(pack["stats"]).all()


def packs() -> list[tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    square = {name: normal(2, 4, 300, 64, seed=ord(name)) for name in "qkv"}
    square["o"] = torch.full_like(square["q"], torch.nan)
    return [
        (square, {"use_causal_mask": True}),
        (decode_pack(paged=False), {}),
        (decode_pack(paged=True), {"keys": 700}),
    ]


@pytest.mark.parametrize("number", range(3), ids=["dense", "decode", "paged"])
def test_neither_bind_nor_launch_waits_or_allocates(number: int) -> None:
    # L2, L3, B22.
    pack, masks = packs()[number]
    graph = build(pack, **masks)
    workspace = workspace_of(graph)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.bind(pack, workspace).launch()
        graph.execute(pack, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    check(clean(pack), causal="use_causal_mask" in masks)


@pytest.mark.parametrize("paged", [False, True])
def test_replay_reads_lengths_and_tables_as_they_are(paged: bool, captured: Any) -> None:
    # L9, B5, B16.
    pack = clean(decode_pack(paged=paged))
    graph = build(pack, keys=700)
    frame = graph.bind(pack, workspace_of(graph))
    frame.launch()
    with captured(frame.launch) as recorded:
        for lengths in ([5, 699, 0, 64], [0, 0, 0, 0], [700, 700, 1, 2]):
            pack["len_kv"].copy_(torch.tensor(lengths).view(-1, 1, 1, 1))
            pack["q"].normal_()
            if paged:
                count = pack["table"].numel()
                order = torch.randperm(count, device="cuda").int()
                pack["table"].copy_(order.view_as(pack["table"]))
            pack["o"].fill_(torch.nan)
            recorded.replay()
            torch.cuda.synchronize()
            check(pack)


def test_concurrent_frames_on_several_streams() -> None:
    # L10, B15: distinct buffers and workspaces, poisoned outputs, after one serial warm-up.
    first = clean(decode_pack(paged=False))
    graph = build(first)
    graph.execute(first, workspace_of(graph))
    torch.cuda.synchronize()
    many = [
        {**first, "q": normal(4, 8, 1, 64, seed=n), "o": torch.full_like(first["o"], torch.nan)}
        for n in range(8)
    ]
    streams = [torch.cuda.Stream() for _ in many]
    frames = [graph.bind(each, workspace_of(graph)) for each in many]
    torch.cuda.synchronize()
    for _ in range(5):
        for frame, stream in zip(frames, streams, strict=True):
            frame.launch(stream)
    torch.cuda.synchronize()
    for each in many:
        check(each)


@pytest.mark.parametrize("recorded", [False, True])
def test_calls_in_a_row_share_a_workspace(recorded: bool) -> None:
    # The combination starts early: neither it nor the next call's first kernel may run ahead.
    first = clean(decode_pack(paged=False, keys=4000))
    graph = build(first)
    workspace = workspace_of(graph)
    many = [
        {**first, "q": normal(4, 8, 1, 64, seed=n), "o": torch.full_like(first["o"], torch.nan)}
        for n in range(6)
    ]
    frames = [graph.bind(each, workspace) for each in many]
    frames[0].launch()
    torch.cuda.synchronize()
    replay = torch.cuda.CUDAGraph()
    if recorded:
        with torch.cuda.graph(replay):
            for frame in frames:
                frame.launch()
    for _ in range(20):
        for each in many:
            each["o"].fill_(torch.nan)
        if recorded:
            replay.replay()
        else:
            for frame in frames:
                frame.launch()
        # In the same stream, with nothing between: what comes next sees whole results.
        copies = [each["o"].clone() for each in many]
    torch.cuda.synchronize()
    for each, copy in zip(many, copies, strict=True):
        check(each)
        assert torch.equal(copy, each["o"])


def test_strides_beyond_32_bits_are_addressed(large_storage: Callable[..., torch.Tensor]) -> None:
    # B1: the address truncated to 32 bits holds a decoy inside the allocation.
    step, width = 2**32 + 64, 64
    storage = large_storage(2 * (2 * step + width * 64)).view(torch.bfloat16)
    for axis in range(3):
        stride = [64 * width, 32 * width, width, 1]
        stride[axis] = step
        dim = [1, 1, 1, width]
        dim[axis] = 2
        dim[2] = max(dim[2], 2)
        if axis != 2:
            stride[2] = width
        pack = {name: normal(*dim, seed=ord(name)) for name in "qv"}
        pack["k"] = storage.as_strided(dim, stride)
        storage[: 128 * width].fill_(77.0)
        pack["k"].copy_(normal(*dim, seed=5))
        pack["o"] = torch.full_like(pack["q"], torch.nan)
        graph = build(pack)
        graph.execute(pack, workspace_of(graph))
        check(pack)


def test_a_page_far_away_is_found(large_storage: Callable[..., torch.Tensor]) -> None:
    # Page stride times page number passes 2**32 elements.
    pages, heads, width = 2**32 // (PAGE * 2 * 64) + 2, 2, 64
    container = large_storage(2 * pages * heads * PAGE * width).view(torch.bfloat16)
    container = container[: pages * heads * PAGE * width].view(pages, heads, PAGE, width)
    container[:4].fill_(77.0)
    far = [pages - 1, pages - 2]
    container[far] = normal(2, heads, PAGE, width)
    pack = {"q": normal(1, 4, 1, width), "k": container, "v": container}
    pack["table"] = torch.tensor(far, device="cuda").int().view(1, 1, 2, 1)
    pack["len_q"] = torch.ones(1, 1, 1, 1, dtype=torch.int32, device="cuda")
    pack["len_kv"] = torch.full((1, 1, 1, 1), 2 * PAGE, dtype=torch.int32, device="cuda")
    pack["o"] = torch.full_like(pack["q"], torch.nan)
    graph = build(pack, keys=2 * PAGE)
    graph.execute(pack, workspace_of(graph))
    near = {**pack, "k": container[far], "v": container[far]}
    near["table"] = torch.tensor([0, 1], device="cuda").int().view(1, 1, 2, 1)
    check(near)


@pytest.mark.parametrize("depth", [16, 24, 32, 64, 72, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_of_each_head_size(depth: int, causal: bool) -> None:
    # Keys and values come by tensor maps, whose swizzle is as wide as a row is.
    pack = {name: normal(2, 4, 384, depth, seed=ord(name)) for name in "qkv"}
    pack["o"] = torch.full_like(pack["q"], torch.nan)
    graph = build(pack, use_causal_mask=causal)
    graph.execute(pack, workspace_of(graph))
    q, k, v = (pack[name].double() for name in "qkv")
    scores = q @ k.transpose(2, 3) * depth**-0.5
    if causal:
        hidden = torch.ones(384, 384, dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    expected = scores.softmax(-1) @ v
    assert (pack["o"].double() - expected).abs().max() <= 2**-7 * expected.abs().max()


BANDS: dict[str, dict[str, Any]] = {
    "open": {},
    "causal": {"use_causal_mask": True},
    "bottom right": {"use_causal_mask_bottom_right": True},
    "window": {"use_causal_mask": True, "sliding_window_length": 200},
    "band": {"diagonal_band_left_bound": 100, "diagonal_band_right_bound": 70},
}


@pytest.mark.parametrize("depth", [64, 96, 128, 256])
@pytest.mark.parametrize("band", BANDS)
def test_plain_loops_by_head_size_and_band(depth: int, band: str) -> None:
    # Tiles that end beyond the operands, keys that are no multiple of a block, grouped heads, and
    # values that are hidden, NaN and seen by some rows; many times, as warps may race.
    rows, keys = 1088, 1057
    dims = {"q": (4, rows), "k": (2, keys), "v": (2, keys)}
    pack = {name: normal(2, *dim, depth, seed=ord(name)) for name, dim in dims.items()}
    if band != "open":
        pack["v"][:, :, 500] = torch.nan
        pack["v"][:, :, 700, 3] = torch.inf
    pack["o"] = torch.full_like(pack["q"], 7.0)
    pack["stats"] = torch.full((2, 4, rows, 1), 7.0, device="cuda")
    graph = build(pack, **BANDS[band])
    seen = seen_keys(rows, keys, band)
    q, k, v = pack["q"].double(), *(pack[x].double().repeat_interleave(2, 1) for x in "kv")
    scores = (q @ k.transpose(2, 3) * depth**-0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1).nan_to_num(0.0) @ v.nan_to_num(0.0, 0.0, 0.0)
    sees_other = (seen.double() @ (~v.isfinite()).double()) > 0
    first = None
    for _ in range(20):
        pack["o"].fill_(7.0)
        pack["stats"].fill_(7.0)
        graph.execute(pack, workspace_of(graph))
        made = pack["o"].double()
        assert not made[sees_other.expand_as(made)].isfinite().any()
        assert (made - expected)[~sees_other].abs().max() <= 2**-7 * expected.abs().max()
        some = seen.any(1)
        stats = scores.logsumexp(-1, keepdim=True)
        assert (pack["stats"] - stats)[:, :, some].abs().max() < 1e-4
        assert (pack["stats"][:, :, ~some] == -torch.inf).all() and (made[:, :, ~some] == 0).all()
        bits = pack["o"].view(torch.int16).clone()
        first = bits if first is None else first
        assert torch.equal(bits, first)


def seen_keys(rows: int, keys: int, band: str) -> torch.Tensor:
    """(rows, keys): what the masks of BANDS show."""
    row = torch.arange(rows, device="cuda")[:, None]
    col = torch.arange(keys, device="cuda")[None, :]
    row = row + (keys - rows if band == "bottom right" else 0)
    right, left = {"open": (None, None), "window": (0, 200), "band": (70, 100)}.get(band, (0, None))
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda")
    if right is not None:
        seen &= col <= row + right
    if left is not None:
        seen &= col > row - left
    return seen


@pytest.mark.parametrize("depth", [64, 128, 256])
def test_every_plan_computes_the_same_function(depth: int) -> None:
    pack = {name: normal(1, 2, 512, depth, seed=ord(name)) for name in "qkvo"}
    graph = build(pack, use_causal_mask=True)
    made = []
    for index in range(graph.get_execution_plan_count()):
        if graph.get_plan_name_at_index(index).startswith("triton"):
            pack["o"] = torch.full_like(pack["q"], torch.nan)
            size = graph.get_workspace_size_plan_at_index(index)
            workspace = torch.full((size + 1,), 0xAB, dtype=torch.uint8, device="cuda")
            graph.execute_plan_at_index(pack, workspace, index=index)
            made.append(pack["o"].float())
    assert len(made) > 1
    assert all((other - made[0]).abs().max() <= 2**-6 for other in made)


def test_engines_agree_on_stats() -> None:
    pack = {name: normal(2, 4, 200, 64, seed=ord(name)) for name in "qkv"}
    pack["o"] = torch.full_like(pack["q"], torch.nan)
    pack["stats"] = torch.full((2, 4, 200, 1), torch.nan, device="cuda")
    graph = build(pack, use_causal_mask=True)
    graph.execute(pack, workspace_of(graph))
    q, k = pack["q"].double(), pack["k"].double()
    hidden = torch.ones(200, 200, dtype=torch.bool, device="cuda").triu(1)
    scores = (q @ k.transpose(2, 3) / 8).masked_fill(hidden, -torch.inf)
    assert (pack["stats"].double() - scores.logsumexp(-1, keepdim=True)).abs().max() < 1e-4


def test_the_functions_take_this_engine() -> None:
    # Each function with the engine named, which raises if it declines, against ATen's result.
    q, k, v = (normal(2, heads, 40, 64, seed=heads) for heads in (8, 2, 2))
    packed = [x.transpose(1, 2).reshape(80, -1, 64) for x in (q, k, v)]
    prefix = torch.tensor([0, 17, 80], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([5, 40], device="cuda", dtype=torch.int32)
    pages = [x.view(2, 2, 5, 8, 64).permute(0, 2, 3, 1, 4).reshape(10, 8, 2, 64) for x in (k, v)]
    table = torch.arange(10, device="cuda", dtype=torch.int32).view(2, 5)
    calls: dict[str, Callable[[str], torch.Tensor]] = {
        "sdpa": lambda engine: ops.sdpa(q, k, v, causal=True, soft_cap=5.0, engine=engine),
        "varlen": lambda engine: ops.sdpa_varlen(
            *packed, prefix, prefix, 63, 63, causal=True, engine=engine
        ),
        "paged": lambda engine: ops.sdpa_paged(q, *pages, table, lengths, engine=engine),
        "decode": lambda engine: ops.sdpa_decode(q[:, :, :1], k, v, lengths, engine=engine),
    }
    for name, call in calls.items():
        made, expected = call("triton"), call("aten")
        assert (made - expected).abs().max() <= 2**-7 * expected.abs().max(), name
