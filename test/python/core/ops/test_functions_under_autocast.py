"""Under ``torch.autocast`` the functions have the types of PyTorch's, and cast their operands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from tilewright import ops
from tilewright.errors import BindingError, NotSupportedError

pytestmark = pytest.mark.L0

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
LENGTHS = torch.tensor([3, 5])
SUMS = torch.tensor([0, 3, 8])
TABLE = torch.tensor([[0, 1], [1, 0]])


def attention(q: Any, k: Any, v: Any) -> Any:
    return ops.sdpa(q, k, v, causal=True, deterministic=True)


def packed(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
    return ops.sdpa_varlen(q, k, v, SUMS.to(q.device), SUMS.to(q.device), 5, 5, deterministic=True)


def paged(q: Any, k: Any, v: Any) -> Any:
    # Two pages of four tokens.
    k, v = (each.reshape(2, 4, -1, each.shape[-1]) for each in (k[0], v[0]))
    return ops.sdpa_paged(q, k, v, TABLE.to(q.device), LENGTHS.to(q.device))


def newest(q: Any, k: Any, v: Any) -> Any:
    return ops.sdpa_decode(q, k, v, seqlens_kv=LENGTHS.to(q.device))


def step(x: Any, weight: Any, bias: Any) -> Any:
    state = torch.ones(2, 6, 2, device=x.device)
    y = ops.conv1d_causal_update(x, state, weight, bias)
    # What is updated in place keeps its type.
    assert state.dtype is torch.float32
    return y


def added(x: Any, weight: Any, bias: Any, residual: Any) -> Any:
    return ops.layer_norm(x, weight, bias, residual=residual)[0]


HEADS = {name: (2, 4, 8, 16) for name in "qkv"}
ROWS = {"x": (2, 3, 6), "weight": (6,), "bias": (6,)}
CONVOLVED = {"x": (2, 5, 6), "weight": (6, 3), "bias": (6,)}
# Function, and the shapes of the operands that are cast to the region's type.
LOWERED = {
    "sdpa": (attention, HEADS),
    "sdpa_varlen": (packed, HEADS),
    "sdpa_paged": (paged, HEADS),
    "sdpa_decode": (newest, HEADS),
    "linear": (ops.linear, {"x": (2, 3, 6), "weight": (4, 6), "bias": (4,)}),
    "conv1d_causal": (ops.conv1d_causal, CONVOLVED),
    "conv1d_causal_update": (step, CONVOLVED | {"x": (2, 6)}),
}
WIDENED = {
    "rms_norm": (ops.rms_norm, ROWS),
    "layer_norm": (added, ROWS | {"residual": (2, 3, 6)}),
    "group_norm": (
        lambda x, weight, bias: ops.group_norm(x, 2, weight, bias),
        {"x": (2, 4, 5), "weight": (4,), "bias": (4,)},
    ),
}


def draw(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def cast(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}


@contextlib.contextmanager
def region(device: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """As ``torch.autocast``, which turns itself off where there is no such device."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def compare(function: Callable[..., Any], shapes: Any, inside: Any, like: torch.dtype) -> None:
    """A call and its gradients in ``inside`` are those of operands in the type ``like``."""
    given = draw(shapes)
    expected_of = cast(given, like)
    is_differentiable = function not in (paged, newest, step)
    with torch.set_grad_enabled(is_differentiable):
        expected = function(**expected_of)
        with inside:
            made = function(**given)
            if is_differentiable:
                made.sum().backward()
    assert made.dtype is like
    assert torch.equal(made, expected)
    if is_differentiable:
        expected.sum().backward()
        for name, tensor in given.items():
            assert tensor.grad is not None and tensor.grad.dtype is torch.float32, name
            assert torch.equal(tensor.grad, expected_of[name].grad.float()), name


@pytest.mark.parametrize("name", LOWERED)
def test_operands_are_cast_to_the_type_of_the_region(name: str) -> None:
    function, shapes = LOWERED[name]
    dtype = torch.float16 if name == "linear" else torch.bfloat16
    compare(function, shapes, torch.autocast(DEVICE, dtype=dtype), dtype)


