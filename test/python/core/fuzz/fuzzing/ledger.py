"""What became of the drawn graphs: counts of operations run and of refusals by reason."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from fuzzing.drawing import Case
from fuzzing.judging import judge
from fuzzing.running import declined, run
from tilewright.graph.operations.pointwise_modes import POINTWISE_MODES

_NAMES = re.compile(r"'[^']*'|#\d+")
_TUPLES = re.compile(r"\((-?\d+(\.\d+)?,? ?)*\)|\[(-?\d+,? ?)*\]")
_NUMBERS = re.compile(r"-?\d+(\.\d+)?")
_REASON_LENGTH = 160


@dataclass
class Ledger:
    """Counts over many graphs. ``as_plain`` and ``merge`` carry them between processes."""

    graphs: int = 0
    # Graphs, apart from their numbers, that were not drawn before.
    distinct: int = 0
    # Graphs that needed the second rule of `fuzzing.judging`.
    conditioned: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._seen: set[int] = set()

    @property
    def declined(self) -> int:
        return sum(self.reasons.values())

    def check(self, case: Case) -> None:
        """Run one graph and count what became of it.

        Raises:
            AssertionError: if it neither declines with a reason nor keeps the contract.
        """
        self.graphs += 1
        self._seen.add(hash(case.shape_text()))
        self.distinct = len(self._seen)
        refusal = declined(case)
        if refusal is not None:
            assert str(refusal).strip(), f"{type(refusal).__name__} without a reason"
            self.reasons[reason_of(refusal)] += 1
            return
        self.conditioned += judge(case, run(case))
        for operation in case.graph.operations:
            self.kinds[operation.kind] += 1
            if operation.kind == "pointwise":
                self.modes[operation.mode] += 1

    def as_plain(self) -> dict[str, Any]:
        return {entry.name: _plain(getattr(self, entry.name)) for entry in fields(self)}

    def merge(self, plain: dict[str, Any]) -> None:
        for name in ("graphs", "distinct", "conditioned"):
            setattr(self, name, getattr(self, name) + plain[name])
        for name in ("kinds", "modes", "reasons"):
            getattr(self, name).update(plain[name])

    def lines(self) -> list[str]:
        """A summary to print: totals, operations by kind, refusals by reason."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        missing = sorted(set(POINTWISE_MODES) - set(self.modes))
        return [
            f"{self.graphs} drawn, {self.distinct} of them distinct in their chunk; "
            f"{self.graphs - self.declined} run and right, {self.declined} declined; "
            f"{self.conditioned} compared within what rounded operands explain",
            f"operations run: {kinds}",
            f"pointwise modes not run: {', '.join(missing) or 'none'}",
            *(f"declined {count:5}  {reason}" for reason, count in self.reasons.most_common()),
        ]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Counter) else value


def reason_of(error: Exception) -> str:
    """The error's type and message without names and numbers, so that equal rules are one line."""
    first = " ".join(str(error).split())
    for pattern, stand_in in ((_NAMES, "_"), (_TUPLES, "(..)"), (_NUMBERS, "n")):
        first = pattern.sub(stand_in, first)
    return f"{type(error).__name__}: {first}"[:_REASON_LENGTH]
