"""Results against the float64 references of the operations, with a bound that each value has.

The references run one after another; what one operation stores for the next is rounded to its
type, as the engine stores it. A result may differ from its reference by

1. the default tolerance of its type, by its largest magnitude; an 8- or 4-bit result by half a
   step at its own magnitude and the default tolerance of float32;
2. where that does not suffice, what the reference itself moves by when each operand of each
   operation moves by a few roundings of the type that is computed in, and each stored intermediate
   by its bound under 1. An engine that computes in that type cannot promise more: both differ from
   the exact result no more than operands within their rounding do. Functions with steps (ceil,
   comparisons, block scales) are drawn over exact operands only and get no such allowance.

What a normalization in float32 makes of finite values whose squares float32 does not hold is not
compared (docs/operations/normalization.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fuzzing.drawing import Case
from fuzzing.elementwise import STEPPED_MODES
from fuzzing.running import Run
from tilewright.cli.input_lengths import row_counts, row_mask
from tilewright.dtypes import DataType
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor
from tilewright.oracle import default_tolerance, layout
from tilewright.oracle.evaluation import stored
from tilewright.oracle.formats import format_of, to_float64
from tilewright.oracle.registry import reference_of

# Roundings of the computing type that an operand may be off by under rule 2.
_ROUNDINGS = 4.0
_TRIALS = 6
# What a random move of all operands shows is not the worst that they can do together.
_TRIAL_FACTOR = 3.0
# Probabilities near a midpoint of v's 8 bits fall to either side; each is a part of its row.
_FLIPPED_SHARE = 0.25
_STATISTICS = ("Stats", "score_max", "score_sum_exp", "rng_dump", "Amax_S")
_EIGHT_BITS = 8
# Below it a few thousand squares add up to what float32 holds.
_LARGEST_SQUARED = 1e17

Values = dict[int, torch.Tensor]
Moves = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Where a result is further from its reference than it may be."""

    tensor: Tensor
    count: int
    message: str


def judge(case: Case, run: Run) -> bool:
    """Compare all outputs; True if rule 2 was needed.

    Raises:
        AssertionError: naming the output, how many elements differ and one of them.
    """
    expected, bounds = _reference(case, run.inputs, None)
    wrong = _differences(case, run, expected, bounds)
    if not wrong:
        return False
    extra: Values = {}
    for trial in range(_TRIALS):
        generator = torch.Generator().manual_seed(trial)
        moved, _ = _reference(case, run.inputs, generator)
        for uid, value in moved.items():
            change = (to_float64(value) - to_float64(expected[uid])).abs()
            # A NaN or infinity that comes or goes with a rounding promises nothing.
            same = (value == expected[uid]) | (value.isnan() & expected[uid].isnan())
            change = torch.where(same, 0.0, torch.where(change.isnan(), torch.inf, change))
            extra[uid] = torch.maximum(extra.get(uid, change), change)
    wider = {uid: bound + _TRIAL_FACTOR * extra[uid] for uid, bound in bounds.items()}
    wrong = _differences(case, run, expected, wider)
    assert not wrong, "\n".join(item.message for item in wrong)
    return True


def _reference(
    case: Case, buffers: Mapping[int, torch.Tensor], generator: torch.Generator | None
) -> tuple[Values, Values]:
    """Unrounded results and their bounds by uid; with a generator, of operands that are moved."""
    graph = case.graph
    exact = {id(tensor) for tensor in case.exact}
    held: Values = {}
    for tensor in graph.inputs():
        offset = tensor.ragged_offset
        offsets = None if offset is None else buffers[offset.uid]
        held[tensor.uid] = layout.load(tensor, buffers[tensor.uid], offsets)
    made: Values = {}
    bounds: Values = {}
    for operation in graph.operations:
        ports = {}
        for port, tensor in operation.inputs.items():
            value = held[tensor.uid]
            if generator is not None and _moves(operation, tensor):
                value = _nudged(operation, value, generator)
            ports[port] = value
            if tensor.ragged_offset is not None:
                ports[f"{port}.ragged_offset"] = held[tensor.ragged_offset.uid]
        results = reference_of(operation.kind)(operation, ports)
        for port, tensor in operation.outputs.items():
            result = stored(tensor, results[port], rounds=False)
            made[tensor.uid] = result
            bound = bounds[tensor.uid] = _bound(operation, port, tensor, result, ports)
            held[tensor.uid] = stored(tensor, results[port], rounds=True)
            if generator is not None and id(tensor) not in exact and bound.any():
                held[tensor.uid] = result + bound * _signs(result.shape, generator)
    return made, bounds


