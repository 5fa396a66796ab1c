"""From attention's torch operands to the graph that computes it, forward and backward."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.dtypes import DataType
from tilewright.errors import NotSupportedError
from tilewright.graph.enums import diagonal_alignment
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor, strides_in_order_of
from tilewright.ops.declaring import alignment_of
from tilewright.ops.first_order import first_order
from tilewright.ops.plan_cache import Operands, operands_key, run

# Packed operands (T, H, D) and the prefix sums that say where each sequence starts.
_PACKED = {"q": "cu_q", "o": "cu_q", "do": "cu_q", "dq": "cu_q", "stats": "cu_q"}
_PACKED |= {"k": "cu_kv", "v": "cu_kv", "dk": "cu_kv", "dv": "cu_kv"}


@dataclass(frozen=True)
class AttentionOptions:
    """Everything of a call that is no operand. Hashable: it is part of the plan's key.

    ``scale`` is None, for D ** -0.5, only where a trace must not make a number of D. ``max_q`` and
    ``max_kv`` bound the sequence lengths of packed and paged operands; None for dense ones.
    """

    scale: float | None = None
    causal: bool = False
    align: str = "top_left"
    window: tuple[int | None, int | None] = (None, None)
    alibi: bool = False
    soft_cap: float | None = None
    dropout_p: float = 0.0
    deterministic: bool = False
    max_q: int | None = None
    max_kv: int | None = None
    stats_token_major: bool = False


@dataclass(frozen=True)
class Call:
    """One attention call: options, operands by name, and where to run."""

    options: AttentionOptions
    operands: Mapping[str, torch.Tensor]
    engine: str | None
    stream: Any

    @property
    def device(self) -> torch.device:
        """The device of q."""
        return self.operands["q"].device

    @property
    def is_packed(self) -> bool:
        """True for operands of one sequence after another, with prefix sums."""
        return "cu_q" in self.operands


def attention_forward(
    call: Call, out: torch.Tensor | None, *, want_stats: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(O, Stats or None). Packed outputs are filled beyond the last sequence: 0 and -inf."""
    o = empty_output(call) if out is None else out
    outputs = {"o": o}
    stats = None
    if want_stats:
        stats = empty_stats(call)
        outputs["stats"] = stats

    def declare(graph: DeclaredGraph) -> None:
        declared = _declare_inputs(graph, call, call.operands)
        made = graph.sdpa(
            declared["q"],
            declared["k"],
            declared["v"],
            generate_stats=want_stats,
            paged_attention_k_table=declared.get("k_table"),
            paged_attention_v_table=declared.get("v_table"),
            paged_attention_max_seq_len_kv=call.options.max_kv if "k_table" in declared else None,
            **_totals(call),
            **_masks(call.options, declared),
        )
        _set_output(made[0], "o", o, call, declared)
        if stats is not None:
            _set_output(made[1], "stats", stats, call, declared)

    key = (call.options, _key(call.operands), _key(outputs))
    run(
        "sdpa",
        key,
        declare,
        call.operands,
        outputs,
        device=call.device,
        engine=call.engine,
        stream=call.stream,
        fill=o.zero_ if call.is_packed else None,
    )
    return o, stats


def attention_backward(
    call: Call,
    o: torch.Tensor,
    stats: torch.Tensor,
    do: torch.Tensor,
    *,
    want_dbias: bool,
    want_dsink: bool,
) -> dict[str, torch.Tensor]:
    """dq, dk, dv, and dbias, dsink if wanted, by the graph's own backward operation."""
    inputs = {**call.operands, "o": o, "stats": stats, "do": do}
    make = torch.zeros_like if call.is_packed else torch.empty_like
    outputs = {f"d{name}": make(call.operands[name]) for name in ("q", "k", "v")}
    if want_dbias:
        outputs["dbias"] = torch.empty_like(call.operands["bias"]).contiguous()
    if want_dsink:
        outputs["dsink"] = torch.empty_like(call.operands["sink"])

    def declare(graph: DeclaredGraph) -> None:
        declared = _declare_inputs(graph, call, inputs)
        given: dict[str, Any] = {}
        for name, argument in (("dbias", "dBias"), ("dsink", "dSink_token")):
            if name in outputs:
                given[argument] = _declare(graph, name, outputs[name], call, declared)
        made = graph.sdpa_backward(
            declared["q"],
            declared["k"],
            declared["v"],
            declared["o"],
            declared["do"],
            declared["stats"],
            use_deterministic_algorithm=call.options.deterministic,
            **given,
            **_totals(call),
            **_masks(call.options, declared),
        )
        for name, tensor in zip(("dq", "dk", "dv"), made, strict=True):
            _set_output(tensor, name, outputs[name], call, declared)

    key = (call.options, _key(inputs), _key(outputs))
    run(
        "sdpa_backward",
        key,
        declare,
        inputs,
        outputs,
        device=call.device,
        engine=call.engine,
        stream=call.stream,
    )
    return outputs


