"""Mathematical functions for kernels: CUDA's own on a device, torch's under the interpreter.

Triton's plain ``exp``, ``sin`` and ``/`` are approximations; these are libdevice's, over the full
range (sines reduce large angles by Payne and Hanek 1983), and IEEE division and roots. Triton's
interpreter has no libdevice, and rounds to bfloat16 by truncation, so there each has a twin. All
take float32 or float64 blocks; libdevice takes subnormal float32 operands as zero.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _product(a, b):
    # ptxas contracts no product that names its rounding.
    if a.dtype.is_fp64():
        result = tl.inline_asm_elementwise(
            "mul.rn.f64 $0, $1, $2;", "=d,d,d", [a, b], dtype=tl.float64, is_pure=True, pack=1
        )
    else:
        result = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _quotient(a, b):
    if a.dtype.is_fp64():
        result = a / b
    else:
        result = tl.div_rn(a, b)
    return result


@triton.jit
def _ratio(a, b):
    return a / b


@triton.jit
def _quick_gate(a):
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [a * -1.4426950408889634],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _quick_tail(a):
    # Abramowitz and Stegun (1964), 7.1.26.
    z = a * 0.7071067811865476
    t = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;",
        "=f,f",
        [z * 0.3275911 + 1.0],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    power = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [a * a * -0.7213475204444817],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    series = t * 0.5307027145 - 0.7265760135
    series = series * t + 0.7107068705
    series = series * t - 0.1422483680
    series = series * t + 0.1274147960
    return series * t * power


@triton.jit
def _ceil(a):
    # libdevice's makes zeros of subnormal numbers, whose ceiling is 1.
    if a.dtype.is_fp64():
        result = tl.ceil(a)
    else:
        result = tl.inline_asm_elementwise(
            "cvt.rpi.f32.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _floor(a):
    if a.dtype.is_fp64():
        result = tl.floor(a)
    else:
        result = tl.inline_asm_elementwise(
            "cvt.rmi.f32.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
        )
    return result


@triton.jit
def _root(a):
    if a.dtype.is_fp64():
        result = tl.sqrt(a)
    else:
        result = tl.sqrt_rn(a)
    return result


@triton.jit
def _cast(a, TYPE: tl.constexpr):
    return a.to(TYPE)


if IS_INTERPRETED:
    import numpy
    import torch
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    # Elements whose torch type numpy has no name for: how their bits are kept there.
    _BIT_TYPES = {
        tl.bfloat16: (torch.bfloat16, torch.int16),
        tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
        tl.float8e5: (torch.float8_e5m2, torch.uint8),
    }
    _PLAIN_TYPES = {
        tl.float16: torch.float16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.int1: torch.bool,
        tl.int8: torch.int8,
        tl.uint8: torch.uint8,
        tl.int32: torch.int32,
        tl.int64: torch.int64,
    }

    def _to_torch(value: Any) -> torch.Tensor:
        data, kind = value.handle.data, value.dtype.scalar
        if kind in _BIT_TYPES:
            target, bits = _BIT_TYPES[kind]
            signed = data.view("int16") if bits is torch.int16 else data
            return torch.from_numpy(signed.copy()).view(target)
        return torch.from_numpy(data.copy())

    def _from_torch(result: torch.Tensor, kind: Any, like: Any) -> Any:
        if kind in _BIT_TYPES:
            result = result.view(_BIT_TYPES[kind][1])
        data = result.contiguous().numpy().view(_get_np_dtype(kind))
        block = tl.block_type(kind, like.shape) if like.type.is_block() else kind
        return tl.tensor(TensorHandle(data, kind), block)

    def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(*operands: Any) -> Any:
            given = [_to_torch(operand) for operand in operands]
            shaped = max(operands, key=lambda operand: len(operand.shape))
            return _from_torch(function(*given), operands[0].dtype.scalar, shaped)

        return call

    def cast(value: Any, kind: Any) -> Any:
        kind = getattr(kind, "value", kind)
        torch_type = _BIT_TYPES[kind][0] if kind in _BIT_TYPES else _PLAIN_TYPES[kind]
        return _from_torch(_to_torch(value).to(torch_type), kind, value)

    def row_reductions() -> tuple[Callable[..., Any], ...]:
        """Sum, product, maximum and minimum of a block along its second axis."""

        def along(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
            def call(block: Any) -> Any:
                result = function(_to_torch(block), 1, keepdim=True)
                kind = block.dtype.scalar
                data = result.numpy()
                return tl.tensor(TensorHandle(data, kind), tl.block_type(kind, list(data.shape)))

            return call

        return tuple(map(along, (torch.sum, torch.prod, torch.amax, torch.amin)))

    product = _by_torch(torch.mul)
    quotient = ratio = _by_torch(torch.div)
    quick_gate = _by_torch(torch.sigmoid)
    quick_tail = _by_torch(lambda a: 0.5 * torch.erfc(a * 0.7071067811865476))
    root = _by_torch(torch.sqrt)
    ceil, floor = _by_torch(torch.ceil), _by_torch(torch.floor)
    exp, expm1 = _by_torch(torch.exp), _by_torch(torch.expm1)
    log, log1p = _by_torch(torch.log), _by_torch(torch.log1p)
    sin, cos, tan = _by_torch(torch.sin), _by_torch(torch.cos), _by_torch(torch.tan)
    tanh, erf = _by_torch(torch.tanh), _by_torch(torch.erf)
    power = _by_torch(torch.pow)
    # torch's own gives up where the quotient is beyond its type.
    remainder = _by_torch(lambda a, b: torch.from_numpy(numpy.fmod(a.numpy(), b.numpy())))
else:
    cast = _cast
    ceil, floor = _ceil, _floor
    product, quotient, root = _product, _quotient, _root
    # Of float32 alone: a / b, good to two last places; 1 / (1 + exp(-a)); and what a normal
    # distribution has beyond a >= 0, good to 1e-7.
    ratio, quick_gate, quick_tail = _ratio, _quick_gate, _quick_tail
    exp, expm1, log, log1p = libdevice.exp, libdevice.expm1, libdevice.log, libdevice.log1p
    sin, cos, tan = libdevice.sin, libdevice.cos, libdevice.tan
    tanh, erf = libdevice.tanh, libdevice.erf
    power, remainder = libdevice.pow, libdevice.fmod


@triton.jit
def to_odd(value):
    """float64 to float32, toward zero, with the last bit set if anything was lost.

    One more rounding to 16 or 8 bits is then the only one (Boldo and Melquiond 2008).
    """
    near = value.to(tl.float32)
    back = near.to(tl.float64)
    bits = near.to(tl.int32, bitcast=True)
    toward_zero = tl.where(tl.abs(back) > tl.abs(value), bits - 1, bits)
    lost = (back != value) & (tl.abs(value) < float("inf"))
    return tl.where(lost, toward_zero | 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def narrow(value, TYPE: tl.constexpr):
    """float32 or float64 to a floating type, rounded once, to nearest even."""
    if value.dtype.is_fp64() and TYPE.primitive_bitwidth < 32:
        result = cast(to_odd(value), TYPE)
    else:
        result = cast(value, TYPE)
    return result
