"""L13, no silent fallback: the plan that runs is the one that was chosen, and has its name."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.testing.detectors.subject import Operands, as_subject, named
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

FALLBACK = Rule("L13", "no silent fallback")


def no_silent_fallback(target: Any, operands: Operands, engine: str | None = None) -> Verdict:
    """The frame of a bound call names the plan that was selected, of ``engine`` if it is given."""
    subject, given = as_subject(target), named(operands)
    if subject.declare is None:
        return FALLBACK.declined("it names no plan")
    results = {
        name: torch.empty_strided(at.dim, at.stride, dtype=at.dtype, device=at.device)
        for name, at in subject.layouts(given).items()
    }
    declared = subject.declare(given, results)
    if declared.plan_name is None or declared.selected is None:
        return FALLBACK.declined("it names no plan")
    ran = declared.plan_name(given, results)
    if not ran:
        return FALLBACK.broken("the bound call has no plan name")
    if ran != declared.selected:
        return FALLBACK.broken(f"plan {declared.selected} was selected and {ran} runs")
    if engine is not None and ran.partition(":")[0] != engine:
        return FALLBACK.broken(f"engine {engine} was asked for and {ran} runs")
    return FALLBACK.held(f"plan {ran} was selected and runs")


assert_no_silent_fallback = asserting(no_silent_fallback)
