"""L11, every element is written and nothing else; L5, nothing outside an operand is read."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.testing.detectors.allocation import FilledAllocations
from tilewright.testing.detectors.guards import (
    FINITE_PATTERN,
    NAN_PATTERN,
    Guarded,
    all_bytes,
    changed_names,
    describe,
    differing,
    guard_all,
    guarded,
    views,
    with_gaps,
)
from tilewright.testing.detectors.subject import Operands, Subject, Tensors, as_subject, named
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

WRITTEN = Rule("L11", "every element written")
GUARDS = Rule("L11", "nothing else written")
OUTSIDE = Rule("L5", "nothing outside is read")


def every_element_written(target: Any, operands: Operands) -> Verdict:
    """Every element of every result is written (L11).

    The results' memory holds one pattern of bytes, then the same again, then another: an element
    that follows the pattern was not written. Of code that returns its results, memory from
    ``torch.empty`` and its kin is filled so.
    """
    subject, given = as_subject(target), named(operands)
    runs = [
        _results_on(subject, given, pattern)[0]
        for pattern in (NAN_PATTERN, NAN_PATTERN, FINITE_PATTERN)
    ]
    for name, first in runs[0].items():
        follows = differing(first, runs[2][name]) & ~differing(first, runs[1][name])
        if bool(follows.any()):
            rows = "" if first.dim() < 2 else f"; {_rows(follows)}"
            return WRITTEN.broken(
                f"{name}: {describe(follows)}, hold what the memory held before{rows}"
            )
    return WRITTEN.held(f"{', '.join(runs[0])}: no element follows the memory's old contents")


def guards_unchanged(target: Any, operands: Operands) -> Verdict:
    """Bytes around results, in their stride gaps, and of all operands keep their values (L11)."""
    subject, given = as_subject(target), named(operands)
    for pattern in (NAN_PATTERN, FINITE_PATTERN):
        inputs = guard_all(given, pattern)
        before = {name: all_bytes(buffer.raw) for name, buffer in inputs.items()}
        _, outputs = _run(subject, views(inputs), pattern, gaps=True)
        changed = changed_names(before, {name: buffer.raw for name, buffer in inputs.items()})
        if changed:
            return GUARDS.broken(f"operand {changed[0]}, or bytes around it, was written")
        for name, buffer in outputs.items():
            byte = buffer.damaged()
            if byte is not None:
                return GUARDS.broken(
                    f"{name}: byte {byte} from its start is no element of it and was written"
                )
    seen = "around and between results" if subject.declare else "around fresh memory"
    return GUARDS.held(f"operands and the bytes {seen} kept their values")


def nothing_outside_read(target: Any, operands: Operands) -> Verdict:
    """Results do not depend on bytes outside the operands' elements (L5): NaN there, then 51015."""
    subject, given = as_subject(target), named(operands)
    runs = [
        subject.call(views(guard_all(given, pattern)))
        for pattern in (FINITE_PATTERN, FINITE_PATTERN, NAN_PATTERN)
    ]
    for name, first in runs[0].items():
        follows = differing(first, runs[2][name]) & ~differing(first, runs[1][name])
        if bool(follows.any()):
            return OUTSIDE.broken(
                f"{name}: {describe(follows)}, depend on bytes outside the operands"
            )
    return OUTSIDE.held("results are the same whatever surrounds the operands")


def _results_on(
    subject: Subject, operands: Tensors, pattern: int
) -> tuple[dict[str, torch.Tensor], dict[str, Guarded]]:
    return _run(subject, {name: t.clone() for name, t in operands.items()}, pattern, gaps=False)


def _run(
    subject: Subject, operands: Tensors, pattern: int, *, gaps: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Guarded]]:
    """Results of one run on memory of the pattern, and the buffers of that memory."""
    if subject.declare is None:
        with FilledAllocations(pattern) as memory, torch.no_grad():
            results = subject.call(operands)
        buffers = {f"allocation {i}": buffer for i, buffer in enumerate(memory.buffers)}
        return results, buffers
    layouts = subject.layouts(operands)
    if gaps and not subject.has_fixed_layout:
        layouts = {name: with_gaps(layout) for name, layout in layouts.items()}
    outputs = {name: guarded(layout, pattern) for name, layout in layouts.items()}
    subject.declare(operands, views(outputs)).execute(operands, views(outputs))
    return views(outputs), outputs


def _rows(where: torch.Tensor) -> str:
    rows = where.flatten(0, -2).any(dim=-1)
    return f"{int(rows.sum())} of {rows.numel()} rows"


assert_every_element_written = asserting(every_element_written)
assert_guards_unchanged = asserting(guards_unchanged)
assert_nothing_outside_read = asserting(nothing_outside_read)
