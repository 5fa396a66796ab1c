"""What an attention operation declares, read once into one record. Pure; needs no Triton.

Forward and backward read it alike. What the kernels cannot do is declined here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.dtypes import DataType
from tilewright.engines.compiled.soft_cap import SoftCap, read_soft_cap
from tilewright.engines.triton.attention_score_mod import score_text
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.operation import Operation
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor

MAX_HEAD_SIZE = 256
# Bits of a block mask stand for tiles of this many queries by as many keys.
BLOCK_MASK_TILE = 128
_OPERAND_TYPES = (DataType.HALF, DataType.BFLOAT16, DataType.FLOAT)
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Length:
    """The lengths of one side: ``tensor`` (B,) of lengths, or (B + 1,) of running sums."""

    tensor: Tensor
    is_sum: bool


@dataclass(frozen=True)
class AttentionSpec:
    """One sdpa or sdpa_backward operation, validated and taken.

    ``ports`` has every bound operand by port name, outputs too; an output that nobody binds is
    left out. Extents: q (batch, heads_q, rows, depth), k (.., heads_kv, keys, depth), v
    (.., depth_v); ``group`` query heads share a key head. ``left`` hides col <= row - left,
    ``right`` hides col > row + right, rows counted from the aligned diagonal; None hides nothing,
    and a bound that hides nothing at these extents is None. ``score_program`` is a score program
    that is no soft cap, in a forward operation. ``scale`` is None where port
    "attn_scale" has it. ``total_q`` bounds the sum of the queries' lengths, if declared. Where
    port "gate" is bound, port "O" is O times sigmoid(gate) (``attention_gate.py``), and
    ``gate_rounding`` has the data types of both factors.
    """

    title: str
    kind: str
    ports: Mapping[str, Tensor]
    batch: int
    heads_q: int
    heads_kv: int
    rows: int
    keys: int
    depth: int
    depth_v: int
    data_type: DataType
    scale: float | None
    left: int | None
    right: int | None
    bottom_right: bool
    alibi: bool
    soft_cap: SoftCap | None
    score_program: ScoreProgram | None
    drop_probability: float
    len_q: Length | None
    len_kv: Length | None
    stats_log2: bool
    total_q: int | None
    gate_rounding: tuple[DataType, DataType] | None = None

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads_q // self.heads_kv

    @property
    def has_bias(self) -> bool:
        """True if a bias is added to the scores."""
        return "bias" in self.ports

    @property
    def has_block_mask(self) -> bool:
        """True if tiles of scores are hidden."""
        return "block_mask" in self.ports

    @property
    def has_sink(self) -> bool:
        """True if a sink joins the denominators."""
        return "sink_token" in self.ports

    @property
    def has_gate(self) -> bool:
        """True if O is multiplied by the sigmoid of a gate."""
        return "gate" in self.ports

    @property
    def has_philox(self) -> bool:
        """True if dropout is drawn from a seed."""
        return "dropout_seed" in self.ports

    @property
    def has_drop_mask(self) -> bool:
        """True if dropout is given as a mask."""
        return "dropout_mask" in self.ports

    @property
    def is_paged(self) -> bool:
        """True if k and v are containers of pages."""
        return "paged_attention_k_table" in self.ports

    @property
    def is_banded(self) -> bool:
        """True if a diagonal band hides keys."""
        return self.left is not None or self.right is not None

    @property
    def changes_scores(self) -> bool:
        """True if more than the scale acts on visible scores."""
        changes = self.has_bias or self.alibi or self.soft_cap is not None
        return changes or self.score_program is not None

    @property
    def hides_values(self) -> bool:
        """True if a row may not see a key that lies within its sequence."""
        return self.is_banded or self.has_bias or self.has_block_mask

    @property
    def features(self) -> frozenset[str]:
        """Names of what is declared beyond plain attention, for ranking and reports."""
        flags = {
            "bias": self.has_bias,
            "block_mask": self.has_block_mask,
            "sink": self.has_sink,
            "gate": self.has_gate,
            "alibi": self.alibi,
            "soft_cap": self.soft_cap is not None,
            "score_mod": self.score_program is not None,
            "dropout": self.has_philox or self.has_drop_mask,
            "left": self.left is not None,
            "right": self.right is not None,
            "bottom_right": self.bottom_right,
            "lengths": self.len_q is not None or self.len_kv is not None,
            "ragged": any(self.is_ragged(port) for port in self.ports),
            "paged": self.is_paged,
            "gqa": self.group > 1,
        }
        return frozenset(name for name, is_there in flags.items() if is_there)

    def is_ragged(self, port: str) -> bool:
        """True if sequences of this port lie one after another, by offsets."""
        tensor = self.ports.get(port)
        return tensor is not None and tensor.ragged_offset is not None


def read_spec(operation: Operation) -> AttentionSpec:
    """The record of an sdpa or sdpa_backward operation of a validated graph.

    Raises:
        NotSupportedError: for what no kernel here takes, naming the tensor and the rule.
    """
    op: Any = operation
    title, extents = op.title(), op.extents()
    ports = dict(op.inputs)
    ports |= {port: tensor for port, tensor in op.outputs.items() if not tensor.is_virtual}
    _check_types(title, ports)
    if "rng_dump" in ports and op.kind != "sdpa":
        raise NotSupportedError(
            f"{title}: tensor {ports['rng_dump'].label()} (rng_dump) is an output; the backward's "
            "kernels do not store their draws"
        )
    _check_extents(title, ports, extents)
    bottom_right = op.alignment is diagonal_alignment.BOTTOM_RIGHT
    len_q, len_kv = _length(ports, "q"), _length(ports, "kv")
    rows, keys = extents.rows, extents.keys
    # How far a row's diagonal may be moved, either way.
    reach = rows + keys
    left, right = op.left_bound, op.right_bound
    soft_cap = score_program = None
    if op.score_mod is not None:
        try:
            soft_cap = read_soft_cap(title, op.score_mod)
        except NotSupportedError:
            # The backward has the slope of soft caps alone.
            if op.kind != "sdpa":
                raise
            score_text(title, op.score_mod)
            score_program = op.score_mod
    scale = 1.0 if op.attn_scale is None else float(op.attn_scale)
    return AttentionSpec(
        title=title,
        kind=op.kind,
        ports=ports,
        batch=extents.batch,
        heads_q=extents.heads_q,
        heads_kv=extents.heads_kv,
        rows=rows,
        keys=keys,
        depth=extents.depth,
        depth_v=extents.depth_v,
        data_type=ports["q"].data_type,
        scale=None if "attn_scale" in ports else scale,
        left=None if left is None or left > reach else left,
        right=None if right is None or right > reach else right,
        bottom_right=bottom_right,
        alibi=op.use_alibi_mask,
        soft_cap=soft_cap,
        score_program=score_program,
        drop_probability=op.dropout_probability or 0.0,
        len_q=len_q,
        len_kv=len_kv,
        stats_log2=bool(getattr(op, "stats_use_log2", False)),
        total_q=op.max_total_seq_len_q,
    )


def alibi_split(heads: int) -> int:
    """The greatest power of two that is at most ``heads``: where ALiBi's slopes change rule.

    Slopes are 2**(-8 (h + 1) / P) below P, then 2**(-4 (2 (h - P) + 1) / P) (Press, Smith and
    Lewis 2022, and the code beside the paper).
    """
    return 1 << (heads.bit_length() - 1)


def _length(ports: Mapping[str, Tensor], side: str) -> Length | None:
    for port, is_sum in ((f"seq_len_{side}", False), (f"cu_seq_len_{side}", True)):
        if port in ports:
            return Length(ports[port], is_sum)
    return None


def _check_types(title: str, ports: Mapping[str, Tensor]) -> None:
    q = ports["q"]
    for port in ("q", "k", "v"):
        tensor = ports[port]
        if tensor.data_type not in _OPERAND_TYPES:
            names = ", ".join(data_type.name for data_type in _OPERAND_TYPES)
            raise NotSupportedError(
                f"{title}: tensor {tensor.label()} ({port}) has data type "
                f"{tensor.data_type.name}; the kernels take {names}"
            )
        if tensor.data_type is not q.data_type:
            raise NotSupportedError(
                f"{title}: tensor {tensor.label()} ({port}) has data type "
                f"{tensor.data_type.name} and q has {q.data_type.name}; the kernels multiply "
                "one type"
            )
    if "dO" in ports and ports["dO"].data_type is not q.data_type:
        raise NotSupportedError(
            f"{title}: tensor {ports['dO'].label()} (dO) has data type "
            f"{ports['dO'].data_type.name} and q has {q.data_type.name}; the kernels multiply "
            "one type"
        )


def _check_extents(title: str, ports: Mapping[str, Tensor], extents: Any) -> None:
    for port, size in (("q", extents.depth), ("v", extents.depth_v)):
        if size > MAX_HEAD_SIZE:
            raise NotSupportedError(
                f"{title}: tensor {ports[port].label()} ({port}) has head size {size}; the "
                f"kernels take up to {MAX_HEAD_SIZE}"
            )
    # Rows, keys and their sum with a bound are held in 32 bits; addresses are not.
    if extents.rows + extents.keys > _INT32_MAX // 4:
        raise NotSupportedError(
            f"{title}: tensor {ports['q'].label()} (q) has {extents.rows} rows and k has "
            f"{extents.keys}; the kernels count up to {_INT32_MAX // 4} together"
        )
