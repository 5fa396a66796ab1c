"""What the forward attention operations share: statistics, pages, and the outputs."""

from __future__ import annotations

from tilewright.dtypes import DataType
from tilewright.graph import enums
from tilewright.graph.operations.attention_base import (
    STATISTICS_TYPES,
    AttentionBase,
    AttentionExtents,
)
from tilewright.records import record


@record(frozen=True, kw_only=True, eq=False)
class AttentionForward(AttentionBase):
    """What the forward operations add: statistics, pages, and the outputs O and Stats."""

    is_inference: bool | None = None
    generate_stats: bool | None = None
    paged_attention_max_seq_len_kv: int | None = None
    implementation: enums.attention_implementation = enums.attention_implementation.AUTO
    unfuse_fma: bool = False
    stats_use_log2: bool = False

    @property
    def max_paged_keys(self) -> int | None:
        """Skv of paged keys."""
        return self.paged_attention_max_seq_len_kv

    @property
    def wants_stats(self) -> bool:
        """True if the declaration asks for Stats; neither flag given means no."""
        if self.generate_stats is not None:
            return self.generate_stats
        return self.is_inference is False

    def infer(self) -> None:
        """O's dim in q's axis order; the statistics in float32."""
        super().infer()
        expected = self._output_dims(self.extents())
        self.fill("O", expected.pop("O"), order_of=self.inputs["q"])
        for port, dim in expected.items():
            self.fill(port, dim, data_type=DataType.FLOAT)
        self.fill_maxima()

    def check(self) -> None:
        """The outputs and what was asked for agree."""
        super().check()
        for port, dim in self._output_dims(self.extents()).items():
            self.require_dim(port, dim, "it follows from the dims of q, k and v")
        if self.is_inference is not None and self.generate_stats is self.is_inference:
            self.fail(
                f"is_inference is {self.is_inference} and generate_stats is "
                f"{self.generate_stats}; expected one of them: inference makes no Stats"
            )
        if self.wants_stats != ("Stats" in self.outputs):
            self.fail(
                f"generate_stats is {self.generate_stats} and is_inference is "
                f"{self.is_inference}; the output Stats exists exactly if they ask for it"
            )
        for port in ("Stats", "score_max", "score_sum_exp"):
            self.require_type(port, STATISTICS_TYPES, "softmax statistics are not rounded further")

    def _output_dims(self, extents: AttentionExtents) -> dict[str, tuple[int, ...]]:
        batch, heads, rows = extents.batch, extents.heads_q, extents.rows
        row_dim = (batch, heads, rows, 1)
        return {
            "O": (batch, heads, rows, extents.depth_v),
            "Stats": row_dim,
            "score_max": row_dim,
            "score_sum_exp": row_dim,
            "rng_dump": (batch, heads, rows, extents.keys),
        }
