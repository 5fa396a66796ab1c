"""Compact tensors of more than 2^32 elements: index times stride needs 64 bits with no wide stride.

Truncated to 32 bits, an offset leads to other valid elements of the same tensor, or, with its sign,
before it. B2. Twins of the kernels whose offsets are 32 bits wide show that the tests can tell.
"""

from __future__ import annotations

import dataclasses
import inspect
import linecache
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.engines.compiled.planned import KernelPlan

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs an NVIDIA GPU"),
]

Storage = Callable[[int], torch.Tensor]
WIDTH = 1024
ROWS = 2**32 // WIDTH + 8
# Where offsets pass 2^31 and 2^32, and both ends.
LOOKED_AT = [
    slice(0, 8),
    slice(2**31 // WIDTH - 4, 2**31 // WIDTH + 4),
    slice(2**32 // WIDTH - 4, ROWS),
]


def operands(large_storage: Storage, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """x of random numbers and y of NaN, bfloat16."""
    size_bytes = 2 * torch.Size(shape).numel()
    x, y = (large_storage(size_bytes).view(torch.bfloat16).view(shape) for _ in range(2))
    x.normal_(generator=torch.Generator("cuda").manual_seed(2))
    return x, y.fill_(torch.nan)


def declared(x: torch.Tensor) -> tuple[Any, Any]:
    graph = tw.Graph(io_data_type=x.dtype, intermediate_data_type="float32")
    return graph, graph.tensor(x.shape, name="x")


def finished(graph: Any, y: Any, pack: dict[str, torch.Tensor]) -> str:
    y.set_output(True).set_name("y")
    graph.build()
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
    graph.execute(pack, workspace)
    torch.cuda.synchronize()
    return str(graph.selected_engine)


def close(y: torch.Tensor, reference: torch.Tensor) -> bool:
    return bool(torch.all((y.double() - reference).abs() <= 2**-8 * reference.abs().max()))


def norm_of_rows(large_storage: Storage) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, scale, y) of a norm that was run."""
    x, y = operands(large_storage, (ROWS, WIDTH))
    scale = torch.rand(1, WIDTH, device="cuda").bfloat16()
    graph, source = declared(x)
    phase = tw.norm_forward_phase.INFERENCE
    made, _ = graph.rmsnorm(
        phase, source, graph.tensor((1, WIDTH), name="scale"), None, graph.tensor_scalar(1e-6)
    )
    assert finished(graph, made, {"x": x, "scale": scale, "y": y}) == "triton"
    return x, scale, y


def check_norm(x: torch.Tensor, scale: torch.Tensor, y: torch.Tensor) -> None:
    for rows in LOOKED_AT:
        part = x[rows].double()
        mean = part.square().mean(-1, keepdim=True)
        assert close(y[rows], part * torch.rsqrt(mean + 1e-6) * scale.double()), rows
    assert not torch.any(torch.isnan(y[:, 0])), "every row is written"


def chain_of_rows(large_storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, y) of a chain that was run."""
    x, y = operands(large_storage, (ROWS, WIDTH))
    graph, source = declared(x)
    assert finished(graph, graph.relu(source), {"x": x, "y": y}) == "triton"
    return x, y


def check_chain(x: torch.Tensor, y: torch.Tensor) -> None:
    for rows in LOOKED_AT:
        assert torch.equal(y[rows], x[rows].relu()), rows
    assert not torch.any(torch.isnan(y[:, 0])), "every row is written"


def test_rows_of_a_norm(large_storage: Storage) -> None:
    check_norm(*norm_of_rows(large_storage))


def test_elements_of_a_chain(large_storage: Storage) -> None:
    check_chain(*chain_of_rows(large_storage))


def narrow_twin(plan: KernelPlan) -> KernelPlan:
    """The plan with kernels of the same text whose offsets wrap at 2^32."""
    kernels = []
    for kernel in plan.kernels:
        spec = kernel.spec
        types = tuple((name, "u32" if kind == "i64" else kind) for name, kind in spec.types)
        twin = dataclasses.replace(spec, function=narrowed(spec.function), types=types)
        kernels.append(dataclasses.replace(kernel, spec=twin))
    return KernelPlan(tuple(kernels), plan.scratch)


def narrowed(function: Any) -> Any:
    """The kernel's text with uint32 for int64, and the same of the addresses that it asks for."""
    names = dict(function.fn.__globals__)
    for helper in (names.get("place"), function):
        if helper is None:
            continue
        text = inspect.getsource(helper.fn)
        assert "tl.int64" in text
        text = text.replace("tl.int64", "tl.uint32")
        file = f"<twin of {helper.fn.__name__}>"
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        exec(compile(text, file, "exec"), names)
    return names[function.fn.__name__]


@pytest.mark.parametrize("family", ["normalization", "pointwise"])
def test_a_twin_with_narrow_offsets_is_caught(
    family: str, large_storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewright.engines.triton import normalization, pointwise

    module = {"normalization": normalization, "pointwise": pointwise}[family]
    planned = module.plan
    # What the twin is made of must not be found by anybody else.
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    monkeypatch.setattr(module, "plan", lambda *a: narrow_twin(planned(*a)))
    ways: dict[str, tuple[Any, Any]] = {
        "normalization": (norm_of_rows, check_norm),
        "pointwise": (chain_of_rows, check_chain),
    }
    run, check = ways[family]
    made = run(large_storage)
    # The rows before come out right, also those that the last ones are taken for.
    with pytest.raises(AssertionError, match=re.escape(str(LOOKED_AT[-1]))):
        check(*made)


def test_positions_of_a_rotation(large_storage: Storage) -> None:
    heads, positions, depth = 2**12 + 1, 2**13, 128
    x, y = operands(large_storage, (1, heads, positions, depth))
    freqs = torch.rand(1, 1, positions, depth // 2, device="cuda") * 6
    graph, source = declared(x)
    angles = graph.tensor(freqs.shape, data_type="float32", name="freqs")
    pack = {"x": x, "freqs": freqs, "y": y}
    assert finished(graph, graph.rope(source, angles), pack) == "triton"
    cosine, sine = freqs.double().cos()[0], freqs.double().sin()[0]
    for head in (0, heads // 2, heads - 2, heads - 1):
        first, second = x[0, head].double().chunk(2, -1)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        assert close(y[0, head], torch.cat(turned, -1)[0]), head
    assert not torch.any(torch.isnan(y[..., 0])), "every position is written"
