"""ops.rms_norm and ops.layer_norm: values and gradients against float64."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.ops import normalization, normalization_custom
from tilewright.ops.plan_cache import plan_count

pytestmark = pytest.mark.L0

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def rms_reference(x: Any, w: Any, b: Any, eps: float = 1e-6, offset: float = 0.0) -> Any:
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if w is None else y * (w + offset)
    return y if b is None else y + b


def layer_reference(x: Any, w: Any, b: Any, eps: float = 1e-5) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def close(actual: torch.Tensor, expected: torch.Tensor, tol: float) -> None:
    expected = expected.detach()
    error = (actual.double() - expected).abs().max().item() if expected.numel() else 0.0
    assert actual.shape == expected.shape
    assert error <= tol * max(expected.abs().max().item() if expected.numel() else 0.0, 1.0), error


FUNCTIONS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (ops.rms_norm, rms_reference),
    (ops.layer_norm, layer_reference),
]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 33), (2, 3, 16), (2, 1, 2, 3, 8)], ids=str)
@pytest.mark.parametrize("parameters", ["none", "weight", "both"])
@pytest.mark.parametrize(("function", "expected"), FUNCTIONS, ids=["rms_norm", "layer_norm"])
def test_values_and_gradients(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    parameters: str,
    function: Callable[..., Any],
    expected: Callable[..., Any],
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    parameter_type = torch.float64 if dtype is torch.float64 else torch.float32
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    made = [
        torch.randn(shape[-1], generator=generator, dtype=parameter_type).requires_grad_()
        for _ in range({"none": 0, "weight": 1, "both": 2}[parameters])
    ]
    w, b = [*made, None, None][:2]
    wide = [t if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    y, y_ref = function(x, w, b), expected(*wide)
    close(y, y_ref, TOLERANCE[dtype])
    grad = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    y.backward(grad)
    y_ref.backward(grad.double())
    for given, reference in zip((x, w, b), wide, strict=True):
        if given is not None and given.requires_grad:
            assert given.grad.dtype is given.dtype
            close(given.grad, reference.grad, 2 * TOLERANCE[dtype])


def test_weight_gradients_accumulate_in_float32() -> None:
    # Field report 12: bf16 input, fp32 weight, gradients from sum() (stride 0) and from [..., ::2].
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(2, 1024, 256, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(256, generator=generator).requires_grad_()
    for loss in (lambda y: y.sum(), lambda y: y[..., ::2].sum()):
        x.grad = weight.grad = None
        loss(ops.rms_norm(x, weight)).backward()
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        loss(rms_reference(*wide, None)).backward()
        # 2,048 rows summed in bf16 would be off by whole units; float32 leaves the input's own
        # rounding, which both sides share.
        assert weight.grad.dtype is torch.float32
        close(weight.grad, wide[1].grad, 1e-5)
        close(x.grad, wide[0].grad, 1e-2)


def test_offset_and_residual() -> None:
    generator = torch.Generator().manual_seed(1)
    x, r = (torch.randn(3, 5, 16, generator=generator).requires_grad_() for _ in range(2))
    w = torch.randn(16, generator=generator).requires_grad_()
    y, total = ops.rms_norm(x, w, offset=1.0, residual=r)
    assert torch.equal(total, x + r)
    wide = [t.detach().double().requires_grad_() for t in (x, r, w)]
    expected = rms_reference(wide[0] + wide[1], wide[2], None, offset=1.0)
    close(y, expected, 1e-5)
    (y.square().sum() + total.sum()).backward()
    (expected.square().sum() + (wide[0] + wide[1]).sum()).backward()
    for given, reference in zip((x, r, w), wide, strict=True):
        close(given.grad, reference.grad, 1e-5)


@pytest.mark.parametrize("function", [ops.rms_norm, ops.layer_norm])
@pytest.mark.parametrize("shape", [(16,), (3, 5, 16)], ids=str)
@pytest.mark.parametrize("residual_type", [torch.bfloat16, torch.float32], ids=str)
def test_residual_without_gradients(
    function: Any, shape: tuple[int, ...], residual_type: torch.dtype
) -> None:
    # Of one type the sum is of the norm's own graph; it is rounded and normalized all the same.
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator).bfloat16()
    r = torch.randn(shape, generator=generator).to(residual_type)
    w = torch.randn(16, generator=generator)
    before = x.clone()
    out = torch.empty(shape, dtype=(x + r).dtype)
    y, total = function(x, w, residual=r, out=out)
    assert torch.equal(total, x + r) and total.dtype is (x + r).dtype and torch.equal(x, before)
    assert y is out
    close(y, function(x + r, w), 0.0)


def test_layouts_and_the_cache() -> None:
    ops.clear_plan_cache()
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(6, 4, 8, generator=generator), torch.randn(8, generator=generator)
    expected = rms_reference(x.double(), w.double(), None)
    wide = torch.full((6, 4, 9), torch.nan)
    wide[..., :8] = x
    # Compact, padded, permuted, then compact again: each right, three plans.
    for view in (x, wide[..., :8], x.transpose(0, 1).contiguous().transpose(0, 1), x):
        close(ops.rms_norm(view, w), expected, 1e-6)
    assert plan_count() == 3
    strided = torch.stack((w, w + 1), 1)[:, 0]
    close(ops.rms_norm(x, strided), expected, 1e-6)
    close(
        ops.rms_norm(x.expand(6, 4, 8)[:1].expand(3, 4, 8), w), expected[:1].expand(3, 4, 8), 1e-6
    )
    out = torch.empty(6, 4, 8)
    assert ops.rms_norm(x, w, out=out) is out
    close(out, expected, 1e-6)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    w = torch.ones(8, requires_grad=True)
    y = ops.layer_norm(x, w, torch.zeros(8))
    y.sum().backward()
    assert y.shape == shape and torch.equal(w.grad, torch.zeros(8))


def test_rows_of_zeros_are_finite() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    for function in (ops.rms_norm, ops.layer_norm):
        x.grad = None
        y = function(x)
        y.sum().backward()
        assert torch.count_nonzero(y) == 0 and torch.isfinite(x.grad).all()


WRONG = [
    (lambda: ops.rms_norm([1.0]), "x: got list"),
    (lambda: ops.rms_norm(torch.zeros(())), "x: shape () has no axis"),
    (lambda: ops.rms_norm(torch.zeros(3, dtype=torch.int64)), "x: data type torch.int64"),
    (lambda: ops.rms_norm(torch.zeros(3), torch.zeros(4)), "weight: shape (4,); expected (3,)"),
    (lambda: ops.layer_norm(torch.zeros(3), torch.zeros(3, 1)), "weight: shape (3, 1) has 2 axes"),
    (lambda: ops.layer_norm(torch.zeros(2, 3), residual=torch.zeros(3)), "residual: shape (3,)"),
    (lambda: ops.rms_norm(torch.zeros(3), torch.zeros(3, device="meta")), "weight: on meta"),
    (lambda: ops.rms_norm(torch.zeros(3), eps=None), "eps: got None; expected a number"),
    (lambda: ops.rms_norm(torch.zeros(3), eps=-1), "eps: got -1; expected a number from 0 up"),
    (
        lambda: ops.layer_norm(torch.zeros(2, 3), out=torch.zeros(1, 3).expand(2, 3)),
        "out: shape (2, 3) with stride (0, 1), whose elements overlap",
    ),
    (
        lambda: ops.rms_norm(torch.zeros(3), out=torch.zeros(3, requires_grad=True)),
        "out: requires grad; expected a tensor without it",
    ),
    (lambda: ops.layer_norm(torch.zeros(3), eps=1e39), "eps: got 1e+39; expected a finite number"),
    (lambda: ops.rms_norm(torch.zeros(3), out=torch.zeros(2)), "out: shape (2,); expected (3,)"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_arguments_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(tw.BindingError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [ops.layer_norm, ops.rms_norm])
def test_a_second_derivative_is_refused(function: Any) -> None:
    # Of a sum, whose own gradient requires none: it is a function of x all the same.
    x = torch.rand(3, 5, requires_grad=True)
    y = function(x, torch.rand(5))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(tw.NotSupportedError, match="_norm: a second derivative"):
        torch.autograd.grad(grad.square().sum(), x)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_child_forked_while_the_cache_is_locked_runs() -> None:
    code = """if True:
        import os, signal, torch
        from tilewright import ops
        from tilewright.ops import plan_cache
        with plan_cache._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                ops.rms_norm(torch.ones(2, 3))
                os._exit(0)
        raise SystemExit(os.waitpid(child, 0)[1])
    """
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("function", [ops.rms_norm, ops.layer_norm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_call_like_an_earlier_one_is_not_checked_again(
    function: Callable[..., Any], has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tw.ops.clear_plan_cache()
    generator = torch.Generator().manual_seed(5)
    x, other = (torch.randn(3, 5, 37, generator=generator) for _ in range(2))
    weight, bias = (torch.randn(37, generator=generator) for _ in range(2))
    given = (weight, bias) if has_bias else (weight,)
    expected = [function(t, *given, engine="aten") for t in (x, other)]
    assert torch.equal(function(x, *given), expected[0])

    def forward(*arguments: Any, **options: Any) -> Any:
        raise LookupError("the long way")

    with monkeypatch.context() as patch:
        for module in (normalization, normalization_custom):
            patch.setattr(module, "norm_forward", forward)
        assert torch.equal(function(other, *given), expected[1])
        learned = torch.nn.Parameter(weight.clone())
        with torch.no_grad():
            assert torch.equal(function(other, learned, *given[1:]), expected[1])
        special: list[Callable[[], Any]] = [
            lambda: function(other, *given, eps=3e-5),
            lambda: function(other.double(), *given),
            lambda: function(other.transpose(0, 1), *given),
            lambda: function(other[..., ::2].contiguous(), *(t[::2].contiguous() for t in given)),
            lambda: function(other[0], *given),
            lambda: function(other, weight.double(), *given[1:]),
            lambda: function(other, *given, residual=other),
            lambda: function(other, *given, out=torch.empty_like(other)),
            lambda: function(other, *given, engine="aten"),
            lambda: function(other, learned, *given[1:]),
        ]
        if has_bias:
            special.append(lambda: function(other, weight, bias.half()))
            special.append(lambda: function(other, weight))
        else:
            special.append(lambda: function(other, weight, bias))
        if function is ops.rms_norm:
            special.append(lambda: function(other, *given, offset=1.0))
        for call in special:
            with pytest.raises(LookupError):
                call()
        for wrong in (True, 0, "1"):
            with pytest.raises((tw.BindingError, LookupError)):
                function(other, *given, eps=wrong)
        tw.ops.clear_plan_cache()
        with pytest.raises(LookupError):
            function(other, *given)
    assert torch.equal(function(other, *given), expected[1])
