"""Triton's rotary embedding: exact tables, any strides; interpreted without a GPU.

With a GPU the same cases run the compiled kernels.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.triton import rope_config

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted")]

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"


def draw(dim: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def rotate(
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    backward: bool = False,
    **attributes: Any,
) -> torch.Tensor:
    """``x`` (B, H, S, D) rotated by the Triton engine, into ``out`` if given."""
    graph = tw.Graph(io_data_type=x.dtype, handle=tw.create_handle(DEVICE))
    source = graph.tensor(x.shape, x.stride(), name="x")
    angles = graph.tensor(freqs.shape, freqs.stride(), freqs.dtype, name="freqs")
    result = torch.full_like(x, torch.nan) if out is None else out
    made = (graph.rope_backward if backward else graph.rope)(source, angles, **attributes)
    made.set_output(True).set_name("y").set_dim(x.shape).set_stride(result.stride())
    made.set_data_type(result.dtype)
    graph.build()
    assert graph.selected_engine == "triton"
    graph.execute({"x": x, "freqs": freqs, "y": result})
    return result


def formula(
    x: torch.Tensor, freqs: torch.Tensor, rotated: int, scale: float, *, backward: bool = False
) -> torch.Tensor:
    """One rounding a step, with correctly rounded cosines and sines, in float32 or float64."""
    half, dtype = rotated // 2, torch.float64 if x.dtype is torch.float64 else torch.float32
    angle = freqs.cpu().float().double()
    if angle.shape[-1] == half:
        angle = torch.cat((angle, angle), -1)
    cos, sin = torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)
    value = x.cpu().to(dtype)
    low, high = value[..., :half], value[..., half:rotated]
    if backward:
        first = low * cos[..., :half] + high * sin[..., half:]
        second = high * cos[..., half:] - low * sin[..., :half]
    else:
        first = low * cos[..., :half] - high * sin[..., :half]
        second = high * cos[..., half:] + low * sin[..., half:]
    whole = torch.cat((first, second, value[..., rotated:]), -1)
    return (whole if scale == 1.0 else whole * scale).to(x.dtype)


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal, signs of zero included; any NaN equals any."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[want.element_size()]
    got = got.cpu().contiguous()
    known = ~want.isnan()
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got[known].view(bits), want.contiguous()[known].view(bits)
    )


# (batch, heads, length, head size), rotated elements, and the angles' batch, length and extent.
CASES = [
    ((1, 1, 1, 2), 2, (1, 1, 1)),
    ((2, 3, 5, 8), 8, (2, 5, 4)),
    ((2, 5, 3, 16), 12, (1, 3, 12)),
    ((1, 9, 33, 64), 64, (1, 33, 32)),
    ((3, 2, 7, 10), 6, (3, 1, 6)),
]


@pytest.mark.parametrize(("dim", "rotated", "angles"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_results_equal_the_formula_bit_for_bit(
    dim: tuple[int, ...], rotated: int, angles: tuple[int, ...], dtype: torch.dtype, backward: bool
) -> None:
    batch, length, extent = angles
    x = draw(dim, dtype)
    # From the first turn to angles that lose all their digits in a careless reduction.
    freqs = draw((batch, 1, length, extent), torch.float32, seed=1) * 10.0 ** (9 * rotated % 20)
    scale = 0.7 if rotated % 4 else 1.0
    got = rotate(x, freqs, backward=backward, rope_dim=rotated, output_scale=scale)
    want = formula(x, freqs, rotated, scale, backward=backward)
    if dtype is torch.float64:
        # Nobody's cosine of float64 is the nearest one.
        assert torch.allclose(got.cpu(), want, rtol=0.0, atol=1e-14)
    else:
        assert same_bits(got, want)


def test_large_angles_signed_zeros_and_non_finite_values() -> None:
    angles = [0.0, -0.0, 1e30, 3.4028235e38, 2.0**100, math.pi, 22.0, 1e-45]
    angles += [math.inf, -math.inf, math.nan, -1e9, 2.0**30, 2.0**31 - 128, 16367173.0, -8e5]
    values = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 5e-45]
    freqs = torch.tensor(angles, device=DEVICE).reshape(1, 1, 1, 16).expand(1, 1, 8, 16)
    x = torch.tensor(values, device=DEVICE).reshape(1, 1, 8, 1).repeat(1, 1, 1, 32)
    x[..., 16:] = x[:, :, torch.arange(8).roll(3), 16:]
    for backward in (False, True):
        got = rotate(x, freqs.contiguous(), backward=backward)
        assert same_bits(got, formula(x, freqs, 32, 1.0, backward=backward))


@pytest.mark.parametrize("change", [None, 1.0, -0.0])
def test_equal_halves_of_the_angles_and_others(change: float | None) -> None:
    # Equal halves take one table; a single difference, of the sign of zero too, takes two.
    x = draw((2, 3, 5, 8), torch.float32)
    x[:, 0] = 0.0
    freqs = draw((1, 1, 5, 4), torch.float32, seed=1)
    freqs[0, 0, 2, 1] = 0.0
    whole = torch.cat((freqs, freqs), -1)
    if change is not None:
        whole[0, 0, 2, 5] = change
    for backward in (False, True):
        want = formula(x, whole, 8, 1.0, backward=backward)
        assert same_bits(rotate(x, whole, backward=backward), want)


@pytest.mark.parametrize("angles", [16, 32])
@pytest.mark.parametrize("heads_adjoin", [False, True])
def test_programs_in_several_blocks_and_groups(angles: int, *, heads_adjoin: bool) -> None:
    x = draw((2, 16, 40, 32), torch.bfloat16, 3)
    if heads_adjoin:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    freqs = draw((1, 1, 40, 16), torch.float32, 4)
    freqs = torch.cat((freqs, freqs), -1) if angles == 32 else freqs
    source, table = (tw.Graph(io_data_type=t.dtype).tensor_like(t) for t in (x, freqs))
    config = rope_config.choose_config(source, table, 16, 4)
    assert config.tokens < 40 and config.groups > 1
    # Programs that start together take what lies together.
    assert rope_config.positions_adjoin(source) != heads_adjoin
    actual = rotate(x, freqs)
    assert torch.equal(actual.cpu(), formula(x, freqs, 32, 1.0))


def test_types_may_differ() -> None:
    x, freqs = draw((1, 2, 4, 8), torch.float16), draw((1, 1, 4, 4), torch.bfloat16, seed=1) * 1e3
    out = torch.empty_like(x, dtype=torch.float32)
    want = formula(x.float(), freqs, 8, 1.0)
    assert same_bits(rotate(x, freqs, out=out), want)
    out = torch.empty_like(x)
    assert same_bits(rotate(x, freqs, out=out), want.half())


def test_angles_of_float64_are_rounded_to_float32_first() -> None:
    x, freqs = draw((1, 2, 4, 8), torch.float32), draw((1, 1, 4, 4), torch.float64, seed=1) * 1e5
    assert same_bits(rotate(x, freqs), formula(x, freqs, 8, 1.0))


def test_any_layout_and_untouched_gaps() -> None:
    # Sequence-major rows, elements two apart, tables with gaps; then gaps in the output.
    x = draw((2, 5, 3, 20), torch.bfloat16).transpose(1, 2)[..., ::2]
    freqs = draw((2, 2, 5, 8), torch.float32, seed=1)[:, :1, :, ::2]
    out = torch.full((2, 3, 5, 13), 7.0, device=DEVICE, dtype=torch.bfloat16)
    got = rotate(x, freqs, out=out[..., 1:11], rope_dim=8)
    assert same_bits(got, formula(x, freqs, 8, 1.0))
    assert torch.all(out[..., :1] == 7.0) and torch.all(out[..., 11:] == 7.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotated", [6, 8])
def test_the_input_may_be_rotated_in_place(dtype: torch.dtype, rotated: int) -> None:
    x, freqs = draw((2, 3, 5, 8), dtype), draw((1, 1, 5, rotated), torch.float32, seed=1)
    for backward in (False, True):
        buffer = x.clone()
        rotate(buffer, freqs, out=buffer, backward=backward, rope_dim=rotated)
        assert same_bits(buffer, formula(x, freqs, rotated, 1.0, backward=backward))


def test_queries_and_fewer_keys_rotate_by_tables_with_a_batch() -> None:
    freqs = draw((2, 1, 5, 4), torch.float32, seed=1)
    for heads in (2, 1):
        x = draw((2, heads, 5, 8), torch.float32, seed=heads)
        assert same_bits(rotate(x, freqs), formula(x, freqs, 8, 1.0))


@pytest.mark.parametrize("dim", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4)], ids=str)
def test_nothing_is_rotated_without_elements(dim: tuple[int, ...]) -> None:
    rotate(torch.empty(dim, device=DEVICE), torch.zeros(1, 1, dim[2], 4, device=DEVICE))


def sparse(folder: Path, elements: int) -> torch.Tensor:
    """bf16 storage of which only the touched pages take memory."""
    storage = torch.UntypedStorage.from_file(str(folder / "storage"), True, 2 * elements)
    return torch.empty(0, dtype=torch.bfloat16).set_(storage)  # type: ignore[call-overload]


@pytest.mark.skipif(HAS_GPU, reason="a GPU has no sparse files; see the tests on a GPU")
def test_strides_beyond_32_bits(tmp_path: Path) -> None:
    # B1: truncated to 32 bits, the second token's address is the first one's, a valid decoy.
    wide = sparse(tmp_path, 2**32 + 8).as_strided((1, 1, 2, 8), (8, 8, 2**32, 1))
    x, freqs = draw((1, 1, 2, 8), torch.bfloat16), draw((1, 1, 2, 4), torch.float32, seed=1)
    wide.copy_(x)
    out = torch.empty_like(x)
    assert same_bits(rotate(wide, freqs, out=out), formula(x, freqs, 8, 1.0))
    # B3: an axis of one element may have any stride.
    odd = x.as_strided(x.shape, (2**62, 2**40 + 1, 8, 1))
    assert same_bits(rotate(odd, freqs, out=out), formula(x, freqs, 8, 1.0))


def test_a_decline_names_the_tensor_and_the_rule() -> None:
    graph = tw.Graph(io_data_type="float32", handle=tw.create_handle(DEVICE))
    x, freqs = graph.tensor((1, 1, 2, 8192), name="x"), graph.tensor((1, 1, 2, 8192))
    graph.rope(x, freqs).set_output(True)
    graph.build()
    verdict = next(v for v in graph.explain().verdicts if v.engine_name == "triton")
    assert graph.selected_engine == "aten" and "'x' has 4096 pairs" in verdict.reason


COMPILE = """
import triton
import tilewright as tw
from tilewright.engines.triton import rope

