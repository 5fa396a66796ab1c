"""Pointwise operations, reductions, channel sums, moves of elements, and rope."""

from __future__ import annotations

import math

from fuzzing.drawing import FLOAT, FLOATS, INTEGERS, Dim, Drawing, Value, result_types
from tilewright.dtypes import DataType
from tilewright.graph.enums import reduction_mode, reshape_mode
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES, PointwiseKind

# Functions with a step: a rounding before them may become a whole step after them. That of a
# quotient is at a denominator of 0, where it changes its sign.
STEPPED_MODES = frozenset(
    {"ceil", "floor", "mod", "relu_backward", "leaky_relu_backward", "reciprocal", "div"}
    | {mode for mode, row in POINTWISE_MODES.items() if row.kind is PointwiseKind.COMPARE}
    | {mode for mode, row in POINTWISE_MODES.items() if row.kind is PointwiseKind.LOGICAL}
)
# Of exact operands these are exact in float32, and of integers in 64 bits.
EXACT_MODES = frozenset({"abs", "ceil", "floor", "identity", "neg", "max", "min"}) | {
    mode
    for mode, row in POINTWISE_MODES.items()
    if row.kind in (PointwiseKind.COMPARE, PointwiseKind.LOGICAL, PointwiseKind.INDEX)
}
# Exact of small integers.
_INTEGER_MODES = EXACT_MODES | {"add", "sub", "mul", "bias", "scale", "add_square", "binary_select"}
_PARAMETERS = {
    "negative_slope": (0.0, 0.1, -0.5),
    "swish_beta": (1.0, 0.5, -1.5),
    "elu_alpha": (1.0, 0.3),
    "softplus_beta": (1.0, 2.0, 0.25),
}
EXACT_REDUCTIONS = (reduction_mode.MAX, reduction_mode.MIN, reduction_mode.AMAX)


def pointwise(d: Drawing, source: Value | None) -> None:
    mode = d.pick(sorted(POINTWISE_MODES))
    row = POINTWISE_MODES[mode]
    stepped = mode in STEPPED_MODES or row.kind is PointwiseKind.INDEX
    types = FLOATS if row.is_floating else (*FLOATS, *INTEGERS)
    first = source
    if first is None or first.data_type not in types or (stepped and not first.exact):
        first = d.operand(d.dim(d.pick((1, 2, 3, 4))), types, exact=stepped)
    operands = [first]
    for position in range(1, row.arity):
        operands.append(_other(d, mode, row.kind, first, types, stepped, position))
    if row.kind is not PointwiseKind.BACKWARD and len(operands) == 2 and d.chance(25):
        operands.reverse()
    tensors = [value.tensor for value in operands]
    if len(operands) == 2 and row.kind is PointwiseKind.BINARY and d.chance(10):
        number = d.pick((0.5, 2.0, -1.5)) if first.data_type.is_floating else 2
        tensors[operands.index(first) ^ 1] = d.graph.tensor_scalar(number)
        operands = [first, first]
    parameters = {}
    for name in row.parameters:
        if name in _PARAMETERS and d.chance(60):
            parameters[name] = d.pick(_PARAMETERS[name])
    if mode.startswith("relu") and d.chance(40):
        parameters["lower_clip"] = d.pick((-0.5, 0.0, 0.25))
        parameters["upper_clip"] = d.pick((0.5, 1.5, math.inf))
    if mode == "gen_index":
        parameters["axis"] = d.pick(range(-len(first.dim), len(first.dim)))
    if mode.startswith("leaky_relu") and "negative_slope" not in parameters:
        parameters["negative_slope"] = 0.1
    out = getattr(d.graph, mode)(*tensors, **parameters)
    exact = all(value.exact for value in operands)
    integral = all(value.data_type in INTEGERS for value in operands)
    exact = exact and (mode in EXACT_MODES or (integral and mode in _INTEGER_MODES))
    dim = _broadcast([value.dim for value in operands])
    results = result_types(FLOAT) if integral else result_types(first.data_type)
    if exact:
        results = (*results, DataType.INT32, DataType.INT64, DataType.INT8, DataType.UINT8)
    if row.kind in (PointwiseKind.COMPARE, PointwiseKind.LOGICAL):
        results = (*results, DataType.BOOLEAN, DataType.BOOLEAN)
    if mode == "gen_index":
        results = (DataType.INT32, DataType.INT64, FLOAT)
    # What a gradient of NaN or infinity times a derivative of 0 is, is left open.
    if d.chance(30) and not (stepped and row.kind is PointwiseKind.BACKWARD):
        for value in operands:
            if value.data_type.is_floating and value.data_type.bits > 8 and value.exact:
                d.case.special.append(value.tensor)
    d.result(out, dim, results, exact=exact)


