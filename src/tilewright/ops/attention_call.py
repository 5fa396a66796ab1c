"""One attention call as a plan that is run: the forward, and the graph's own backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import strides_in_order_of
from tilewright.ops.attention_declaring import (
    declare_inputs,
    declare_operand,
    gated_output,
    set_output_like,
    shared_arguments,
    stepped,
    total_lengths,
)
from tilewright.ops.attention_records import Call
from tilewright.ops.declaring import alignment_of
from tilewright.ops.gating import gated
from tilewright.ops.plan_cache import Fill, Operands, operands_key, run, takes_together


def attention_forward(
    call: Call, out: torch.Tensor | None, *, want_stats: bool, gate: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(O, Stats or None). Packed outputs are filled beyond the last sequence: 0 and -inf.

    O times sigmoid(gate) if there is a ``gate``, which shares no storage with ``out``: by the
    kernel of attention, where the engine that would run attention alone has one that does.
    """
    o = empty_output(call) if out is None else out
    outputs = {"o": o}
    stats = None
    if want_stats:
        stats = empty_stats(call)
        outputs["stats"] = stats
    if gate is None:
        _run_forward(call, call.operands, outputs, forward_key(call, call.operands, outputs))
        return o, stats
    inputs = {**call.operands, "gate": stepped(gate)}
    whole, part = (_declaring(call, operands, outputs) for operands in (inputs, call.operands))
    key = forward_key(call, inputs, outputs)
    if takes_together("sdpa", key, whole, part, call.device, call.engine):
        _run_forward(call, inputs, outputs, key)
        return o, stats
    # Here the gate is read after O is written.
    outputs["o"] = o if out is None else empty_output(call)
    _run_forward(call, call.operands, outputs, forward_key(call, call.operands, outputs))
    return gated(outputs["o"], gate, out), stats


def forward_key(call: Call, inputs: Operands, outputs: Operands) -> Hashable:
    """What a forward's plan depends on beside the engine and the device."""
    return (call.options, _key(inputs), _key(outputs))


def _declaring(call: Call, inputs: Operands, outputs: Operands) -> Callable[[DeclaredGraph], None]:
    """How the graph is declared; its O is multiplied by the gate that is among ``inputs``."""

    def declare(graph: DeclaredGraph) -> None:
        declared = declare_inputs(graph, call, inputs)
        o, stats = graph.sdpa(
            declared["q"],
            declared["k"],
            declared["v"],
            generate_stats="stats" in outputs,
            paged_attention_k_table=declared.get("k_table"),
            paged_attention_v_table=declared.get("v_table"),
            paged_attention_max_seq_len_kv=call.options.max_kv if "k_table" in declared else None,
            **total_lengths(call),
            **shared_arguments(call.options, declared),
        )
        if "gate" in inputs:
            o = gated_output(graph, o, outputs["o"], call, declared)
        set_output_like(o, "o", outputs["o"], call, declared)
        if "stats" in outputs:
            set_output_like(stats, "stats", outputs["stats"], call, declared)

    return declare


def _run_forward(call: Call, inputs: Operands, outputs: Operands, key: Hashable) -> None:
    run(
        "sdpa",
        key,
        _declaring(call, inputs, outputs),
        inputs,
        outputs,
        device=call.device,
        engine=call.engine,
        stream=call.stream,
        fill=zeroing(outputs["o"]) if call.is_packed else None,
    )


def zeroing(o: torch.Tensor) -> Fill:
    """What makes rows of no sequence 0, before the others are written.

    On a CPU sequences are looked at when the plan runs, and may be refused then (L1).
    """

    def fill() -> Callable[[], Any]:
        before = o.clone() if o.device.type == "cpu" else o
        o.zero_()
        return lambda: o.copy_(before)

    return fill


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
    outputs = {f"d{name}": _gradient_like(call.operands[name], call) for name in ("q", "k", "v")}
    if want_dbias:
        outputs["dbias"] = torch.empty_like(call.operands["bias"]).contiguous()
    if want_dsink:
        outputs["dsink"] = torch.empty_like(call.operands["sink"])

    def declare(graph: DeclaredGraph) -> None:
        declared = declare_inputs(graph, call, inputs)
        given: dict[str, Any] = {}
        for name, argument in (("dbias", "dBias"), ("dsink", "dSink_token")):
            if name in outputs:
                given[argument] = declare_operand(graph, name, outputs[name], call, declared)
        made = graph.sdpa_backward(
            declared["q"],
            declared["k"],
            declared["v"],
            declared["o"],
            declared["do"],
            declared["stats"],
            use_deterministic_algorithm=call.options.deterministic,
            **given,
            **total_lengths(call),
            **shared_arguments(call.options, declared),
        )
        for name, tensor in zip(("dq", "dk", "dv"), made, strict=True):
            set_output_like(tensor, name, outputs[name], call, declared)

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


def _gradient_like(operand: torch.Tensor, call: Call) -> torch.Tensor:
    """A new dq, dk or dv; zeros where sequences are packed, for the rows of none."""
    make = torch.zeros_like if call.is_packed else torch.empty_like
    if operand.numel():
        return make(operand)
    # Of an empty view PyTorch keeps the strides, which may be 0.
    return make(operand, memory_format=torch.contiguous_format)


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


def _key(operands: Operands) -> Hashable:
    """What a plan depends on of operands: an address that is not aligned changes the engine."""
    return operands_key(operands), tuple([alignment_of(tensor) for tensor in operands.values()])
