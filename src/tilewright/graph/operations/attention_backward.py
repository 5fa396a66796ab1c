"""Gradients of scaled dot product attention. docs/operations/attention.md defines them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tilewright.dtypes import DataType
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.operation import operation_kind
from tilewright.graph.operations.attention_arguments import AttentionDeclarer, ScoreCallback
from tilewright.graph.operations.attention_base import (
    DROPOUT_PORTS,
    FLOATS,
    LENGTH_PORTS,
    STATISTICS_TYPES,
    AttentionBase,
)
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.shapes import self_overlaps
from tilewright.graph.tensor import Tensor
from tilewright.records import record

_GRADIENTS = (
    ("dQ", "q"),
    ("dK", "k"),
    ("dV", "v"),
    ("dBias", "bias"),
    ("dSink_token", "sink_token"),
)


@record(frozen=True, kw_only=True, eq=False)
class AttentionBackward(AttentionBase):
    """What the backward operations add: the forward's results, and dQ, dK and dV."""

    # Ports of O's dim: the forward's output and its gradient, in whatever types.
    output_ports: ClassVar[tuple[str, ...]] = ("o", "dO")
    output_types: ClassVar[tuple[DataType, ...]] = FLOATS

    use_deterministic_algorithm: bool = False

    def infer(self) -> None:
        """Each gradient has the dim and, where its elements are distinct, the strides."""
        super().infer()
        for port, source in _GRADIENTS:
            if source in self.inputs:
                self._fill_like(port, self.inputs[source])
        extents = self.extents()
        drawn = (extents.batch, extents.heads_q, extents.rows, extents.keys)
        self.fill("rng_dump", drawn, data_type=DataType.FLOAT)
        self.fill_maxima()

    def check(self) -> None:
        """The forward's results and the gradients fit q, k and v."""
        super().check()
        extents = self.extents()
        rows = (extents.batch, extents.heads_q, extents.rows)
        for port in self.output_ports:
            self.require_dim(port, (*rows, extents.depth_v), "it has the dim of the output O")
            self.require_type(port, self.output_types, "it is the output O or its gradient")
        self.require_dim("stats", (*rows, 1), "one log-sum-exp for each query")
        self.require_type("stats", STATISTICS_TYPES, "softmax statistics are not rounded further")
        for port, source in _GRADIENTS:
            if source in self.inputs:
                dim = self.inputs[source].dim
                self.require_dim(port, dim, f"a gradient has the dim of its tensor, {source}")
            elif port in self.outputs:
                self.fail(
                    f"tensor {self.outputs[port].label()} ({port}) is given without {source}; "
                    "expected both"
                )

    def _fill_like(self, port: str, source: Tensor) -> None:
        if self_overlaps(source.dim, source.stride):
            # A broadcast view has one element in many places; its gradient has one for each.
            self.fill(port, source.dim, order_of=source)
        else:
            self.fill(port, source.dim, stride=source.stride)


@operation_kind("sdpa_backward")
@record(frozen=True, kw_only=True, eq=False)
class SdpaBackward(AttentionBackward):
    """dQ, dK and dV from the forward's operands, its O and Stats, and dO."""

    required: ClassVar = ("q", "k", "v", "o", "dO", "stats")
    optional: ClassVar = (
        *("attn_scale", "bias", "block_mask", "sink_token", "dropout_scale_inv"),
        *LENGTH_PORTS,
        *DROPOUT_PORTS,
    )
    list_port: ClassVar = ("score_mod_", "score_mod_bprop_")
    produces: ClassVar = ("dQ", "dK", "dV")
    required_outputs: ClassVar = produces
    accepts_outputs: ClassVar = ("dBias", "dSink_token", "rng_dump")

    score_mod: ScoreProgram | None = None
    score_mod_bprop: ScoreProgram | None = None

    def programs(self) -> Mapping[str, ScoreProgram]:
        """The score program and its gradient's, the absent ones left out."""
        given = {"score_mod": self.score_mod, "score_mod_bprop": self.score_mod_bprop}
        return {name: program for name, program in given.items() if program is not None}


class AttentionBackwardMethods(AttentionDeclarer):
    """Declares the gradients of attention in 16-bit and wider floating types."""

    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        attn_scale: float | Tensor | None = None,
        bias: Tensor | None = None,
        dBias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: tuple[Any, ...] | None = None,
        rng_dump: Tensor | None = None,
        use_deterministic_algorithm: bool = False,
        compute_data_type: object = None,
        name: str = "",
        score_mod: ScoreCallback | None = None,
        score_mod_bprop: ScoreCallback | None = None,
        sink_token: Tensor | None = None,
        dSink_token: Tensor | None = None,
        block_mask: Tensor | None = None,
        cu_seq_len_q: Tensor | None = None,
        cu_seq_len_kv: Tensor | None = None,
    ) -> list[Tensor]:
        """Gradients of ``sdpa`` with the same operands, attributes and dropout draws.

        Args:
            o, dO: the forward's output and the gradient of the loss by it, (B, Hq, Sq, Dv).
            stats: the forward's Stats (B, Hq, Sq, 1), natural logarithms.
            dBias, dSink_token: outputs that the caller declares, with the dims of ``bias`` and
                ``sink_token``; sums over what those broadcast to.
            score_mod_bprop: ``score_mod_bprop(graph, dScore, score)`` returns the gradient by
                ``score``, the scores that ``score_mod`` reads; without it an engine
                differentiates ``score_mod`` or declines.
            dropout: as in ``sdpa``, or (mask, scale, 1 / scale).

        The other arguments are those of ``sdpa``.

        Returns:
            [dQ, dK, dV], with the dims and strides of q, k and v.

        Raises:
            GraphError: here for arguments that contradict one another, at ``validate`` for
                tensors that do not fit.
        """
        operation = self._declare_attention(
            SdpaBackward,
            {
                "q": q,
                "k": k,
                "v": v,
                "o": o,
                "dO": dO,
                "stats": stats,
                "bias": bias,
                "block_mask": block_mask,
                "seq_len_q": seq_len_q,
                "seq_len_kv": seq_len_kv,
                "cu_seq_len_q": cu_seq_len_q,
                "cu_seq_len_kv": cu_seq_len_kv,
                "sink_token": sink_token,
            },
            name=name,
            compute_data_type=compute_data_type,
            given_outputs={"dBias": dBias, "dSink_token": dSink_token, "rng_dump": rng_dump},
            attn_scale=attn_scale,
            dropout=dropout,
            score_mod=score_mod,
            score_mod_bprop=score_mod_bprop,
            use_alibi_mask=use_alibi_mask,
            use_padding_mask=use_padding_mask,
            use_causal_mask=use_causal_mask,
            use_causal_mask_bottom_right=use_causal_mask_bottom_right,
            sliding_window_length=sliding_window_length,
            diagonal_alignment=diagonal_alignment,
            diagonal_band_left_bound=diagonal_band_left_bound,
            diagonal_band_right_bound=diagonal_band_right_bound,
            max_total_seq_len_q=max_total_seq_len_q,
            max_total_seq_len_kv=max_total_seq_len_kv,
            use_deterministic_algorithm=use_deterministic_algorithm,
        )
        return [operation.outputs[port] for port in ("dQ", "dK", "dV")]
