"""Hopper attention without its GPU: what is taken and declined, and that it compiles for sm_90."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

import tilewright as tw
from tilewright.engines.hopper import attention
from tilewright.engines.hopper.attention_spec import read_spec
from tilewright.launch.tensor_maps import TensorMap
from tilewright.planning.devices import DeviceProperties
from tilewright.planning.rows import admit
from tilewright.planning.table import engine_by_name

DIM = (2, 4, 256, 64)


def declare(
    *,
    dims: tuple[Any, Any, Any] = (DIM, DIM, DIM),
    strides: tuple[Any, Any, Any] = (None, None, None),
    dtype: str = "bfloat16",
    stats: bool = True,
    **options: Any,
) -> Any:
    graph = tw.Graph(
        io_data_type=dtype, intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    q, k, v = (
        graph.tensor(dim, **({} if stride is None else {"stride": stride}), name=name)
        for dim, stride, name in zip(dims, strides, "qkv", strict=True)
    )
    options = {
        name: value(graph) if callable(value) and name != "score_mod" else value
        for name, value in options.items()
    }
    out, statistics = graph.sdpa(q, k, v, generate_stats=stats, **{"attn_scale": 0.125, **options})
    out.set_output(True).set_name("o")
    if statistics is not None:
        statistics.set_output(True).set_data_type("float32")
    graph.validate()
    return graph


def spec_of(**options: Any) -> Any:
    return read_spec(declare(**options).operations[0])


@pytest.mark.L0
def test_bounds_are_those_of_the_kernels_own_rows() -> None:
    causal = spec_of(use_causal_mask=True)
    assert (causal.left, causal.right) == (None, 0)
    shorter = ((2, 4, 100, 64), DIM, DIM)
    bottom = spec_of(dims=shorter, use_causal_mask_bottom_right=True, sliding_window_length=40)
    # Row 0 is row 156 of the keys: it sees keys 117 to 156.
    assert (bottom.left, bottom.right) == (40 - 156, 156)
    wide = spec_of(diagonal_band_right_bound=255, sliding_window_length=256)
    assert (wide.left, wide.right) == (None, None), "bounds that hide nothing are none"


ODD = (2, 4, 256, 60)
FAR = (2**40, 256 * 64, 64, 1)
DECLINES: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": "float32"}, r"'q' \(q\) has data type FLOAT"),
    "bias": (
        {"bias": lambda graph: graph.tensor((1, 1, 256, 256), name="b")},
        r"tensor 'b' \(bias\): the Hopper kernels take K?",
    ),
    "alibi": ({"use_alibi_mask": True}, "use_alibi_mask"),
    "score program": (
        {"score_mod": lambda graph, score: graph.relu(score)},
        "score_mod has relu on .* take soft caps",
    ),
    "great cap": (
        {"score_mod": lambda graph, score: graph.mul(graph.tanh(score), graph.tensor_scalar(1e4))},
        "caps scores at 10000.0, .* up to 4096",
    ),
    "wide heads": ({"dims": ((2, 4, 256, 320),) * 3}, "head sizes 320 and 320"),
    "few rows": ({"dims": ((2, 4, 16, 64), DIM, DIM)}, "16 query rows"),
    "odd heads": ({"dims": (ODD, ODD, ODD)}, "steps by 120 bytes; .* multiples of 16"),
    "expanded": (
        {"strides": (None, (0, 256 * 64, 64, 1), None)},
        r"tensor 'k' \(k\): axis 0 steps by 0 bytes",
    ),
    "stepped": (
        {"strides": (None, None, (4 * 256 * 128, 256 * 128, 128, 2))},
        r"tensor 'v' \(v\): stride .* needs 1 on the last axis",
    ),
    "far": ({"strides": (FAR, None, None)}, "below 2\\*\\*40"),
    "block mask": (
        {"block_mask": lambda graph: graph.tensor((2, 4, 2, 1), data_type="uint8", name="m")},
        r"tensor 'm' \(block_mask\): the Hopper kernels take K?",
    ),
}


@pytest.mark.L0
@pytest.mark.parametrize("name", DECLINES)
def test_a_decline_names_the_tensor_and_the_rule(name: str) -> None:
    options, reason = DECLINES[name]
    graph = declare(**options)
    with pytest.raises(tw.NotSupportedError, match=reason):
        attention.propose(graph, 132)


@pytest.mark.L0
def test_an_output_that_nobody_asks_for_is_declined() -> None:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q, k, v = (graph.tensor((2, 4, 256, 64)) for _ in range(3))
    _, stats = graph.sdpa(q, k, v, generate_stats=True)
    stats.set_output(True).set_data_type("float32")
    graph.validate()
    with pytest.raises(tw.NotSupportedError, match="O is virtual; the kernels store it"):
        attention.propose(graph, 132)


@pytest.mark.L0
def test_scales_and_caps_are_part_of_the_call() -> None:
    cap = {"score_mod": lambda graph, score: graph.tanh(score)}
    for options, scores in (
        ({"attn_scale": 0.5}, 0),
        ({"attn_scale": -0.5}, 1),
        ({"attn_scale": lambda graph: graph.tensor((1, 1, 1, 1), data_type="float32")}, 1),
        ({"attn_scale": lambda graph: graph.tensor_scalar(0.5)}, 1),
        (cap, 2),
    ):
        kernel = attention.plan(declare(**options), (), 132).kernels[0]
        assert dict(kernel.spec.constants)["SCORES"] == scores, options


def paged(
    k_page: int,
    v_page: int,
    *,
    depth: tuple[int, int] = (128, 128),
    is_causal: bool = False,
    ragged: str = "",
) -> Any:
    """A graph over pages of 2 heads, up to 1000 keys."""
    graph = tw.Graph(
        io_data_type="bfloat16", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    q = graph.tensor((2, 4, 256, depth[0]), name="q")
    k = graph.tensor((50, 2, k_page, depth[0]), name="k")
    v = graph.tensor((50, 2, v_page, depth[1]), name="v")
    lengths = {
        f"seq_len_{side}": graph.tensor((2, 1, 1, 1), data_type="int32") for side in ("q", "kv")
    }
    tables = {
        f"paged_attention_{side}_table": graph.tensor(
            (2, 1, -(-1000 // page), 1), data_type="int32"
        )
        for side, page in (("k", k_page), ("v", v_page))
    }
    for side in ragged:
        starts = graph.tensor((3, 1, 1, 1), data_type="int32")
        tables[f"paged_attention_{side}_table"].set_name("t").set_ragged_offset(starts)
    out, _ = graph.sdpa(
        q,
        k,
        v,
        is_inference=True,
        attn_scale=0.1,
        use_padding_mask=True,
        use_causal_mask_bottom_right=is_causal,
        paged_attention_max_seq_len_kv=1000,
        **lengths,
        **tables,
    )
    out.set_output(True).set_name("o")
    graph.validate()
    return graph


@pytest.mark.L0
def test_copies_of_paged_rows_go_to_multiples_of_128_bytes() -> None:
    for size in range(8, 257, 8):
        for page in (1, 2, 3, 16):
            plan = attention.plan(paged(page, page, depth=(size, size)), (), 132)
            told = dict(plan.kernels[0].spec.constants)
            row_bytes = told["DEPTH"] // told["SLABS"] * 2
            assert told["K_BOX"] * row_bytes % 128 == 0, (size, page, told)


@pytest.mark.L0
@pytest.mark.parametrize("side", ["k", "v"])
def test_rows_of_page_numbers_one_after_another_are_declined(side: str) -> None:
    graph = paged(16, 16, ragged=side)
    reason = rf"'t' \(paged_attention_{side}_table\) has a ragged offset; .* a row of entries"
    with pytest.raises(tw.NotSupportedError, match=reason):
        attention.propose(graph, 132)


@pytest.mark.L0
def test_a_box_of_paged_rows_lies_in_one_page() -> None:
    for k_page, v_page, boxes in (
        (16, 16, (16, 16)),
        (128, 256, (128, 128)),
        (48, 24, (16, 8)),
        (1, 100, (1, 4)),
    ):
        kernel = attention.plan(paged(k_page, v_page), (), 132).kernels[0]
        maps = [argument for argument in kernel.arguments if isinstance(argument, TensorMap)]
        assert [each.box for each in maps[1:3]] == [(1, 1, rows, 64) for rows in boxes]
        assert all(each.swizzle_bytes == 128 for each in maps)
        constants = dict(kernel.spec.constants)
        assert (constants["K_BOX"], constants["V_BOX"]) == boxes and constants["PAGED"]


def packed(*, multiplier: int, ragged: str = "qkvo", with_lengths: bool = True) -> Any:
    """A graph over packed sequences of 4 heads of 64."""
    graph = tw.Graph(
        io_data_type="float16", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    sums = graph.tensor((3, 1, 1, 1), data_type="int32", name="sums")
    stride = (256 * 256, 64, 256, 1)
    offset = {"ragged_offset": sums, "ragged_offset_multiplier": multiplier}
    q, k, v = (
        graph.tensor(DIM, stride, name=name, **(offset if name in ragged else {})) for name in "qkv"
    )
    options: dict[str, Any] = {}
    if with_lengths:
        options = {"use_padding_mask": True, "cu_seq_len_q": sums, "cu_seq_len_kv": sums}
    out, _ = graph.sdpa(q, k, v, is_inference=True, attn_scale=0.125, **options)
    out.set_output(True).set_name("o").set_dim(DIM).set_stride(stride)
    if "o" in ragged:
        out.set_ragged_offset(sums).set_ragged_offset_multiplier(multiplier)
    graph.validate()
    return graph


@pytest.mark.L0
def test_packed_sequences_that_start_at_whole_rows_are_taken() -> None:
    kernel = attention.plan(packed(multiplier=256), (), 132).kernels[0]
    maps = [argument for argument in kernel.arguments if isinstance(argument, TensorMap)]
    assert len(maps) == 4 and all(each.is_flat for each in maps)
    constants = dict(kernel.spec.constants)
    assert constants["RAGGED_Q"] and constants["RAGGED_KV"]
    for options, reason in (
        ({"multiplier": 64}, r"'q' \(q\) has ragged_offset_multiplier 64 .* whole rows"),
        ({"multiplier": 256, "ragged": "qkv"}, r"'o' \(O\) and 'q' \(q\): .* both ragged"),
        ({"multiplier": 256, "ragged": "kqo"}, r"'v' \(v\) and 'k' \(k\): .* both ragged"),
    ):
        with pytest.raises(tw.NotSupportedError, match=reason):
            attention.propose(packed(**options), 132)


@pytest.mark.L0
def test_a_declared_alignment_that_is_too_small_is_declined() -> None:
    graph = tw.Graph(
        io_data_type="float16", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    q, k, v = (graph.tensor(DIM, name=n, alignment_value=16 if n == "q" else 8) for n in "qkv")
    graph.sdpa(q, k, v, is_inference=True, attn_scale=0.125)[0].set_output(True)
    graph.validate()
    with pytest.raises(tw.NotSupportedError, match=r"'k' \(k\): an alignment of 8 bytes"):
        attention.propose(graph, 132)


@pytest.mark.L0
def test_a_stride_that_is_never_stepped_does_not_count() -> None:
    # B20, B3: singleton axes may have any stride; the tensor map gets one that the driver takes.
    dim = (1, 1, 256, 64)
    graph = declare(dims=(dim, dim, dim), strides=((2**50 + 1, 3, 64, 1), None, None))
    kernel = attention.plan(graph, (), 132).kernels[0]
    q_map = kernel.arguments[0]
    assert isinstance(q_map, TensorMap)
    assert q_map.dim == dim and q_map.stride == (16, 16, 64, 1)


@pytest.mark.L0
def test_only_sm90_is_admitted() -> None:
    # G3: a lower bound is not the device.
    entry = engine_by_name("hopper")
    assert entry is not None
    cap = declare(score_mod=lambda graph, score: graph.tanh(score)).operations[0]
    assert admit(entry.rows, cap, DeviceProperties("cuda", 0, "made up", (9, 0))) is None
    operation = declare().operations[0]
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        reason = admit(entry.rows, operation, DeviceProperties("cuda", 0, "made up", capability))
        assert (reason is None) == (capability == (9, 0)), (capability, reason)
    assert admit(entry.rows, operation, DeviceProperties("cpu")) is not None


@pytest.mark.L0
@pytest.mark.parametrize("is_causal", [False, True])
def test_tiles_of_every_head_size_fit_into_shared_memory(is_causal: bool) -> None:
    for depth in range(8, 257, 8):
        for depth_v in range(8, depth + 1, 8):
            dims = ((1, 2, 1024, depth),) * 2 + ((1, 2, 1024, depth_v),)
            kernel = attention.plan(declare(dims=dims, use_causal_mask=is_causal), (), 132)
            made = dict(kernel.kernels[0].spec.constants)
            rows = 64 * made["WARPGROUPS"]
            width, width_v, parts = made["DEPTH"], made["DEPTH_V"], made["OUT_PARTS"]
            q_width = width if parts else max(width, width_v)
            elements = made["Q_SLOTS"] * rows * q_width
            elements += made["STAGES"] * made["BLOCK_N"] * (width + width_v)
            elements += rows * width_v // parts if parts else 0
            # What barriers and reductions need besides is below 2 KiB.
            assert 2 * elements <= 225 * 1024, (depth, depth_v)
            # Barriers of a program: one a group, two a stage, one a tile of Q, five of Triton's.
            named = made["WARPGROUPS"] + 2 * made["STAGES"] + made["Q_SLOTS"]
            assert 5 + named <= 16, (depth, depth_v)


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
import tilewright as tw
from tilewright.engines.compiled import compiler
from tilewright.engines.hopper import attention

made = []
original = triton.compile
triton.compile = lambda *a, **k: made.append(original(*a, **k)) or made[-1]
results = []
for depth, causal, page in json.loads(sys.argv[1]):
    graph = tw.Graph(
        io_data_type="bfloat16", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    kv_dim, options = (1, 4, 1024), {}
    if page:
        # Pages, and a cap that lies on the device.
        kv_dim, count = (100, 4, page), -(-1024 // page)
        cap = graph.tensor((1, 1, 1, 1), data_type="float32")
        options = {
            f"paged_attention_{side}_table": graph.tensor((1, 1, count, 1), data_type="int32")
            for side in "kv"
        }
        options["paged_attention_max_seq_len_kv"] = 1024
        options["score_mod"] = lambda graph, score: graph.mul(graph.tanh(score), cap)
    q = graph.tensor((1, 4, 1024, depth[0]))
    k, v = (graph.tensor((*kv_dim, size)) for size in depth[1:])
    out, stats = graph.sdpa(q, k, v, generate_stats=causal, use_causal_mask=causal, **options)
    out.set_output(True)
    if stats is not None:
        stats.set_output(True).set_data_type("float32")
    graph.validate()
    kernel = attention.plan(graph, (), 132).kernels[0]
    code = compiler.compile_kernel(kernel.spec, (9, 0))
    names = list(kernel.spec.function.arg_names)
    given = [name for name, _ in kernel.spec.types]
    constants = [name for name, _ in kernel.spec.constants]
    results.append({
        "threads": code.threads,
        "shared_bytes": code.shared_bytes,
        "boxes": [list(a.box) for a in kernel.arguments if hasattr(a, "box")],
        "compiled": [
            [meta["block_size"], meta["swizzle"], meta["elem_size"]]
            for meta in made[-1].metadata.tensordesc_meta
        ],
        "stack": made[-1].asm["ptx"].count(".local"),
        "runtime_in_order": given == [n for n in names if n not in constants],
        "all_named": sorted(given + constants) == sorted(names),
        "one_argument_each": len(kernel.arguments) == len(given),
    })
print(json.dumps(results))
"""


