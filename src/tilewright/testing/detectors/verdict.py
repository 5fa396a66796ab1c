"""What a detector says of a rule: held, broken with evidence, or declined with a reason."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

Parameters = ParamSpec("Parameters")


class Outcome(enum.Enum):
    """HELD: looked and found nothing wrong. DECLINED: could not look, for a reason that is told."""

    HELD = "held"
    BROKEN = "broken"
    DECLINED = "declined"


@dataclass(frozen=True)
class Verdict:
    """One rule on one subject. ``text`` is the evidence, or what was looked at, or the reason."""

    rule: str
    detector: str
    outcome: Outcome
    text: str

    @property
    def is_broken(self) -> bool:
        """True if the rule was seen to be broken."""
        return self.outcome is Outcome.BROKEN

    def __str__(self) -> str:
        return f"{self.rule} {self.detector}: {self.outcome.value}: {self.text}"


@dataclass(frozen=True)
class Rule:
    """Makes the verdicts of one detector."""

    rule: str
    detector: str

    def held(self, text: str) -> Verdict:
        """Nothing wrong; ``text`` says what was looked at."""
        return Verdict(self.rule, self.detector, Outcome.HELD, text)

    def broken(self, text: str) -> Verdict:
        """The rule is broken; ``text`` is the evidence."""
        return Verdict(self.rule, self.detector, Outcome.BROKEN, text)

    def declined(self, text: str) -> Verdict:
        """The rule cannot be looked at here; ``text`` is the reason."""
        return Verdict(self.rule, self.detector, Outcome.DECLINED, text)


def asserting(detector: Callable[Parameters, Verdict]) -> Callable[Parameters, Verdict]:
    """The ``assert_`` form: raises AssertionError on a broken verdict, returns any other.

    A declined verdict is no proof; a test that must not pass on one compares ``outcome``.
    """

    @functools.wraps(detector)
    def check(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Verdict:
        verdict = detector(*arguments, **keywords)
        if verdict.is_broken:
            raise AssertionError(str(verdict))
        return verdict

    return check