texts = []
compile_source = triton.compile
def keep(*arguments, **options):
    made = compile_source(*arguments, **options)
    texts.append(made.asm["ptx"])
    return made
triton.compile = keep

for kind, dtype, extent, rotated in (
    ("rope", "bfloat16", 64, 64),
    ("rope_backward", "float64", 32, 64),
):
    graph = tw.Graph(io_data_type=dtype)
    x = graph.tensor((2, 8, 40, 128), (8 * 40 * 128, 128, 8 * 128, 1))
    freqs = graph.tensor((1, 1, 40, extent), data_type="float32")
    getattr(graph, kind)(x, freqs, 0.5, rotated).set_output(True)
    graph.validate()
    plan = rope.plan(graph, (), 4)
    for chosen, targets in ((plan, TARGETS), (plan.fallback, TARGETS[1:2])):
        for kernel in chosen.kernels:
            for target in targets:
                facts = facts_of(kernel, target)
                text = texts.pop()
                told.append(facts | {
                    "approximate": "sin.approx" in text or "cos.approx" in text,
                    "fused": "fma.rn.f32" in text,
                    "products": "mul.rn.f32" in text or "mul.rn.f64" in text,
                    "wide_stores": "st.global.v4" in text or "st.global.v2.b64" in text,
                    "is_aligned": bool(kernel.spec.aligned),
                })
"""


def test_every_kernel_compiles_for_four_targets_without_approximations(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    # O8: sines are no approximations and no product is fused with a sum.
    results = compiled_facts(COMPILE)
    assert {result["target"] for result in results} == {(8, 0), (9, 0), (10, 0), (12, 0)}
    assert len(results) == 2 * (4 + 1)
    for result in results:
        assert not result["approximate"] and not result["fused"] and result["products"]
        assert result["wide_stores"] == result["is_aligned"]