def _moves(operation: Operation, tensor: Tensor) -> bool:
    if not tensor.data_type.is_floating or tensor.data_type is DataType.FP8_E8M0:
        return False
    if operation.kind == "pointwise":
        return getattr(operation, "mode", "") not in STEPPED_MODES
    return operation.kind not in ("block_scale_quantize", *_MOVED_KINDS)


_MOVED_KINDS = ("reshape", "slice", "transpose", "concatenate")


def _nudged(operation: Operation, value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    tensors = (*operation.inputs.values(), *operation.outputs.values())
    is_double = any(tensor.data_type is DataType.DOUBLE for tensor in tensors)
    step = _ROUNDINGS * 2.0 ** (-53 if is_double else -24)
    exact = to_float64(value)
    return exact * (1.0 + step * _signs(exact.shape, generator))


def _signs(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator).to(torch.float64) * 2.0 - 1.0


def _squares_overflow(operation: Operation, ports: Mapping[str, torch.Tensor]) -> bool:
    if "norm" not in operation.kind or operation.inputs["input"].data_type is DataType.DOUBLE:
        return False
    values = to_float64(ports["input"])
    return bool((values.isfinite() & (values.abs() > _LARGEST_SQUARED)).any())


def _bound(
    operation: Operation,
    port: str,
    tensor: Tensor,
    expected: torch.Tensor,
    ports: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """How far each element may be from its reference under rule 1."""
    data_type = tensor.data_type
    exact = to_float64(expected)
    if _squares_overflow(operation, ports):
        return torch.full_like(exact, torch.inf)
    if not data_type.is_floating or data_type is DataType.FP8_E8M0:
        return torch.zeros_like(exact)
    if port == "Y" and operation.kind == "block_scale_quantize":
        scale = operation.outputs["scale"]
        if scale.data_type is not DataType.FLOAT:
            return torch.zeros_like(exact)
    magnitude = torch.where(exact.isfinite(), exact.abs(), 0.0)
    largest = max(float(magnitude.max()) if magnitude.numel() else 0.0, 1.0)
    if port == "DX" and operation.kind.endswith("norm_backward"):
        # A difference of terms of this size, which cancel wherever few elements are averaged.
        terms = to_float64(ports["grad"]) * ports["scale"] * ports["inv_variance"]
        largest = max(largest, float(terms.nan_to_num().abs().max()) if terms.numel() else 0.0)
    target = format_of(data_type)
    factor = default_tolerance(DataType.FLOAT)
    own = torch.zeros_like(exact)
    if target.bits <= _EIGHT_BITS:
        steps = 1.0 if operation.kind == "block_scale_quantize" else 0.5
        smallest = 2.0 ** (target.min_exponent - target.mantissa_bits)
        own = steps * (target.epsilon * magnitude).clamp(min=smallest)
    else:
        factor = default_tolerance(data_type)
    if operation.kind.startswith("sdpa") and port not in _STATISTICS:
        source = operation.inputs["v"].data_type
        share = 1.0 if source.bits > _EIGHT_BITS else _FLIPPED_SHARE
        factor = max(factor, default_tolerance(source) * share)
    return own + factor * largest


def _differences(case: Case, run: Run, expected: Values, bounds: Values) -> list[Difference]:
    found = []
    for tensor in case.graph.outputs():
        got, want = run.outputs[tensor.uid], to_float64(expected[tensor.uid])
        assert got.shape == want.shape, f"{tensor.label()}: {got.shape}, expected {want.shape}"
        rounded = to_float64(stored(tensor, expected[tensor.uid], rounds=True))
        finite = got.isfinite() & rounded.isfinite()
        same = (got == rounded) | (got.isnan() & rounded.isnan())
        off = (got - want).abs() > bounds[tensor.uid]
        wrong = torch.where(finite, off & ~same, ~same & (bounds[tensor.uid] != torch.inf))
        if tensor.ragged_offset is not None:
            wrong = wrong & row_mask(tensor, row_counts(case.graph, tensor, run.inputs))
        if not bool(wrong.any()):
            continue
        where = tuple(int(i) for i in wrong.nonzero()[0])
        found.append(
            Difference(
                tensor,
                int(wrong.sum()),
                f"output {tensor.label()} {tensor.data_type.name} {tensor.dim}: "
                f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {where}: got "
                f"{float(got[where]):.9g}, expected {float(want[where]):.9g} within "
                f"{float(bounds[tensor.uid][where]):.3g}",
            )
        )
    return found
