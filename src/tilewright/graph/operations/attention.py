"""Scaled dot product attention, forward and backward. docs/operations/attention.md defines it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tilewright.graph.enums import attention_implementation, diagonal_alignment
from tilewright.graph.operation import operation_kind
from tilewright.graph.operations.attention_arguments import (
    ScoreCallback,
    title_of,
    wants_stats,
)
from tilewright.graph.operations.attention_backward import AttentionBackwardMethods
from tilewright.graph.operations.attention_base import (
    DROPOUT_PORTS,
    LENGTH_PORTS,
    PAGE_PORTS,
)
from tilewright.graph.operations.attention_forward import AttentionForward
from tilewright.graph.operations.attention_fp8 import AttentionFp8Methods
from tilewright.graph.operations.attention_mxfp8 import AttentionMxfp8Methods
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor
from tilewright.records import record


@operation_kind("sdpa")
@record(frozen=True, kw_only=True, eq=False)
class Sdpa(AttentionForward):
    """O = softmax(mask(score_mod(scale * Q K^T) + bias)) V, and Stats, its log-sum-exp a row."""

    required: ClassVar = ("q", "k", "v")
    optional: ClassVar = (
        *("attn_scale", "bias", "block_mask", "sink_token"),
        *LENGTH_PORTS,
        *DROPOUT_PORTS,
        *PAGE_PORTS,
    )
    list_port: ClassVar = "score_mod_"
    produces: ClassVar = ("O", "Stats")
    accepts_outputs: ClassVar = ("rng_dump", "score_max", "score_sum_exp")

    score_mod: ScoreProgram | None = None

    def programs(self) -> Mapping[str, ScoreProgram]:
        """The score program, if there is one."""
        return {} if self.score_mod is None else {"score_mod": self.score_mod}


class AttentionMethods(AttentionBackwardMethods, AttentionFp8Methods, AttentionMxfp8Methods):
    """Declares attention: here in 16-bit and wider types, the other kinds by inheritance."""

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_inference: bool | None = None,
        attn_scale: float | Tensor | None = None,
        bias: Tensor | None = None,
        block_mask: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[Any, ...] | None = None,
        rng_dump: Tensor | None = None,
        paged_attention_k_table: Tensor | None = None,
        paged_attention_v_table: Tensor | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        compute_data_type: object = None,
        name: str = "",
        score_mod: ScoreCallback | None = None,
        generate_stats: bool | None = None,
        implementation: attention_implementation = attention_implementation.AUTO,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
        cu_seq_len_q: Tensor | None = None,
        cu_seq_len_kv: Tensor | None = None,
        stats_use_log2: bool = False,
    ) -> list[Tensor | None]:
        """Attention of q (B, Hq, Sq, D) over k (B, Hkv, Skv, D) and v (B, Hkv, Skv, Dv).

        Args:
            is_inference, generate_stats: one of them says whether Stats exists; neither: no.
            attn_scale: the factor on Q K^T, a number or a one-element tensor; None is 1.
            bias: added to the scores; broadcasts to (B, Hq, Sq, Skv).
            block_mask: UINT8 (B, Hq, ceil(Sq/128), ceil(ceil(Skv/128)/8)), a bit a tile.
            seq_len_q, seq_len_kv: lengths (B, 1, 1, 1), with ``use_padding_mask``; or running
                sums (B + 1, 1, 1, 1) in ``cu_seq_len_q`` and ``cu_seq_len_kv``.
            dropout: (probability, seed, offset) or (mask, scale).
            rng_dump, score_max, score_sum_exp: outputs that the caller declares.
            paged_attention_k_table, paged_attention_v_table: (B, 1, pages, 1) page numbers; k
                and v are then containers (blocks, Hkv, tokens a page, D), and
                ``paged_attention_max_seq_len_kv`` is Skv. With a ragged offset, rows of a table
                lie one after another, each as long as its sequence needs.
            score_mod: ``score_mod(graph, score)`` returns what its pointwise operations make of
                the float32 scores (B, Hq, Sq, Skv), after the scale and before bias and masks.
            sink_token: (1, Hq, 1, 1), a score that joins each row's denominator.
            stats_use_log2: Stats in base 2 instead of natural logarithms.

        Returns:
            [O, Stats]: O (B, Hq, Sq, Dv) in q's axis order, Stats (B, Hq, Sq, 1) float32 or None.

        Raises:
            GraphError: here for arguments that contradict one another, at ``validate`` for
                tensors that do not fit.
        """
        with_stats = wants_stats(title_of(Sdpa.kind, name), is_inference, generate_stats)
        operation = self._declare_attention(
            Sdpa,
            {
                "q": q,
                "k": k,
                "v": v,
                "bias": bias,
                "block_mask": block_mask,
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
            outputs=("O", "Stats") if with_stats else ("O",),
            given_outputs={
                "rng_dump": rng_dump,
                "score_max": score_max,
                "score_sum_exp": score_sum_exp,
            },
            is_inference=is_inference,
            generate_stats=generate_stats,
            attn_scale=attn_scale,
            dropout=dropout,
            score_mod=score_mod,
            use_alibi_mask=use_alibi_mask,
            use_padding_mask=use_padding_mask,
            use_causal_mask=use_causal_mask,
            use_causal_mask_bottom_right=use_causal_mask_bottom_right,
            sliding_window_length=sliding_window_length,
            diagonal_alignment=diagonal_alignment,
            diagonal_band_left_bound=diagonal_band_left_bound,
            diagonal_band_right_bound=diagonal_band_right_bound,
            paged_attention_max_seq_len_kv=paged_attention_max_seq_len_kv,
            max_total_seq_len_q=max_total_seq_len_q,
            max_total_seq_len_kv=max_total_seq_len_kv,
            implementation=implementation,
            unfuse_fma=unfuse_fma,
            stats_use_log2=stats_use_log2,
        )
        return [operation.outputs["O"], operation.outputs.get("Stats")]
