"""FP8 attention on an H100 or H200 beside bfloat16, and beside cuDNN's in FP8.

    python benchmark/hopper_fp8.py [--quick]

One run measures everything, on the same random numbers of E4M3, medians of interleaved rounds,
host time hidden. Every result is compared with the bfloat16 kernel's first. It writes
benchmark/results/<device>/hopper_fp8.csv: teraflops a second, where a causal mask counts half the
products. cuDNN comes through its own front end (PyTorch has no such call); it is left out where
that is not installed or declines.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
from typing import Any

import cudnn_frontend
import torch
from building import build_ahead
from hopper_attention import HOST_US, TOKENS, WIDTH, build, frame
from results import Table
from timing import Call, device_ms

import tilewright as tw

FP8 = torch.float8_e4m3fn
SIZES = (128, 64)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SCALES = {
    "descale_q": 1.0,
    "descale_k": 1.0,
    "descale_v": 1.0,
    "descale_s": 2.0**-8,
    "scale_s": 2.0**8,
    "scale_o": 4.0,
}
OUTPUTS = {"o": FP8, "amax_s": torch.float32, "amax_o": torch.float32}
# Probabilities of 3 bits of mantissa: 2 to 3 per cent each, which do not average out in a sum
# whose terms cancel; O of 3 bits as much again.
MOST_DIFFERENT = 0.06


def dim_of(size: int, length: int) -> tuple[int, int, int, int]:
    """Of q, k, v and O: TOKENS tokens, heads WIDTH wide in all."""
    return (max(TOKENS // length, 1), WIDTH // size, length, size)


def scalars() -> dict[str, torch.Tensor]:
    """The scales, and room for the maxima."""
    return {name: torch.full((1, 1, 1, 1), value, device="cuda") for name, value in SCALES.items()}


def build_fp8(size: int, length: int, causal: bool) -> Any:
    """A graph that the Hopper engine has taken in FP8."""
    dim = dim_of(size, length)
    graph = tw.Graph(io_data_type=FP8, intermediate_data_type="float32")
    declared = [graph.tensor(dim, name=name) for name in "qkv"]
    declared += [graph.tensor((1, 1, 1, 1), data_type="float32", name=name) for name in SCALES]
    outputs = graph.sdpa_fp8(
        *declared, is_inference=True, attn_scale=size**-0.5, use_causal_mask=causal
    )
    for tensor, (name, kind) in zip((outputs[0], *outputs[2:]), OUTPUTS.items(), strict=True):
        tensor.set_output(True).set_name(name).set_data_type(kind)
    graph.build()
    if graph.selected_engine != "hopper":
        raise SystemExit(str(graph.explain()))
    return graph


def own(q: Any, k: Any, v: Any, o: Any, causal: bool) -> Call:
    """A call of the Hopper engine in FP8."""
    maxima = {name: torch.empty(1, device="cuda") for name in ("amax_s", "amax_o")}
    graph = build_fp8(q.shape[-1], q.shape[2], causal)
    launch: Call = graph.bind({"q": q, "k": k, "v": v, "o": o, **scalars(), **maxima}).launch
    return launch


def cudnn(q: Any, k: Any, v: Any, o: Any, causal: bool) -> Call | None:
    """cuDNN's call, or None with the reason told."""
    module = cudnn_frontend.module()
    if module is None:
        return None
    types = module.data_type
    try:
        graph = module.pygraph(
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=cudnn_frontend.handle(),
        )
        one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": types.FLOAT}
        buffers = {
            graph.tensor(
                name=name, dim=list(x.shape), stride=list(x.stride()), data_type=types.FP8_E4M3
            ): x.view(torch.uint8)
            for name, x in zip("qkv", (q, k, v), strict=True)
        }
        scales = {name: graph.tensor(name=name, **one) for name in SCALES}
        inputs = dict(zip("qkv", buffers, strict=True))
        outputs = graph.sdpa_fp8(
            **inputs,
            **scales,
            generate_stats=False,
            attn_scale=q.shape[-1] ** -0.5,
            use_causal_mask=causal,
        )
        filled = scalars()
        buffers |= {tensor: filled[name] for name, tensor in scales.items()}
        outputs[0].set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride()))
        outputs[0].set_data_type(types.FP8_E4M3)
        buffers[outputs[0]] = o.view(torch.uint8)
        for maximum in outputs[2:]:
            maximum.set_output(True).set_dim(one["dim"]).set_stride(one["stride"])
            maximum.set_data_type(types.FLOAT)
            buffers[maximum] = torch.zeros(1, 1, 1, 1, device="cuda")
        return cudnn_frontend.prepare(graph, buffers)
    except Exception as error:  # The front end's errors have no common type.
        print(f"cuDNN in FP8 is left out, head size {q.shape[-1]}: {str(error)[:200]}")
        return None


