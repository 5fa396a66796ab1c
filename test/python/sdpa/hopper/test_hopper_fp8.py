"""Hopper FP8 attention without its GPU: what is taken and declined, and that it compiles."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import tilewright as tw
from tilewright.engines.hopper import attention_fp8
from tilewright.engines.hopper.attention_fp8_spec import SCALES, read_spec
from tilewright.launch.prepared import Operand
from tilewright.planning.devices import DeviceProperties
from tilewright.planning.rows import admit
from tilewright.planning.table import engine_by_name

DIM = (2, 4, 256, 64)


def declare(
    *,
    dims: tuple[Any, Any, Any] = (DIM, DIM, DIM),
    strides: tuple[Any, Any, Any] = (None, None, None),
    types: tuple[Any, ...] = ("fp8_e4m3",) * 3,
    out: str = "bfloat16",
    stats: bool = True,
    maxima: bool = True,
    by_value: bool = False,
    **options: Any,
) -> Any:
    graph = tw.Graph(
        io_data_type=tw.data_type.FP8_E4M3,
        intermediate_data_type="float32",
        handle=tw.create_handle("cpu"),
    )
    q, k, v = (
        graph.tensor(
            dim,
            **({} if stride is None else {"stride": stride}),
            name=name,
            data_type=getattr(tw.data_type, kind.upper()),
        )
        for dim, stride, name, kind in zip(dims, strides, "qkv", types, strict=True)
    )
    scales = [
        graph.tensor((1, 1, 1, 1), data_type="float32", name=name, is_pass_by_value=by_value)
        for name in SCALES
    ]
    options = {
        name: value(graph) if callable(value) and name != "score_mod" else value
        for name, value in options.items()
    }
    o, statistics, *amaxes = graph.sdpa_fp8(
        q, k, v, *scales, generate_stats=stats, **{"attn_scale": 0.125, **options}
    )
    o.set_output(True).set_name("o").set_data_type(getattr(tw.data_type, out.upper()))
    if statistics is not None:
        statistics.set_output(True).set_data_type("float32")
    for amax in amaxes:
        amax.set_output(maxima).set_data_type("float32")
    graph.validate()
    return graph


@pytest.mark.L0
def test_bounds_are_those_of_the_kernels_own_rows() -> None:
    causal = read_spec(declare(use_causal_mask=True).operations[0])
    assert (causal.right, causal.shifts) == (0, False)
    shorter = ((2, 4, 100, 64), DIM, DIM)
    bottom = read_spec(declare(dims=shorter, use_causal_mask_bottom_right=True).operations[0])
    # Row 0 is row 156 of the keys: it sees keys 0 to 156.
    assert (bottom.right, bottom.shifts) == (156, False)
    wide = read_spec(declare(right_bound=255, sliding_window_length=256).operations[0])
    assert wide.right is None, "bounds that hide nothing are none"


ODD = (2, 4, 256, 56)
DECLINES: dict[str, tuple[dict[str, Any], str]] = {
    "the other 8-bit type": (
        {"types": ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2")},
        r"'v' \(v\) has data type FP8_E5M2; the FP8 kernels take FP8_E4M3",
    ),
    "O in float32": ({"out": "float"}, r"'o' \(O\) has data type FLOAT"),
    "bias": (
        {"bias": lambda graph: graph.tensor((1, 1, 256, 256), name="b", data_type="float32")},
        r"tensor 'b' \(bias\): the FP8 kernels take Amax_O",
    ),
    "alibi": ({"use_alibi_mask": True}, "use_alibi_mask"),
    "score program": (
        {"score_mod": lambda graph, score: graph.tanh(score)},
        "score_mod",
    ),
    "sliding window": (
        {"use_causal_mask": True, "sliding_window_length": 40},
        r"the left bound \(sliding window\) 40 hides keys",
    ),
    "wide heads": ({"dims": ((2, 4, 256, 192),) * 3}, "head sizes 192 and 192"),
    "few rows": ({"dims": ((2, 4, 16, 64), DIM, DIM)}, "16 query rows"),
    "odd heads": ({"dims": (ODD, ODD, ODD)}, "steps by 56 bytes; .* multiples of 16"),
    "expanded": (
        {"strides": (None, (0, 256 * 64, 64, 1), None)},
        r"tensor 'k' \(k\): axis 0 steps by 0 bytes",
    ),
    "negative scale": ({"attn_scale": -1.0}, "attn_scale is -1.0"),
    "scales by value": (
        {"by_value": True},
        r"'descale_q' \(descale_q\) is passed by value",
    ),
}


@pytest.mark.L0
@pytest.mark.parametrize("name", DECLINES)
def test_a_decline_names_the_tensor_and_the_rule(name: str) -> None:
    options, reason = DECLINES[name]
    graph = declare(**options)
    with pytest.raises(tw.NotSupportedError, match=reason):
        attention_fp8.propose(graph, 132)


@pytest.mark.L0
def test_maxima_are_zeroed_first_and_only_if_somebody_asked() -> None:
    # L2: every launch is in the plan.
    kernels = attention_fp8.plan(declare(), (), 132).kernels
    assert [kernel.spec.name for kernel in kernels] == [
        "clear_amax",
        "attention_fp8_forward",
    ]
    cleared = kernels[0].arguments
    assert len(set(cleared)) == 2 and all(isinstance(each, Operand) for each in cleared)
    bare = attention_fp8.plan(declare(maxima=False), (), 132).kernels
    assert [kernel.spec.name for kernel in bare] == ["attention_fp8_forward"]
    constants = dict(bare[0].spec.constants)
    assert not constants["HAS_AMAX_S"] and not constants["HAS_AMAX_O"]


@pytest.mark.L0
def test_tiles_follow_the_lengths_and_the_knobs_tell_them() -> None:
    # Short tiles under a right bound go to two consumers, and all of wide heads.
    for width, keys, causal, rows, is_long in (
        (128, 2048, True, 128, False),
        (128, 2056, True, 128, True),
        (128, 1032, False, 192, True),
        (128, 1024, False, 192, False),
        (64, 2048, True, 128, False),
        (64, 2056, True, 192, False),
        (64, 2056, False, 192, False),
    ):
        graph = declare(dims=((2, 4, keys, width),) * 3, use_causal_mask=causal)
        (proposal,) = attention_fp8.propose(graph, 132)
        assert dict(proposal.knobs)[tw.knob_type.TILE_M] == rows, (width, keys, causal)
        constants = dict(attention_fp8.plan(graph, proposal.knobs, 132).kernels[-1].spec.constants)
        assert constants["IS_LONG"] == is_long, (width, keys, causal)
    # Consumers that take turns do so by a barrier each, which leaves fewer for stages.
    for keys, causal, most in ((1032, False, 3), (256, False, 4), (256, True, 3)):
        graph = declare(dims=((2, 4, keys, 128),) * 3, use_causal_mask=causal)
        attention_fp8.plan(graph, ((tw.knob_type.STAGES, most),), 132)
        with pytest.raises(tw.NotSupportedError, match="stages take more barriers than the 16"):
            attention_fp8.plan(graph, ((tw.knob_type.STAGES, most + 1),), 132)


@pytest.mark.L0
def test_only_sm90_is_admitted() -> None:
    # G3: a lower bound is not the device.
    entry = engine_by_name("hopper")
    assert entry is not None
    operation = declare().operations[0]
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        reason = admit(entry.rows, operation, DeviceProperties("cuda", 0, "made up", capability))
        assert (reason is None) == (capability == (9, 0)), (capability, reason)
    assert admit(entry.rows, operation, DeviceProperties("cpu")) is not None


COMPILE = """
import json, sys
import triton
import tilewright as tw
from tilewright.engines.compiled import compiler
from tilewright.engines.hopper import attention_fp8
from tilewright.engines.hopper.attention_fp8_spec import SCALES

