"""ATen's fused attention, where it means the same as the composition.

CPU: ``_scaled_dot_product_flash_attention_for_cpu`` gives O and the natural log-sum-exp; its causal
mask is top-left, its ``attn_mask`` is added, and it maps query heads to key heads itself. It
misreads a last axis that is not contiguous, divides by zero on empty extents, needs Dv = D, gives a
log-sum-exp of 0 to rows that see nothing, and lets NaN and infinity in hidden values through
(0 * NaN): a result that is not finite is therefore computed again by the composition.

Half and bfloat16 are converted to float32 first: its own 16-bit form rounds P.

CUDA, half and bfloat16, forward: ``_scaled_dot_product_flash_attention``. Under a causal mask it
too multiplies hidden values by 0; what is not finite in V is taken out before, and a running sum of
it is added after, which puts it into exactly the rows that see it. No value is read by the host.
The backward sums dQ in no fixed order there, so it is composed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.engines.aten.attention_spec import AttentionSpec
from tilewright.engines.aten.casts import storer

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]
# Returns False where the composition must compute the call instead.
Attempt = Callable[[Operands, Operands], bool]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
LOG2_E = 1.0 / math.log(2.0)
_CUDA_TYPES = {DataType.HALF, DataType.BFLOAT16}
_CUDA_MAX_DEPTH = 256
_BIAS_TYPES = (DataType.FLOAT, DataType.DOUBLE, DataType.HALF, DataType.BFLOAT16)


def fused_forward(op: Any, spec: AttentionSpec, device: torch.device) -> Attempt | None:
    """A function that fills O and Stats of a call, or None if ATen's does not mean the same."""
    if device.type == "cuda":
        return _cuda_forward(op, spec)
    if not _serves(op, spec, device) or set(op.outputs) - {"O", "Stats"}:
        return None
    causal, scale, compute = spec.right is not None, spec.scale, spec.compute
    has_bias, store = spec.has_bias, _results_storer(op, spec)
    may_hide = causal or has_bias

    def attempt(inputs: Operands, outputs: Operands) -> bool:
        q, k, v = (readable(inputs[port], compute) for port in ("q", "k", "v"))
        mask = inputs["bias"].to(compute) if has_bias else None
        factor = float(inputs["attn_scale"]) if scale is None else scale
        o, stats = _flash(q, k, v, 0.0, causal, attn_mask=mask, scale=factor)
        if may_hide and not is_finite(o):
            return False
        # What it gives for a row that sees nothing.
        if has_bias and bool((stats == 0.0).any()):
            return False
        store(outputs, o, stats)
        return True

    return attempt


def fused_backward(op: Any, spec: AttentionSpec, device: torch.device) -> Attempt | None:
    """A function that fills dQ, dK and dV of a call, or None if ATen's does not mean the same."""
    if not _serves(op, spec, device) or set(op.outputs) - {"dQ", "dK", "dV"}:
        return None
    causal, scale, compute = spec.right is not None, spec.scale, spec.compute
    has_bias = spec.has_bias
    stores = [(port, storer(op.outputs[port])) for port in ("dQ", "dK", "dV")]

    def attempt(inputs: Operands, outputs: Operands) -> bool:
        q, k, v, o, d_o = (readable(inputs[port], compute) for port in ("q", "k", "v", "o", "dO"))
        stats = inputs["stats"].squeeze(-1)
        if has_bias and not is_finite(stats):
            return False
        mask = inputs["bias"].to(compute) if has_bias else None
        factor = float(inputs["attn_scale"]) if scale is None else scale
        found = _flash_backward(
            d_o, q, k, v, o, stats.to(compute), 0.0, causal, attn_mask=mask, scale=factor
        )
        if (causal or has_bias) and not all(map(is_finite, found)):
            return False
        for (port, store), gradient in zip(stores, found, strict=True):
            store(outputs[port], gradient)
        return True

    return attempt


def _cuda_forward(op: Any, spec: AttentionSpec) -> Attempt | None:
    types = {op.inputs[port].data_type for port in ("q", "k", "v")}
    if len(types) != 1 or not types <= _CUDA_TYPES or set(op.outputs) - {"O", "Stats"}:
        return None
    if not _means_the_same(spec) or spec.has_bias or spec.scale is None:
        return None
    causal = spec.right is not None
    if spec.depth % 8 or spec.depth > _CUDA_MAX_DEPTH or (causal and spec.rows != spec.keys):
        return None
    scale, group = spec.scale, spec.heads_q // spec.heads_kv
    store = _results_storer(op, spec)

    def attempt(inputs: Operands, outputs: Operands) -> bool:
        q, k, v = (
            operand if operand.stride(3) == 1 else operand.contiguous()
            for operand in (inputs["q"], inputs["k"], inputs["v"])
        )
        values = v.masked_fill(~torch.isfinite(v), 0.0) if causal else v
        o, stats = _flash_cuda(q, k, values, 0.0, causal, False, scale=scale)[:2]
        if causal:
            seen = (v - values).cumsum(2)
            o = o + (seen if group == 1 else seen.repeat_interleave(group, 1))
        store(outputs, o, stats)
        return True

    return attempt


def _results_storer(op: Any, spec: AttentionSpec) -> Callable[[Operands, Tensor, Tensor], None]:
    """A function (outputs, o, log-sum-exp of rows) that stores O, and Stats if declared."""
    has_stats, factor = "Stats" in op.outputs, LOG2_E if spec.stats_log2 else 1.0
    store_o = storer(op.outputs["O"])

    def store(outputs: Operands, o: Tensor, stats: Tensor) -> None:
        store_o(outputs["O"], o)
        if has_stats:
            stats = stats.unsqueeze(-1)
            outputs["Stats"].copy_(stats if factor == 1.0 else stats * factor)

    return store


def readable(operand: Tensor, compute: torch.dtype) -> Tensor:
    """The operand in the compute type, with rows that a BLAS takes: packed, and apart."""
    operand = operand.to(compute)
    if operand.stride(3) == 1 and operand.stride(2) >= operand.shape[3]:
        return operand
    # Not contiguous(): that keeps whatever strides an axis of extent 1 has.
    return operand.clone(memory_format=torch.contiguous_format)


def reads_scores_alone(op: Any, spec: AttentionSpec, device: torch.device) -> bool:
    """True if the CPU's function serves the call but for a band and lengths."""
    if device.type != "cpu" or not spec.only_masked or spec.depth != spec.depth_v:
        return False
    if 0 in (spec.batch, spec.rows, spec.keys, spec.depth):
        return False
    if spec.scale is None and op.inputs["attn_scale"].is_pass_by_value:
        return False
    return not spec.has_bias or op.inputs["bias"].data_type in _BIAS_TYPES


def _serves(op: Any, spec: AttentionSpec, device: torch.device) -> bool:
    return reads_scores_alone(op, spec, device) and _means_the_same(spec)


def _means_the_same(spec: AttentionSpec) -> bool:
    if not spec.plain or spec.depth != spec.depth_v:
        return False
    if 0 in (spec.batch, spec.rows, spec.keys, spec.depth):
        return False
    causal = spec.right == 0 and spec.left is None
    if spec.banded and not causal:
        return False
    return not (spec.banded and spec.bottom_right and spec.rows != spec.keys)


def is_finite(values: Tensor) -> bool:
    """True if no element is NaN or infinite; a finite sum that overflows says False too."""
    return math.isfinite(values.sum().item())
