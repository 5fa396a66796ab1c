"""How fast a multiprocessor does what FP8 attention does to a score, alone and beside products.

    python benchmark/hopper_fp8_units.py

One or two groups of four warps repeat a mixture of instructions on registers, and another one
multiplies 64 x 128 x 128 in FP8 without a pause or not at all. It writes
benchmark/results/<device>/hopper_fp8_units.csv: clocks a score and scheduler, and clocks a product
beside them. Mixtures are told by letters; what a score takes of each:

    e  its exponential            f  its scaling, a multiply-add
    a  the addition to a sum      c  half a rounding to E4M3
    m  half a maximum of three

Around 128 scores there are 80 other instructions that keep all of this from being left out.
"""

from __future__ import annotations

import torch
from results import Table
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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
SCORES, ROUNDS, PRODUCTS, TRIES = 128, 40, 800, 4
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


@gluon.jit
def side_by_side(out, rounds, products, MIXTURE: gl.constexpr, GROUPS: gl.constexpr):
    left: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], _KIND)
    right: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], _KIND)
    a = gl.allocate_shared_memory(_KIND, [64, 128], left)
    b = gl.allocate_shared_memory(_KIND, [128, 128], right)
    fence_async_shared()
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


def clocks(mixture: str, groups: int, products: int) -> tuple[float, float]:
    """(clocks a score and scheduler, clocks a product), the least of some runs."""
    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    found = []
    for _ in range(TRIES):
        side_by_side[(programs,)](out, ROUNDS, products, mixture, groups, num_warps=4, maxnreg=128)
        took = out[:4].tolist()
        found.append((max(took[:groups]) / (ROUNDS * SCORES * groups), took[3] / max(products, 1)))
    return min(found)


def main() -> None:
    table = Table("hopper_fp8_units", "python benchmark/hopper_fp8_units.py")
    for mixture in MIXTURES:
        for groups in GROUPS:
            alone, _ = clocks(mixture, groups, 0)
            beside, product = clocks(mixture, groups, PRODUCTS)
            table.add(
                mixture=mixture,
                warps_a_scheduler=groups,
                alone=f"{alone:.2f}",
                beside_products=f"{beside:.2f}",
                clocks_a_product=f"{product:.0f}",
            )
    table.write()


if __name__ == "__main__":
    main()
