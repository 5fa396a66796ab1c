"""Joining the states of attention, (O, Stats), that several caches of keys left of one query."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.errors import BindingError, NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import MAX_RANK, Tensor
from tilewright.ops.arguments import (
    require_device,
    require_float,
    require_shape,
    require_tensor,
)
from tilewright.ops.custom import is_traced, needs_gradient, require_operator_arguments
from tilewright.ops.declaring import bind_output, declare_all
from tilewright.ops.plan_cache import operands_key, run
from tilewright.ops.streams import on_its_stream

# Below every finite level; what is -inf less it is -inf, and not NaN.
_BELOW_ALL = -3.0e38


@on_its_stream
def merge_states(
    o1: torch.Tensor,
    stats1: torch.Tensor,
    o2: torch.Tensor,
    stats2: torch.Tensor,
    *,
    engine: str | None = None,
    stream: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint key sets, from the states over each.

    ``o1`` and ``o2`` are (..., D), ``stats1`` and ``stats2`` (...) natural log-sum-exps. Returns
    (O, Stats) of the same shapes: Stats = log(exp(stats1) + exp(stats2)), and O the mean of o1 and
    o2 weighted by exp(stats - Stats). An empty state (-inf) weighs nothing; two give 0 and -inf.
    O has o1's data type; Stats is float32, float64 where o1 is. Differentiable.

    On a GPU this is one graph of pointwise operations, and ``engine`` runs that graph or declines.
    Where gradients are wanted, and on a CPU, it is made of PyTorch's own operations. ``stream`` is
    where to run; default is the device's current stream.
    Source: FlashAttention (Dao et al. 2022), section 3.1.

    Raises:
        BindingError: naming the argument, what came and what is accepted.
        NotSupportedError: if the engine that is named takes no such graph, or an operand of a call
            that names one requires grad.
    """
    require_float("o1", require_tensor("o1", o1))
    if o1.dim() < 1:
        raise BindingError("o1: shape (); expected (..., D)")
    require_shape("o2", require_tensor("o2", o2), o1.shape, "o1's shape")
    for name, stats in (("stats1", stats1), ("stats2", stats2)):
        require_float(name, require_tensor(name, stats))
        require_shape(name, stats, o1.shape[:-1], "o1's shape less D")
    for name, tensor in (("o2", o2), ("stats1", stats1), ("stats2", stats2)):
        require_device(name, tensor, o1.device)
    tensors = (o1, stats1, o2, stats2)
    if is_traced(*tensors):
        require_operator_arguments(engine, stream)
        return _by_pytorch(*tensors)
    needs_grad = needs_gradient(*tensors)
    has_other_rank = not 2 <= o1.dim() <= MAX_RANK
    if engine is None and (needs_grad or has_other_rank or o1.device.type == "cpu"):
        return _by_pytorch(*tensors)
    if needs_grad:
        raise NotSupportedError(
            f"merge_states: an operand requires grad and engine={engine!r} is named; no engine has "
            "its backward, so leave it out, or use torch.no_grad"
        )
    return _by_graph(*tensors, engine, stream)


def _compute_type(o: torch.Tensor) -> torch.dtype:
    return torch.float64 if o.dtype is torch.float64 else torch.float32


def _by_graph(
    o1: torch.Tensor,
    stats1: torch.Tensor,
    o2: torch.Tensor,
    stats2: torch.Tensor,
    engine: str | None,
    stream: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = {"o1": o1, "o2": o2, "stats1": stats1[..., None], "stats2": stats2[..., None]}
    compute = _compute_type(o1)
    stats = torch.empty(stats1.shape, dtype=compute, device=o1.device)
    outputs = {"o": torch.empty_like(o1), "stats": stats[..., None]}

    def declare(graph: DeclaredGraph) -> None:
        given = declare_all(graph, inputs)
        first, second = given["stats1"], given["stats2"]

        def number(value: float) -> Tensor:
            return graph.tensor_scalar(value, compute)

        # The larger one, or a number below all where both are empty: exp gives 0 then.
        level = graph.max(graph.max(first, second), number(_BELOW_ALL))
        weights = [graph.exp(graph.sub(each, level)) for each in (first, second)]
        total = graph.add(weights[0], weights[1])
        parts = []
        for weight, o in zip(weights, (given["o1"], given["o2"]), strict=True):
            # Weight 0 times a NaN of an empty state would be NaN.
            is_nothing = graph.cmp_eq(weight, number(0.0)).set_data_type("BOOLEAN")
            parts.append(graph.binary_select(number(0.0), graph.mul(weight, o), is_nothing))
        # The larger state weighs 1, so the total is below 1 where both are empty alone.
        joined = graph.div(graph.add(parts[0], parts[1]), graph.max(total, number(1.0)))
        bind_output(joined, "o", outputs["o"])
        bind_output(graph.add(graph.log(total), level), "stats", outputs["stats"])

    key = (operands_key(inputs), operands_key(outputs))
    options: dict[str, Any] = {"device": o1.device, "engine": engine, "stream": stream}
    run("merge_states", key, declare, inputs, outputs, **options)
    return outputs["o"], stats


def _by_pytorch(
    o1: torch.Tensor, stats1: torch.Tensor, o2: torch.Tensor, stats2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    compute = _compute_type(o1)
    first, second = stats1.to(compute), stats2.to(compute)
    is_empty = torch.isneginf(first) & torch.isneginf(second)
    # Any level gives the same result, so none has a slope; -inf - -inf would be NaN.
    level = torch.maximum(first, second).detach().masked_fill(is_empty, 0)
    # Weights by the level, and not by Stats: beside a large one ln 2 is rounded away.
    weights = [torch.exp(part - level).unsqueeze(-1) for part in (first, second)]
    # The larger state weighs 1. An empty pair has no total, and log 0 no slope.
    total = (weights[0] + weights[1]).masked_fill(is_empty.unsqueeze(-1), 1)
    stats = (level + torch.log(total.squeeze(-1))).masked_fill(is_empty, -torch.inf)
    # Weight 0 times a NaN of an empty state would be NaN, in the gradient of the weight too.
    parts = [
        weight * torch.where(weight == 0, torch.zeros((), dtype=compute, device=o.device), o)
        for weight, o in zip(weights, (o1.to(compute), o2.to(compute)), strict=True)
    ]
    return ((parts[0] + parts[1]) / total).to(o1.dtype), stats
