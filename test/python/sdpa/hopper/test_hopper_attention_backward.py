"""Attention backward on Hopper: what is declined, that it compiles, and values on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from attention_on_hopper import SINKS, in_reach
from needing_hopper import needs_hopper

import tilewright as tw
from tilewright.engines.hopper.attention_backward_spec import read_backward
from tilewright.errors import NotSupportedError
from tilewright.launch.workspace import plan_workspace

BOTTOM_RIGHT = tw.diagonal_alignment.BOTTOM_RIGHT
Masks = dict[str, Any]


def declare(
    dims: dict[str, tuple[int, ...]],
    dtype: str = "bfloat16",
    device: str | None = None,
    strides: dict[str, tuple[int, ...]] | None = None,
    scale: float = 0.1,
    **options: Any,
) -> Any:
    """A graph of one backward; ``sink`` asks for a sink and its gradient."""
    handle = None if device is None else tw.create_handle(device)
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32", handle=handle)
    strides = strides or {}
    named = {
        name: graph.tensor(dim, **({"stride": strides[name]} if name in strides else {}), name=name)
        for name, dim in dims.items()
        if name != "sink"
    }
    stats = graph.tensor((*dims["q"][:3], 1), data_type="float32", name="stats")
    if "sink" in dims:
        options["sink_token"] = graph.tensor(dims["sink"], data_type="float32", name="sink")
        options["dSink_token"] = graph.tensor(dims["sink"], data_type="float32", name="dSink")
        options["dSink_token"].set_output(True)
    made = graph.sdpa_backward(
        *(named[name] for name in ("q", "k", "v", "o", "dO")), stats, attn_scale=scale, **options
    )
    for tensor, name in zip(made, ("dQ", "dK", "dV"), strict=True):
        tensor.set_output(True).set_name(name)
    return graph


def dims_of(
    rows: int = 256, keys: int = 256, depth: int = 64, heads: tuple[int, int] = (4, 2)
) -> dict[str, tuple[int, ...]]:
    q, k = (2, heads[0], rows, depth), (2, heads[1], keys, depth)
    return {"q": q, "k": k, "v": k, "o": q, "dO": q}


DECLINES: list[tuple[str, Masks, Masks, str]] = [
    ("float32", {}, {"dtype": "float32"}, "has data type FLOAT"),
    ("depth", {"depth": 264}, {}, "head sizes 264 and 264; the kernels take up to 256"),
    ("short", {"rows": 63}, {}, "63 rows and 256 keys"),
    ("fixed order", {}, {"use_deterministic_algorithm": True}, "Triton's kernels are quicker"),
    ("alibi", {}, {"use_alibi_mask": True, "use_causal_mask": True}, "use_alibi_mask"),
    (
        "step",
        {},
        {"strides": {"q": (4 * 256 * 65, 256 * 65, 65, 1)}},
        "multiples of 16 bytes",
    ),
]


@pytest.mark.L0
@pytest.mark.parametrize(
    ("extents", "options", "reason"),
    [row[1:] for row in DECLINES],
    ids=[row[0] for row in DECLINES],
)
def test_a_decline_names_the_tensor_or_the_rule(
    extents: Masks, options: Masks, reason: str
) -> None:
    graph = declare(dims_of(**extents), **options)
    graph.validate()
    with pytest.raises(NotSupportedError) as caught:
        read_backward(graph.operations[0])
    assert reason in str(caught.value)


@pytest.mark.L0
@pytest.mark.parametrize(
    ("depth", "scale", "is_fixed", "names"),
    [
        (64, 0.1, False, ["attention_backward", "finish_rows"]),
        (128, -0.1, False, ["attention_backward", "finish_rows"]),
        (128, 0.1, True, ["attention_backward", "attention_backward_query"]),
        (128, 0.0, False, ["attention_backward", "attention_backward_query"]),
        (256, 0.1, False, ["attention_backward_wide", "attention_backward_query"]),
    ],
)
def test_where_dq_is_added_up(depth: int, scale: float, is_fixed: bool, names: list[str]) -> None:
    from tilewright.engines.hopper import attention_backward

    graph = declare(dims_of(depth=depth), scale=scale, use_deterministic_algorithm=is_fixed)
    graph.validate()
    kernels = attention_backward.plan(graph, (), 132).kernels
    assert [kernel.spec.name for kernel in kernels] == ["prepare_rows", *names]
    (proposal,) = attention_backward.propose(graph, 132)
    has_sums = "finish_rows" in names
    assert (tw.numeric_note.NONDETERMINISTIC in proposal.numeric_notes) == has_sums


@pytest.mark.L0
def test_bounds_are_in_rows_of_the_tensors_and_vanish_where_they_hide_nothing() -> None:
    for masks, expected in (
        ({"use_causal_mask": True}, (None, 0)),
        ({"use_causal_mask_bottom_right": True}, (None, 44)),
        ({"sliding_window_length": 100, "use_causal_mask": True}, (100, 0)),
        ({"sliding_window_length": 400}, (None, None)),
        ({"diagonal_band_right_bound": 299}, (None, None)),
        ({"diagonal_band_left_bound": 60, "diagonal_alignment": BOTTOM_RIGHT}, (16, None)),
    ):
        graph = declare(dims_of(256, 300), **masks)
        graph.validate()
        spec = read_backward(graph.operations[0])
        assert (spec.left, spec.right) == expected


COMPILE = """
import json, sys
sys.path.insert(0, {folder!r})
from test_hopper_attention_backward import declare, dims_of
from tilewright.engines.compiled.compiler import compile_kernel
from tilewright.engines.hopper import attention_backward