def attention_gradients(
    call: Call,
    o: torch.Tensor,
    stats: torch.Tensor,
    do: torch.Tensor | None,
    dstats: torch.Tensor | None,
    *,
    want_dbias: bool,
    want_dsink: bool,
) -> dict[str, torch.Tensor]:
    """dq, dk, dv, and dbias, dsink if wanted, of a loss on O and on Stats; one of them is given."""
    do = torch.zeros_like(o) if do is None else stepped(do)
    if dstats is None:
        return attention_backward(call, o, stats, do, want_dbias=want_dbias, want_dsink=want_dsink)
    dsink_of_stats = _sink_share(call, stats, dstats)
    # dStats is a column of dO there, and 16 bits would round it, or overflow.
    wide, o, do = _with_stats_gradient(_widened(call), _widen(o), _widen(do), dstats)
    grads = attention_backward(wide, o, stats, do, want_dbias=want_dbias, want_dsink=want_dsink)
    grads["dv"] = grads["dv"][..., : call.operands["v"].shape[-1]]
    if want_dsink and dsink_of_stats is not None:
        grads["dsink"] = grads["dsink"] + dsink_of_stats
    return {name: grad.to(call.operands[name[1:]].dtype) for name, grad in grads.items()}


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _widened(call: Call) -> Call:
    """The same call on float32 operands where they are 16-bit; lengths and tables stay."""
    operands = {name: _widen(tensor) for name, tensor in call.operands.items()}
    return Call(call.options, operands, call.engine, call.stream)


