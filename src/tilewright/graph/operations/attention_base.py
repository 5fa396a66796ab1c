"""What all attention operations have in common: extents, optional operands, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from tilewright.dtypes import DataType
from tilewright.graph.operation import Operation
from tilewright.graph.operations.attention_masks import AttentionMasks
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor, packed_strides
from tilewright.records import record

FLOATS = (DataType.HALF, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)
FP8_TYPES = (DataType.FP8_E4M3, DataType.FP8_E5M2)
INDEX_TYPES = (DataType.INT32, DataType.INT64)
STATISTICS_TYPES = (DataType.FLOAT, DataType.DOUBLE)
SCALAR = (1, 1, 1, 1)
# One bit of a block mask stands for a tile of this many queries by as many keys.
BLOCK_MASK_TILE = 128
BITS_PER_BYTE = 8

LENGTH_PORTS = ("seq_len_q", "seq_len_kv", "cu_seq_len_q", "cu_seq_len_kv")
DROPOUT_PORTS = ("dropout_seed", "dropout_offset", "dropout_mask", "dropout_scale")
PAGE_PORTS = ("paged_attention_k_table", "paged_attention_v_table")


class AttentionExtents(NamedTuple):
    """B, Hq, Hkv, Sq, Skv, D and Dv of an attention operation."""

    batch: int
    heads_q: int
    heads_kv: int
    rows: int
    keys: int
    depth: int
    depth_v: int


@record(frozen=True, kw_only=True, eq=False)
class AttentionBase(AttentionMasks):
    """Attributes and checks of every attention operation, forward and backward."""

    # The data types of q, k and v, and why.
    operand_types: ClassVar[tuple[DataType, ...]] = FLOATS
    operand_rule: ClassVar[str] = "8-bit operands need sdpa_fp8 or sdpa_mxfp8, which scale them"
    # The data types of O, or of dQ, dK, dV and dBias, and why.
    result_types: ClassVar[tuple[DataType, ...]] = FLOATS
    result_rule: ClassVar[str] = "it has no scale, so 8 bits cannot hold it"
    # The ports that hold one sequence after another if they have a ragged offset.
    ragged_ports: ClassVar[frozenset[str]] = frozenset(
        {"q", "k", "v", "o", "dO", "stats", "O", "Stats", "score_max", "score_sum_exp"}
        | {"dQ", "dK", "dV", *PAGE_PORTS}
    )

    attn_scale: float | None = None
    dropout_probability: float | None = None
    max_total_seq_len_q: int | None = None
    max_total_seq_len_kv: int | None = None

    @property
    def is_paged(self) -> bool:
        """True if k and v are containers of pages that the page tables order."""
        return any(port in self.inputs for port in PAGE_PORTS)

    @property
    def max_paged_keys(self) -> int | None:
        """Skv of paged keys; operations without page tables have none."""
        return None

    def programs(self) -> Mapping[str, ScoreProgram]:
        """The score programs by attribute name, the absent ones left out."""
        return {}

    def extents(self) -> AttentionExtents:
        """The extents that q, k and v declare.

        Raises:
            GraphError: if the three do not fit together.
        """
        for port in ("q", "k", "v"):
            self.require_rank(port, 4, 4, "its axes are batch, heads, sequence, head size")
        q, k, v = (self.inputs[port] for port in ("q", "k", "v"))
        batch, heads_q, rows, depth = q.dim
        heads_kv = k.dim[1]
        if self.is_paged:
            keys = self._paged_keys()
        else:
            keys = k.dim[2]
            self._same_extent("k", 0, batch, "one batch of keys for each of q's")
            self._same_extent("v", 0, batch, "one batch of values for each of q's")
            self._same_extent("v", 2, keys, "one value for each key")
        self._same_extent("v", 1, heads_kv, "k and v have the same heads")
        self._same_extent("k", 3, depth, "q and k have the same head size")
        if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
            self.fail(
                f"tensor {q.label()} (q) has {heads_q} heads and tensor {k.label()} (k) has "
                f"{heads_kv}; expected a multiple of k's: query head h reads KV head "
                "h // (Hq // Hkv)"
            )
        if depth < 1 or v.dim[3] < 1:
            self.fail(
                f"tensor {q.label()} (q) has dim {q.dim} and tensor {v.label()} (v) has dim "
                f"{v.dim}; expected head sizes of at least 1"
            )
        return AttentionExtents(batch, heads_q, heads_kv, rows, keys, depth, v.dim[3])

    def open_nested(self) -> None:
        """Declare the float32 scores, and their gradients, that score programs read."""
        programs = self.programs()
        if not programs:
            return
        dim = self._score_dim()
        for attribute, program in programs.items():
            for tensor in program.own_inputs():
                self._declare_score(attribute, tensor, dim)
            # A program computes in float32 whatever the graph's intermediate type is.
            for operation in program.operations:
                for tensor in operation.outputs.values():
                    if tensor.data_type is DataType.NOT_SET:
                        tensor.data_type = DataType.FLOAT

    def nested_operations(self) -> Sequence[Operation]:
        """The operations of the score programs, forward before backward."""
        return [step for program in self.programs().values() for step in program.operations]

    def infer(self) -> None:
        """Give lengths their four axes; subclasses fill the outputs."""
        extents = self.extents()
        for port in LENGTH_PORTS:
            tensor = self.inputs.get(port)
            entries = extents.batch + port.startswith("cu_")
            if tensor is not None and tensor.dim == (entries,) and not tensor.is_virtual:
                tensor.dim = (entries, 1, 1, 1)
                tensor.stride = (*tensor.stride, 1, 1, 1)

    def check(self) -> None:
        """Everything that the attention operations have in common."""
        extents = self.extents()
        self._check_outputs()
        for port in ("q", "k", "v"):
            self.require_type(port, self.operand_types, self.operand_rule)
        self.check_masks()
        self._check_scale()
        self._check_lengths(extents)
        self._check_ragged()
        self._check_scores(extents)
        self._check_dropout(extents)
        self._check_pages(extents)
        self._check_programs()

    def require_scalar(
        self, port: str, accepted: Sequence[DataType] = (DataType.FLOAT,), rule: str = "a scalar"
    ) -> None:
        """Require one element of one of these types on ``port``, if present."""
        tensor = self.inputs.get(port) or self.outputs.get(port)
        if tensor is None:
            return
        if math.prod(tensor.dim) != 1:
            self.fail(
                f"tensor {tensor.label()} ({port}) has dim {tensor.dim}; expected {SCALAR}: {rule}"
            )
        self.require_type(port, accepted, rule)

    def fill_maxima(self) -> None:
        """Fill the outputs that hold a largest magnitude."""
        for port in self._maxima():
            self.fill(port, SCALAR, data_type=DataType.FLOAT)

    def _maxima(self) -> list[str]:
        return [port for port in self.outputs if port.lower().startswith("amax_")]

    def _check_outputs(self) -> None:
        for port in ("O", "dQ", "dK", "dV", "dBias", "dSink_token"):
            self.require_type(port, self.result_types, self.result_rule)
        for port in self._maxima():
            self.require_scalar(port, rule="a largest magnitude is one number")

    def _score_dim(self) -> tuple[int, int, int, int]:
        extents = self.extents()
        return (extents.batch, extents.heads_q, extents.rows, extents.keys)

    def _same_extent(self, port: str, axis: int, expected: int, rule: str) -> None:
        tensor = self.inputs[port]
        if tensor.dim[axis] != expected:
            self.fail(
                f"tensor {tensor.label()} ({port}) has dim {tensor.dim}; "
                f"expected {expected} on axis {axis}: {rule}"
            )

    def _paged_keys(self) -> int:
        keys = self.max_paged_keys
        if keys is None or keys < 1:
            self.fail(
                f"paged_attention_max_seq_len_kv is {keys}; expected at least 1: page tables do "
                "not tell how many keys a sequence may have"
            )
        return keys

    def _declare_score(self, attribute: str, tensor: Tensor, dim: tuple[int, ...]) -> None:
        if not tensor.is_virtual:
            self.fail(
                f"{attribute}: tensor {tensor.label()} is not the scores that attention feeds in; "
                "expected a virtual tensor of its own"
            )
        if tensor.dim and tensor.dim != dim:
            self.fail(
                f"{attribute}: tensor {tensor.label()} has dim {tensor.dim}; expected {dim}: "
                "there is one score for each query and key"
            )
        tensor.dim, tensor.stride, tensor.data_type = dim, packed_strides(dim), DataType.FLOAT

    def _check_scale(self) -> None:
        if self.attn_scale is not None:
            if "attn_scale" in self.inputs:
                self.fail("attn_scale is both a number and a tensor; expected one of them")
            if not math.isfinite(self.attn_scale):
                self.fail(f"attn_scale is {self.attn_scale}; expected a finite number")
        self.require_scalar("attn_scale", FLOATS, "the scores' factor is one number")
        for attribute in ("max_total_seq_len_q", "max_total_seq_len_kv"):
            total = getattr(self, attribute)
            if total is not None and total < 0:
                self.fail(f"{attribute} is {total}; expected a count of tokens")

    def _check_lengths(self, extents: AttentionExtents) -> None:
        for side in ("q", "kv"):
            given = [port for port in (f"seq_len_{side}", f"cu_seq_len_{side}") if self._has(port)]
            if len(given) == 2:
                self.fail(f"{given[0]} and {given[1]} are both given; expected one of them")
            if given and not self.use_padding_mask:
                self.fail(
                    f"tensor {self.inputs[given[0]].label()} ({given[0]}) is given and "
                    "use_padding_mask is False; expected use_padding_mask=True with lengths"
                )
            if self.use_padding_mask and not given:
                self.fail(
                    f"seq_len_{side} is missing and use_padding_mask is True; expected "
                    f"seq_len_{side} or cu_seq_len_{side}: a padding mask needs both lengths"
                )
            batch = extents.batch
            self.require_dim(f"seq_len_{side}", (batch, 1, 1, 1), "one length a sequence")
            self.require_dim(
                f"cu_seq_len_{side}", (batch + 1, 1, 1, 1), "running sums of the lengths, from 0"
            )
        for port in LENGTH_PORTS:
            self.require_type(port, INDEX_TYPES, "lengths are integers")

    def _check_ragged(self) -> None:
        for port, tensor in (*self.inputs.items(), *self.outputs.items()):
            if tensor.ragged_offset is None:
                continue
            if port not in self.ragged_ports:
                self.fail(
                    f"tensor {tensor.label()} ({port}) has a ragged offset; expected none: only "
                    "operands with a row a token, and page tables, can be ragged"
                )
            if not self.use_padding_mask:
                self.fail(
                    f"tensor {tensor.label()} ({port}) has a ragged offset and use_padding_mask "
                    "is False; expected use_padding_mask=True and the lengths: offsets tell where "
                    "sequences start, not where they end"
                )
            if self.is_paged and port in ("k", "v"):
                self.fail(
                    f"tensor {tensor.label()} ({port}) has a ragged offset and a page table; "
                    "expected one of them"
                )

    def _check_scores(self, extents: AttentionExtents) -> None:
        self.require_broadcast("bias", self._score_dim(), "it is added to (B, Hq, Sq, Skv) scores")
        self.require_type("bias", FLOATS, "it is added to the scores; True and False are no bias")
        tiles = [-(-extent // BLOCK_MASK_TILE) for extent in (extents.rows, extents.keys)]
        self.require_dim(
            "block_mask",
            (extents.batch, extents.heads_q, tiles[0], -(-tiles[1] // BITS_PER_BYTE)),
            f"one bit for each {BLOCK_MASK_TILE} x {BLOCK_MASK_TILE} tile of scores, eight a byte",
        )
        self.require_type("block_mask", (DataType.UINT8,), "a byte holds eight tiles")
        self.require_dim("sink_token", (1, extents.heads_q, 1, 1), "one sink for each query head")
        self.require_type("sink_token", FLOATS, "a sink is a score")

    def _check_dropout(self, extents: AttentionExtents) -> None:
        probability = self.dropout_probability
        seeded = [port for port in ("dropout_seed", "dropout_offset") if self._has(port)]
        masked = [port for port in ("dropout_mask", "dropout_scale") if self._has(port)]
        if len(seeded) == 1 or len(masked) == 1 or (seeded and masked):
            self.fail(
                f"dropout has {', '.join((*seeded, *masked))}; expected dropout_seed and "
                "dropout_offset, or dropout_mask and dropout_scale"
            )
        if (probability is None) == bool(seeded):
            self.fail(
                f"dropout_probability is {probability} and dropout has "
                f"{', '.join((*seeded, *masked)) or 'no tensor'}; expected a probability exactly "
                "with dropout_seed and dropout_offset"
            )
        if probability is not None and not 0.0 <= probability < 1.0:
            self.fail(
                f"dropout_probability is {probability}; expected 0 <= p < 1: what is kept is "
                "scaled by 1 / (1 - p)"
            )
        for port in seeded:
            self.require_scalar(port, INDEX_TYPES, "the generator's key and counter are integers")
        self.require_broadcast(
            "dropout_mask", self._score_dim(), "it multiplies (B, Hq, Sq, Skv) probabilities"
        )
        for port in ("dropout_scale", "dropout_scale_inv"):
            self.require_scalar(port, FLOATS, "the factor on what is kept is one number")
        if "rng_dump" in self.outputs and not seeded:
            self.fail(
                f"tensor {self.outputs['rng_dump'].label()} (rng_dump) is given; expected "
                "dropout=(probability, seed, offset): without it nothing is drawn"
            )
        self.require_dim("rng_dump", self._score_dim(), "one draw for each query and key")

    def _check_pages(self, extents: AttentionExtents) -> None:
        if not self.is_paged:
            if self.max_paged_keys is not None:
                self.fail(
                    f"paged_attention_max_seq_len_kv is {self.max_paged_keys} and there are no "
                    "page tables; expected both: without pages k's dim tells the keys"
                )
            return
        for port, side in zip(PAGE_PORTS, ("k", "v"), strict=True):
            if port not in self.inputs:
                self.fail(f"{port} is missing; expected page tables of both k and v")
            table, pages = self.inputs[port], self.inputs[side]
            self.require_rank(port, 4, 4, "its axes are batch, 1, pages, 1")
            self.require_dim(
                port, (extents.batch, 1, table.dim[2], 1), "one row of page numbers a sequence"
            )
            self.require_type(port, INDEX_TYPES, "page numbers are integers")
            if table.dim[2] * pages.dim[2] < extents.keys:
                self.fail(
                    f"tensor {table.label()} ({port}) has {table.dim[2]} pages of {pages.dim[2]} "
                    f"tokens; expected room for paged_attention_max_seq_len_kv = {extents.keys}"
                )

    def _check_programs(self) -> None:
        listed = {port for port in self.inputs if port.startswith("score_mod_")}
        for attribute, program in self.programs().items():
            external = program.external_inputs()
            for index, tensor in enumerate(external):
                port = f"{attribute}_{index}"
                listed.discard(port)
                if self.inputs.get(port) is not tensor:
                    self.fail(
                        f"{attribute} reads tensor {tensor.label()}; expected it on port {port!r}: "
                        "ports list what a program reads and does not make, in order of first use"
                    )
                if tensor.ragged_offset is not None:
                    self.fail(
                        f"tensor {tensor.label()} ({port}) has a ragged offset; expected none: it "
                        "broadcasts to the scores"
                    )
                if math.prod(tensor.dim) != 1:
                    self.require_broadcast(port, self._score_dim(), "it is read beside the scores")
            self._check_program_tensors(attribute, program)
        if listed:
            port = sorted(listed)[0]
            self.fail(f"tensor {self.inputs[port].label()} ({port}) is read by no score program")

    def _check_program_tensors(self, attribute: str, program: ScoreProgram) -> None:
        is_backward = attribute == "score_mod_bprop"
        if (program.gradient is not None) != is_backward:
            self.fail(
                f"{attribute} has {'a' if program.gradient else 'no'} gradient to read; expected "
                f"{'one' if is_backward else 'none'}"
            )
        made = program.made()
        for tensor in made:
            if not tensor.is_virtual:
                self.fail(
                    f"tensor {tensor.label()} is made inside {attribute} and is marked as an "
                    "output; expected a virtual tensor: scores are never stored"
                )
        output = program.output
        if not any(output is tensor for tensor in (*program.own_inputs(), *made)):
            self.fail(
                f"{attribute} returns tensor {output.label()}, which it does not compute; expected "
                "the result of its operations"
            )
        if output.dim != self._score_dim():
            self.fail(
                f"{attribute} returns tensor {output.label()} of dim {output.dim}; expected "
                f"{self._score_dim()}: one score for each query and key"
            )

    def _has(self, port: str) -> bool:
        return port in self.inputs
