"""Where the assembler says that matrix products' operands lie on SM90: no GPU needed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from machine_code.descriptors import Product, products

DISASSEMBLE = """
import json, os, pathlib, subprocess, sys, tempfile
os.environ.pop("TRITON_INTERPRET", None)
import triton
import tilewright as tw
from tilewright.engines.compiled.compiler import compile_kernel
from tilewright.engines.triton.engine import ENGINE

ROWS, KEYS, SM_COUNT = 4100, 4100, 132

def declared(kind, depth, depth_v):
    # Of few queries there are more than one tile of a warp group's rows has.
    rows, heads, heads_kv = (4, 20, 1) if kind == "few" else (ROWS, 4, 4)
    graph = tw.Graph(
        io_data_type="float16", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    q, k, v, o, d_o = (
        graph.tensor((2, h, n, d))
        for h, n, d in (
            (heads, rows, depth), (heads_kv, KEYS, depth), (heads_kv, KEYS, depth_v),
            (heads, rows, depth_v), (heads, rows, depth_v),
        )
    )
    mask = "use_causal_mask_bottom_right" if kind == "few" else "use_causal_mask"
    options = {"attn_scale": 0.1, mask: True}
    if kind == "backward":
        stats = graph.tensor((2, heads, rows, 1), data_type="float32")
        made = graph.sdpa_backward(q, k, v, o, d_o, stats, **options)
    else:
        made = graph.sdpa(q, k, v, is_inference=True, **options)[:1]
    for tensor in made:
        tensor.set_output(True)
    graph.validate()
    return graph

tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
told = []
for kind, depth, depth_v in json.loads(sys.argv[1]):
    graph = declared(kind, depth, depth_v)
    plan = ENGINE.plan(graph, ENGINE.family(graph).propose(graph, SM_COUNT)[0].knobs, SM_COUNT)
    kernels = [*plan.kernels, *(plan.fallback.kernels if plan.fallback else ())]
    for place, kernel in enumerate(kernels):
        code = compile_kernel(kernel.spec, (9, 0))
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(code.image)
            file.flush()
            run = subprocess.run([tool, "-c", file.name], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        told.append((f"{kind}, {place}: {kernel.spec.name} of {depth}, {depth_v}", run.stdout))
print(json.dumps(told))
"""
SIZES = (16, 32, 64, 128, 256)
KINDS = ("forward", "backward", "few")
UNLIKE = [
    (kind, depth, depth_v) for kind in KINDS for depth, depth_v in itertools.permutations(SIZES, 2)
]
# What other tiles cut into two powers of two.
UNLIKE += [("few", depth, depth) for depth in (40, 48, 72, 80, 96, 160, 192)]
# Each of them had a kernel whose narrower tiles were looked for where none were.
SMOKE = [("backward", 16, 64), ("forward", 64, 32), ("few", 96, 96)]


@pytest.mark.parametrize(
    "declarations",
    [
        pytest.param(SMOKE, marks=pytest.mark.L0, id="smoke"),
        *(
            pytest.param(UNLIKE[at::8], marks=pytest.mark.L1, id=f"part {at + 1} of 8")
            for at in range(8)
        ),
    ],
)
def test_every_product_knows_where_its_tiles_lie(
    declarations: list[tuple[str, int, int]], run_python: Callable[..., str]
) -> None:
    texts = json.loads(run_python(DISASSEMBLE, json.dumps(declarations), timeout_s=600.0))
    found = {what: products(text) for what, text in texts}
    assert sum(map(len, found.values())) > 50 * len(declarations)
    assert all(any(what.endswith(f" of {d}, {v}") for what in found) for _, d, v in declarations)
    wrong = {
        what: [product for product in made if not product.is_plain]
        for what, made in found.items()
        if not all(product.is_plain for product in made)
    }
    assert not wrong


def of_lines(*lines: str) -> list[Product]:
    """Products of a listing."""
    places = itertools.count(0, 16)
    return products(
        "\n".join(
            line if line.startswith(".L") else f"        /*{next(places):04x}*/  {line} ;"
            for line in lines
        )
    )


# As the assembler writes it: a constant, and a sum with what is carried out of an address.
BEGINNING = (
    "LDC R2, c[0x0][0x210]",
    "SHF.R.U32.HI R2, RZ, 0x4, R2",
    "IMAD.MOV.U32 R3, RZ, RZ, RZ",
    "IADD3 R4, P0, R2, 0x40, RZ",
    "IADD3.X R5, R3, -0x7fffffe0, RZ, P0, !PT",
)
PRODUCT = "HGMMA.64x32x16.F32 R88, R28, gdesc[UR4].tnspB, R88, gsb0"


@pytest.mark.L0
def test_a_constant_is_followed_through_moves_sums_swaps_and_memory() -> None:
    told = of_lines(
        *BEGINNING,
        "STL.64 [R1+0x8], R4",
        "LDL R9, [R1+0xc]",
        "R2UR UR7, R4",
        "R2UR UR6, R9",
        "ULOP3.LUT UR7, UR7, UR6, URZ, 0x3c, !UPT",
        "ULOP3.LUT UR6, UR7, UR6, URZ, 0x3c, !UPT",
        "ULOP3.LUT UR7, UR7, UR6, URZ, 0x3c, !UPT",
        PRODUCT,
        "UIADD3.64 UR6, UR6, 0x7e, URZ",
        PRODUCT,
        "EXIT",
    )
    assert [product.halves for product in told] == [("0x80000020",)] * 2
    assert all(product.is_plain for product in told)


@pytest.mark.L0
def test_what_another_path_leaves_in_the_register_is_found() -> None:
    told = of_lines(
        *BEGINNING,
        "R2UR UR7, R5",
        "@!P1 BRA `(.L_x_1)",
        "FMUL R0, R16, 1.4426950216293334961",
        "R2UR UR7, R0",
        ".L_x_1:",
        PRODUCT,
        "EXIT",
    )
    assert [product.halves for product in told] == [("unknown",)]
    assert not told[0].is_plain


@pytest.mark.L0
def test_a_guarded_write_may_not_happen() -> None:
    told = of_lines(*BEGINNING, "R2UR UR7, R5", "@P3 UMOV UR7, 0x40000040", PRODUCT, "EXIT")
    assert not told[0].is_plain


@pytest.mark.L0
def test_a_constant_that_says_no_swizzle_is_found() -> None:
    told = of_lines("UMOV UR7, 0x3f800020", PRODUCT, "EXIT")
    assert told[0].halves == ("0x3f800020",) and not told[0].is_plain


@pytest.mark.L0
def test_both_operands_in_shared_memory_are_looked_at() -> None:
    shared = "HGMMA.64x64x16.F32 R56, gdesc[UR4], R56"
    told = of_lines("UMOV UR5, 0x40000040", "UMOV UR7, 0x40000040", shared, "EXIT")
    assert told[0].halves == ("0x40000040",) * 2 and told[0].is_plain
    told = of_lines("UMOV UR7, 0x40000040", shared, "EXIT")
    assert told[0].halves == ("unknown", "0x40000040")