class AttentionFunction(torch.autograd.Function):
    """O and Stats with gradients for q, k, v, bias and sink."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sink: torch.Tensor | None,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, stats = attention_forward(call, None, want_stats=True)
        if stats is None:
            raise NotSupportedError("attention for training makes Stats")
        ctx.set_materialize_grads(False)
        # All operands, so that lengths and seeds that change before the backward are found out.
        others = {n: t for n, t in call.operands.items() if n not in ("q", "k", "v")}
        ctx.save_for_backward(o, stats, q, k, v, *others.values())
        ctx.call = (call.options, ("q", "k", "v", *others), call.engine, call.stream)
        return o, stats

    @staticmethod
    @first_order("sdpa")
    def backward(
        ctx: Any, do: torch.Tensor | None, dstats: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if do is None and dstats is None:
            return (None,) * 6
        o, stats, *saved = ctx.saved_tensors
        options, names, engine, stream = ctx.call
        grads = attention_gradients(
            Call(options, dict(zip(names, saved, strict=True)), engine, stream),
            o,
            stats,
            do,
            dstats,
            want_dbias=bool(ctx.needs_input_grad[3]),
            want_dsink=bool(ctx.needs_input_grad[4]),
        )
        return grads["dq"], grads["dk"], grads["dv"], grads.get("dbias"), grads.get("dsink"), None


def stepped(packed: torch.Tensor) -> torch.Tensor:
    """A packed operand whose tokens are distinct in storage: prefix sums need a step to count."""
    return packed.contiguous() if packed.dim() == 3 and packed.stride(0) == 0 else packed


def _with_stats_gradient(
    call: Call, o: torch.Tensor, do: torch.Tensor, dstats: torch.Tensor
) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """Fold a gradient of Stats into the operands of the backward operation.

    d Stats / d S is P, so a loss on Stats adds P * dStats to dS = P * (dO V^T - rowsum(dO * O)).
    One more column does that: V gets ones, dO gets dStats, O gets zeros.
    """
    if call.options.dropout_p:
        raise NotSupportedError(
            "a loss on Stats together with dropout_p > 0 has no backward: Stats is not dropped out"
        )
    v = call.operands["v"]
    # Seven more columns of zeros keep the head size a multiple of eight.
    extra = 8
    if call.is_packed and call.options.stats_token_major:
        column = dstats
    else:
        column = dstats.transpose(0, 1) if call.is_packed else dstats
    column = column.to(do.dtype).unsqueeze(-1) if call.is_packed else column.to(do.dtype)
    ones = torch.zeros((*v.shape[:-1], extra), dtype=v.dtype, device=v.device)
    ones[..., 0] = 1
    grown = torch.zeros((*do.shape[:-1], extra), dtype=do.dtype, device=do.device)
    grown[..., :1] = column
    operands = {**call.operands, "v": torch.cat((v, ones), dim=-1)}
    wide = Call(call.options, operands, call.engine, call.stream)
    return (
        wide,
        torch.cat((o, torch.zeros_like(grown)), dim=-1),
        torch.cat((do, grown), dim=-1),
    )


def _sink_share(call: Call, stats: torch.Tensor, dstats: torch.Tensor) -> torch.Tensor | None:
    """What a gradient of Stats gives the sink: exp(sink - Stats) * dStats, summed a head.

    The extra column does not reach the sink, which has no value row.
    """
    sink = call.operands.get("sink")
    if sink is None:
        return None
    # Heads on axis 0 of what is packed head-major, on axis 1 otherwise.
    head_axis = 0 if call.is_packed and not call.options.stats_token_major else 1
    shape = [1] * stats.dim()
    shape[head_axis] = -1
    share = torch.exp(sink.to(stats.dtype).view(shape) - stats)
    # Rows of no sequence hold -inf and have no share.
    share = torch.where(torch.isneginf(stats), torch.zeros_like(share), share) * dstats
    return share.transpose(0, head_axis).flatten(1).sum(1).view(sink.shape)


def empty_output(call: Call) -> torch.Tensor:
    """A new O in q's axis order."""
    q, v = call.operands["q"], call.operands["v"]
    shape = (*q.shape[:-1], v.shape[-1])
    stride = strides_in_order_of(shape, q.stride())
    return torch.empty_strided(shape, stride, dtype=q.dtype, device=q.device)


def empty_stats(call: Call) -> torch.Tensor:
    """A new Stats; where sequences are packed, -inf for rows of no sequence."""
    q = call.operands["q"]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if not call.is_packed:
        return torch.empty((*q.shape[:-1], 1), dtype=dtype, device=q.device)
    shape = q.shape[:2] if call.options.stats_token_major else (q.shape[1], q.shape[0])
    return torch.full(shape, -torch.inf, dtype=dtype, device=q.device)