made = []
original = triton.compile
triton.compile = lambda *a, **k: made.append(original(*a, **k)) or made[-1]
results = []
for depth, causal, out, keys in json.loads(sys.argv[1]):
    graph = tw.Graph(
        io_data_type=tw.data_type.FP8_E4M3,
        intermediate_data_type="float32",
        handle=tw.create_handle("cpu"),
    )
    q, k, v = (graph.tensor((1, 4, keys, depth)) for _ in range(3))
    scales = [graph.tensor((1, 1, 1, 1), data_type="float32") for _ in SCALES]
    o, stats, *maxima = graph.sdpa_fp8(
        q, k, v, *scales, generate_stats=causal, use_causal_mask=causal
    )
    o.set_output(True).set_data_type(getattr(tw.data_type, out))
    for tensor in (stats, *maxima):
        if tensor is not None:
            tensor.set_output(True).set_data_type("float32")
    graph.validate()
    for kernel in attention_fp8.plan(graph, (), 132).kernels:
        code = compiler.compile_kernel(kernel.spec, (9, 0))
        names = list(kernel.spec.function.arg_names)
        given = [name for name, _ in kernel.spec.types]
        constants = [name for name, _ in kernel.spec.constants]
        results.append({
            "name": code.name,
            "shared_bytes": code.shared_bytes,
            "boxes": [
                [list(a.box), a.swizzle_bytes] for a in kernel.arguments if hasattr(a, "box")
            ],
            "compiled": [
                [meta["block_size"], {1: 32, 2: 64, 3: 128}[meta["swizzle"]]]
                for meta in getattr(made[-1].metadata, "tensordesc_meta", None) or []
            ],
            "ptx": [
                line for line in made[-1].asm["ptx"].splitlines()
                if any(word in line for word in (".local", "wgmma.mma", "ldmatrix", "stmatrix"))
            ],
            "runtime_in_order": given == [n for n in names if n not in constants],
            "all_named": sorted(given + constants) == sorted(names),
            "one_argument_each": len(kernel.arguments) == len(given),
        })
print(json.dumps(results))
"""


def check_compiled(cases: list[tuple[int, bool, str, int]]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(cases)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)
    assert [each["name"] for each in results] == [
        "clear_amax",
        "attention_fp8_forward",
    ] * len(cases)
    for result in results:
        assert result["runtime_in_order"] and result["all_named"] and result["one_argument_each"]
        assert result["shared_bytes"] <= 227 * 1024
        assert result["compiled"] == result["boxes"]
        assert not any(".local" in line for line in result["ptx"])
        if result["name"] == "clear_amax":
            continue
        text = "\n".join(result["ptx"])
        # Both products in 8 bits, and V turned round by the instructions that transpose.
        assert set(re.findall(r"wgmma\S*\.f32\.(\w+\.\w+)", text)) == {"e4m3.e4m3"}
        assert "ldmatrix.sync.aligned.m8n8.x4.trans" in text and "stmatrix" in text


@pytest.mark.L0
def test_a_kernel_compiles_for_sm90_and_is_called_as_compiled() -> None:
    # B18; and the tensor maps move what the compiled copies expect.
    check_compiled([(128, False, "BFLOAT16", 4096)])


@pytest.mark.L1
def test_all_kernels_compile_for_sm90_and_are_called_as_compiled() -> None:
    cases = [
        (128, True, "FP8_E4M3", 1024),
        (128, False, "BFLOAT16", 1024),
        (128, True, "FP8_E4M3", 4096),
        (64, True, "HALF", 1024),
        (64, True, "HALF", 4096),
        (64, False, "FP8_E4M3", 1024),
    ]
    check_compiled(cases)
