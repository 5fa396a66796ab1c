"""Rotary position embedding and its adjoint.

input (B, H, S, D); freqs are angles, broadcastable to (B, 1, S, R) or with R / 2 as last
extent. With h = R / 2 and angle a_i, for i < h:

    out[i]     = output_scale (x[i] cos a_i - x[i + h] sin a_i)
    out[i + h] = output_scale (x[i + h] cos a_(i+h) + x[i] sin a_(i+h))

Elements from R on are multiplied by output_scale alone. The angle is converted to float32
first, and cosine and sine are those of that float32 number, over the full range, rounded to
float32: they are taken in float64, where argument reduction is exact enough for every float32,
so the tables do not depend on which vector path the library takes. Products and sums are
float32, each rounded (float64 for a float64 input, the angle still rounded to float32). The
adjoint is the transposed rotation: the sine of the other half's angle, with the sign swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.engines.aten import casts
from tilewright.engines.aten.dense import implements_dense
from tilewright.engines.aten.registry import Kernel, Operands
from tilewright.errors import NotSupportedError
from tilewright.graph.tensor import Tensor as TensorRecord

Tensor = torch.Tensor


@implements_dense("rope")
def prepare_rope(operation: Any, device: torch.device) -> Kernel:
    """The rotation of ``input`` into ``out``, which may be one buffer with it."""
    return _prepare(operation, "input", device, is_adjoint=False)


@implements_dense("rope_backward")
def prepare_rope_backward(operation: Any, device: torch.device) -> Kernel:
    """The adjoint of the rotation, of ``dY`` into ``out``, which may be one buffer with it."""
    return _prepare(operation, "dY", device, is_adjoint=True)


def _prepare(operation: Any, port: str, device: torch.device, *, is_adjoint: bool) -> Kernel:
    source, freqs, out = operation.inputs[port], operation.inputs["freqs"], operation.outputs["out"]
    if 0 in source.dim:
        return lambda inputs, outputs: None
    rotated = _rotated_extent(operation, source, freqs)
    if out.dim != source.dim:
        raise NotSupportedError(
            f"tensor {out.label()} has dim {out.dim}; a rotation of {source.dim} keeps its dim"
        )
    if out.data_type.is_sub_byte:
        raise NotSupportedError(
            f"tensor {out.label()} has data type {out.data_type.name}; a rotation does not write "
            "packed elements"
        )
    half, tail = rotated // 2, source.dim[-1] - rotated
    scale = float(operation.output_scale)
    dtype = casts.compute_dtype((source, out))
    load, load_table = casts.loader(source, dtype, device), _table_loader(freqs, dtype, device)
    store = casts.storer(out)
    plain = casts.is_plain(out, dtype)
    second = half if freqs.dim[-1] == rotated else 0

    def run(inputs: Operands, outputs: Operands) -> None:
        x, output = load(inputs[port]), outputs["out"]
        cos, sin = load_table(inputs["freqs"])
        low_cos, low_sin = cos.narrow(-1, 0, half), sin.narrow(-1, 0, half)
        high_cos, high_sin = cos.narrow(-1, second, half), sin.narrow(-1, second, half)
        low, high = x.narrow(-1, 0, half), x.narrow(-1, half, half)
        # Every product is formed before the first write: out may be the input's own buffer.
        if is_adjoint:
            low_parts = low * low_cos, high * high_sin
            high_parts = high * high_cos, low * low_sin
        else:
            low_parts = low * low_cos, high * low_sin
            high_parts = high * high_cos, low * high_sin
        add, subtract = (torch.sub, torch.add) if is_adjoint else (torch.add, torch.sub)
        write(output.narrow(-1, 0, half), subtract, low_parts)
        write(output.narrow(-1, half, half), add, high_parts)
        if tail:
            rest = x.narrow(-1, rotated, tail)
            store(output.narrow(-1, rotated, tail), rest if scale == 1.0 else rest * scale)

    def write(target: Tensor, combine: Callable[..., Tensor], parts: tuple[Tensor, Tensor]) -> None:
        if plain:
            combine(*parts, out=target)
            if scale != 1.0:
                target.mul_(scale)
            return
        value = combine(*parts)
        store(target, value if scale == 1.0 else value.mul_(scale))

    return run


def _rotated_extent(operation: Any, source: TensorRecord, freqs: TensorRecord) -> int:
    """R, checked against the input and the angles."""
    rotated = int(operation.rope_dim) or (source.dim[-1] if source.dim else 0)
    if len(source.dim) != 4 or rotated % 2 or not 0 < rotated <= source.dim[-1]:
        raise NotSupportedError(
            f"tensor {source.label()} has dim {source.dim} and rope_dim is "
            f"{operation.rope_dim}; a rotation takes rank 4 (B, H, S, D) and an even rope_dim of "
            "at most D (0 means D)"
        )
    batch, heads, length, _ = source.dim
    fits = (
        len(freqs.dim) == 4
        and freqs.dim[0] in (1, batch)
        and freqs.dim[1] in (1, heads)
        and freqs.dim[2] in (1, length)
        and freqs.dim[3] in (rotated, rotated // 2)
    )
    if not fits:
        raise NotSupportedError(
            f"tensor {freqs.label()} has dim {freqs.dim}; expected ({batch} or 1, 1, {length}, "
            f"{rotated} or {rotated // 2}) for an input of dim {source.dim}"
        )
    return rotated


def _table_loader(
    freqs: TensorRecord, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from the angles, rounded to float32, to their cosines and sines in ``dtype``."""
    if not freqs.data_type.is_floating:
        raise NotSupportedError(
            f"tensor {freqs.label()} has data type {freqs.data_type.name}; angles are floating"
        )
    load = casts.loader(freqs, torch.float32, device)

    def tables(operand: Tensor) -> tuple[Tensor, Tensor]:
        angle = load(operand).to(torch.float64)
        return torch.cos(angle).to(dtype), torch.sin(angle).to(dtype)

    return tables
