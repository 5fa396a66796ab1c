"""Scaled dot product attention, forward and backward: which way each call is computed.

ATen's fused function where it means the same (``attention_fused``), else a composition of matrix
products a row block at a time (``attention_forward``, ``attention_backward``) over the parts that
``attention_parts`` makes of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.engines.aten.attention_backward import Gradients, Saved, attend_backward
from tilewright.engines.aten.attention_forward import ForwardOutputs, attend
from tilewright.engines.aten.attention_fused import fused_backward, fused_forward
from tilewright.engines.aten.attention_parts import PartBuilder, dump_keep, one_batch
from tilewright.engines.aten.attention_scores import Part
from tilewright.engines.aten.attention_spec import AttentionSpec, read_spec
from tilewright.engines.aten.casts import storer
from tilewright.engines.aten.registry import Kernel, implements

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]
_LN_2 = math.log(2.0)
# What rows beyond a sequence's length hold.
_ROW_OUTPUTS = {"O": 0.0, "Stats": -math.inf, "score_max": -math.inf, "score_sum_exp": 0.0}


@implements("sdpa")
def prepare_sdpa(operation: Any, device: torch.device) -> Kernel:
    """Attention forward; see ``AttentionSpec`` for what may be declared."""
    spec = read_spec(operation)
    composed = compose_forward(operation, spec, device, device.type == "cpu")
    return _first_that_serves(fused_forward(operation, spec, device), composed)


@implements("sdpa_backward")
def prepare_sdpa_backward(operation: Any, device: torch.device) -> Kernel:
    """Attention backward, deterministic."""
    spec = read_spec(operation)
    composed = compose_backward(operation, spec, device, device.type == "cpu")
    return _first_that_serves(fused_backward(operation, spec, device), composed)


def _first_that_serves(
    attempt: Callable[[Operands, Operands], bool] | None, composed: Kernel
) -> Kernel:
    if attempt is None:
        return composed

    def run(inputs: Operands, outputs: Operands) -> None:
        if not attempt(inputs, outputs):
            composed(inputs, outputs)

    return run


def compose_forward(
    operation: Any, spec: AttentionSpec, device: torch.device, on_host: bool
) -> Kernel:
    """The composition; lengths and tables are read by the host only if ``on_host``."""
    builder = PartBuilder(operation, spec, device, on_host)
    store_o = storer(operation.outputs["O"])
    rows_ports = [port for port in _ROW_OUTPUTS if port in operation.outputs]
    dumps = "rng_dump" in operation.outputs

    def compute(part: Part, views: Operands) -> None:
        attend(
            part,
            ForwardOutputs(
                o=views["O"],
                store_o=store_o,
                stats=views.get("Stats"),
                score_max=views.get("score_max"),
                score_sum_exp=views.get("score_sum_exp"),
                stats_log2=spec.stats_log2,
            ),
        )

    def run(inputs: Operands, outputs: Operands) -> None:
        run_forward_parts(builder, inputs, outputs, rows_ports, compute)
        philox = builder.philox(inputs) if dumps else None
        if philox is not None:
            dump_keep(philox, outputs["rng_dump"])

    return run


def run_forward_parts(
    builder: PartBuilder,
    inputs: Operands,
    outputs: Operands,
    ports: list[str],
    compute: Callable[[Part, Operands], None],
) -> None:
    """Call ``compute`` with each part of a call and views of the outputs ``ports`` for it.

    What lies beyond the lengths in outputs that are not ragged is filled here.
    """
    spec = builder.spec
    if not spec.sequences_differ:
        compute(builder.whole(inputs, inputs["q"], inputs["k"], inputs["v"]), outputs)
        return
    if builder.on_host:
        facts, starts = builder.sequences(inputs), builder.starts(inputs)
        views = [
            {port: builder.view(outputs, port, fact.batch, fact.rows, starts) for port in ports}
            for fact in facts
        ]
        for fact, part in builder.parts(inputs, facts, starts):
            compute(part, views[fact.batch])
            for port in ports:
                if port not in builder.ragged:
                    outputs[port][fact.batch, :, fact.rows :].fill_(_ROW_OUTPUTS[port])
        return
    q, k, v = (builder.dense(inputs, port) for port in ("q", "k", "v"))
    dense = {
        port: torch.empty(
            (*q.shape[:3], v.shape[3] if port == "O" else 1),
            dtype=outputs[port].dtype,
            device=q.device,
        )
        if port in builder.ragged
        else outputs[port]
        for port in ports
    }
    compute(builder.whole(inputs, q, k, v), dense)
    lengths = builder.len_q.on_device(inputs, q.device)
    for port in ports:
        if port in builder.ragged:
            builder.ragged[port].scatter(outputs[port], inputs, dense[port], lengths)


def compose_backward(
    operation: Any, spec: AttentionSpec, device: torch.device, on_host: bool
) -> Kernel:
    """The composed backward; lengths are read by the host only if ``on_host``."""
    builder = PartBuilder(operation, spec, device, on_host)
    store_q, store_k, store_v = (storer(operation.outputs[port]) for port in ("dQ", "dK", "dV"))
    log_base = _LN_2 if spec.stats_log2 else 1.0
    has_bias, has_sink = "dBias" in operation.outputs, "dSink_token" in operation.outputs
    store_bias = storer(operation.outputs["dBias"]) if has_bias else None
    store_sink = storer(operation.outputs["dSink_token"]) if has_sink else None
    dumps = "rng_dump" in operation.outputs

    def run(inputs: Operands, outputs: Operands) -> None:
        d_bias = d_sink = None
        if has_bias:
            d_bias = torch.zeros(outputs["dBias"].shape, dtype=spec.compute, device=device)
        if has_sink:
            d_sink = torch.zeros(spec.heads_q, dtype=spec.compute, device=device)

        def compute(part: Part, saved: Operands, views: Operands) -> None:
            stats = saved["stats"]
            bias = d_bias
            if bias is not None and part.q.shape[0] != spec.batch:
                bias = one_batch(bias, part.first_batch)
            attend_backward(
                part,
                Saved(
                    o=saved["o"],
                    d_o=saved["dO"],
                    stats=stats if log_base == 1.0 else stats * log_base,
                ),
                Gradients(
                    d_q=views["dQ"],
                    d_k=views["dK"],
                    d_v=views["dV"],
                    store_q=store_q,
                    store_k=store_k,
                    store_v=store_v,
                    d_bias=bias,
                    d_sink=d_sink,
                ),
            )

        run_backward_parts(builder, inputs, outputs, ("o", "dO", "stats"), compute)
        if store_bias is not None and d_bias is not None:
            store_bias(outputs["dBias"], d_bias)
        if store_sink is not None and d_sink is not None:
            store_sink(outputs["dSink_token"], d_sink.view(outputs["dSink_token"].shape))
        philox = builder.philox(inputs) if dumps else None
        if philox is not None:
            dump_keep(philox, outputs["rng_dump"])

    return run


def run_backward_parts(
    builder: PartBuilder,
    inputs: Operands,
    outputs: Operands,
    saved_ports: tuple[str, ...],
    compute: Callable[[Part, Operands, Operands], None],
) -> None:
    """Call ``compute`` with each part of a call and views of saved operands and gradients."""
    spec = builder.spec
    if not spec.sequences_differ:
        compute(builder.whole(inputs, inputs["q"], inputs["k"], inputs["v"]), inputs, outputs)
        return
    sides = {"dQ": "rows", "dK": "keys", "dV": "keys"}
    if builder.on_host:
        facts, starts = builder.sequences(inputs), builder.starts(inputs)
        views = [
            (
                {p: builder.view(inputs, p, fact.batch, fact.rows, starts) for p in saved_ports},
                {
                    port: builder.view(outputs, port, fact.batch, getattr(fact, side), starts)
                    for port, side in sides.items()
                },
            )
            for fact in facts
        ]
        for fact, part in builder.parts(inputs, facts, starts):
            compute(part, *views[fact.batch])
            for port, side in sides.items():
                if port not in builder.ragged:
                    outputs[port][fact.batch, :, getattr(fact, side) :].zero_()
        return
    q, k, v = (builder.dense(inputs, port) for port in ("q", "k", "v"))
    like = {"dQ": q, "dK": k, "dV": v}
    dense = {
        port: torch.empty(like[port].shape, dtype=outputs[port].dtype, device=q.device)
        if port in builder.ragged
        else outputs[port]
        for port in sides
    }
    saved = {port: builder.dense(inputs, port) for port in saved_ports}
    part = builder.whole(inputs, q, k, v)
    # Rows beyond a length have no Stats: what a buffer holds there must not matter.
    rows = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
    lengths = builder.len_q.on_device(inputs, q.device)
    beyond = rows >= lengths.view(-1, 1, 1, 1)
    saved["stats"] = saved["stats"].masked_fill(beyond, -torch.inf)
    compute(part, saved, dense)
    key_lengths = builder.len_kv.on_device(inputs, q.device)
    for port, side in sides.items():
        if port in builder.ragged:
            builder.ragged[port].scatter(
                outputs[port], inputs, dense[port], lengths if side == "rows" else key_lengths
            )