def _other(
    d: Drawing,
    mode: str,
    kind: PointwiseKind,
    first: Value,
    types: tuple[DataType, ...],
    stepped: bool,
    position: int,
) -> Value:
    if kind is PointwiseKind.BACKWARD:
        return d.operand(first.dim, types, exact=stepped)
    dim = tuple(1 if d.chance(25) else extent for extent in first.dim)
    if mode == "binary_select" and position == 2:
        return d.input(dim, d.pick((DataType.BOOLEAN, DataType.UINT8, FLOAT, DataType.INT32)))
    same = tuple(t for t in types if t.is_floating == first.data_type.is_floating)
    return d.operand(dim, same if d.chance(90) else types, exact=stepped)


def _broadcast(dims: list[Dim]) -> Dim:
    whole = dims[0]
    for dim in dims[1:]:
        whole = tuple(b if a == 1 else a for a, b in zip(whole, dim, strict=True))
    return whole


def reduction(d: Drawing, source: Value | None) -> None:
    modes = [mode for mode in reduction_mode if mode is not reduction_mode.NOT_SET]
    mode = d.pick(modes)
    types = (*FLOATS, *INTEGERS)
    if source is None or source.data_type not in types:
        source = d.operand(d.dim(d.pick((1, 2, 3, 4, 5))), types)
    if mode in (reduction_mode.MUL, reduction_mode.MUL_NO_ZEROS):
        # Other inputs of a product would leave every range.
        source = d.input(d.dim(d.pick((1, 2, 3)), 40), d.pick(types))
    reduced = d.subset(range(len(source.dim)))
    dim = tuple(1 if axis in reduced else extent for axis, extent in enumerate(source.dim))
    integral = source.data_type in INTEGERS
    exact = source.exact and (integral or mode in EXACT_REDUCTIONS)
    results = result_types(FLOAT if integral else source.data_type)
    if exact and mode not in (reduction_mode.AVG, reduction_mode.NORM2):
        # Over nothing, the maximum is INT64's least number, whose magnitude 64 bits do not hold.
        results = (*results, DataType.INT32, DataType.INT32 if 0 in source.dim else DataType.INT64)
    exact = exact and mode not in (reduction_mode.AVG, reduction_mode.NORM2)
    out = d.graph.reduction(source.tensor, mode)
    d.result(out, dim, results, exact=exact and 0 not in source.dim, set_dim=True)


def genstats(d: Drawing, source: Value | None) -> None:
    if source is None or len(source.dim) < 2 or source.data_type not in FLOATS:
        source = d.operand(d.dim(d.pick((2, 3, 4, 5))), FLOATS)
    dim = tuple(extent if axis == 1 else 1 for axis, extent in enumerate(source.dim))
    for out in d.graph.genstats(source.tensor):
        d.result(out, dim, (FLOAT, FLOAT, source.data_type))


# -- moves ------------------------------------------------------------------------------------

_MOVED = (*FLOATS, *INTEGERS, DataType.BOOLEAN)


def _moved(d: Drawing, source: Value | None) -> Value:
    if source is None or source.data_type not in _MOVED:
        return d.operand(d.dim(d.pick((1, 2, 3, 4))), _MOVED)
    return source


