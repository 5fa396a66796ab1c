"""What an attention operation declares, in the Hopper kernels' words. Pure; needs no Triton.

Whatever the kernels do not do is declined here, by name, so that another engine takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.dtypes import DataType
from tilewright.engines.compiled.soft_cap import SoftCap, read_soft_cap
from tilewright.engines.hopper.bounds import LENGTHS
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
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor
from tilewright.launch.tensor_maps import map_decline_reason

DATA_TYPES = (DataType.BFLOAT16, DataType.HALF)
MAX_HEAD_SIZE = 256
# Fewer query rows than this leave most of a 64-row product empty: decoding, another kernel's work.
MIN_ROWS = 17
# A capped score is off by up to 2e-7 of its cap: of this one by less than float16 rounds a weight.
MAX_CAP = 4096.0
_TABLES = ("paged_attention_k_table", "paged_attention_v_table")
_PORTS = frozenset(
    ("q", "k", "v", "sink_token", "O", "Stats", "attn_scale", *_TABLES)
    + LENGTHS["q"]
    + LENGTHS["kv"]
)


@dataclass(frozen=True)
class AttentionSpec(Declared):
    """One sdpa operation that the kernels take.

    Row i sees key j if ``i - left < j <= i + right``. The alignment of the diagonal is in the
    bounds, unless it follows from lengths: then ``shifts``, and the kernel adds keys - rows. None
    is no bound, and a bound that hides nothing at these extents is None. ``scale`` is None where
    port "attn_scale" has it.
    """

    scale: float | None
    soft_cap: SoftCap | None
    ragged_q: bool
    ragged_kv: bool
    stats_log2: bool

    @property
    def folds_scale(self) -> bool:
        """True if the scale may be taken out of a row's maximum."""
        return self.soft_cap is None and self.scale is not None and self.scale > 0.0

    @property
    def is_paged(self) -> bool:
        """True if k and v are containers of pages."""
        return _TABLES[0] in self.ports


def read_spec(operation: Operation) -> AttentionSpec:
    """The spec of a validated sdpa operation.

    Raises:
        NotSupportedError: naming the tensor or the attribute, and what is taken.
    """
    title = operation.title()
    ports = ports_of(operation)
    _check_features(title, operation, ports)
    extents = operation.extents()
    # q, O and Stats are ragged together, k and v too.
    require_same_raggedness(ports, {"O": "q", "Stats": "q", "v": "k"})
    require_whole_rows(ports, ("q", "k", "v", "O"))
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
    require_countable(operation)
    scale = 1.0 if operation.attn_scale is None else float(operation.attn_scale)
    program = operation.score_mod
    return AttentionSpec(
        **declared(operation, ports),
        scale=None if "attn_scale" in ports else scale,
        soft_cap=None if program is None else _soft_cap(title, program),
        ragged_q=ports["q"].ragged_offset is not None,
        ragged_kv=ports["k"].ragged_offset is not None,
        stats_log2=operation.stats_use_log2,
    )


def _soft_cap(title: str, program: ScoreProgram) -> SoftCap:
    cap = read_soft_cap(title, program)
    if cap.outer is not None and cap.outer.value is not None and abs(cap.outer.value) > MAX_CAP:
        raise NotSupportedError(
            f"{title}: score_mod caps scores at {cap.outer.value}, tensor {cap.outer.label()}; the "
            f"kernels keep the digits of scores under caps up to {MAX_CAP:.0f}"
        )
    return cap


def _check_features(title: str, operation: Operation, ports: Mapping[str, Tensor]) -> None:
    if operation.use_alibi_mask:
        raise NotSupportedError(f"{title}: use_alibi_mask; the Hopper kernels do not have it")
    for port in _TABLES:
        if port in ports and ports[port].ragged_offset is not None:
            raise NotSupportedError(
                f"tensor {ports[port].label()} ({port}) has a ragged offset; the Hopper kernels "
                "take page tables with a row of entries a sequence"
            )
    for port, tensor in ports.items():
        # What a score program reads is looked at with the program.
        if port not in _PORTS and not port.startswith("score_mod_"):
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}): the Hopper kernels take "
                f"{', '.join(sorted(_PORTS))}"
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
        # The batch axis of a ragged operand is never stepped.
        reason = map_decline_reason(tensor, is_flat=tensor.ragged_offset is not None)
        if reason is not None:
            raise NotSupportedError(f"tensor {tensor.label()} ({port}): {reason}")
    stats = ports.get("Stats")
    if stats is not None and stats.data_type is not DataType.FLOAT:
        raise NotSupportedError(
            f"tensor {stats.label()} (Stats) has data type {stats.data_type.name}; the kernels "
            "store FLOAT"
        )
    require_packed_sink(ports)