def compare(case: str, o: Any, reference: Any) -> None:
    """End the run if O, stored times its scale, is not the reference within FP8's rounding."""
    reference = reference.float()
    found = o.float() / SCALES["scale_o"]
    error = ((found - reference).norm() / reference.norm()).item()
    if not error < MOST_DIFFERENT:
        raise SystemExit(f"{case}: wrong result, relative error {error}")


def measure(table: Table, size: int, length: int, causal: bool, rounds: int) -> None:
    """One cell."""
    dim = dim_of(size, length)
    batch, heads = dim[:2]
    q, k, v = (torch.randn(dim, device="cuda").to(FP8) for _ in range(3))
    q_wide, k_wide, v_wide = (x.to(torch.bfloat16) for x in (q, k, v))
    o, o_wide = torch.zeros(dim, device="cuda").to(FP8), torch.empty_like(q_wide)
    calls: dict[str, Call] = {
        "fp8": own(q, k, v, o, causal),
        "bf16": frame(q_wide, k_wide, v_wide, o_wide, causal).launch,
    }
    o_cudnn = torch.zeros(dim, device="cuda").to(FP8)
    other = cudnn(q, k, v, o_cudnn, causal)
    if other is not None:
        calls["cudnn"] = other
    times = device_ms(calls, rounds, HOST_US)
    compare(f"{size}, {length}", o, o_wide)
    work = 4 * batch * heads * length * length * size * (0.5 if causal else 1)
    speeds = {name: work / ms / 1e9 for name, ms in times.items()}
    has_cudnn = "cudnn" in speeds
    table.add(
        head_size=size,
        length=length,
        heads=heads,
        mask="causal" if causal else "full",
        ms=f"{times['fp8']:.4f}",
        fp8=f"{speeds['fp8']:.0f}",
        bf16=f"{speeds['bf16']:.0f}",
        cudnn=f"{speeds['cudnn']:.0f}" if has_cudnn else "",
        over_bf16=f"{speeds['fp8'] / speeds['bf16']:.3f}",
        over_cudnn=f"{speeds['fp8'] / speeds['cudnn']:.3f}" if has_cudnn else "",
    )


def main() -> None:
    # The lengths on both sides of where another tile is taken.
    ends = list(itertools.product(SIZES, (LENGTHS[0], LENGTHS[-1]), (False, True)))
    build_ahead([functools.partial(of, *cell) for of in (build_fp8, build) for cell in ends])
    rounds = 8 if "--quick" in sys.argv else 15
    torch.manual_seed(0)
    table = Table("hopper_fp8", "python benchmark/hopper_fp8.py")
    for size, length in itertools.product(SIZES, LENGTHS):
        for causal in (False, True):
            measure(table, size, length, causal, rounds)
        if length >= LENGTHS[-2]:
            # What there is stays, should the run be cut short.
            table.write()
    for peer in ("bf16", "cudnn"):
        ratios = [float(row[f"over_{peer}"]) for row in table.rows if row[f"over_{peer}"]]
        if ratios:
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
            print(f"over {peer}: geometric mean {mean:.3f}, least {min(ratios):.3f}")


if __name__ == "__main__":
    main()
