"""What an attention declaration says, read once, in the words that the kernels use."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import diagonal_alignment
from tilewright.records import record

LENGTH_PORTS = ("seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv")
_FLOATS = (DataType.FLOAT, DataType.DOUBLE, DataType.HALF, DataType.BFLOAT16)
_EIGHT_BIT = (DataType.FP8_E4M3, DataType.FP8_E5M2)
BLOCK_MASK_TILE = 128


@record(frozen=True)
class AttentionSpec:
    """The declaration of one attention operation.

    ``left`` hides col <= row - left and ``right`` hides col > row + right, both after the shift of
    ``bottom_right``; None is no bound. ``scale`` is None if a port gives it.
    """

    title: str
    batch: int
    heads_q: int
    heads_kv: int
    rows: int
    keys: int
    depth: int
    depth_v: int
    compute: torch.dtype
    scale: float | None
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    alibi: bool = False
    has_bias: bool = False
    has_block_mask: bool = False
    has_sink: bool = False
    has_score_mod: bool = False
    lengths: frozenset[str] = frozenset()
    ragged: frozenset[str] = frozenset()
    paged: frozenset[str] = frozenset()
    philox: bool = False
    drop_probability: float = 0.0
    drop_mask: bool = False
    stats_log2: bool = False

    @property
    def banded(self) -> bool:
        """True if a diagonal band hides keys."""
        return self.left is not None or self.right is not None

    @property
    def sequences_differ(self) -> bool:
        """True if a sequence's extent or place is known only at the call."""
        return bool(self.lengths or self.ragged or self.paged)

    @property
    def plain(self) -> bool:
        """True if nothing but a band and a bias acts on the scores."""
        return self.only_masked and not self.lengths

    @property
    def only_masked(self) -> bool:
        """True if nothing but a band, a bias and lengths of dense sequences acts on the scores."""
        return not (
            self.ragged
            or self.paged
            or self.alibi
            or self.has_block_mask
            or self.has_sink
            or self.has_score_mod
            or self.philox
            or self.drop_mask
        )


def read_spec(op: Any) -> AttentionSpec:
    """The spec of an attention operation's record.

    Raises:
        NotSupportedError: for a declaration that this engine does not serve, naming the tensor.
    """
    title, ports, extents = op.title(), op.inputs, op.extents()
    for port in ("q", "k", "v"):
        _check_operand(title, port, ports[port], op.kind)
    paged = frozenset(side for side in ("k", "v") if f"paged_attention_{side}_table" in ports)
    ragged = frozenset(
        port
        for mapping in (ports, op.outputs)
        for port, record in mapping.items()
        if record.ragged_offset is not None
    )
    scale = 1.0 if op.attn_scale is None else op.attn_scale
    wide = any(ports[port].data_type is DataType.DOUBLE for port in ("q", "k", "v"))
    return AttentionSpec(
        title=title,
        batch=extents.batch,
        heads_q=extents.heads_q,
        heads_kv=extents.heads_kv,
        rows=extents.rows,
        keys=extents.keys,
        depth=extents.depth,
        depth_v=extents.depth_v,
        compute=torch.float64 if wide else torch.float32,
        scale=None if "attn_scale" in ports else scale,
        left=op.left_bound,
        right=op.right_bound,
        bottom_right=op.alignment is diagonal_alignment.BOTTOM_RIGHT,
        alibi=op.use_alibi_mask,
        has_bias="bias" in ports,
        has_block_mask="block_mask" in ports,
        has_sink="sink_token" in ports,
        has_score_mod=getattr(op, "score_mod", None) is not None,
        lengths=frozenset(port for port in LENGTH_PORTS if port in ports),
        ragged=ragged,
        paged=paged,
        philox="dropout_seed" in ports,
        drop_probability=op.dropout_probability or 0.0,
        drop_mask="dropout_mask" in ports,
        stats_log2=bool(getattr(op, "stats_use_log2", False)),
    )


def alibi_slopes(heads: int) -> list[float]:
    """ALiBi's slope of each head (Press, Smith and Lewis, 2022, and the code beside the paper).

    2**(-8 (h + 1) / H) where H is a power of two; otherwise the slopes of the power of two below,
    then every second one of the power of two above.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / below) for head in range(below)]
    slopes += [2.0 ** (-4.0 * (2 * head + 1) / below) for head in range(heads - below)]
    return slopes


def _check_operand(title: str, port: str, record: Any, kind: str) -> None:
    accepted = _EIGHT_BIT if "fp8" in kind else _FLOATS
    if record.data_type not in accepted:
        names = ", ".join(data_type.name for data_type in accepted)
        raise NotSupportedError(
            f"{title}: {port} has data type {record.data_type.name}; accepted are {names}"
        )