results = []
for extents, options in (
    (dict(depth=128), dict()),
    (dict(depth=128), dict(use_causal_mask=True, use_deterministic_algorithm=True)),
    (dict(depth=256), dict(use_causal_mask=True)),
    (dict(depth=128, rows=300, keys=300), dict(use_causal_mask=True)),
    (dict(depth=64), dict(use_causal_mask=True, sliding_window_length=99, dtype="float16")),
):
    graph = declare(dims_of(**extents) | dict(sink=(1, 4, 1, 1)), **options)
    graph.validate()
    for kernel in attention_backward.plan(graph, (), 132).kernels:
        names = list(kernel.spec.function.arg_names)
        given = [name for name, _ in kernel.spec.types]
        constants = [name for name, _ in kernel.spec.constants]
        code = compile_kernel(kernel.spec, (9, 0))
        results.append(dict(
            kernel=kernel.spec.name,
            bytes=len(code.image),
            shared=code.shared_bytes,
            runtime_in_order=given == [n for n in names if n not in constants],
            all_named=sorted(given + constants) == sorted(names),
            one_argument_each=len(kernel.arguments) == len(given),
        ))
print(json.dumps(results))
"""


@pytest.mark.L1
def test_every_kernel_compiles_and_is_called_as_compiled() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    source = COMPILE.format(folder=os.path.dirname(__file__))
    child = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)
    names = {result["kernel"] for result in results}
    assert names == {
        "prepare_rows",
        "attention_backward",
        "attention_backward_query",
        "attention_backward_wide",
        "finish_rows",
        "finish_sinks",
    }
    for result in results:
        assert result["bytes"] > 1000 and result["shared"] <= 227 * 1024
        assert result["runtime_in_order"] and result["all_named"] and result["one_argument_each"]


MASKS: dict[str, Masks] = {
    "open": {},
    "causal": {"use_causal_mask": True},
    "bottom_right": {"use_causal_mask_bottom_right": True},
    "window": {"use_causal_mask": True, "sliding_window_length": 70},
    "band": {
        "diagonal_band_left_bound": 90,
        "diagonal_band_right_bound": 33,
        "diagonal_alignment": BOTTOM_RIGHT,
    },
}
SHAPES = [
    (256, 256, 128, (2, 2)),
    (300, 300, 64, (4, 2)),
    (129, 400, 128, (3, 1)),
    (500, 640, 96, (2, 1)),
    (1024, 1024, 64, (2, 2)),
    (64, 65, 40, (1, 1)),
    (300, 300, 256, (4, 2)),
]


def visible(rows: int, keys: int, masks: Masks) -> torch.Tensor:
    i = torch.arange(rows, device="cuda")[:, None]
    j = torch.arange(keys, device="cuda")[None]
    is_low = masks.get("diagonal_alignment") is BOTTOM_RIGHT
    if is_low or "use_causal_mask_bottom_right" in masks:
        i = i + keys - rows
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda")
    if "use_causal_mask" in masks or "use_causal_mask_bottom_right" in masks:
        seen &= j <= i
    if "diagonal_band_right_bound" in masks:
        seen &= j <= i + masks["diagonal_band_right_bound"]
    left = masks.get("sliding_window_length", masks.get("diagonal_band_left_bound"))
    return seen if left is None else seen & (j > i - left)


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients(shape: Any, mask: str, dtype: str) -> None:
    check_gradients(shape, mask, dtype)


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize("mask", ["window", "band"])
@pytest.mark.parametrize("shape", [(300, 300, 64, (4, 2)), (500, 640, 40, (2, 1))], ids=str)
def test_gradients_in_a_fixed_order(shape: Any, mask: str) -> None:
    check_gradients(shape, mask, "bfloat16", use_deterministic_algorithm=True)


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize("sinks", SINKS[1:], ids=str)
@pytest.mark.parametrize("shape", [(300, 300, 64, (4, 2)), (300, 300, 128, (4, 4))], ids=str)
def test_gradients_beside_sinks_far_from_any_score(shape: Any, sinks: Any) -> None:
    check_gradients(shape, "causal", "bfloat16", sinks=sinks)


def check_gradients(
    shape: Any, mask: str, dtype: str, *, sinks: tuple[float, ...] = (), **options: Any
) -> None:
    rows, keys, depth, heads = shape
    masks = MASKS[mask]
    kind = getattr(torch, dtype)
    dims = dims_of(rows, keys, depth, heads) | {"sink": (1, heads[0], 1, 1)}
    generator = torch.Generator("cuda").manual_seed(rows)
    pack = {
        name: torch.randn(dims[name], generator=generator, device="cuda").to(kind)
        for name in ("q", "k", "v", "dO")
    }
    pack["sink"] = torch.randn(dims["sink"], generator=generator, device="cuda")
    if sinks:
        pack["sink"] = torch.tensor(sinks, device="cuda").view(dims["sink"])
    leaves = [pack[n].double().requires_grad_() for n in ("q", "k", "v", "sink")]
    q, k, v, sink = leaves
    group = heads[0] // heads[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * 0.1
    scores = scores.masked_fill(~visible(rows, keys, masks), -torch.inf)
    stats = torch.logaddexp(scores.logsumexp(-1, keepdim=True), sink)
    o = (scores - stats).exp() @ v.repeat_interleave(group, 1)
    o.backward(pack["dO"].double())
    pack |= {"o": o.detach().to(kind), "stats": in_reach(stats.detach(), log2=False).float()}
    expected = dict(zip(("dQ", "dK", "dV", "dSink"), (x.grad for x in leaves), strict=True))
    graph = declare(dims, dtype, "cuda", **masks, **options)
    graph.build()
    assert graph.selected_engine == "hopper"
    for name, value in expected.items():
        out_kind = torch.float32 if name == "dSink" else kind
        pack[name] = torch.full(value.shape, torch.nan, dtype=out_kind, device="cuda")
    size = graph.get_workspace_size()
    workspace = torch.full((size + 64,), 0xAB, dtype=torch.uint8, device="cuda")
    graph.execute(pack, workspace)
    assert (workspace[size:] == 0xAB).all()
    for name, value in expected.items():
        error = (pack[name].double() - value).abs().max().item()
        assert error <= 2 * torch.finfo(kind).eps * max(1.0, value.abs().max().item()), name


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize("depth", [128, 256])
def test_a_fixed_order_repeats_bit_for_bit(depth: int) -> None:
    dims = dims_of(2048, 2048, depth, (8, 4))
    pack = {n: torch.randn(dims[n], device="cuda").bfloat16() for n in ("q", "k", "v", "dO", "o")}
    pack["stats"] = torch.full((2, 8, 2048, 1), 8.0, device="cuda")
    made = {"dQ": pack["q"], "dK": pack["k"], "dV": pack["v"]}
    pack |= {name: torch.empty_like(source) for name, source in made.items()}
    graph = declare(dims, device="cuda", use_causal_mask=True, use_deterministic_algorithm=True)
    graph.build()
    assert graph.selected_engine == "hopper"
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    graph.execute(pack, workspace)
    first = {name: pack[name].clone() for name in made}
    for _ in range(50):
        for name in made:
            pack[name].fill_(torch.nan)
        graph.execute(pack, workspace)
        assert all(torch.equal(pack[name], value) for name, value in first.items())


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize("depth", [64, 128])
def test_many_programs_meet_at_every_barrier(depth: int) -> None:
    # A consumer that is ahead of the other one must not be taken for it: that hung, now and then.
    dims = dims_of(4096, 4096, depth, (16, 16))
    pack = {n: torch.randn(dims[n], device="cuda").bfloat16() for n in ("q", "k", "v", "dO", "o")}
    pack["stats"] = torch.full((2, 16, 4096, 1), 9.0, device="cuda")
    pack |= {n: torch.empty_like(pack["q"]) for n in ("dQ", "dK", "dV")}
    graph = declare(dims, device="cuda", use_causal_mask=True)
    graph.build()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    for _ in range(20):
        graph.execute(pack, workspace)
    torch.cuda.synchronize()
    assert torch.isfinite(pack["dQ"]).all()


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize(
    ("depth", "is_fixed"), [(64, False), (128, False), (128, True)], ids=["64", "128", "fixed"]
)
def test_keys_that_no_early_row_sees_may_hold_nan(depth: int, is_fixed: bool) -> None:
    dims = dims_of(256, 256, depth, (1, 1))
    pack = {n: torch.randn(dims[n], device="cuda").bfloat16() for n in ("q", "k", "v", "dO", "o")}
    pack["stats"] = torch.full((2, 1, 256, 1), 5.0, device="cuda")
    pack |= {n: torch.empty_like(pack["q"]) for n in ("dQ", "dK", "dV")}
    graph = declare(dims, device="cuda", use_causal_mask=True, use_deterministic_algorithm=is_fixed)
    graph.build()
    assert graph.selected_engine == "hopper"
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    pack["k"][:, :, 200], pack["v"][:, :, 200] = torch.nan, torch.inf
    graph.execute(pack, workspace)
    assert torch.isfinite(pack["dQ"][:, :, :200]).all()
    assert torch.isnan(pack["dQ"][:, :, 200:]).all(), "rows that see the key are not finite"


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize("depth", [64, 128, 256])
def test_keys_that_no_row_sees_may_hold_nan(depth: int) -> None:
    dims = dims_of(100, 256, depth, (1, 1))
    pack = {n: torch.randn(dims[n], device="cuda").bfloat16() for n in ("q", "k", "v", "dO", "o")}
    pack["stats"] = torch.full((2, 1, 100, 1), 5.0, device="cuda")
    pack |= {n: torch.empty_like(pack[n[1:].lower()]) for n in ("dQ", "dK", "dV")}
    pack["k"][:, :, 100:], pack["v"][:, :, 100:] = torch.nan, torch.nan
    graph = declare(dims, device="cuda", use_causal_mask=True)
    graph.build()
    assert graph.selected_engine == "hopper"
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    graph.execute(pack, workspace)
    assert torch.isfinite(pack["dQ"]).all()
    for name in ("dK", "dV"):
        assert torch.isfinite(pack[name]).all()
        assert torch.all(pack[name][:, :, 100:] == 0.0), name


@pytest.mark.L0
@needs_hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("scale", [0.1, -2.0])
def test_parts_of_row_statistics_keep_the_bits_of_a_float32(dtype: str, scale: float) -> None:
    from tilewright.engines.hopper import attention_backward

    kind, rows, padded = getattr(torch, dtype), 300, 384
    dims = dims_of(rows, rows, 64, (2, 2))
    generator = torch.Generator("cuda").manual_seed(3)
    pack = {
        n: torch.randn(dims[n], generator=generator, device="cuda").to(kind)
        for n in ("q", "k", "v", "dO", "o")
    }
    spread = torch.randn((2, 2, rows, 1), generator=generator, device="cuda")
    pack["stats"] = spread * 10 ** torch.linspace(-3, 4, rows, device="cuda")[:, None]
    pack["stats"][:, :, 7] = -torch.inf
    pack |= {n: torch.empty_like(pack["q"]) for n in ("dQ", "dK", "dV")}
    graph = declare(dims, dtype, "cuda", scale=scale)
    graph.build()
    assert graph.selected_engine == "hopper"
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    graph.execute(pack, workspace)
    pieces = plan_workspace(attention_backward.plan(graph, (), 132).scratch).pieces
    held = [
        workspace[piece.offset_bytes :][: 4 * padded * size].view(of)
        for piece, size, of in zip(
            pieces, (4, 4, 256, 32, 32), (torch.float32,) * 3 + (kind,) * 2, strict=True
        )
    ]
    units = [1.0] * 3 if dtype == "bfloat16" else [2.0 ** (11 - 11 * i) for i in range(4)]
    units_of = torch.tensor(units + [0.0] * (16 - len(units)), dtype=torch.float64, device="cuda")
    lse, delta = (
        torch.nan_to_num(part.view(4, padded, 16).double(), neginf=-3e38, posinf=3e38) @ units_of
        for part in held[3:]
    )
    wanted = -pack["stats"].double().view(4, rows) / scale
    hidden = torch.zeros(padded, dtype=torch.bool, device="cuda")
    hidden[7], hidden[rows:] = True, True
    assert torch.all(lse[:, hidden] * scale < -1e37), "exp2 of it is 0"
    error = (lse[:, :rows] - wanted)[:, ~hidden[:rows]].abs()
    assert torch.all(error <= wanted[:, ~hidden[:rows]].abs() * 2**-21 + 1e-12)
    plain = held[1].view(4, padded).double()
    assert torch.all((delta + plain).abs() <= plain.abs() * 2**-22 + 1e-12)
