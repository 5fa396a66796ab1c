"""Which sdpa_backward operations the Hopper kernels take. Pure; needs no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.dtypes import DataType
from tilewright.engines.hopper.attention_spec import DATA_TYPES
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.launch.tensor_maps import map_decline_reason

MAX_HEAD_SIZE = 128
# Fewer rows or keys than this leave most of a tile empty.
MIN_EXTENT = 64
_PORTS = frozenset(
    {"q", "k", "v", "o", "dO", "stats", "sink_token", "dQ", "dK", "dV", "dSink_token"}
)
_MAPPED = ("q", "k", "v", "o", "dO", "dQ", "dK", "dV")
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class BackwardSpec:
    """One sdpa_backward operation that the kernels take.

    Row i sees key j if ``i - left < j <= i + right``; the alignment of the diagonal is in the
    bounds, and every row sees some key. None is no bound.
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

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads_q // self.heads_kv


def read_backward(operation: Operation) -> BackwardSpec:
    """The spec of a validated sdpa_backward operation.

    Raises:
        NotSupportedError: naming the tensor or the attribute, and what is taken.
    """
    op: Any = operation
    title, extents = op.title(), op.extents()
    ports = dict(op.inputs)
    ports |= {name: t for name, t in op.outputs.items() if not t.is_virtual}
    _check_features(title, op, ports)
    _check_operands(title, ports)
    if max(extents.depth, extents.depth_v) > MAX_HEAD_SIZE:
        raise NotSupportedError(
            f"{title}: head sizes {extents.depth} and {extents.depth_v}; the kernels take up to "
            f"{MAX_HEAD_SIZE}"
        )
    if min(extents.rows, extents.keys) < MIN_EXTENT:
        raise NotSupportedError(
            f"{title}: {extents.rows} rows and {extents.keys} keys; the kernels take "
            f"{MIN_EXTENT} and more"
        )
    if extents.batch * extents.heads_q > _INT32_MAX // (2 * extents.rows):
        raise NotSupportedError(f"{title}: {extents.batch} x {extents.heads_q} heads are too many")
    shift = 0
    if op.alignment is diagonal_alignment.BOTTOM_RIGHT:
        shift = extents.keys - extents.rows
    left, right = op.left_bound, op.right_bound
    left = None if left is None or left - shift >= extents.rows else left - shift
    right = None if right is None or right + shift >= extents.keys - 1 else right + shift
    last_seeing = extents.rows if left is None else extents.keys - 1 + left
    if (right is not None and right < 0) or extents.rows > last_seeing:
        raise NotSupportedError(
            f"{title}: some of {extents.rows} rows see none of {extents.keys} keys; the kernels "
            "take masks that show every row a key"
        )
    return BackwardSpec(
        ports=ports,
        batch=extents.batch,
        heads_q=extents.heads_q,
        heads_kv=extents.heads_kv,
        rows=extents.rows,
        keys=extents.keys,
        depth=extents.depth,
        depth_v=extents.depth_v,
        scale=1.0 if op.attn_scale is None else float(op.attn_scale),
        left=left,
        right=right,
    )


def _check_features(title: str, op: Any, ports: Mapping[str, Tensor]) -> None:
    flags = {
        "use_alibi_mask": op.use_alibi_mask,
        "use_padding_mask": op.use_padding_mask,
        "score_mod": op.score_mod is not None,
        "use_deterministic_algorithm": op.use_deterministic_algorithm,
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
    wanted = ports["q"].data_type
    for port in _MAPPED:
        tensor = ports.get(port)
        if tensor is None:
            raise NotSupportedError(f"{title}: {port} is virtual; the kernels store it")
        if tensor.data_type not in DATA_TYPES or tensor.data_type is not wanted:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) has data type {tensor.data_type.name} and q "
                f"{wanted.name}; the kernels take one of BFLOAT16 and HALF for all"
            )
        reason = map_decline_reason(tensor)
        if reason is not None:
            raise NotSupportedError(f"tensor {tensor.label()} ({port}): {reason}")
    stats, sink = ports["stats"], ports.get("sink_token")
    if stats.data_type is not DataType.FLOAT:
        raise NotSupportedError(
            f"tensor {stats.label()} (stats) has data type {stats.data_type.name}; the kernels "
            "take FLOAT"
        )
    if sink is not None and sink.dim[1] > 1 and sink.stride[1] != 1:
        raise NotSupportedError(
            f"tensor {sink.label()} (sink_token) has stride {sink.stride}; the kernels take 1 "
            "along the heads"
        )
