"""Head sizes that are multiples of 8, both ways; every page size; interpreted without a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases.backward import DeclaredBackward, backward_case
from attention_cases.case import Case
from attention_cases.running import Declared, select_split

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
SIZES = range(8, 257, 8)
# Of every number of powers of two that a head is cut into, and what is between them.
FEW = (8, 40, 96, 160, 192, 248)


def levels(smoke: tuple[int, ...]) -> list[Any]:
    """All sizes; those of the smoke run are L0."""
    return [pytest.param(n, marks=pytest.mark.L0 if n in smoke else pytest.mark.L1) for n in SIZES]


def execute(graph: Any, pack: dict[Any, torch.Tensor]) -> None:
    graph.deselect_engines(["hopper"])
    select_split(graph)
    graph.build()
    assert graph.selected_engine == "triton", graph.explain()
    size = graph.get_workspace_size()
    workspace = torch.full((size + 64,), 0xAB, dtype=torch.uint8, device=DEVICE)
    graph.execute(pack, workspace)
    assert (workspace[size:] == 0xAB).all()


def of_size(depth: int, **levels: Any) -> Case:
    """Values of another size than keys, on either side of it."""
    depth_v = 264 - depth if depth % 16 else depth
    return Case(sizes=(depth, depth_v), band="causal", heads=(2, 1), dtype="float16", **levels)


@pytest.mark.parametrize("depth", levels(FEW))
def test_forward(depth: int) -> None:
    Declared(of_size(depth, rows=17, keys=19, stats="natural"), DEVICE, start="promised").run(
        execute
    )


@pytest.mark.L1
@pytest.mark.parametrize("depth", SIZES)
def test_forward_of_few_queries(depth: int) -> None:
    case = of_size(depth, rows=2, keys=300, stats="log2", lengths="lengths")
    Declared(case, DEVICE, start="promised").run(execute)


@pytest.mark.parametrize("depth", levels(FEW[1:3]))
def test_backward(depth: int) -> None:
    case = backward_case(of_size(depth, rows=17, keys=19))
    DeclaredBackward(case, DEVICE, start="promised").run(execute)


# One of them narrower than a line of 128 bytes and than the other; L0 is what the assembler's loss
# of such tiles was found in.
UNLIKE = [
    pytest.param(
        (depth, depth_v),
        marks=pytest.mark.L0 if (depth, depth_v) in ((16, 64), (64, 24)) else pytest.mark.L1,
        id=f"{depth}-{depth_v}",
    )
    for narrow in (8, 16, 24, 32)
    for wide in (32, 64, 128, 256)
    if wide > narrow
    for depth, depth_v in ((narrow, wide), (wide, narrow))
]


def unlike(sizes: tuple[int, int], **levels: Any) -> Case:
    """More rows and keys than a tile has of either."""
    plain = {"band": "causal", "heads": (2, 1), "dtype": "float16", "rows": 140, "keys": 150}
    return Case(sizes=sizes, **(plain | levels))


@pytest.mark.parametrize("start", ["promised", "odd"])
@pytest.mark.parametrize("sizes", UNLIKE)
def test_forward_of_unlike_sizes(sizes: tuple[int, int], start: str) -> None:
    # Hidden NaN, for the kernel that makes spoilt rows again.
    case = unlike(sizes, stats="natural", values="hidden_nan")
    Declared(case, DEVICE, start=start).run(execute)


@pytest.mark.parametrize("start", ["promised", "odd"])
@pytest.mark.parametrize("sizes", UNLIKE)
def test_backward_of_unlike_sizes(sizes: tuple[int, int], start: str) -> None:
    DeclaredBackward(backward_case(unlike(sizes)), DEVICE, start=start).run(execute)


# Beside a bias or draws, sums this wide have other tiles. L0 is what the assembler once had too few
# registers for.
CROWDED = [
    pytest.param(
        sizes,
        crowd,
        band,
        marks=pytest.mark.L0 if (sizes, band) == ((128, 256), "window") else pytest.mark.L1,
        id=f"{sizes[0]}-{sizes[1]}-{'-'.join(crowd.values())}-{band}",
    )
    for sizes in ((128, 256), (256, 256), (24, 160))
    for crowd in ({"bias": "full"}, {"dropout": "philox"}, {"bias": "hiding", "dropout": "mask"})
    for band in ("window", "bottom_right")
]


@pytest.mark.parametrize("start", ["promised", "odd"])
@pytest.mark.parametrize(("sizes", "crowd", "band"), CROWDED)
def test_wide_sums_beside_a_bias_or_draws(
    sizes: tuple[int, int], crowd: dict[str, Any], band: str, start: str
) -> None:
    case = unlike(sizes, stats="natural", band=band, **crowd)
    Declared(case, DEVICE, start=start).run(execute)
    lengths = unlike(sizes, lengths="lengths", values="hidden_nan", band=band, **crowd)
    Declared(replace(lengths, dtype="bfloat16", seed=1), DEVICE, start=start).run(execute)


PAGES = (1, 2, 3, 5, 7, 8, 13, 32, 64, 100, 128, 200, 256)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize(
    "page",
    [pytest.param(n, marks=pytest.mark.L0 if n == 3 else pytest.mark.L1) for n in PAGES],
)
def test_pages(page: int, rows: int) -> None:
    # Values have pages of twice as many rows, in an order of their own; entries behind a length
    # name no page, and what is behind it in a page is NaN.
    case = Case(place=f"paged_{page}", index="int64", lengths="lengths", heads=(4, 2))
    case = replace(case, rows=rows, keys=300, batch=3, seed=page, sizes=(64, 32))
    declared = Declared(case, DEVICE, start="promised")
    spoil_free_slots(declared, page)
    declared.run(execute)


def spoil_free_slots(declared: Declared, page: int) -> None:
    """NaN behind each length in its last page, and in the pages that no entry names."""
    operands = {tensor.name: buffer for tensor, buffer in declared.inputs.items() if tensor.name}
    tables = [buffer for tensor, buffer in declared.inputs.items() if is_table(tensor, declared)]
    for name, table, width in zip("kv", tables, (page, 2 * page), strict=True):
        named = torch.zeros(len(operands[name]), dtype=torch.bool)
        for batch, length in enumerate(declared.len_kv):
            used = table[batch, 0, : -(-length // width), 0].long()
            named[used] = True
            if length % width:
                operands[name][used[-1], :, length % width :] = torch.nan
        operands[name][~named] = torch.nan


def is_table(tensor: Any, declared: Declared) -> bool:
    """Whether it is a page table: several entries a sequence."""
    return not tensor.name and tensor.dim[0] == declared.case.batch and tensor.dim[2] > 1
