"""The answer to "why this plan?": every engine, taken or declined, with the reason."""

from __future__ import annotations

from typing import Any

from tilewright.planning.plans import EngineVerdict, Plan
from tilewright.records import record


@record(frozen=True)
class Explanation:
    """What planning decided for one graph on one device. Prints as a small table."""

    graph_name: str
    device: str
    verdicts: tuple[EngineVerdict, ...]
    barred: tuple[tuple[str, str], ...]
    selected: Plan | None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {
            "graph": self.graph_name,
            "device": self.device,
            "selected": None if self.selected is None else self.selected.name,
            "engines": [
                {
                    "id": verdict.engine_id,
                    "name": verdict.engine_name,
                    "taken": verdict.is_taken,
                    "plans": list(verdict.plan_names),
                    "reason": verdict.reason,
                }
                for verdict in self.verdicts
            ],
            "barred": [{"plan": name, "reason": reason} for name, reason in self.barred],
        }

    def __str__(self) -> str:
        width = max(len(verdict.engine_name) for verdict in self.verdicts)
        lines = [f"graph {self.graph_name!r} on {self.device}"]
        for verdict in self.verdicts:
            text = "taken: " + ", ".join(verdict.plan_names) if verdict.is_taken else "declined"
            if verdict.reason:
                text += f": {verdict.reason}"
            lines.append(f"  {verdict.engine_name:<{width}}  {text}")
        lines += [f"  barred {name}: {reason}" for name, reason in self.barred]
        lines.append(f"  runs: {self.selected.name if self.selected else 'nothing'}")
        return "\n".join(lines)
