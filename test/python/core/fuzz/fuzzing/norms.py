"""Normalizations and batch normalizations, forward and backward."""

from __future__ import annotations

from fuzzing.drawing import FLOAT, FLOATS, WIDE, Dim, Drawing, Value, result_types
from tilewright.graph.enums import norm_forward_phase

_EPSILONS = (1e-5, 1e-3, 0.1)


def _source(d: Drawing, source: Value | None, low: int) -> Value:
    if source is None or len(source.dim) < low or source.data_type not in FLOATS:
        return d.operand(d.dim(d.pick(range(low, 5))), FLOATS)
    return source


def _layout(d: Drawing, kind: str, dim: Dim) -> tuple[Dim, Dim]:
    """The scale's dim and the statistics' dim."""
    rank = len(dim)
    if kind == "instancenorm":
        return (1, dim[1], *(1,) * (rank - 2)), (*dim[:2], *(1,) * (rank - 2))
    lowest = 1 if kind == "adalayernorm" else 0
    first = d.pick(range(lowest, rank)) if rank > lowest else 0
    axes = range(first, rank) if d.chance(75) else {rank - 1, *d.subset(range(lowest, rank))}
    varying = {*axes, 0} if kind == "adalayernorm" and d.chance(80) else {*axes}
    scale = tuple(extent if axis in varying else 1 for axis, extent in enumerate(dim))
    statistics = tuple(
        1 if axis in varying and not (kind == "adalayernorm" and axis == 0) else extent
        for axis, extent in enumerate(dim)
    )
    return scale, statistics


def _parameter(d: Drawing, dim: Dim, data_type: object) -> Value:
    return d.input(dim, d.pick((data_type, FLOAT)))


def _forward(d: Drawing, source: Value | None, kind: str) -> None:
    source = _source(d, source, {"instancenorm": 3, "adalayernorm": 2}.get(kind, 1))
    scale_dim, statistics = _layout(d, kind, source.dim)
    training = d.chance(60)
    phase = norm_forward_phase.TRAINING if training else norm_forward_phase.INFERENCE
    data_type = source.data_type if source.data_type in WIDE else FLOAT
    scale = _parameter(d, scale_dim, data_type).tensor
    bias = _parameter(d, scale_dim, data_type).tensor if d.chance(60) else None
    epsilon = d.scalar(d.pick(_EPSILONS), (FLOAT, FLOAT, data_type))
    y, *rest = getattr(d.graph, kind)(phase, source.tensor, scale=scale, bias=bias, epsilon=epsilon)
    for tensor in rest:
        if tensor is not None:
            d.result(tensor, statistics, (FLOAT, FLOAT, data_type))
    d.result(y, source.dim, result_types(source.data_type))


def _backward(d: Drawing, source: Value | None, kind: str) -> None:
    # Statistics follow from the input, which is therefore bound.
    source = d.input(d.dim(d.pick(range(3 if kind == "instancenorm" else 2, 5))), d.pick(FLOATS))
    scale_dim, statistics = _layout(d, kind, source.dim)
    data_type = source.data_type if source.data_type in WIDE else FLOAT
    ports = {
        "grad": d.operand(source.dim, (source.data_type, data_type)).tensor,
        "input": source.tensor,
        "scale": _parameter(d, scale_dim, data_type).tensor,
        "inv_variance": _parameter(d, statistics, data_type).tensor,
    }
    if kind == "rmsnorm":
        ports["has_dbias"] = d.chance(50)
    else:
        ports["mean"] = _parameter(d, statistics, data_type).tensor
    dx, *rest = getattr(d.graph, f"{kind}_backward")(**ports)
    for tensor in rest:
        if tensor is not None:
            d.result(tensor, scale_dim, (FLOAT, FLOAT, data_type))
    d.result(dx, source.dim, result_types(source.data_type))


def layernorm(d: Drawing, source: Value | None) -> None:
    _forward(d, source, "layernorm")


def rmsnorm(d: Drawing, source: Value | None) -> None:
    _forward(d, source, "rmsnorm")


def instancenorm(d: Drawing, source: Value | None) -> None:
    _forward(d, source, "instancenorm")


def adalayernorm(d: Drawing, source: Value | None) -> None:
    _forward(d, source, "adalayernorm")


def layernorm_backward(d: Drawing, source: Value | None) -> None:
    _backward(d, source, "layernorm")


def rmsnorm_backward(d: Drawing, source: Value | None) -> None:
    _backward(d, source, "rmsnorm")


def instancenorm_backward(d: Drawing, source: Value | None) -> None:
    _backward(d, source, "instancenorm")


def adalayernorm_backward(d: Drawing, source: Value | None) -> None:
    _backward(d, source, "adalayernorm")


# -- batch normalization ----------------------------------------------------------------------


def _channels(dim: Dim) -> Dim:
    return tuple(extent if axis == 1 else 1 for axis, extent in enumerate(dim))


def batchnorm(d: Drawing, source: Value | None) -> None:
    source = _source(d, source, 2)
    dim = _channels(source.dim)
    data_type = source.data_type if source.data_type in WIDE else FLOAT
    running = d.chance(60)
    more = [_parameter(d, dim, data_type).tensor if running else None for _ in range(2)]
    y, *rest = d.graph.batchnorm(
        source.tensor,
        _parameter(d, dim, data_type).tensor,
        _parameter(d, dim, data_type).tensor,
        *more,
        d.scalar(d.pick(_EPSILONS)),
        d.scalar(d.pick((0.0, 0.1, 1.0))) if running else None,
    )
    for tensor in rest:
        if tensor is not None:
            d.result(tensor, dim, (FLOAT, FLOAT, data_type))
    d.result(y, source.dim, result_types(source.data_type))


def batchnorm_inference(d: Drawing, source: Value | None) -> None:
    source = _source(d, source, 2)
    dim = _channels(source.dim)
    data_type = source.data_type if source.data_type in WIDE else FLOAT
    more = [_parameter(d, dim, data_type).tensor for _ in range(4)]
    y = d.graph.batchnorm_inference(source.tensor, *more)
    d.result(y, source.dim, result_types(source.data_type))


def batchnorm_backward(d: Drawing, source: Value | None) -> None:
    source = d.input(d.dim(d.pick((2, 3, 4, 5))), d.pick(FLOATS))
    dim = _channels(source.dim)
    data_type = source.data_type if source.data_type in WIDE else FLOAT
    grad = d.operand(source.dim, (source.data_type, data_type)).tensor
    more = [_parameter(d, dim, data_type).tensor for _ in range(3)]
    dx, *rest = d.graph.batchnorm_backward(grad, source.tensor, *more)
    for tensor in rest:
        d.result(tensor, dim, (FLOAT, FLOAT, data_type))
    d.result(dx, source.dim, result_types(source.data_type))
