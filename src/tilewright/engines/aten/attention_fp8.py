"""Attention on FP8 tensors with one float32 scale each, computed in float32.

Forward: S = attn_scale descale_q descale_k Q K^T; P8 = P scale_s rounded to V's type;
O = descale_s descale_v P8 V, stored times scale_o; Amax_S = max |P|, Amax_O = max |O|.

Backward: dV = descale_s descale_dO P8^T dO; dP = descale_dO descale_v dO V^T;
Delta = descale_o descale_dO rowsum(dO * O); dS = attn_scale P (dP - Delta), amax_dP = max |dS|;
dS8 = dS scale_dP rounded to dO's type; dQ = descale_dP descale_k dS8 K; dK = descale_dP descale_q
dS8^T Q; each stored times its scale, with its largest magnitude before that.

Rounding is to nearest even and saturates. Mixed FP8 types are taken as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.engines.aten.attention_backward import RoundedGradients
from tilewright.engines.aten.attention_compose import (
    BackwardRecipe,
    ForwardRecipe,
    compose_backward,
    compose_forward,
)
from tilewright.engines.aten.attention_forward import RoundedProducts
from tilewright.engines.aten.attention_parts import PartBuilder
from tilewright.engines.aten.attention_spec import read_spec
from tilewright.engines.aten.registry import Kernel, implements
from tilewright.torch_dtypes import to_torch

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]
Number = float | Tensor


def rounding_to(data_type: DataType) -> Callable[[Tensor], Tensor]:
    """A function that rounds float32 values to an FP8 type and back, saturating; NaN stays NaN."""
    limit, dtype = data_type.layout.largest, to_torch(data_type)
    return lambda values: values.clamp(-limit, limit).to(dtype).to(values.dtype)


@implements("sdpa_fp8")
def prepare_sdpa_fp8(operation: Any, device: torch.device) -> Kernel:
    """FP8 attention forward."""
    return compose_fp8_forward(operation, device, device.type == "cpu")


@implements("sdpa_fp8_backward")
def prepare_sdpa_fp8_backward(operation: Any, device: torch.device) -> Kernel:
    """FP8 attention backward."""
    return compose_fp8_backward(operation, device, device.type == "cpu")


def compose_fp8_forward(operation: Any, device: torch.device, on_host: bool) -> Kernel:
    """The composition with P rounded to V's type."""
    spec = read_spec(operation)
    round_p = rounding_to(operation.inputs["v"].data_type)

    def begin(builder: PartBuilder, inputs: Operands) -> tuple[Number, RoundedProducts]:
        def scale(port: str) -> Number:
            return builder.scalar(inputs, port)

        rounded = RoundedProducts(
            round_p=round_p,
            scale_p=scale("scale_s"),
            descale_o=scale("descale_s") * scale("descale_v"),
            scale_o=scale("scale_o"),
            amax_p=torch.zeros((), dtype=spec.compute, device=device),
            amax_o=torch.zeros((), dtype=spec.compute, device=device),
        )
        return scale("descale_q") * scale("descale_k"), rounded

    return compose_forward(operation, spec, device, on_host, ForwardRecipe(begin=begin))


def compose_fp8_backward(operation: Any, device: torch.device, on_host: bool) -> Kernel:
    """The composed backward with P rounded to V's type and dS to dO's."""
    spec = read_spec(operation)
    round_p = rounding_to(operation.inputs["v"].data_type)
    round_d_s = rounding_to(operation.inputs["dO"].data_type)

    def begin(builder: PartBuilder, inputs: Operands) -> tuple[Number, RoundedGradients]:
        def scale(port: str) -> Number:
            return builder.scalar(inputs, port)

        d_o, d_p = scale("descale_dO"), scale("descale_dP")
        rounded = RoundedGradients(
            round_p=round_p,
            round_d_s=round_d_s,
            attn_scale=builder.scale(inputs),
            delta=scale("descale_o") * d_o,
            d_p=scale("descale_v") * d_o,
            scale_p=scale("scale_s"),
            scale_d_s=scale("scale_dP"),
            d_q=d_p * scale("descale_k"),
            d_k=d_p * scale("descale_q"),
            d_v=scale("descale_s") * d_o,
            amax_d_s=torch.zeros((), dtype=spec.compute, device=device),
        )
        return scale("descale_q") * scale("descale_k"), rounded

    recipe = BackwardRecipe(
        begin=begin, scales={port: f"scale_{port}" for port in ("dQ", "dK", "dV")}
    )
    return compose_backward(operation, spec, device, on_host, recipe)
