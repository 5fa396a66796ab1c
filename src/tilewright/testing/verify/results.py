"""What a run of verify found: one record a check, and their counts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tilewright.testing.verify.pictures import ErrorMap


class Status(enum.Enum):
    """Of one check. DEVIATES: broken, where the callable says that it does otherwise."""

    HELD = "held"
    BROKEN = "broken"
    DEVIATES = "deviates"
    DECLINED = "declined"


VALUES = "values"


@dataclass(frozen=True)
class Check:
    """One rule on one case.

    ``rule`` is L1 to L13, "same" (determinism), "beside" (another process), or "values".
    """

    family: str
    case: str
    rule: str
    detector: str
    status: Status
    text: str
    picture: ErrorMap | None = None

    def document(self) -> dict[str, str]:
        """For JSON."""
        return {
            "family": self.family,
            "case": self.case,
            "rule": self.rule,
            "detector": self.detector,
            "status": self.status.value,
            "text": self.text,
        }


@dataclass(frozen=True)
class Report:
    """All checks of a run."""

    subject: str
    families: tuple[str, ...]
    level: str
    device: str
    versions: dict[str, str | None]
    checks: tuple[Check, ...]

    def count(self, status: Status) -> int:
        """How many checks ended so."""
        return sum(check.status is status for check in self.checks)

    @property
    def is_broken(self) -> bool:
        """True if any rule is broken."""
        return self.count(Status.BROKEN) > 0

    @property
    def is_declined(self) -> bool:
        """True if every check was declined: nothing is known of what was examined."""
        return self.count(Status.DECLINED) == len(self.checks)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "subject": self.subject,
            "families": list(self.families),
            "level": self.level,
            "device": self.device,
            "versions": self.versions,
            "counts": {status.value: self.count(status) for status in Status},
            "checks": [check.document() for check in self.checks],
        }


# Worst first: what one cell of the table shows for several checks.
ORDER = (Status.BROKEN, Status.DEVIATES, Status.HELD, Status.DECLINED)


def worst(checks: list[Check]) -> Status | None:
    """The status that stands for several checks of one cell; None without a check."""
    found = {check.status for check in checks}
    return next((status for status in ORDER if status in found), None)
