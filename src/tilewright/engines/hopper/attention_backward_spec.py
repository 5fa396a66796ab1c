"""Which sdpa_backward operations the Hopper kernels take. Pure; needs no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.dtypes import DataType
from tilewright.engines.hopper.attention_spec import DATA_TYPES
from tilewright.engines.hopper.declared import (
    Declared,
    declared,
    ports_of,
    require_countable,
)
from tilewright.engines.hopper.operand_rules import (
    require_packed_sink,
    require_same_raggedness,
    require_whole_rows,
)
from tilewright.engines.hopper.tile_config import padded
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.launch.tensor_maps import map_decline_reason

MAX_HEAD_SIZE = 256
SMALL_HEAD_SIZE = 64
# Fewer rows or keys than this leave most of a tile empty.
MIN_EXTENT = 64
_PORTS = frozenset(
    {"q", "k", "v", "o", "dO", "stats", "sink_token", "dQ", "dK", "dV", "dSink_token"}
    | {"seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv"}
)
_MAPPED = ("q", "k", "v", "o", "dO", "dQ", "dK", "dV")
# What has a row a query is ragged as q is, and what has one a key as k is.
_PARTNERS = dict.fromkeys(("o", "dO", "stats", "dQ"), "q") | dict.fromkeys(("v", "dK", "dV"), "k")


@dataclass(frozen=True)
class BackwardSpec(Declared):
    """One sdpa_backward operation that the kernels take.

    Row i sees key j if ``i - left < j <= i + right``. The alignment of the diagonal is in the
    bounds, unless it follows from lengths: then ``shifts``, and the kernel adds keys - rows. None
    is no bound, and a bound that hides nothing at these extents is None.
    """

    scale: float
    ragged_q: bool
    ragged_kv: bool
    is_deterministic: bool

    @property
    def width(self) -> int:
        """The width of the products: that of the wider head size, filled up."""
        return max(padded(self.depth), padded(self.depth_v))


def read_backward(operation: Operation) -> BackwardSpec:
    """The spec of a validated sdpa_backward operation.

    Raises:
        NotSupportedError: naming the tensor or the attribute, and what is taken.
    """
    op: Any = operation
    title, extents = op.title(), op.extents()
    ports = ports_of(op)
    _check_features(title, op, ports)
    require_same_raggedness(ports, _PARTNERS)
    require_whole_rows(ports, ("q", "k", "v", "dO", "dK", "dV"))
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
    require_countable(op, places_a_row=2)
    fields = declared(op, ports)
    has_lengths = any(fields[f"lengths_{side}"] is not None for side in ("q", "kv"))
    is_small = max(extents.depth, extents.depth_v) <= SMALL_HEAD_SIZE
    if op.use_deterministic_algorithm and is_small and fields["left"] is None and not has_lengths:
        raise NotSupportedError(
            f"{title}: use_deterministic_algorithm with head sizes {extents.depth} and "
            f"{extents.depth_v}; up to {SMALL_HEAD_SIZE}, without a left bound and lengths, "
            "Triton's kernels are quicker"
        )
    return BackwardSpec(
        **fields,
        scale=1.0 if op.attn_scale is None else float(op.attn_scale),
        ragged_q=ports["q"].ragged_offset is not None,
        ragged_kv=ports["k"].ragged_offset is not None,
        is_deterministic=op.use_deterministic_algorithm,
    )


def _check_features(title: str, op: Any, ports: Mapping[str, Tensor]) -> None:
    flags = {
        "use_alibi_mask": op.use_alibi_mask,
        "score_mod": op.score_mod is not None,
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
        # The batch axis of a ragged operand is never stepped.
        reason = map_decline_reason(tensor, is_flat=tensor.ragged_offset is not None)
        if reason is not None:
            raise NotSupportedError(f"tensor {tensor.label()} ({port}): {reason}")
    stats = ports["stats"]
    if stats.data_type is not DataType.FLOAT:
        raise NotSupportedError(
            f"tensor {stats.label()} (stats) has data type {stats.data_type.name}; the kernels "
            "take FLOAT"
        )
    require_packed_sink(ports)