def check_compiled(cases: list[tuple[tuple[int, int, int], bool, int]]) -> None:
    """Compile cases of (sizes of q, k and v; is causal; rows of a page or 0)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(cases)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)
    assert len(results) == len(cases)
    for result, (_, _, page) in zip(results, cases, strict=True):
        assert result["threads"] in (12 * 32, 16 * 32)
        assert result["shared_bytes"] <= 227 * 1024 and result["stack"] == 0
        assert result["runtime_in_order"] and result["all_named"] and result["one_argument_each"]
        # The compiler has no swizzle of fewer than 8 rows; addresses are all that it makes there.
        swizzle_128_bytes, item_bytes = 3, 2
        swizzles = [swizzle_128_bytes if box[2] >= 8 else 0 for box in result["boxes"]]
        assert result["compiled"] == [
            [box, swizzle, item_bytes]
            for box, swizzle in zip(result["boxes"], swizzles, strict=True)
        ]
        assert not page or result["boxes"][1][2] == math.gcd(page, 128)


@pytest.mark.L0
def test_a_kernel_compiles_for_sm90_and_is_called_as_compiled() -> None:
    # B18; and the tensor maps move what the compiled copies expect.
    check_compiled([((128, 128, 128), True, 0), ((64, 64, 64), True, 16)])


@pytest.mark.L1
def test_all_kernels_compile_for_sm90_and_are_called_as_compiled() -> None:
    cases = [((64,) * 3, True, 0), ((64,) * 3, False, 0), ((128,) * 3, False, 0)]
    cases += [((256,) * 3, True, 0), ((256,) * 3, False, 0), ((192, 192, 128), True, 0)]
    cases += [((128,) * 3, True, 128), ((256,) * 3, False, 48), ((128,) * 3, False, 1)]
    cases += [((160,) * 3, True, 0)]
    check_compiled(cases)
