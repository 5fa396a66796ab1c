"""The same call on the same operands gives the same bits."""

from __future__ import annotations

from typing import Any

from tilewright.testing.detectors.guards import describe, differing
from tilewright.testing.detectors.subject import Operands, as_subject, named
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

DETERMINISM = Rule("same", "determinism")


def determinism(target: Any, operands: Operands, runs: int = 4) -> Verdict:
    """Repeated calls give the same bits, NaNs included."""
    subject, given = as_subject(target), named(operands)
    first = {name: result.clone() for name, result in subject.call(given).items()}
    for number in range(1, runs):
        for name, result in subject.call(given).items():
            where = differing(result, first[name])
            if bool(where.any()):
                return DETERMINISM.broken(f"{name}, call {number + 1}: {describe(where)} differ")
    return DETERMINISM.held(f"{runs} calls, the same bits")


assert_determinism = asserting(determinism)
