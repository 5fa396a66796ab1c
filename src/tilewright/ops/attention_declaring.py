"""How attention's torch operands are declared in a graph: layouts, packed sequences, masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor
from tilewright.ops.attention_records import AttentionOptions, Call
from tilewright.ops.declaring import alignment_of
from tilewright.ops.plan_cache import Operands

# Packed operands (T, H, D) and the prefix sums that say where each sequence starts.
_PACKED = {"q": "cu_q", "o": "cu_q", "do": "cu_q", "dq": "cu_q", "stats": "cu_q", "gate": "cu_q"}
_PACKED |= {"k": "cu_kv", "v": "cu_kv", "dk": "cu_kv", "dv": "cu_kv"}


def stepped(packed: torch.Tensor) -> torch.Tensor:
    """A packed operand whose tokens are distinct in storage: prefix sums need a step to count."""
    return packed.contiguous() if packed.dim() == 3 and packed.stride(0) == 0 else packed


def _layout(
    name: str, tensor: torch.Tensor, call: Call
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Declared dim and stride of an operand, and the elements a prefix sum counts (1: dense)."""
    if not call.is_packed or name not in _PACKED:
        return tuple(tensor.shape), tuple(tensor.stride()), 1
    longest = call.options.max_q if _PACKED[name] == "cu_q" else call.options.max_kv
    batch = call.operands[_PACKED[name]].shape[0] - 1
    length = longest or 0
    if name == "stats":
        token_major = call.options.stats_token_major
        token, head = tensor.stride() if token_major else tensor.stride()[::-1]
        heads = tensor.shape[1] if token_major else tensor.shape[0]
        return (batch, heads, length, 1), (max(length * token, 1), head, token, 1), token
    token, head, element = tensor.stride()
    dim = (batch, tensor.shape[1], length, tensor.shape[2])
    return dim, (max(length * token, 1), head, token, element), token


def declare_operand(
    graph: DeclaredGraph,
    name: str,
    tensor: torch.Tensor,
    call: Call,
    declared: Mapping[str, Tensor],
) -> Tensor:
    """Declare one operand; the prefix sums that it is counted by are ``declared`` before."""
    dim, stride, unit = _layout(name, tensor, call)
    offset = declared[_PACKED[name]] if call.is_packed and name in _PACKED else None
    by_value = name in ("seed", "offset") and tensor.device.type == "cpu"
    return graph.tensor(
        dim,
        stride,
        tensor.dtype,
        name=name,
        is_pass_by_value=by_value,
        ragged_offset=offset,
        ragged_offset_multiplier=max(unit, 1),
        alignment_value=alignment_of(tensor),
    )


def declare_inputs(graph: DeclaredGraph, call: Call, inputs: Operands) -> dict[str, Tensor]:
    """Declare the operands of a call, by name."""
    declared: dict[str, Tensor] = {}
    prefixes_first = sorted(inputs, key=lambda name: not name.startswith("cu_"))
    for name in prefixes_first:
        declared[name] = declare_operand(graph, name, inputs[name], call, declared)
    return declared


def set_output_like(
    made: Tensor | None, name: str, buffer: torch.Tensor, call: Call, declared: Mapping[str, Tensor]
) -> None:
    """Make ``made`` an output with the name, layout and type of ``buffer``.

    Raises:
        NotSupportedError: if the operation does not make it.
    """
    if made is None:
        raise NotSupportedError(f"attention makes no {name}")
    dim, stride, unit = _layout(name, buffer, call)
    made.set_output(True).set_name(name).set_data_type(buffer.dtype)
    made.set_dim(dim).set_stride(stride)
    made.alignment_value = alignment_of(buffer)
    if call.is_packed:
        made.set_ragged_offset(declared[_PACKED[name]])
        made.set_ragged_offset_multiplier(max(unit, 1))


def gated_output(
    graph: DeclaredGraph,
    made: Tensor | None,
    buffer: torch.Tensor,
    call: Call,
    declared: Mapping[str, Tensor],
) -> Tensor:
    """The product of O, which is stored nowhere and lies as ``buffer`` would, and its gate.

    Raises:
        NotSupportedError: if the operation does not make O.
    """
    if made is None:
        raise NotSupportedError("attention makes no o")
    set_output_like(made, "o", buffer, call, declared)
    made.set_output(False).set_name("").set_data_type("float32")
    return graph.mul(made, graph.sigmoid(declared["gate"]))


def total_lengths(call: Call) -> dict[str, Any]:
    """What packed operands bound the sums of lengths by: a grid need not hold every longest one."""
    if not call.is_packed:
        return {}
    return {
        "max_total_seq_len_q": call.operands["q"].shape[0],
        "max_total_seq_len_kv": call.operands["k"].shape[0],
    }


def shared_arguments(options: AttentionOptions, declared: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keyword arguments that forward and backward share."""
    left, right = options.window
    if options.causal:
        right = 0
    bottom_right = options.align == "bottom_right"
    arguments: dict[str, Any] = {
        "attn_scale": options.scale,
        "use_alibi_mask": options.alibi,
        "diagonal_alignment": (
            diagonal_alignment.BOTTOM_RIGHT if bottom_right else diagonal_alignment.TOP_LEFT
        ),
        # The window lets row i see key i - left; the bound hides col <= row - bound.
        "diagonal_band_left_bound": None if left is None else left + 1,
        "diagonal_band_right_bound": right,
        "bias": declared.get("bias"),
        "sink_token": declared.get("sink"),
        "seq_len_q": declared.get("seqlens_q"),
        "seq_len_kv": declared.get("seqlens_kv"),
        "cu_seq_len_q": declared.get("cu_q"),
        "cu_seq_len_kv": declared.get("cu_kv"),
        "use_padding_mask": "seqlens_kv" in declared or "cu_kv" in declared,
    }
    if options.dropout_p:
        arguments["dropout"] = (options.dropout_p, declared["seed"], declared["offset"])
    if options.soft_cap is not None:
        arguments["score_mod"] = _soft_cap(options.soft_cap, declared["q"].data_type)
    return arguments


def _soft_cap(cap: float, data_type: DataType) -> Any:
    """score -> cap * tanh(score / cap), as Gemma 2 (2024) defines it."""
    # Scores of float64 operands are float64, and a float32 reciprocal would not be exact enough.
    kept = DataType.DOUBLE if data_type is DataType.DOUBLE else DataType.FLOAT

    def score_mod(graph: DeclaredGraph, score: Tensor) -> Tensor:
        small = graph.mul(score, graph.tensor_scalar(1.0 / cap, kept))
        return graph.mul(graph.tanh(small), graph.tensor_scalar(float(cap), kept))

    return score_mod