def _layout(
    name: str, tensor: torch.Tensor, call: Call
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Declared dim and stride of an operand, and the elements a prefix sum counts (1: dense)."""
    if not call.is_packed or name not in _PACKED:
        return tuple(tensor.shape), tuple(tensor.stride()), 1
    longest = call.options.max_q if _PACKED[name] == "cu_q" else call.options.max_kv
    batch = call.operands[_PACKED[name]].shape[0] - 1
    length = longest or 0
    if name == "stats":
        token_major = call.options.stats_token_major
        token, head = tensor.stride() if token_major else tensor.stride()[::-1]
        heads = tensor.shape[1] if token_major else tensor.shape[0]
        return (batch, heads, length, 1), (max(length * token, 1), head, token, 1), token
    token, head, element = tensor.stride()
    dim = (batch, tensor.shape[1], length, tensor.shape[2])
    return dim, (max(length * token, 1), head, token, element), token


def _declare(
    graph: DeclaredGraph,
    name: str,
    tensor: torch.Tensor,
    call: Call,
    declared: Mapping[str, Tensor],
) -> Tensor:
    dim, stride, unit = _layout(name, tensor, call)
    offset = declared[_PACKED[name]] if call.is_packed and name in _PACKED else None
    by_value = name in ("seed", "offset") and tensor.device.type == "cpu"
    return graph.tensor(
        dim,
        stride,
        tensor.dtype,
        name=name,
        is_pass_by_value=by_value,
        ragged_offset=offset,
        ragged_offset_multiplier=max(unit, 1),
        alignment_value=alignment_of(tensor),
    )


def _declare_inputs(graph: DeclaredGraph, call: Call, inputs: Operands) -> dict[str, Tensor]:
    declared: dict[str, Tensor] = {}
    prefixes_first = sorted(inputs, key=lambda name: not name.startswith("cu_"))
    for name in prefixes_first:
        declared[name] = _declare(graph, name, inputs[name], call, declared)
    return declared


def _set_output(
    made: Tensor | None, name: str, buffer: torch.Tensor, call: Call, declared: Mapping[str, Tensor]
) -> None:
    if made is None:
        raise NotSupportedError(f"attention makes no {name}")
    dim, stride, unit = _layout(name, buffer, call)
    made.set_output(True).set_name(name).set_data_type(buffer.dtype)
    made.set_dim(dim).set_stride(stride)
    made.alignment_value = alignment_of(buffer)
    if call.is_packed:
        made.set_ragged_offset(declared[_PACKED[name]])
        made.set_ragged_offset_multiplier(max(unit, 1))


def _key(operands: Operands) -> Hashable:
    """What a plan depends on of operands: an address that is not aligned changes the engine."""
    return operands_key(operands), tuple([alignment_of(tensor) for tensor in operands.values()])


def _totals(call: Call) -> dict[str, Any]:
    """What packed operands bound the sums of lengths by: a grid need not hold every longest one."""
    if not call.is_packed:
        return {}
    return {
        "max_total_seq_len_q": call.operands["q"].shape[0],
        "max_total_seq_len_kv": call.operands["k"].shape[0],
    }


def _masks(options: AttentionOptions, declared: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keyword arguments that forward and backward share."""
    left, right = options.window
    if options.causal:
        right = 0
    bottom_right = options.align == "bottom_right"
    arguments: dict[str, Any] = {
        "attn_scale": options.scale,
        "use_alibi_mask": options.alibi,
        "diagonal_alignment": (
            diagonal_alignment.BOTTOM_RIGHT if bottom_right else diagonal_alignment.TOP_LEFT
        ),
        # The window lets row i see key i - left; the bound hides col <= row - bound.
        "diagonal_band_left_bound": None if left is None else left + 1,
        "diagonal_band_right_bound": right,
        "bias": declared.get("bias"),
        "sink_token": declared.get("sink"),
        "seq_len_q": declared.get("seqlens_q"),
        "seq_len_kv": declared.get("seqlens_kv"),
        "cu_seq_len_q": declared.get("cu_q"),
        "cu_seq_len_kv": declared.get("cu_kv"),
        "use_padding_mask": "seqlens_kv" in declared or "cu_kv" in declared,
    }
    if options.dropout_p:
        arguments["dropout"] = (options.dropout_p, declared["seed"], declared["offset"])
    if options.soft_cap is not None:
        arguments["score_mod"] = _soft_cap(options.soft_cap, declared["q"].data_type)
    return arguments


def _soft_cap(cap: float, data_type: DataType) -> Any:
    """score -> cap * tanh(score / cap), as Gemma 2 (2024) defines it."""
    # Scores of float64 operands are float64, and a float32 reciprocal would not be exact enough.
    kept = DataType.DOUBLE if data_type is DataType.DOUBLE else DataType.FLOAT

    def score_mod(graph: DeclaredGraph, score: Tensor) -> Tensor:
        small = graph.mul(score, graph.tensor_scalar(1.0 / cap, kept))
        return graph.mul(graph.tanh(small), graph.tensor_scalar(float(cap), kept))

    return score_mod
