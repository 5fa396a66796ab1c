"""Attention in 8-bit floating point with one scale a tensor, forward and backward.

A descale multiplies what is read, a scale what is rounded to 8 bits; an amax is the largest
magnitude before that scale. docs/operations/attention.md places each in the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tilewright.graph.enums import attention_implementation, diagonal_alignment
from tilewright.graph.operation import operation_kind
from tilewright.graph.operations.attention_arguments import (
    AttentionDeclarer,
    ScoreCallback,
    one_spelling,
    title_of,
    wants_stats,
)
from tilewright.graph.operations.attention_backward import AttentionBackward
from tilewright.graph.operations.attention_base import (
    DROPOUT_PORTS,
    FLOATS,
    FP8_TYPES,
    LENGTH_PORTS,
    PAGE_PORTS,
)
from tilewright.graph.operations.attention_forward import AttentionForward
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor
from tilewright.records import record

_FORWARD_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
_BACKWARD_SCALES = (
    *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP"),
    *("scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
)
_RESULT_TYPES = (*FP8_TYPES, *FLOATS)
_RESULT_RULE = "it is a floating result"
_SCALE_RULE = "one scale a tensor, in float32"


@operation_kind("sdpa_fp8")
@record(frozen=True, kw_only=True, eq=False)
class SdpaFp8(AttentionForward):
    """``sdpa`` of FP8 operands: O, Stats, and the largest magnitudes of P and O."""

    operand_types: ClassVar = FP8_TYPES
    operand_rule: ClassVar = "sdpa_fp8 reads 8-bit operands; wider ones need sdpa"
    result_types: ClassVar = _RESULT_TYPES
    result_rule: ClassVar = _RESULT_RULE
    required: ClassVar = ("q", "k", "v", *_FORWARD_SCALES)
    optional: ClassVar = (
        *("attn_scale", "bias", "block_mask", "sink_token"),
        *LENGTH_PORTS,
        *DROPOUT_PORTS,
        *PAGE_PORTS,
    )
    list_port: ClassVar = "score_mod_"
    produces: ClassVar = ("O", "Stats", "Amax_S", "Amax_O")
    required_outputs: ClassVar = ("Amax_S", "Amax_O")
    accepts_outputs: ClassVar = ("rng_dump", "score_max", "score_sum_exp")

    score_mod: ScoreProgram | None = None

    def programs(self) -> Mapping[str, ScoreProgram]:
        """The score program, if there is one."""
        return {} if self.score_mod is None else {"score_mod": self.score_mod}

    def check(self) -> None:
        """Scales are scalars beside what all attention requires."""
        super().check()
        for port in _FORWARD_SCALES:
            self.require_scalar(port, rule=_SCALE_RULE)


@operation_kind("sdpa_fp8_backward")
@record(frozen=True, kw_only=True, eq=False)
class SdpaFp8Backward(AttentionBackward):
    """``sdpa_backward`` of FP8 operands, and the largest magnitudes of its results and of dP."""

    operand_types: ClassVar = FP8_TYPES
    operand_rule: ClassVar = "sdpa_fp8_backward reads 8-bit operands; wider ones need sdpa_backward"
    output_types: ClassVar = _RESULT_TYPES
    result_types: ClassVar = _RESULT_TYPES
    result_rule: ClassVar = _RESULT_RULE
    required: ClassVar = ("q", "k", "v", "o", "dO", "stats", *_BACKWARD_SCALES)
    optional: ClassVar = (
        *("attn_scale", "sink_token", "dropout_scale_inv"),
        *LENGTH_PORTS,
        *DROPOUT_PORTS,
    )
    produces: ClassVar = ("dQ", "dK", "dV", "amax_dQ", "amax_dK", "amax_dV", "amax_dP")
    required_outputs: ClassVar = produces
    accepts_outputs: ClassVar = ("dSink_token",)

    def check(self) -> None:
        """Scales are scalars beside what all attention requires."""
        super().check()
        for port in _BACKWARD_SCALES:
            self.require_scalar(port, rule=_SCALE_RULE)


class AttentionFp8Methods(AttentionDeclarer):
    """Declares attention on FP8 tensors with one scale each."""

    def sdpa_fp8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descale_q: Tensor,
        descale_k: Tensor,
        descale_v: Tensor,
        descale_s: Tensor,
        scale_s: Tensor,
        scale_o: Tensor,
        is_inference: bool | None = None,
        attn_scale: float | Tensor | None = None,
        bias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        dropout: tuple[Any, ...] | None = None,
        rng_dump: Tensor | None = None,
        paged_attention_k_table: Tensor | None = None,
        paged_attention_v_table: Tensor | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        compute_data_type: object = None,
        name: str = "",
        fn: ScoreCallback | None = None,
        generate_stats: bool | None = None,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
        implementation: attention_implementation = attention_implementation.AUTO,
        cu_seq_len_q: Tensor | None = None,
        cu_seq_len_kv: Tensor | None = None,
        stats_use_log2: bool = False,
        score_mod: ScoreCallback | None = None,
        sliding_window_length: int | None = None,
        block_mask: Tensor | None = None,
    ) -> list[Tensor | None]:
        """``sdpa`` of FP8 q, k and v, with float32 scales of one element each.

        S is scaled by descale_q descale_k, P by scale_s before it is rounded to v's type, and
        the second product by descale_s descale_v; O is stored times scale_o. ``left_bound``,
        ``right_bound``, ``sliding_window`` and ``fn`` are what ``sdpa`` calls
        ``diagonal_band_left_bound``, ``diagonal_band_right_bound``, ``sliding_window_length``
        and ``score_mod``; the last two are accepted as well. The other arguments are ``sdpa``'s.

        Returns:
            [O, Stats, Amax_S, Amax_O]: Stats is None unless asked for; the maxima are float32
            (1, 1, 1, 1), of P and of O before their scales.

        Raises:
            GraphError: here for arguments that contradict one another, at ``validate`` for
                tensors that do not fit.
        """
        title = title_of(SdpaFp8.kind, name)
        with_stats = wants_stats(title, is_inference, generate_stats)
        operation = self._declare_attention(
            SdpaFp8,
            {
                "q": q,
                "k": k,
                "v": v,
                "descale_q": descale_q,
                "descale_k": descale_k,
                "descale_v": descale_v,
                "descale_s": descale_s,
                "scale_s": scale_s,
                "scale_o": scale_o,
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
            outputs=("O", *(("Stats",) if with_stats else ()), "Amax_S", "Amax_O"),
            given_outputs={
                "rng_dump": rng_dump,
                "score_max": score_max,
                "score_sum_exp": score_sum_exp,
            },
            is_inference=is_inference,
            generate_stats=generate_stats,
            attn_scale=attn_scale,
            dropout=dropout,
            score_mod=one_spelling(title, score_mod=score_mod, fn=fn),
            use_alibi_mask=use_alibi_mask,
            use_padding_mask=use_padding_mask,
            use_causal_mask=use_causal_mask,
            use_causal_mask_bottom_right=use_causal_mask_bottom_right,
            sliding_window_length=one_spelling(
                title,
                sliding_window_length=sliding_window_length,
                sliding_window=sliding_window,
            ),
            diagonal_alignment=diagonal_alignment,
            diagonal_band_left_bound=left_bound,
            diagonal_band_right_bound=right_bound,
            paged_attention_max_seq_len_kv=paged_attention_max_seq_len_kv,
            max_total_seq_len_q=max_total_seq_len_q,
            max_total_seq_len_kv=max_total_seq_len_kv,
            implementation=implementation,
            unfuse_fma=unfuse_fma,
            stats_use_log2=stats_use_log2,
        )
        ports = ("O", "Stats", "Amax_S", "Amax_O")
        return [operation.outputs.get(port) for port in ports]

    def sdpa_fp8_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        descale_q: Tensor,
        descale_k: Tensor,
        descale_v: Tensor,
        descale_o: Tensor,
        descale_dO: Tensor,
        descale_s: Tensor,
        descale_dP: Tensor,
        scale_s: Tensor,
        scale_dQ: Tensor,
        scale_dK: Tensor,
        scale_dV: Tensor,
        scale_dP: Tensor,
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
        """Gradients of ``sdpa_fp8``, with float32 scales of one element each.

        o and dO are FP8 like q, k and v; Stats are the forward's. The gradients are stored times
        scale_dQ, scale_dK and scale_dV.

        Returns:
            [dQ, dK, dV, amax_dQ, amax_dK, amax_dV, amax_dP]: the maxima are float32
            (1, 1, 1, 1), before the scales.

        Raises:
            GraphError: here for arguments that contradict one another, at ``validate`` for
                tensors that do not fit.
        """
        operation = self._declare_attention(
            SdpaFp8Backward,
            {
                "q": q,
                "k": k,
                "v": v,
                "o": o,
                "dO": dO,
                "stats": stats,
                "descale_q": descale_q,
                "descale_k": descale_k,
                "descale_v": descale_v,
                "descale_o": descale_o,
                "descale_dO": descale_dO,
                "descale_s": descale_s,
                "descale_dP": descale_dP,
                "scale_s": scale_s,
                "scale_dQ": scale_dQ,
                "scale_dK": scale_dK,
                "scale_dV": scale_dV,
                "scale_dP": scale_dP,
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
        return [operation.outputs[port] for port in SdpaFp8Backward.produces]
