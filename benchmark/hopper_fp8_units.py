"""How fast a multiprocessor does what FP8 attention does to a score, alone and beside products.

    python benchmark/hopper_fp8_units.py

One or two groups of four warps repeat a mixture of instructions on registers, and another group
multiplies 64 x 128 x 128 in FP8, two products at a time. Clocks of a score are a scheduler's, for
one warp's; each side is timed where the other one outlasts it. Writes
benchmark/results/<device>/hopper_fp8_units.csv. Mixtures are told by letters; what a score takes
of each:

    e  its exponential            f  its scaling, a multiply-add
    a  the addition to a sum      c  half a rounding to E4M3
    m  half a maximum of three

Around 128 scores there are 50 to 70 other instructions that keep all of this from being left out.
"""

from __future__ import annotations

import functools

import torch
from building import build_ahead
from results import Table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

MIXTURES = ("e", "ef", "ea", "ec", "em", "facm", "efac", "efacm")
GROUPS = (1, 2)
# Four scores, %0 to %3; s are sums and maxima.
PARTS = {
    "f": "".join(f"fma.rn.f32 %{j}, %{j}, s0, s1;" for j in range(4)),
    "e": "".join(f"ex2.approx.ftz.f32 %{j}, %{j};" for j in range(4)),
    "a": "".join(f"add.f32 s{2 + j}, s{2 + j}, %{j};" for j in range(4)),
    "c": "cvt.rn.satfinite.e4m3x2.f32 low, %1, %0; cvt.rn.satfinite.e4m3x2.f32 high, %3, %2;"
    "mov.b32 word, {low, high}; xor.b32 s6, s6, word;",
    "m": "max.s32 t, %0, %1; max.s32 s7, s7, t; max.s32 t, %2, %3; max.s32 s8, s8, t;",
}
# (rounds of SCORES, products): so many that the side that is timed ends before the other one.
SCORES_ALONE, SCORES_BESIDE = (40, 0), (40, 1200)
PRODUCTS_ALONE, PRODUCTS_BESIDE = (0, 64), (400, 64)
SCORES, TRIES = 128, 4
_SCORES = gl.constexpr(SCORES)
_REGISTERS, _SUMS = 32, 9
_KIND = gl.constexpr(gl.float8e4nv)


@gluon.constexpr_function
def mixture_text(mixture, scores):
    """PTX of ``scores`` scores; the input starts all registers, which all go into the output."""
    names = [f"r{i}" for i in range(_REGISTERS)] + [f"s{i}" for i in range(_SUMS)]
    text = "{ .reg .b16 low, high; .reg .b32 t, word;"
    text += "".join(f".reg .b32 {name}; add.u32 {name}, $1, {name[1:]};" for name in names)
    for four in range(scores // 4):
        for letter in str(mixture):
            part = PARTS[letter]
            for j in range(4):
                part = part.replace(f"%{j}", f"r{(4 * four + j) % _REGISTERS}")
            text += part
    text += "".join(f"xor.b32 r0, r0, {name};" for name in names[1:])
    return text + "mov.b32 $0, r0; }"


@gluon.jit
def clock():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %clock;", "=r,r,~{memory}", [gl.to_tensor(0)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def mix(out, a, b, rounds, products, MIXTURE: gl.constexpr, GROUP: gl.constexpr):
    start = clock()
    x = start
    for _ in range(rounds):
        x = gl.inline_asm_elementwise(
            mixture_text(MIXTURE, _SCORES), "=r,r,~{memory}", [x],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    gl.store(out + GROUP, clock() - start)
    gl.store(out + 8 + GROUP, x)


@gluon.jit
def mix_first(out, a, b, rounds, products, MIXTURE: gl.constexpr):
    mix(out, a, b, rounds, products, MIXTURE, 0)


@gluon.jit
def mix_second(out, a, b, rounds, products, MIXTURE: gl.constexpr):
    mix(out, a, b, rounds, products, MIXTURE, 1)


@gluon.jit
def multiply(out, a, b, rounds, products, MIXTURE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )
    acc = gl.zeros([64, 128], gl.float32, layout)
    start = clock()
    for _ in range(products // 2):
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    gl.store(out + 3, clock() - start)
    rows = gl.arange(0, 64, gl.SliceLayout(1, layout))
    gl.store(out + 16 + rows, gl.max(acc, 1).to(gl.int32))


@gluon.jit(do_not_specialize=["rounds", "products"])
def side_by_side(out, rounds, products, MIXTURE: gl.constexpr, GROUPS: gl.constexpr):
    left: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], _KIND)
    right: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], _KIND)
    # Whatever lies there: values make no difference to clocks.
    a = gl.allocate_shared_memory(_KIND, [64, 128], left)
    b = gl.allocate_shared_memory(_KIND, [128, 128], right)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (mix_first, (out, a, b, rounds, products, MIXTURE)),
                (multiply, (out, a, b, rounds, products, MIXTURE)),
            ],
            [4],
            [128],
        )
    else:
        gl.warp_specialize(
            [
                (mix_first, (out, a, b, rounds, products, MIXTURE)),
                (mix_second, (out, a, b, rounds, products, MIXTURE)),
                (multiply, (out, a, b, rounds, products, MIXTURE)),
            ],
            [4, 4],
            [128, 128],
        )


def compile_mixture(mixture: str) -> None:
    """Leave the kernels of a mixture in Triton's store."""
    for groups in GROUPS:
        side_by_side.warmup(torch.int32, 0, 0, mixture, groups, grid=(1,), num_warps=4, maxnreg=128)


def clocks(mixture: str, groups: int, work: tuple[int, int]) -> tuple[int, int]:
    """Clocks of the scores and of the products, each the least of some runs."""
    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    found = []
    for _ in range(TRIES):
        side_by_side[(programs,)](out, *work, mixture, groups, num_warps=4, maxnreg=128)
        *scores, products = out[:4].tolist()
        found.append((max(scores[:groups]), products))
    return min(scores for scores, _ in found), min(products for _, products in found)


def measure(table: Table, mixture: str, groups: int) -> None:
    """One row."""
    alone, _ = clocks(mixture, groups, SCORES_ALONE)
    beside, outlasting = clocks(mixture, groups, SCORES_BESIDE)
    _, product_alone = clocks(mixture, groups, PRODUCTS_ALONE)
    outlasting_scores, product_beside = clocks(mixture, groups, PRODUCTS_BESIDE)
    if beside > outlasting or product_beside > outlasting_scores:
        raise SystemExit(f"{mixture}, {groups}: what is timed was not beside the other to its end")
    scores, products = SCORES_ALONE[0] * SCORES * groups, PRODUCTS_ALONE[1]
    table.add(
        mixture=mixture,
        warps_a_scheduler=groups,
        score_alone=f"{alone / scores:.2f}",
        score_beside_products=f"{beside / scores:.2f}",
        product_alone=f"{product_alone / products:.0f}",
        product_beside_scores=f"{product_beside / products:.0f}",
    )


def main() -> None:
    build_ahead([functools.partial(compile_mixture, mixture) for mixture in MIXTURES])
    table = Table("hopper_fp8_units", "python benchmark/hopper_fp8_units.py")
    for mixture in MIXTURES:
        for groups in GROUPS:
            measure(table, mixture, groups)
    table.write()


if __name__ == "__main__":
    main()
