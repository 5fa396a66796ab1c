"""Results of a run against the float64 reference, with a tolerance from the types in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewright.cli.input_lengths import row_counts, row_mask
from tilewright.dtypes import DataType
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import walk
from tilewright.graph.tensor import Tensor

OK, WRONG = "ok", "wrong"
# The reference rounds 8-bit probabilities as the operation defines it. Only those near a midpoint
# may fall to the other side, and each is a part of its row.
_FLIPPED_SHARE = 0.25
_STATISTICS = ("Stats", "score_max", "score_sum_exp", "rng_dump")


@dataclass(frozen=True)
class Check:
    """One output against its reference; errors are absolute, NaN where nothing was compared."""

    verdict: str
    max_error: float
    tolerance: float
    detail: str = ""


@dataclass(frozen=True)
class Tolerance:
    """How far a result x may lie from its reference.

    ``factor`` times max(1, largest magnitude of the reference), plus ``relative`` |x| or
    ``absolute``, whichever is larger: the last two are the rounding of a narrow output itself.
    """

    factor: float
    relative: float = 0.0
    absolute: float = 0.0

    def bounds(self, expected: torch.Tensor) -> torch.Tensor:
        """The bound of each element; infinities and NaN count as 0."""
        magnitude = torch.where(torch.isfinite(expected), expected.abs(), 0.0)
        largest = float(magnitude.max()) if magnitude.numel() else 0.0
        own = (self.relative * magnitude).clamp(min=self.absolute)
        return own + self.factor * max(largest, 1.0)


def tolerance_of(graph: DeclaredGraph, output: Tensor) -> Tolerance:
    """The tolerance of an output: that of the coarsest type that values pass through on their way.

    Those are the types of intermediate tensors, v's of an attention, whose probabilities take it,
    and the output's own. Half a step of an 8-bit or 4-bit output differs too much from element to
    element to be told by the largest one, so there each element has its own bound.
    """
    from tilewright.oracle import default_tolerance
    from tilewright.oracle.formats import format_of

    if output.data_type is DataType.FP8_E8M0:
        return Tolerance(0.0)
    types = {tensor.data_type for tensor in graph.virtual_tensors()}
    flips = [0.0]
    for operation in walk(graph.operations):
        # Statistics are sums of exponentials of float32 scores; no probability is rounded there.
        is_statistic = any(operation.outputs.get(port) is output for port in _STATISTICS)
        if not operation.kind.startswith("sdpa") or is_statistic:
            continue
        data_type = operation.inputs["v"].data_type
        if data_type.bits > 8:
            types.add(data_type)
        else:
            flips.append(default_tolerance(data_type) * _FLIPPED_SHARE)
    if not output.data_type.is_floating:
        types |= {t.data_type for t in graph.inputs() if not t.is_pass_by_value}
        factor = max((default_tolerance(t) for t in types), default=0.0)
        # Truncation turns any rounding before it into a whole step.
        return Tolerance(factor, absolute=1.0 if factor and output.data_type.is_integer else 0.0)
    layout = format_of(output.data_type)
    if layout is None or layout.bits > 8:
        factors = [default_tolerance(data_type) for data_type in {*types, output.data_type}]
        return Tolerance(max(*factors, *flips))
    smallest = 2.0 ** (layout.min_exponent - layout.mantissa_bits)
    return Tolerance(
        max(*flips, *(default_tolerance(data_type) for data_type in {*types, DataType.FLOAT})),
        relative=layout.epsilon / 2,
        absolute=smallest / 2,
    )


def compare(got: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> Check:
    """``got`` against ``expected``, both float64 of one shape.

    NaN and infinities must lie at the same places. The check's tolerance is the largest bound.
    """
    bounds = tolerance.bounds(expected)
    finite = torch.isfinite(expected)
    same = torch.where(torch.isnan(expected), torch.isnan(got), got == expected)
    misplaced = (~finite & ~same) | (finite & ~torch.isfinite(got))
    error = torch.where(finite & torch.isfinite(got), (got - expected).abs(), 0.0)
    max_error = float(error.max()) if error.numel() else 0.0
    largest_bound = float(bounds.max()) if bounds.numel() else 0.0
    bad = misplaced | (error > bounds)
    if not bool(bad.any()):
        return Check(OK, max_error, largest_bound)
    if bool(misplaced.any()):
        max_error = float("inf")
    where = tuple(int(i) for i in bad.nonzero()[0])
    detail = (
        f"{int(bad.sum())} of {bad.numel()} elements differ, first at {where}: "
        f"got {float(got[where]):.9g}, expected {float(expected[where]):.9g}"
    )
    return Check(WRONG, max_error, largest_bound, detail)


def check_outputs(
    graph: DeclaredGraph, inputs: Mapping[int, torch.Tensor], outputs: Mapping[int, torch.Tensor]
) -> dict[int, Check]:
    """Every output's check, by uid. ``inputs`` and ``outputs`` are CPU storage by uid.

    Raises:
        NotSupportedError: if the reference has no such operation.
    """
    from tilewright.oracle import evaluate
    from tilewright.oracle.formats import to_float64
    from tilewright.oracle.layout import load

    references = evaluate(graph, inputs)
    checks = {}
    for tensor in graph.outputs():
        offsets = None if tensor.ragged_offset is None else inputs[tensor.ragged_offset.uid]
        got = to_float64(load(tensor, outputs[tensor.uid], offsets))
        expected = references[tensor.uid].to(torch.float64)
        if offsets is not None:
            # Past a sequence's end there is no element, whatever the reference puts there.
            exists = row_mask(tensor, row_counts(graph, tensor, inputs))
            got, expected = (torch.where(exists, part, 0.0) for part in (got, expected))
        checks[tensor.uid] = compare(got, expected, tolerance_of(graph, tensor))
    return checks
