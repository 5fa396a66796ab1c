"""Attention in 8-bit floating point with one power-of-two scale a block, forward and backward.

Scales are FP8_E8M0, one for each 32 elements along the axis that a product sums over (OCP
Microscaling Formats (MX) specification 1.0). docs/operations/attention.md places each.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tilewright.dtypes import DataType
from tilewright.graph.enums import attention_implementation, diagonal_alignment, tensor_reordering
from tilewright.graph.operation import operation_kind
from tilewright.graph.operations.attention_arguments import (
    AttentionDeclarer,
    title_of,
    wants_stats,
)
from tilewright.graph.operations.attention_backward import AttentionBackward
from tilewright.graph.operations.attention_base import (
    DROPOUT_PORTS,
    FP8_TYPES,
    LENGTH_PORTS,
    PAGE_PORTS,
    AttentionBase,
)
from tilewright.graph.operations.attention_forward import AttentionForward
from tilewright.graph.tensor import Tensor
from tilewright.records import record

MX_BLOCK = 32
# Scales may be declared padded to whole tiles of the 128x4 layout.
TILE_ROWS = 128
TILE_BLOCKS = 4
_SEQUENCE, _DEPTH = 2, 3
# Scale port -> (operand port, the axis that its blocks lie along).
_FORWARD_SCALES = {
    "descale_q": ("q", _DEPTH),
    "descale_k": ("k", _DEPTH),
    "descale_v": ("v", _SEQUENCE),
}
_BACKWARD_SCALES = {
    "descale_q": ("q", _DEPTH),
    "descale_q_T": ("q_T", _SEQUENCE),
    "descale_k": ("k", _DEPTH),
    "descale_k_T": ("k_T", _SEQUENCE),
    "descale_v": ("v", _DEPTH),
    "descale_dO": ("dO", _DEPTH),
    "descale_dO_T": ("dO_T", _SEQUENCE),
}


def _require_block_scales(operation: AttentionBase, scales: dict[str, tuple[str, int]]) -> None:
    """Require E8M0 scales that cover their operand's blocks, exactly or in whole tiles."""
    for port, (operand, block_axis) in scales.items():
        rule = f"one FP8_E8M0 scale for {MX_BLOCK} elements of {operand} along axis {block_axis}"
        operation.require_rank(port, 4, 4, rule)
        operation.require_type(port, (DataType.FP8_E8M0,), rule)
        tensor, dim = operation.inputs[port], operation.inputs[operand].dim
        exact, padded = list(dim), list(dim)
        for axis in (_SEQUENCE, _DEPTH):
            if axis == block_axis:
                exact[axis] = -(-dim[axis] // MX_BLOCK)
            tile = TILE_BLOCKS if axis == block_axis else TILE_ROWS
            padded[axis] = -(-exact[axis] // tile) * tile
        choices = zip(tensor.dim, exact, padded, strict=True)
        if any(have not in (least, whole) for have, least, whole in choices):
            operation.fail(
                f"tensor {tensor.label()} ({port}) has dim {tensor.dim}; expected {tuple(exact)}, "
                f"or padded to {tuple(padded)}: {rule}"
            )
        if tensor.reordering_type not in (tensor_reordering.NONE, tensor_reordering.F8_128x4):
            operation.fail(
                f"tensor {tensor.label()} ({port}) has reordering "
                f"{tensor.reordering_type.name}; expected NONE or F8_128x4: scales are stored "
                "plainly or in 128x4 tiles"
            )


@operation_kind("sdpa_mxfp8")
@record(frozen=True, kw_only=True, eq=False)
class SdpaMxfp8(AttentionForward):
    """``sdpa`` of FP8 operands with block scales: O, Stats, and O's largest magnitude."""

    operand_types: ClassVar = FP8_TYPES
    operand_rule: ClassVar = "sdpa_mxfp8 reads 8-bit operands; wider ones need sdpa"
    required: ClassVar = ("q", "k", "v", *_FORWARD_SCALES)
    optional: ClassVar = ("attn_scale", "sink_token", *LENGTH_PORTS, *PAGE_PORTS)
    produces: ClassVar = ("O", "Stats", "Amax_O")
    required_outputs: ClassVar = ("Amax_O",)

    def check(self) -> None:
        """Scales cover their operands, beside what all attention requires."""
        super().check()
        _require_block_scales(self, _FORWARD_SCALES)


@operation_kind("sdpa_mxfp8_backward")
@record(frozen=True, kw_only=True, eq=False)
class SdpaMxfp8Backward(AttentionBackward):
    """``sdpa_backward`` of block-scaled FP8 operands, and the gradients' largest magnitudes.

    ``x_T`` has the dim of ``x`` and the same numbers, quantized in blocks along the sequence.
    """

    operand_types: ClassVar = FP8_TYPES
    operand_rule: ClassVar = (
        "sdpa_mxfp8_backward reads 8-bit operands; wider ones need sdpa_backward"
    )
    output_ports: ClassVar = ("o_f16", "dO_f16")
    ragged_ports: ClassVar = AttentionBackward.ragged_ports | {
        *("q_T", "k_T", "dO_T", "o_f16", "dO_f16")
    }
    required: ClassVar = (
        *("q", "q_T", "k", "k_T", "v", "o_f16", "dO_f16", "dO", "dO_T", "stats"),
        *_BACKWARD_SCALES,
    )
    optional: ClassVar = (
        *("attn_scale", "sink_token", "dropout_scale_inv"),
        *LENGTH_PORTS,
        *DROPOUT_PORTS,
    )
    produces: ClassVar = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV")
    required_outputs: ClassVar = produces
    accepts_outputs: ClassVar = ("dSink_token",)

    def check(self) -> None:
        """Transposed operands match and scales cover them, beside what all attention requires."""
        super().check()
        for port, source in (("q_T", "q"), ("k_T", "k"), ("dO", "o_f16"), ("dO_T", "o_f16")):
            self.require_dim(port, self.inputs[source].dim, f"it has the axes of {source}")
            self.require_type(port, FP8_TYPES, self.operand_rule)
        _require_block_scales(self, _BACKWARD_SCALES)


class AttentionMxfp8Methods(AttentionDeclarer):
    """Declares attention on FP8 tensors with one scale a block of 32."""

    def sdpa_mxfp8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descale_q: Tensor,
        descale_k: Tensor,
        descale_v: Tensor,
        attn_scale: float | Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        compute_data_type: object = None,
        name: str = "",
        generate_stats: bool | None = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
        implementation: attention_implementation = attention_implementation.AUTO,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        cu_seq_len_q: Tensor | None = None,
        cu_seq_len_kv: Tensor | None = None,
        paged_attention_k_table: Tensor | None = None,
        paged_attention_v_table: Tensor | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        is_inference: bool | None = None,
    ) -> list[Tensor | None]:
        """``sdpa`` of FP8 q, k and v with FP8_E8M0 scales of 32 elements each.

        Args:
            descale_q, descale_k: (B, H, S, ceil(D / 32)), blocks along the head size.
            descale_v: (B, Hkv, ceil(Skv / 32), Dv), blocks along the keys.

        Scales may be padded to whole 128x4 tiles: the axis of blocks to a multiple of 4, the
        other to one of 128. The other arguments are ``sdpa``'s.

        Returns:
            [O, Stats, Amax_O]: Stats is None unless asked for; Amax_O is float32 (1, 1, 1, 1).

        Raises:
            GraphError: here for arguments that contradict one another, at ``validate`` for
                tensors that do not fit.
        """
        with_stats = wants_stats(title_of(SdpaMxfp8.kind, name), is_inference, generate_stats)
        operation = self._declare_attention(
            SdpaMxfp8,
            {
                "q": q,
                "k": k,
                "v": v,
                "descale_q": descale_q,
                "descale_k": descale_k,
                "descale_v": descale_v,
                "seq_len_q": seq_len_q,
                "seq_len_kv": seq_len_kv,
                "cu_seq_len_q": cu_seq_len_q,
                "cu_seq_len_kv": cu_seq_len_kv,
                "paged_attention_k_table": paged_attention_k_table,
                "paged_attention_v_table": paged_attention_v_table,
                "sink_token": sink_token,
            },
            name=name,
            compute_data_type=compute_data_type,
            outputs=("O", *(("Stats",) if with_stats else ()), "Amax_O"),
            is_inference=is_inference,
            generate_stats=generate_stats,
            attn_scale=attn_scale,
            use_padding_mask=use_padding_mask,
            use_causal_mask=use_causal_mask,
            use_causal_mask_bottom_right=use_causal_mask_bottom_right,
            diagonal_alignment=diagonal_alignment,
            diagonal_band_left_bound=diagonal_band_left_bound,
            diagonal_band_right_bound=diagonal_band_right_bound,
            paged_attention_max_seq_len_kv=paged_attention_max_seq_len_kv,
            max_total_seq_len_q=max_total_seq_len_q,
            max_total_seq_len_kv=max_total_seq_len_kv,
            implementation=implementation,
            unfuse_fma=unfuse_fma,
        )
        return [operation.outputs.get(port) for port in ("O", "Stats", "Amax_O")]

    def sdpa_mxfp8_backward(
        self,
        q: Tensor,
        q_T: Tensor,
        k: Tensor,
        k_T: Tensor,
        v: Tensor,
        o_f16: Tensor,
        dO_f16: Tensor,
        dO: Tensor,
        dO_T: Tensor,
        stats: Tensor,
        descale_q: Tensor,
        descale_q_T: Tensor,
        descale_k: Tensor,
        descale_k_T: Tensor,
        descale_v: Tensor,
        descale_dO: Tensor,
        descale_dO_T: Tensor,
        attn_scale: float | Tensor | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        dropout: tuple[Any, ...] | None = None,
        compute_data_type: object = None,
        name: str = "",
        sink_token: Tensor | None = None,
        dSink_token: Tensor | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        cu_seq_len_q: Tensor | None = None,
        cu_seq_len_kv: Tensor | None = None,
    ) -> list[Tensor]:
        """Gradients of ``sdpa_mxfp8``.

        Each operand comes in the quantizations that the products sum over: ``x`` in blocks of 32
        along the head size (``v`` too, unlike in the forward), ``x_T`` with the same dim in blocks
        along the sequence. ``o_f16`` and ``dO_f16`` are the unquantized output and its gradient.

        Returns:
            [dQ, dK, dV, amax_dQ, amax_dK, amax_dV]: the maxima are float32 (1, 1, 1, 1).

        Raises:
            GraphError: here for arguments that contradict one another, at ``validate`` for
                tensors that do not fit.
        """
        operation = self._declare_attention(
            SdpaMxfp8Backward,
            {
                "q": q,
                "q_T": q_T,
                "k": k,
                "k_T": k_T,
                "v": v,
                "o_f16": o_f16,
                "dO_f16": dO_f16,
                "dO": dO,
                "dO_T": dO_T,
                "stats": stats,
                "descale_q": descale_q,
                "descale_q_T": descale_q_T,
                "descale_k": descale_k,
                "descale_k_T": descale_k_T,
                "descale_v": descale_v,
                "descale_dO": descale_dO,
                "descale_dO_T": descale_dO_T,
                "seq_len_q": seq_len_q,
                "seq_len_kv": seq_len_kv,
                "cu_seq_len_q": cu_seq_len_q,
                "cu_seq_len_kv": cu_seq_len_kv,
                "sink_token": sink_token,
            },
            name=name,
            compute_data_type=compute_data_type,
            given_outputs={"dSink_token": dSink_token},
            attn_scale=attn_scale,
            dropout=dropout,
            use_padding_mask=use_padding_mask,
            use_causal_mask=use_causal_mask,
            use_causal_mask_bottom_right=use_causal_mask_bottom_right,
            diagonal_alignment=diagonal_alignment,
            diagonal_band_left_bound=left_bound,
            diagonal_band_right_bound=right_bound,
            max_total_seq_len_q=max_total_seq_len_q,
            max_total_seq_len_kv=max_total_seq_len_kv,
            use_deterministic_algorithm=use_deterministic_algorithm,
        )
        return [operation.outputs[port] for port in SdpaMxfp8Backward.produces]
