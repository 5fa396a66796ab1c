"""What an attention operation declares, in the Hopper kernels' words. Pure; needs no Triton.

Whatever the kernels do not do is declined here, by name, so that another engine takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.launch.tensor_maps import map_decline_reason

DATA_TYPES = (DataType.BFLOAT16, DataType.HALF)
MAX_HEAD_SIZE = 256
# Fewer query rows than this leave most of a 64-row product empty: decoding, another kernel's work.
MIN_ROWS = 17
_PORTS = frozenset({"q", "k", "v", "sink_token", "O", "Stats"})
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class AttentionSpec:
    """One sdpa operation that the kernels take.

    Row i sees key j if ``i - left < j <= i + right``; the alignment of the diagonal is in the
    bounds. None is no bound, and a bound that hides nothing at these extents is None.
    """

    ports: Mapping[str, Tensor]
    batch: int
    heads_q: int
    heads_kv: int
    rows: int
    keys: int
    depth: int
    depth_v: int
    scale: float
    left: int | None
    right: int | None
    stats_log2: bool

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads_q // self.heads_kv


def read_spec(operation: Operation) -> AttentionSpec:
    """The spec of a validated sdpa operation.

    Raises:
        NotSupportedError: naming the tensor or the attribute, and what is taken.
    """
    title = operation.title()
    ports = dict(operation.inputs)
    ports |= {name: t for name, t in operation.outputs.items() if not t.is_virtual}
    _check_features(title, operation, ports)
    extents = operation.extents()
    _check_operands(title, ports)
    if max(extents.depth, extents.depth_v) > MAX_HEAD_SIZE or extents.depth_v > extents.depth:
        raise NotSupportedError(
            f"{title}: head sizes {extents.depth} and {extents.depth_v}; the kernels take up to "
            f"{MAX_HEAD_SIZE}, and v's at most q's"
        )
    if extents.rows < MIN_ROWS:
        raise NotSupportedError(
            f"{title}: {extents.rows} query rows; the kernels take {MIN_ROWS} and more"
        )
    if extents.batch * extents.heads_q > _INT32_MAX // max(extents.rows, 1):
        raise NotSupportedError(f"{title}: {extents.batch} x {extents.heads_q} heads are too many")
    scale = 1.0 if operation.attn_scale is None else operation.attn_scale
    if not scale > 0:
        raise NotSupportedError(f"{title}: attn_scale is {scale}; the kernels take positive ones")
    shift = 0
    if operation.alignment is diagonal_alignment.BOTTOM_RIGHT:
        shift = extents.keys - extents.rows
    left, right = operation.left_bound, operation.right_bound
    # In the kernel's own rows; a bound beyond every row and key says nothing.
    left = None if left is None or left - shift >= extents.rows else left - shift
    right = None if right is None or right + shift >= extents.keys - 1 else right + shift
    return AttentionSpec(
        ports=ports,
        batch=extents.batch,
        heads_q=extents.heads_q,
        heads_kv=extents.heads_kv,
        rows=extents.rows,
        keys=extents.keys,
        depth=extents.depth,
        depth_v=extents.depth_v,
        scale=float(scale),
        left=None if left is None else max(left, -extents.keys),
        right=None if right is None else max(right, -extents.rows),
        stats_log2=operation.stats_use_log2,
    )


def _check_features(title: str, operation: Operation, ports: Mapping[str, Tensor]) -> None:
    flags = {
        "use_alibi_mask": operation.use_alibi_mask,
        "use_padding_mask": operation.use_padding_mask,
        "score_mod": operation.score_mod is not None,
    }
    for name, is_set in flags.items():
        if is_set:
            raise NotSupportedError(f"{title}: {name}; the Hopper kernels do not have it")
    for port, tensor in ports.items():
        if port not in _PORTS:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}): the Hopper kernels take "
                f"{', '.join(sorted(_PORTS))}"
            )
        if tensor.ragged_offset is not None:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) is ragged; the Hopper kernels take dense ones"
            )


def _check_operands(title: str, ports: Mapping[str, Tensor]) -> None:
    if "O" not in ports:
        raise NotSupportedError(f"{title}: O is virtual; the kernels store it")
    wanted = ports["q"].data_type
    for port in ("q", "k", "v", "O"):
        tensor = ports[port]
        if tensor.data_type not in DATA_TYPES or tensor.data_type is not wanted:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) has data type {tensor.data_type.name} and q "
                f"{wanted.name}; the kernels take one of BFLOAT16 and HALF for all four"
            )
        reason = map_decline_reason(tensor)
        if reason is not None:
            raise NotSupportedError(f"tensor {tensor.label()} ({port}): {reason}")
    stats, sink = ports.get("Stats"), ports.get("sink_token")
    if stats is not None and stats.data_type is not DataType.FLOAT:
        raise NotSupportedError(
            f"tensor {stats.label()} (Stats) has data type {stats.data_type.name}; the kernels "
            "store FLOAT"
        )
    if sink is not None and sink.dim[1] > 1 and sink.stride[1] != 1:
        raise NotSupportedError(
            f"tensor {sink.label()} (sink_token) has stride {sink.stride}; the kernels take 1 "
            "along the heads"
        )