@pytest.mark.parametrize("name", WIDENED)
def test_norms_are_float32_on_a_gpu_and_of_their_operands_type_on_a_cpu(name: str) -> None:
    function, shapes = WIDENED[name]
    compare(function, shapes, torch.autocast(DEVICE, dtype=torch.bfloat16), torch.float32)
    low = draw(shapes, torch.bfloat16)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert function(**low).dtype is (torch.float32 if HAS_GPU else torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_types_are_those_of_pytorch(device: str, dtype: torch.dtype) -> None:
    # Of fakes, which need no GPU: what autocast does is asked of PyTorch itself.
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(2, 4, 8, 16, device=device, dtype=dtype)
        shapes = ((2, 4, 8), (8,), (4,), (8, 8), (8, 1))
        x, w, channel, square, angles = (
            torch.empty(shape, device=device, dtype=dtype) for shape in shapes
        )
        pairs = {
            "sdpa": (
                lambda: ops.sdpa(q, q, q),
                lambda: functional.scaled_dot_product_attention(q, q, q),
            ),
            "linear": (lambda: ops.linear(x, square), lambda: functional.linear(x, square)),
            # On a GPU PyTorch 2.11 leaves RMSNorm its type; later versions have it as the others.
            "rms_norm": (lambda: ops.rms_norm(x, w), lambda: functional.layer_norm(x, (8,), w)),
            "layer_norm": (
                lambda: ops.layer_norm(x, w, w),
                lambda: functional.layer_norm(x, (8,), w, w),
            ),
            "group_norm": (
                lambda: ops.group_norm(x, 2, channel, channel),
                lambda: functional.group_norm(x, 2, channel, channel),
            ),
            "rope": (lambda: ops.rope(q, angles, angles, rotary_dim=2), lambda: q * q),
        }
        for name, (ours, theirs) in pairs.items():
            assert ours().dtype is dtype, name
            with region(device):
                assert ours().dtype is theirs().dtype, name


def test_a_call_with_out_has_the_types_that_it_was_given() -> None:
    q, k, v = (tensor.detach() for tensor in draw(HEADS).values())
    out = torch.empty_like(q)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert ops.sdpa(q, k, v, out=out).dtype is torch.float32
    assert torch.equal(out, ops.sdpa(q, k, v))


def test_a_region_of_another_device_changes_nothing() -> None:
    q, k, v = draw(HEADS, device="cpu").values()
    with region("cuda"):
        assert ops.sdpa(q, k, v).dtype is torch.float32


def test_wrong_arguments_are_named_in_a_region_too() -> None:
    nowhere = torch.ones(1, 1, 2, 4, device="meta")
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        with pytest.raises(BindingError, match="q: got list"):
            ops.sdpa([1.0], torch.ones(1), torch.ones(1))  # type: ignore[arg-type]
        with pytest.raises(BindingError, match=r"q: data type torch\.int32"):
            ops.sdpa(*(torch.ones(1, 1, 2, 4, dtype=torch.int32, device=DEVICE),) * 3)
        # A type of device that knows no regions.
        with pytest.raises(NotSupportedError, match="device meta"):
            ops.sdpa(nowhere, nowhere, nowhere)
        with pytest.raises(TypeError, match="positional"):
            ops.sdpa(*(torch.ones(1, 1, 2, 4, device=DEVICE),) * 4)  # type: ignore[call-arg]


def test_what_was_compiled_outside_is_compiled_anew_in_a_region() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.linear(ops.rms_norm(x), weight)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, weight = (tensor.to(DEVICE) for tensor in (torch.ones(4, 8), torch.ones(8, 8)))
    assert compiled(x, weight).dtype is torch.float32
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert compiled(x, weight).dtype is torch.bfloat16
    assert compiled(x, weight).dtype is torch.float32
