"""The six attention operations, with their options in any combination that may go together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzzing.drawing import BFLOAT16, DOUBLE, FLOAT, FP8, HALF, Dim, Drawing, Value
from tilewright.dtypes import DataType
from tilewright.graph.enums import (
    attention_implementation,
    diagonal_alignment,
    tensor_reordering,
)
from tilewright.graph.tensor import Tensor

_INDEX = (DataType.INT32, DataType.INT32, DataType.INT64)
_TYPES = (FLOAT, FLOAT, HALF, HALF, BFLOAT16, BFLOAT16, DOUBLE)
_WIDE = (FLOAT, HALF, BFLOAT16)
_SCALAR = (1, 1, 1, 1)
_MX_BLOCK = 32
_TILE = 128


@dataclass(frozen=True)
class Extents:
    """B, Hq, Hkv, Sq, Skv, D, Dv."""

    batch: int
    heads: int
    heads_kv: int
    rows: int
    keys: int
    depth: int
    depth_v: int

    @property
    def scores(self) -> Dim:
        return (self.batch, self.heads, self.rows, self.keys)

    @property
    def q(self) -> Dim:
        return (self.batch, self.heads, self.rows, self.depth)

    @property
    def k(self) -> Dim:
        return (self.batch, self.heads_kv, self.keys, self.depth)

    @property
    def v(self) -> Dim:
        return (self.batch, self.heads_kv, self.keys, self.depth_v)

    @property
    def o(self) -> Dim:
        return (self.batch, self.heads, self.rows, self.depth_v)

    @property
    def stats(self) -> Dim:
        return (self.batch, self.heads, self.rows, 1)


def _extents(d: Drawing, source: Value | None) -> Extents:
    heads_kv = d.pick((1, 1, 2, 3))
    heads = heads_kv * d.pick((1, 1, 2, 3))
    batch, rows, depth = d.pick((1, 2, 2, 3)), d.pick((1, 2, 3, 7, 17)), d.pick((1, 3, 4, 8, 13))
    if source is not None:
        batch, heads, rows, depth = source.dim
        heads_kv = d.pick([h for h in (1, 2, 3, heads) if heads % h == 0])
    keys = d.pick((1, 2, 3, 7, 19, 19, 33, 33, 133))
    if d.chance(3):
        keys = 0
    elif source is None and d.chance(3):
        rows = 0
    elif source is None and d.chance(2):
        batch = 0
    return Extents(batch, heads, heads_kv, rows, keys, depth, d.pick((depth, depth, 1, 5, 16)))


class _Attention:
    """One attention under construction: which operands are ragged or paged, and its options."""

    def __init__(self, d: Drawing, method: Callable[..., Any], extents: Extents) -> None:
        self.d, self.method, self.extents = d, method, extents
        self.accepted = frozenset(inspect.signature(method).parameters)
        self.options: dict[str, Any] = {}
        self.padded = d.chance(45)
        self.ragged = self.padded and extents.batch > 0 and d.chance(40)
        self.paged = (
            "paged_attention_k_table" in self.accepted and extents.keys > 0 and d.chance(20)
        )

    def takes(self, *names: str) -> bool:
        return self.accepted.issuperset(names)

    def operand(
        self,
        dim: Dim,
        data_type: DataType,
        *,
        is_key: bool,
        source: Value | None = None,
        distinct: bool = False,
    ) -> Tensor:
        """A tensor of (B, H, S, D), ragged by chance if operands are.

        ``distinct``: one that follows from others, so that no two elements share a place.
        """
        d = self.d
        if source is not None:
            return source.tensor
        if not (self.ragged and d.chance(70)) or (is_key and self.paged):
            return d.input(dim, data_type, d.strides(dim, distinct=distinct)).tensor
        strides, more = self.ragged_layout(dim)
        return d.input(dim, data_type, strides, **more).tensor

    def ragged_layout(self, dim: Dim) -> tuple[Dim, dict[str, Any]]:
        """Strides of (token, head, element), perhaps padded, and the offsets to go with them."""
        d = self.d
        batch, heads, length, depth = dim
        element, head = 1, depth + d.pick((0, 0, 3))
        token = heads * head + d.pick((0, 0, 5))
        offset = d.input((batch + 1, 1, 1, 1), d.pick(_INDEX), (1, 1, 1, 1)).tensor
        multiplier = d.pick((1, 1, token))
        more = {"ragged_offset": offset, "ragged_offset_multiplier": multiplier}
        return (token * length, head, token, element), more

    def make_ragged(self, tensor: Tensor | None, dim: Dim) -> None:
        """Give an output an offset of its own, by chance."""
        if tensor is None or not self.ragged or not self.d.chance(60):
            return
        strides, more = self.ragged_layout(dim)
        tensor.set_dim(dim).set_stride(strides)
        tensor.set_ragged_offset(more["ragged_offset"])
        tensor.set_ragged_offset_multiplier(more["ragged_offset_multiplier"])
        # A ragged tensor inside a graph has no rows that tell where it ends.
        tensor.set_output(True)

    def add_lengths(self) -> None:
        if not self.padded:
            return
        d, extents = self.d, self.extents
        self.options["use_padding_mask"] = True
        for side, capacity in (("q", extents.rows), ("kv", extents.keys)):
            lengths = [d.pick(range(capacity + 1)) for _ in range(extents.batch)]
            if self.takes(f"cu_seq_len_{side}") and d.chance(25):
                sums = [sum(lengths[:i]) for i in range(extents.batch + 1)]
                dim, numbers, port = (extents.batch + 1, 1, 1, 1), sums, f"cu_seq_len_{side}"
            else:
                dim, numbers, port = (extents.batch, 1, 1, 1), lengths, f"seq_len_{side}"
            self.options[port] = d.given(dim, _INDEX, numbers)

    def add_masks(self) -> None:
        d, options = self.d, self.options
        left, right = d.pick((None, None, 1, 2, 7)), d.pick((None, None, 0, 1, 4))
        style = d.pick(("none", "none", "causal", "bottom", "band", "band"))
        left_name = "left_bound" if self.takes("left_bound") else "diagonal_band_left_bound"
        right_name = left_name.replace("left", "right")
        if style == "none":
            return
        if style == "causal":
            options["use_causal_mask"] = True
        elif style == "bottom":
            options["use_causal_mask_bottom_right"] = True
        else:
            options["diagonal_alignment"] = d.pick(list(diagonal_alignment))
            if right is not None:
                options[right_name] = right
        if left is not None:
            sliding = self.takes("sliding_window_length") and d.chance(40)
            options["sliding_window_length" if sliding else left_name] = left

    def add_features(self) -> None:
        """Whatever else the method takes, each by chance."""
        d, extents, options = self.d, self.extents, self.options
        form = d.pick(("none", "number", "number", "tensor"))
        if form == "number":
            options["attn_scale"] = d.pick((1.0, 0.3, -0.5, 0.0))
        elif form == "tensor":
            options["attn_scale"] = d.input(_SCALAR, FLOAT, is_pass_by_value=d.chance(50)).tensor
        if self.takes("bias") and d.chance(25):
            dim = [1 if d.chance(35) else extent for extent in extents.scores]
            options["bias"] = d.input(dim, d.pick(_WIDE)).tensor
            if self.takes("dBias") and d.chance(60):
                options["dBias"] = self.output(dim, _WIDE)
        if self.takes("block_mask") and d.chance(15):
            tiles_across = -(-extents.keys // _TILE)
            tiles = (-(-extents.rows // _TILE), -(-tiles_across // 8))
            dim = (extents.batch, extents.heads, *tiles)
            options["block_mask"] = d.input(dim, DataType.UINT8).tensor
        if self.takes("use_alibi_mask") and d.chance(20):
            options["use_alibi_mask"] = True
        if self.takes("sink_token") and d.chance(20):
            dim = (1, extents.heads, 1, 1)
            options["sink_token"] = d.input(dim, FLOAT).tensor
            if self.takes("dSink_token") and d.chance(60):
                options["dSink_token"] = self.output(dim, (FLOAT,))
        if self.takes("dropout") and d.chance(25):
            self._add_dropout()
        for name in ("score_max", "score_sum_exp"):
            if self.takes(name) and d.chance(15):
                options[name] = self.output(extents.stats, (FLOAT,))
                self.make_ragged(options[name], extents.stats)
        if self.takes("stats_use_log2") and d.chance(20):
            options["stats_use_log2"] = True
        if self.takes("unfuse_fma") and d.chance(10):
            options["unfuse_fma"] = True
        if self.takes("implementation") and d.chance(20):
            options["implementation"] = d.pick(list(attention_implementation))
        if self.takes("use_deterministic_algorithm") and d.chance(20):
            options["use_deterministic_algorithm"] = True
        if self.takes("score_mod") and d.chance(25):
            self._add_score_mod()

    def output(self, dim: Any, types: tuple[DataType, ...]) -> Tensor:
        """A tensor for a result that the caller declares."""
        d = self.d
        strides = d.strides(tuple(dim), distinct=True)
        return d.input(dim, d.pick(types), strides).tensor

    def _add_dropout(self) -> None:
        d, extents = self.d, self.extents
        if d.chance(50):
            dim = [1 if d.chance(25) else extent for extent in extents.scores]
            mask, scale = d.input(dim, d.pick(_WIDE)).tensor, d.input(_SCALAR, FLOAT).tensor
            self.options["dropout"] = (mask, scale)
            return
        words = [d.input(_SCALAR, d.pick(_INDEX)).tensor for _ in range(2)]
        self.options["dropout"] = (d.pick((0.0, 0.1, 0.5, 0.9)), *words)
        if self.takes("rng_dump") and d.chance(40):
            self.options["rng_dump"] = self.output(extents.scores, (FLOAT, HALF))

    def _add_score_mod(self) -> None:
        d, extents = self.d, self.extents
        program = d.pick(("cap", "factor", "added", "select", "nothing"))
        cap, factor = d.graph.tensor_scalar(3.0), d.graph.tensor_scalar(-0.5)
        dim = [1 if d.chance(40) else extent for extent in extents.scores]
        added = d.input(dim, d.pick(_WIDE)).tensor if program == "added" else None

        def forward(graph: Any, score: Tensor) -> Tensor:
            if program == "cap":
                return graph.mul(graph.tanh(graph.div(score, cap)), cap)
            if program == "factor":
                return graph.mul(score, factor)
            if program == "added":
                return graph.add(score, added)
            if program == "select":
                row, column = graph.gen_index(score, axis=2), graph.gen_index(score, axis=3)
                return graph.binary_select(
                    score, graph.mul(score, factor), graph.cmp_ge(row, column)
                )
            return score

        self.options["score_mod"] = forward
        if self.takes("score_mod_bprop") and program in ("factor", "added") and d.chance(50):

            def backward(graph: Any, gradient: Tensor, score: Tensor) -> Tensor:
                return graph.mul(gradient, factor) if program == "factor" else gradient

            self.options["score_mod_bprop"] = backward

    def key_value(self, data_type: DataType) -> tuple[Tensor, Tensor]:
        """k and v: dense, ragged, or containers of pages with their tables among the options."""
        extents, d = self.extents, self.d
        if not self.paged:
            k = self.operand(extents.k, data_type, is_key=True)
            return k, self.operand(extents.v, data_type, is_key=True)
        containers = []
        self.options["paged_attention_max_seq_len_kv"] = extents.keys
        for name, dim in (("k", extents.k), ("v", extents.v)):
            tokens = d.pick((1, 2, 5, 16))
            pages = -(-extents.keys // tokens) + d.pick((0, 0, 1))
            blocks = max(extents.batch * pages + d.pick((-1, 0, 2)), 1)
            containers.append(d.input((blocks, dim[1], tokens, dim[3]), data_type).tensor)
            table = d.input((extents.batch, 1, pages, 1), d.pick(_INDEX)).tensor
            self.options[f"paged_attention_{name}_table"] = table
        return containers[0], containers[1]

    def finish(self, *operands: Any, **ports: Any) -> list[Tensor | None]:
        return list(self.method(*operands, **ports, **self.options))

    def results(
        self, tensors: list[Tensor | None], dims: list[Dim], types: list[tuple[DataType, ...]]
    ) -> None:
        for tensor, dim, choices in zip(tensors, dims, types, strict=True):
            if tensor is None:
                continue
            if dim != _SCALAR:
                self.make_ragged(tensor, dim)
            if tensor.ragged_offset is not None:
                tensor.set_data_type(self.d.pick(choices))
                continue
            self.d.result(tensor, dim, choices)


def _prepared(d: Drawing, source: Value | None, method: str) -> _Attention:
    attention = _Attention(d, getattr(d.graph, method), _extents(d, source))
    attention.add_lengths()
    attention.add_masks()
    attention.add_features()
    return attention


def sdpa(d: Drawing, source: Value | None) -> None:
    fits = source is not None and len(source.dim) == 4 and source.data_type in _TYPES
    if source is not None and (not fits or min(source.dim[1], source.dim[3]) < 1):
        source = None
    attention = _prepared(d, source, "sdpa")
    extents = attention.extents
    data_type = source.data_type if source is not None else d.pick(_TYPES)
    k, v = attention.key_value(data_type)
    q = attention.operand(extents.q, data_type, is_key=False, source=source)
    attention.options["generate_stats"] = d.chance(60)
    made = attention.finish(q, k, v)
    attention.results(made, [extents.o, extents.stats], [(data_type, *_WIDE), (FLOAT,)])


def sdpa_backward(d: Drawing, source: Value | None) -> None:
    attention = _prepared(d, None, "sdpa_backward")
    extents, data_type = attention.extents, d.pick(_TYPES)
    ports = {
        "q": (extents.q, data_type),
        "k": (extents.k, data_type),
        "v": (extents.v, data_type),
        "o": (extents.o, data_type),
        "dO": (extents.o, data_type),
        "stats": (extents.stats, FLOAT),
    }
    made = attention.finish(**_operands(attention, ports))
    dims = [extents.q, extents.k, extents.v]
    attention.results(made, dims, [(data_type, *_WIDE)] * 3)


# Of a block-scaled backward, x, x_T and x_f16 hold the same numbers.
_DERIVED = ("o", "stats", "q_T", "k_T", "dO_T", "o_f16", "dO_f16")


def _operands(attention: _Attention, ports: dict[str, tuple[Dim, DataType]]) -> dict[str, Tensor]:
    derived = {*_DERIVED, *("q", "k", "dO")} if "q_T" in ports else {*_DERIVED}
    return {
        port: attention.operand(dim, data_type, is_key=port[0] in "kv", distinct=port in derived)
        for port, (dim, data_type) in ports.items()
    }


# -- eight bits -------------------------------------------------------------------------------


def _scales(d: Drawing, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: d.input(_SCALAR, FLOAT).tensor for name in names}


def sdpa_fp8(d: Drawing, source: Value | None) -> None:
    attention = _prepared(d, None, "sdpa_fp8")
    extents, data_type = attention.extents, d.pick(FP8)
    k, v = attention.key_value(data_type)
    q = attention.operand(extents.q, data_type, is_key=False)
    attention.options["generate_stats"] = d.chance(60)
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    made = attention.finish(q, k, v, **_scales(d, names))
    dims = [extents.o, extents.stats, _SCALAR, _SCALAR]
    attention.results(made, dims, [(data_type, *FP8, HALF, FLOAT), (FLOAT,), (FLOAT,), (FLOAT,)])


def sdpa_fp8_backward(d: Drawing, source: Value | None) -> None:
    attention = _prepared(d, None, "sdpa_fp8_backward")
    extents, data_type = attention.extents, d.pick(FP8)
    ports = {
        "q": (extents.q, data_type),
        "k": (extents.k, data_type),
        "v": (extents.v, data_type),
        "o": (extents.o, data_type),
        "dO": (extents.o, d.pick(FP8)),
        "stats": (extents.stats, FLOAT),
    }
    names = (
        *("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s"),
        *("descale_dP", "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
    )
    made = attention.finish(**_operands(attention, ports), **_scales(d, names))
    dims = [extents.q, extents.k, extents.v, *(_SCALAR,) * 4]
    wide = (data_type, *FP8, HALF, FLOAT)
    attention.results(made, dims, [wide] * 3 + [(FLOAT,)] * 4)


def _block_scales(d: Drawing, dim: Dim, axis: int) -> Tensor:
    """E8M0 scales of blocks along an axis: exact, or padded to whole tiles and perhaps tiled."""
    exact = list(dim)
    exact[axis] = -(-dim[axis] // _MX_BLOCK)
    if not d.chance(30) or 0 in dim:
        return d.input(exact, DataType.FP8_E8M0).tensor
    padded = list(exact)
    for other in (2, 3):
        tile = 4 if other == axis else _TILE
        padded[other] = -(-exact[other] // tile) * tile
    rows = 5 - axis
    strides = [0, padded[rows] * padded[axis], 1, 1]
    strides[0], strides[rows] = strides[1] * padded[1], padded[axis]
    tiled = d.pick((tensor_reordering.NONE, tensor_reordering.F8_128x4))
    return d.input(padded, DataType.FP8_E8M0, strides, reordering_type=tiled).tensor


def sdpa_mxfp8(d: Drawing, source: Value | None) -> None:
    attention = _prepared(d, None, "sdpa_mxfp8")
    extents, data_type = attention.extents, d.pick(FP8)
    k, v = attention.key_value(data_type)
    q = attention.operand(extents.q, data_type, is_key=False)
    attention.options["generate_stats"] = d.chance(60)
    scales = {
        "descale_q": _block_scales(d, extents.q, 3),
        "descale_k": _block_scales(d, k.dim, 3),
        "descale_v": _block_scales(d, v.dim, 2),
    }
    made = attention.finish(q, k, v, **scales)
    attention.results(made, [extents.o, extents.stats, _SCALAR], [_WIDE, (FLOAT,), (FLOAT,)])


def sdpa_mxfp8_backward(d: Drawing, source: Value | None) -> None:
    attention = _prepared(d, None, "sdpa_mxfp8_backward")
    extents, data_type, wide = attention.extents, d.pick(FP8), d.pick(_WIDE)
    ports = {
        "q": (extents.q, data_type),
        "q_T": (extents.q, data_type),
        "k": (extents.k, data_type),
        "k_T": (extents.k, data_type),
        "v": (extents.v, data_type),
        "o_f16": (extents.o, wide),
        "dO_f16": (extents.o, wide),
        "dO": (extents.o, data_type),
        "dO_T": (extents.o, data_type),
        "stats": (extents.stats, FLOAT),
    }
    scales = {}
    for port, dim in (("q", extents.q), ("k", extents.k), ("v", extents.v), ("dO", extents.o)):
        scales[f"descale_{port}"] = _block_scales(d, dim, 3)
        if port != "v":
            scales[f"descale_{port}_T"] = _block_scales(d, dim, 2)
    made = attention.finish(**_operands(attention, ports), **scales)
    dims = [extents.q, extents.k, extents.v, *(_SCALAR,) * 3]
    attention.results(made, dims, [_WIDE] * 3 + [(FLOAT,)] * 3)