def reshape(d: Drawing, source: Value | None) -> None:
    source = _moved(d, source)
    mode = d.pick((reshape_mode.LOGICAL, reshape_mode.LOGICAL, reshape_mode.VIEW_ONLY))
    flat = list(source.dim)
    new: list[int] = []
    # Factors of the extents, in order, merged and split at random.
    for extent in flat:
        parts = next(
            ([f, extent // f] for f in (2, 3, 5, 7, 11) if f < extent > extent % f == 0), 0
        )
        pieces = parts if parts and d.chance(40) else [extent]
        if new and d.chance(40):
            new[-1] *= pieces.pop(0)
        new.extend(pieces)
    if d.chance(20):
        new.insert(d.pick(range(len(new) + 1)), 1)
    dim = tuple(new[:7]) if math.prod(new[:7]) == math.prod(flat) else source.dim
    out = d.graph.reshape(source.tensor, reshape_mode=mode)
    layout = mode is reshape_mode.LOGICAL
    d.result(out, dim, (source.data_type,), exact=source.exact, set_dim=True, layout=layout)


def slice_(d: Drawing, source: Value | None) -> None:
    source = _moved(d, source)
    slices, dim = [], list(source.dim)
    for axis in range(d.pick(range(len(dim) + 1))):
        extent = dim[axis]
        start = d.pick(range(extent + 1))
        stop = d.pick(range(start, extent + 1))
        step = d.pick((1, 1, 2, 3))
        dim[axis] = len(range(start, stop, step))
        if extent and start < extent and d.chance(20):
            start -= extent
        slices.append(slice(start, stop, step))
    out = d.graph.slice(source.tensor, slices)
    d.result(out, dim, (source.data_type,), exact=source.exact)


def transpose(d: Drawing, source: Value | None) -> None:
    source = _moved(d, source)
    order = d.permutation(len(source.dim))
    out = d.graph.transpose(source.tensor, order)
    dim = [source.dim[axis] for axis in order]
    d.result(out, dim, (source.data_type,), exact=source.exact)


def concatenate(d: Drawing, source: Value | None) -> None:
    source = _moved(d, source)
    axis = d.pick(range(len(source.dim)))
    parts = [source]
    for _ in range(d.pick((0, 1, 1, 2))):
        dim = list(source.dim)
        dim[axis] = d.extent(8)
        parts.append(d.operand(dim, (source.data_type,)))
    dim = list(source.dim)
    dim[axis] = sum(part.dim[axis] for part in parts)
    named = axis - len(dim) if d.chance(20) else axis
    out = d.graph.concatenate([part.tensor for part in parts], named)
    d.result(out, dim, (source.data_type,), exact=all(part.exact for part in parts))


# -- rope -------------------------------------------------------------------------------------


def _rotate(d: Drawing, source: Value | None, method: str) -> None:
    fits = source is not None and len(source.dim) == 4 and source.data_type in FLOATS
    if source is None or not fits or source.dim[3] % 2:
        batch, heads, length = d.dim(3, 100)
        source = d.operand((batch, heads, length, d.pick((2, 4, 6, 10, 16))), FLOATS)
    batch, _, length, extent = source.dim
    rotated = d.pick([0, *range(2, extent + 1, 2)])
    angles = (
        d.pick((1, batch)),
        1,
        d.pick((1, length, length)),
        (rotated or extent) // d.pick((1, 2)),
    )
    freqs = d.input(angles, d.pick((FLOAT, FLOAT, DataType.DOUBLE, DataType.BFLOAT16)))
    scale = d.pick((1.0, 0.5, -2.0))
    out = getattr(d.graph, method)(source.tensor, freqs.tensor, scale, rotated)
    d.result(out, source.dim, result_types(source.data_type))


def rope(d: Drawing, source: Value | None) -> None:
    _rotate(d, source, "rope")


def rope_backward(d: Drawing, source: Value | None) -> None:
    _rotate(d, source, "rope_backward")
