"""What an FP8 attention operation declares, in the Hopper kernels' words. Pure; needs no Triton.

Whatever the kernels do not do is declined here, by name, so that another engine takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.dtypes import DataType
from tilewright.engines.hopper.attention_spec import MIN_ROWS
from tilewright.engines.hopper.bounds import LENGTHS
from tilewright.engines.hopper.declared import (
    Declared,
    declared,
    ports_of,
    require_countable,
)
from tilewright.engines.hopper.operand_rules import require_packed_sink
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.launch.tensor_maps import map_decline_reason

OUTPUT_TYPES = (DataType.FP8_E4M3, DataType.BFLOAT16, DataType.HALF)
MAX_HEAD_SIZE = 128
SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
MAXIMA = ("Amax_S", "Amax_O")
_PORTS = frozenset(
    {"q", "k", "v", "sink_token", "O", "Stats", *SCALES, *MAXIMA, *LENGTHS["q"], *LENGTHS["kv"]}
)


@dataclass(frozen=True)
class AttentionFp8Spec(Declared):
    """One sdpa_fp8 operation that the kernels take.

    Bounds are told as in ``attention_spec.AttentionSpec``; there is none on the left.
    """

    scale: float
    stats_log2: bool


def read_spec(operation: Operation) -> AttentionFp8Spec:
    """The spec of a validated sdpa_fp8 operation.

    Raises:
        NotSupportedError: naming the tensor or the attribute, and what is taken.
    """
    title = operation.title()
    ports = ports_of(operation)
    _check_features(title, operation, ports)
    _check_operands(title, ports)
    extents = operation.extents()
    if max(extents.depth, extents.depth_v) > MAX_HEAD_SIZE:
        raise NotSupportedError(
            f"{title}: head sizes {extents.depth} and {extents.depth_v}; the FP8 kernels take up "
            f"to {MAX_HEAD_SIZE}"
        )
    if extents.rows < MIN_ROWS:
        raise NotSupportedError(
            f"{title}: {extents.rows} query rows; the kernels take {MIN_ROWS} and more"
        )
    require_countable(operation)
    scale = 1.0 if operation.attn_scale is None else operation.attn_scale
    if not scale > 0:
        raise NotSupportedError(f"{title}: attn_scale is {scale}; the kernels take positive ones")
    fields = declared(operation, ports)
    if fields["left"] is not None:
        raise NotSupportedError(
            f"{title}: the left bound (sliding window) {operation.left_bound} hides keys; the FP8 "
            "kernels take a right bound alone"
        )
    return AttentionFp8Spec(
        **fields,
        scale=float(scale),
        stats_log2=operation.stats_use_log2,
    )


def _check_features(title: str, operation: Operation, ports: Mapping[str, Tensor]) -> None:
    flags = {
        "use_alibi_mask": operation.use_alibi_mask,
        "score_mod": operation.score_mod is not None,
    }
    for name, is_set in flags.items():
        if is_set:
            raise NotSupportedError(f"{title}: {name}; the FP8 kernels do not have it")
    for port, tensor in ports.items():
        if port not in _PORTS:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}): the FP8 kernels take "
                f"{', '.join(sorted(_PORTS))}"
            )
        if tensor.ragged_offset is not None:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) is ragged; the FP8 kernels take dense operands"
            )
        if tensor.is_pass_by_value:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) is passed by value; the FP8 kernels read scales "
                "on the device"
            )


def _check_operands(title: str, ports: Mapping[str, Tensor]) -> None:
    if "O" not in ports:
        raise NotSupportedError(f"{title}: O is virtual; the kernels store it")
    for port in ("q", "k", "v", "O"):
        tensor = ports[port]
        accepted = OUTPUT_TYPES if port == "O" else (DataType.FP8_E4M3,)
        if tensor.data_type not in accepted:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) has data type {tensor.data_type.name}; the FP8 "
                f"kernels take {', '.join(t.name for t in accepted)}"
            )
        reason = map_decline_reason(tensor)
        if reason is not None:
            raise NotSupportedError(f"tensor {tensor.label()} ({port}): {reason}")
    for port in ("Stats", *MAXIMA):
        tensor = ports.get(port)
        if tensor is not None and tensor.data_type is not DataType.FLOAT:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) has data type {tensor.data_type.name}; the "
                "kernels store FLOAT"
            )
    require_packed_sink(ports)
