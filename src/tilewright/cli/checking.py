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


@dataclass(frozen=True)
class Check:
    """One output against its reference; errors are absolute, NaN where nothing was compared."""

    verdict: str
    max_error: float
    tolerance: float
    detail: str = ""


def tolerance_factor(graph: DeclaredGraph, output: Tensor) -> float:
    """The tolerance of an output, as a factor on max(1, largest magnitude of the reference).

    That of the coarsest type that a value passes through on its way: the output's, those of
    intermediate tensors, and v's of an attention, whose probabilities take it.
    """
    from tilewright.oracle import default_tolerance

    if output.data_type is DataType.FP8_E8M0:
        return 0.0
    types = {output.data_type, *(tensor.data_type for tensor in graph.virtual_tensors())}
    for operation in walk(graph.operations):
        if operation.kind.startswith("sdpa"):
            types.add(operation.inputs["v"].data_type)
    if output.data_type.is_integer:
        types |= {t.data_type for t in graph.inputs() if not t.is_pass_by_value}
    return max(default_tolerance(data_type) for data_type in types)


def compare(
    got: torch.Tensor, expected: torch.Tensor, factor: float, *, is_integer: bool = False
) -> Check:
    """``got`` against ``expected``, both float64 of one shape.

    NaN and infinities must lie at the same places. An integer may be one off where ``factor`` is
    not 0, since truncation turns any rounding into a whole step.
    """
    finite = torch.isfinite(expected)
    magnitude = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    tolerance = factor * max(magnitude, 1.0)
    if is_integer and factor:
        tolerance = max(tolerance, 1.0)
    special = ~finite
    same = torch.where(torch.isnan(expected), torch.isnan(got), got == expected)
    misplaced = (special & ~same) | (finite & ~torch.isfinite(got))
    error = torch.where(finite & torch.isfinite(got), (got - expected).abs(), 0.0)
    max_error = float(error.max()) if error.numel() else 0.0
    bad = misplaced | (error > tolerance)
    if not bool(bad.any()):
        return Check(OK, max_error, tolerance)
    if bool(misplaced.any()):
        max_error = float("inf")
    where = tuple(int(i) for i in bad.nonzero()[0])
    detail = (
        f"{int(bad.sum())} of {bad.numel()} elements differ, first at {where}: "
        f"got {float(got[where]):.9g}, expected {float(expected[where]):.9g}"
    )
    return Check(WRONG, max_error, tolerance, detail)


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
        factor = tolerance_factor(graph, tensor)
        checks[tensor.uid] = compare(got, expected, factor, is_integer=tensor.data_type.is_integer)
    return checks
