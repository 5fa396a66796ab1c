"""How Hopper's attention backward shares its work out: plain arithmetic, and what it computes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from needing_hopper import needs_hopper

import tilewright as tw
from tilewright.engines.hopper import attention_backward
from tilewright.engines.hopper.attention_backward_balance import divide, heads_together
from tilewright.engines.hopper.attention_backward_workspace import lay_out

MULTIPROCESSORS = 132


def declare(
    heads: tuple[int, int], rows: int, keys: int, depth: int, device: str | None, **options: Any
) -> Any:
    """A graph of one backward of two batch entries."""
    handle = None if device is None else tw.create_handle(device)
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32", handle=handle)
    q, k = (2, heads[0], rows, depth), (2, heads[1], keys, depth)
    dims = {"q": q, "k": k, "v": k, "o": q, "dO": q}
    tensors = [graph.tensor(dim, name=name) for name, dim in dims.items()]
    tensors.append(graph.tensor((*q[:3], 1), data_type="float32", name="stats"))
    made = graph.sdpa_backward(*tensors, attn_scale=depth**-0.5, **options)
    for tensor, name in zip(made, ("dQ", "dK", "dV"), strict=True):
        tensor.set_output(True).set_name(name)
    return graph


@pytest.mark.L0
@pytest.mark.parametrize("blocks", [1, 16, 40, 131, 132, 133, 200, 2048, 4096])
@pytest.mark.parametrize("tiles", [1, 4, 7, 32, 129])
@pytest.mark.parametrize("group", [1, 3])
def test_a_last_round_is_shared_if_it_ends_earlier(blocks: int, tiles: int, group: int) -> None:
    found = divide(blocks, tiles, group, MULTIPROCESSORS)
    left = blocks - found.whole
    assert found.programs == found.whole + left * found.shares
    assert found.sharing == (0 if found.shares == 1 else left * found.shares)
    if found.shares > 1:
        assert left == blocks % MULTIPROCESSORS
        assert tiles // found.shares >= 4, "no share is empty, nor nearly so"
        rounds = -(-found.sharing // MULTIPROCESSORS)
        assert rounds * -(-tiles // found.shares) < tiles
    else:
        assert found.whole == blocks


@pytest.mark.L0
def test_what_is_shared_at_a_length_of_8192() -> None:
    assert divide(2048, 128, 1, MULTIPROCESSORS).shares > 1
    assert divide(2048 + 64, 128, 1, MULTIPROCESSORS).shares == 1, "16 whole rounds"


def idle_share(width: int, heads: int, lengths: Sequence[int]) -> float:
    """The part of the time for which multiprocessors wait for the last one."""
    ends = [0.0] * MULTIPROCESSORS
    for first in range(0, heads, width):
        for length in lengths:
            for _ in range(min(width, heads - first)):
                heapq.heapreplace(ends, ends[0] + length)
    return 1 - sum(ends) / MULTIPROCESSORS / max(ends)


@pytest.mark.L0
@pytest.mark.parametrize(
    ("most", "heads", "keys", "rows"),
    [(5, 32, 8192, 64), (11, 64, 8192, 128), (23, 128, 2048, 64), (2, 16, 16384, 64)],
)
def test_groups_of_heads_end_together(most: int, heads: int, keys: int, rows: int) -> None:
    lengths = [(keys - first) // rows for first in range(0, keys, 128)]
    width = heads_together(most, heads, lengths, MULTIPROCESSORS)
    assert 1 <= width <= most
    assert idle_share(width, heads, lengths) < 0.025
    assert idle_share(width, heads, lengths) <= idle_share(most, heads, lengths) + 0.002


@pytest.mark.L0
def test_five_heads_of_thirty_two_leave_a_group_of_two() -> None:
    lengths = [(8192 - first) // 64 for first in range(0, 8192, 128)]
    assert idle_share(5, 32, lengths) > 0.04
    assert heads_together(5, 32, lengths, MULTIPROCESSORS) == 4


@pytest.mark.L0
def test_the_workspace_has_what_a_pass_needs() -> None:
    found = lay_out(256, 64, 128, has_sums=True, sharing=3, keys=128)
    assert list(found.sizes) == [
        "lse",
        "delta",
        "sums",
        "lse_parts",
        "delta_parts",
        "shares",
        "arrivals",
    ]
    assert found.sizes["sums"] == 4 * 256 * 64
    assert found.sizes["shares"] == 4 * 3 * 128 * (64 + 128)
    assert found.sizes["arrivals"] == 4 * 2 * 3, "one a consumer"
    assert found.at("arrivals") >= found.at("shares") + found.sizes["shares"]
    alone = lay_out(256, 64, 128, has_sums=False, sharing=0, keys=128)
    assert list(alone.sizes) == ["lse", "delta"]
    assert alone.at("sums") == 0, "nobody looks there"


@pytest.mark.L0
@pytest.mark.parametrize(
    ("options", "is_shared"),
    [
        ({}, True),
        ({"use_causal_mask": True}, False),
        ({"sliding_window_length": 200}, False),
        ({"use_deterministic_algorithm": True, "sliding_window_length": 200}, False),
    ],
)
def test_only_keys_that_all_rows_see_are_shared(options: Any, is_shared: bool) -> None:
    graph = declare((4, 2), 1024, 1024, 128, None, **options)
    graph.validate()
    kernels = attention_backward.plan(graph, (), MULTIPROCESSORS).kernels
    assert (kernels[1].grid[0] > 4 * 8) == is_shared
    constants = dict(kernels[1].spec.constants)
    assert constants["SHARES"] == is_shared


def operands(heads: tuple[int, int], rows: int, keys: int, depth: int) -> dict[str, torch.Tensor]:
    """Operands of an open attention and, as float64 under "want ...", its gradients."""
    generator = torch.Generator("cuda").manual_seed(rows)
    dims = {"q": (heads[0], rows), "k": (heads[1], keys), "v": (heads[1], keys)}
    dims["dO"] = dims["q"]
    pack = {
        name: torch.randn((2, *dim, depth), generator=generator, device="cuda").bfloat16()
        for name, dim in dims.items()
    }
    leaves = [pack[name].double().requires_grad_() for name in ("q", "k", "v")]
    group = heads[0] // heads[1]
    q, k, v = leaves[0], *(leaf.repeat_interleave(group, 1) for leaf in leaves[1:])
    scores = q @ k.transpose(2, 3) * depth**-0.5
    stats = scores.logsumexp(-1, keepdim=True)
    o = (scores - stats).exp() @ v
    o.backward(pack["dO"].double())
    pack |= {"o": o.detach().bfloat16(), "stats": stats.detach().float()}
    wanted = zip(("dQ", "dK", "dV"), leaves, strict=True)
    return pack | {f"want {name}": leaf.grad for name, leaf in wanted if leaf.grad is not None}


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize(
    ("heads", "rows", "keys", "depth"),
    [
        ((4, 2), 1100, 1000, 128),
        ((2, 2), 2050, 700, 64),
        ((3, 1), 600, 300, 96),
        # Whole rounds, and shares behind them.
        ((34, 34), 1024, 512, 128),
    ],
    ids=str,
)
def test_shared_keys(
    heads: tuple[int, int], rows: int, keys: int, depth: int, captured: Any
) -> None:
    pack = operands(heads, rows, keys, depth)
    graph = declare(heads, rows, keys, depth, "cuda")
    graph.build()
    assert graph.selected_engine == "hopper"
    count = torch.cuda.get_device_properties(0).multi_processor_count
    kernels = attention_backward.plan(graph, (), count).kernels
    assert dict(kernels[1].spec.constants)["SHARES"], "the test is of keys that are shared"
    wanted = {name: pack.pop(f"want {name}") for name in ("dQ", "dK", "dV")}
    pack |= {name: torch.full_like(pack["q" if name == "dQ" else "k"], 7.0) for name in wanted}
    size = graph.get_workspace_size()
    workspace = torch.full((size + 64,), 0xAB, dtype=torch.uint8, device="cuda")
    frame = graph.bind(pack, workspace)
    frame.launch()
    for name, value in wanted.items():
        error = (pack[name].double() - value).abs().max().item()
        bound = 2 * torch.finfo(torch.bfloat16).eps * max(1.0, value.abs().max().item())
        assert error <= bound, name
    assert (workspace[size:] == 0xAB).all()
    # Whoever comes last adds up in the same order; replayed, too.
    first = {name: pack[name].clone() for name in ("dK", "dV")}
    with captured(frame.launch) as recorded:
        for _ in range(20):
            for name in first:
                pack[name].fill_(torch.nan)
            recorded.replay()
            assert all(torch.equal(pack[name], value) for name, value in first.items())


@pytest.mark.L0
@needs_hopper
def test_launches_that_follow_one_another_at_once_do_not_mix() -> None:
    # The workspace is the same for all: what a launch leaves there must not matter to the next.
    heads, rows, keys, depth = (4, 4), 640, 640, 128
    packs = [operands(heads, rows + 64 * i, keys, depth) for i in range(2)]
    frames, made = [], []
    for i, pack in enumerate(packs):
        graph = declare(heads, rows + 64 * i, keys, depth, "cuda")
        graph.build()
        outputs = {n: torch.empty_like(pack["q" if n == "dQ" else "k"]) for n in ("dQ", "dK", "dV")}
        inputs = {name: value for name, value in pack.items() if not name.startswith("want")}
        if i == 0:
            size = 2 * graph.get_workspace_size()
            workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        frames.append(graph.bind(inputs | outputs, workspace))
        made.append(outputs)
    for _ in range(20):
        for frame in frames:
            frame.launch()
    for pack, outputs in zip(packs, made, strict=True):
        for name, value in outputs.items():
            want = pack[f"want {name}"]
            bound = 2 * torch.finfo(torch.bfloat16).eps * max(1.0, want.abs().max().item())
            assert (value.double() - want).abs().max().item() <= bound, name
