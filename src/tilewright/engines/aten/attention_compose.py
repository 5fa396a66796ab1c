"""Composed attention over the parts of a call: what plain, FP8 and MXFP8 attention share.

A recipe says what is different: how operands are read, and what is rounded between products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any, TypeVar

import torch

from tilewright.engines.aten.attention_backward import (
    Gradients,
    RoundedGradients,
    Saved,
    attend_backward,
)
from tilewright.engines.aten.attention_forward import ForwardOutputs, RoundedProducts, attend
from tilewright.engines.aten.attention_parts import PartBuilder, dump_keep, one_batch
from tilewright.engines.aten.attention_scores import Part
from tilewright.engines.aten.attention_spec import AttentionSpec
from tilewright.engines.aten.casts import storer
from tilewright.engines.aten.registry import Kernel
from tilewright.records import record

Tensor = torch.Tensor
Operands = Mapping[str, Tensor]
Number = float | Tensor
Rounded = TypeVar("Rounded")
# What rows beyond a sequence's length hold.
_ROW_OUTPUTS = {"O": 0.0, "Stats": -math.inf, "score_max": -math.inf, "score_sum_exp": 0.0}
_GRADIENT_SIDES = {"dQ": "rows", "dK": "keys", "dV": "keys"}


@record(frozen=True)
class ForwardRecipe:
    """How a kind of attention differs from the plain one.

    ``read`` gives operands whose q, k and v are what the products take; ``begin`` gives, for one
    call, a factor on the scores and what is done between the products.
    """

    read: Callable[[Operands], Operands] | None = None
    begin: Callable[[PartBuilder, Operands], tuple[Number, RoundedProducts]] | None = None


@record(frozen=True)
class BackwardRecipe:
    """The same for the backward; see ``Saved`` for ``saved``, its fields by port.

    ``sides`` tells which extent the rows of a saved port have. ``scales`` are the ports of the
    factors on stored gradients.
    """

    read: Callable[[Operands], Operands] | None = None
    begin: Callable[[PartBuilder, Operands], tuple[Number, RoundedGradients]] | None = None
    saved: Mapping[str, str] = field(
        default_factory=lambda: {"o": "o", "d_o": "dO", "stats": "stats"}
    )
    sides: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, str] = field(default_factory=dict)


PLAIN_FORWARD = ForwardRecipe()
PLAIN_BACKWARD = BackwardRecipe()


def compose_forward(
    operation: Any,
    spec: AttentionSpec,
    device: torch.device,
    on_host: bool,
    recipe: ForwardRecipe = PLAIN_FORWARD,
) -> Kernel:
    """The composition; lengths and tables are read by the host only if ``on_host``."""
    builder = PartBuilder(operation, spec, device, on_host)
    store_o = storer(operation.outputs["O"])
    rows_ports = [port for port in _ROW_OUTPUTS if port in operation.outputs]
    dumps = "rng_dump" in operation.outputs
    read, begin = recipe.read, recipe.begin

    def run(inputs: Operands, outputs: Operands) -> None:
        inputs, factor, rounded = _begun(read, begin, builder, inputs)

        def compute(part: Part, views: Operands) -> None:
            if begin is not None:
                part = replace(part, scale=part.scale * factor)
            attend(
                part,
                ForwardOutputs(
                    o=views["O"],
                    store_o=store_o,
                    stats=views.get("Stats"),
                    score_max=views.get("score_max"),
                    score_sum_exp=views.get("score_sum_exp"),
                    stats_log2=spec.stats_log2,
                    rounded=rounded,
                ),
            )

        _run_forward_parts(builder, inputs, outputs, rows_ports, compute)
        if rounded is not None:
            for port, amax in (("Amax_S", rounded.amax_p), ("Amax_O", rounded.amax_o)):
                if port in outputs:
                    outputs[port].copy_(amax)
        philox = builder.philox(inputs) if dumps else None
        if philox is not None:
            dump_keep(philox, outputs["rng_dump"])

    return run


def compose_backward(
    operation: Any,
    spec: AttentionSpec,
    device: torch.device,
    on_host: bool,
    recipe: BackwardRecipe = PLAIN_BACKWARD,
) -> Kernel:
    """The composed backward; lengths are read by the host only if ``on_host``."""
    builder = PartBuilder(operation, spec, device, on_host)
    stores = {port: storer(operation.outputs[port]) for port in _GRADIENT_SIDES}
    sums = {
        port: storer(operation.outputs[port])
        for port in ("dBias", "dSink_token")
        if port in operation.outputs
    }
    reported = [port for port in _GRADIENT_SIDES if f"amax_{port}" in operation.outputs]
    dumps = "rng_dump" in operation.outputs
    saved_sides = {port: recipe.sides.get(port, "rows") for port in recipe.saved.values()}
    read, begin = recipe.read, recipe.begin

    def run(inputs: Operands, outputs: Operands) -> None:
        inputs, factor, rounded = _begun(read, begin, builder, inputs)
        totals = {
            port: torch.zeros(outputs[port].shape, dtype=spec.compute, device=device)
            for port in sums
        }
        d_sink = totals["dSink_token"].view(-1) if "dSink_token" in totals else None
        maxima = {port: torch.zeros((), dtype=spec.compute, device=device) for port in reported}
        call_stores = {
            port: _scaled(
                store,
                builder.scalar(inputs, recipe.scales[port]) if port in recipe.scales else 1.0,
                maxima.get(port),
            )
            for port, store in stores.items()
        }

        def compute(part: Part, views: Operands, results: Operands) -> None:
            if begin is not None:
                part = replace(part, scale=part.scale * factor)
            saved = Saved(**{name: views[port] for name, port in recipe.saved.items()})
            d_bias = totals.get("dBias")
            if d_bias is not None and spec.sequences_differ and on_host:
                d_bias = one_batch(d_bias, part.first_batch)
            attend_backward(
                part,
                saved,
                Gradients(
                    d_q=results["dQ"],
                    d_k=results["dK"],
                    d_v=results["dV"],
                    store_q=call_stores["dQ"],
                    store_k=call_stores["dK"],
                    store_v=call_stores["dV"],
                    d_bias=d_bias,
                    d_sink=d_sink,
                    rounded=rounded,
                ),
            )

        _run_backward_parts(builder, inputs, outputs, saved_sides, compute)
        for port, store in sums.items():
            store(outputs[port], totals[port])
        for port, amax in maxima.items():
            outputs[f"amax_{port}"].copy_(amax)
        if rounded is not None and "amax_dP" in outputs:
            outputs["amax_dP"].copy_(rounded.amax_d_s)
        philox = builder.philox(inputs) if dumps else None
        if philox is not None:
            dump_keep(philox, outputs["rng_dump"])

    return run


def _begun(
    read: Callable[[Operands], Operands] | None,
    begin: Callable[[PartBuilder, Operands], tuple[Number, Rounded]] | None,
    builder: PartBuilder,
    inputs: Operands,
) -> tuple[Operands, Number, Rounded | None]:
    """What a recipe makes of one call: its operands, the factor on scores, and the roundings."""
    if read is not None:
        inputs = read(inputs)
    return (inputs, 1.0, None) if begin is None else (inputs, *begin(builder, inputs))


def _scaled(
    store: Callable[[Tensor, Tensor], None], factor: Number, amax: Tensor | None
) -> Callable[[Tensor, Tensor], None]:
    """``store`` of values times a factor; ``amax`` (0-d) grows by the values before it."""
    if amax is None and isinstance(factor, float) and factor == 1.0:
        return store

    def scaled(output: Tensor, values: Tensor) -> None:
        if amax is not None and values.numel():
            torch.maximum(amax, values.abs().amax(), out=amax)
        store(output, values * factor)

    return scaled


def _run_forward_parts(
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


def _run_backward_parts(
    builder: PartBuilder,
    inputs: Operands,
    outputs: Operands,
    saved_sides: Mapping[str, str],
    compute: Callable[[Part, Operands, Operands], None],
) -> None:
    """Call ``compute`` with each part of a call and views of saved operands and gradients."""
    spec = builder.spec
    if not spec.sequences_differ:
        compute(builder.whole(inputs, inputs["q"], inputs["k"], inputs["v"]), inputs, outputs)
        return
    if builder.on_host:
        facts, starts = builder.sequences(inputs), builder.starts(inputs)
        views = [
            (
                {
                    port: builder.view(inputs, port, fact.batch, getattr(fact, side), starts)
                    for port, side in saved_sides.items()
                },
                {
                    port: builder.view(outputs, port, fact.batch, getattr(fact, side), starts)
                    for port, side in _GRADIENT_SIDES.items()
                },
            )
            for fact in facts
        ]
        for fact, part in builder.parts(inputs, facts, starts):
            compute(part, *views[fact.batch])
            for port, side in _GRADIENT_SIDES.items():
                if port not in builder.ragged:
                    outputs[port][fact.batch, :, getattr(fact, side) :].zero_()
        return
    q, k, v = (builder.dense(inputs, port) for port in ("q", "k", "v"))
    like = {"dQ": q, "dK": k, "dV": v}
    dense = {
        port: torch.empty(like[port].shape, dtype=outputs[port].dtype, device=q.device)
        if port in builder.ragged
        else outputs[port]
        for port in _GRADIENT_SIDES
    }
    saved = {port: builder.dense(inputs, port) for port in saved_sides}
    part = builder.whole(inputs, q, k, v)
    # Rows beyond a length have no Stats: what a buffer holds there must not matter.
    rows = torch.arange(q.shape[2], device=q.device).view(1, 1, -1, 1)
    lengths = builder.len_q.on_device(inputs, q.device)
    beyond = rows >= lengths.view(-1, 1, 1, 1)
    saved["stats"] = saved["stats"].masked_fill(beyond, -torch.inf)
    compute(part, saved, dense)
    key_lengths = builder.len_kv.on_device(inputs, q.device)
    for port, side in _GRADIENT_SIDES.items():
        if port in builder.ragged:
            builder.ragged[port].scatter(
                outputs[port], inputs, dense[port], lengths if side == "rows" else key_lengths
            )
