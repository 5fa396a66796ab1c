"""Print docs/gpu_records.md: what the committed records of runs on GPUs say.

    python test/gpu/summary.py > docs/gpu_records.md

Needs nothing but the records, so it runs anywhere; `make docs` runs it.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("records")
_REASON_CHARS = 160
# What begins the reason of a test that had no time.
LEFT_OUT = "left out: "
# The status of a command that timeout(1) ended.
_TIME_IS_OVER = 124

Record = Mapping[str, Any]

_HEAD = """# What runs on GPUs found

Written by `make docs` from the records in `test/gpu/records/`; the commands that make those are in
[testing.md](testing.md#on-a-gpu). Each tells of the code of its day.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for kind, (title, section) in _SECTIONS.items():
        for path in sorted(RECORDS.glob(f"*_{kind}.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            parts.append(f"\n## {title}, {record['device']}\n\n{_facts(path, record)}\n")
            parts += [f"\n{line}\n" for line in section(record)]
    return "".join(parts)


def _facts(path: Path, record: Record) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"`{path.name}`, {record['date']}; {versions}."


def _tests(record: Record) -> list[str]:
    run = record["pytest"]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(run["totals"].items()))
    end = ", when its time was over" if run["exit_status"] == _TIME_IS_OVER else ""
    out = sum(str(found[-1]).startswith(LEFT_OUT) for found in record["tests"].values())
    of_them = f", {out} of them for want of time" if out else ""
    # What had no time in one call comes first in the next; a record may be of several.
    calls = f" of {run['calls']} calls" if run.get("calls", 1) > 1 else ""
    lines = [f"`{run['command']}`: {counts}{of_them}, in {run['seconds']:.0f} s{calls}{end}."]
    bad = {
        name: found for name, found in record["tests"].items() if found[0] in ("failed", "crashed")
    }
    if bad:
        lines.append(
            _table(
                "test",
                "reason",
                [(name.removeprefix("test/python/"), found[-1]) for name, found in bad.items()],
            )
        )
    rows = []
    for check in record["verify"]:
        counts = ", ".join(f"{count} {word}" for word, count in check["counts"].items())
        rows.append((f"{check['name']}: {', '.join(check['families'])}", counts))
    lines.append(_table("`tilewright verify` of", "checks", rows))
    found = [
        (f"{check['name']}, {word}", text)
        for check in record["verify"]
        for word in ("broken", "deviates")
        for text in check[word]
    ]
    if found:
        lines.append(_table("what", "how", found))
    return lines


def _sanitizer(record: Record) -> list[str]:
    log = "../benchmark/hopper_attention.md#what-racecheck-says"
    lines = [
        "A call is clean if nothing is reported, or nothing but races on the words that tell warps "
        f"their partition, by the kernel's machine code. Why: [a log]({log})."
    ]
    for name, runs in (
        ("calls of the engines' kernels", record["runs"]),
        ("controls, kernels whose answer is known", record["controls"]),
    ):
        by_tool = collections.Counter(run["tool"] for run in runs)
        clean = collections.Counter(run["tool"] for run in runs if run["clean"])
        counts = ", ".join(f"{tool} {clean[tool]} of {by_tool[tool]}" for tool in by_tool)
        lines.append(f"Clean {name}: {counts}.")
        reported = [run for run in runs if run["status"]]
        reports = [(f"{run['tool']}: {run['sample']}", _reports(run)) for run in reported]
        if reports:
            lines.append(_table("tool: sample", "report", reports))
    return lines


def _reports(run: Record) -> str:
    """What a tool says of a call: racecheck's races by kind, where it was told so."""
    kinds = run.get("reports")
    if kinds is None:
        return str(run["summary"])
    races = ", ".join(f"{count} of {kind}" for kind, count in kinds.items())
    return f"{races}; clean but for partition words" if run["clean"] else races


def _pairs(record: Record) -> list[str]:
    lines = []
    directions = {name: told for name, told in record.items() if is_of_cases(told)}
    for direction, told in directions.items():
        # Nothing else is a reason there: see the plugin in ``pairs.py``.
        late = {"skipped": "left out for want of time"}
        outcomes = ", ".join(f"{n} {late.get(what, what)}" for what, n in told["tests"].items())
        lines.append(
            f"{direction[0].upper()}{direction[1:]}: {told['cases_run']} cases ran, "
            f"{told['cases_declined']} declined; tests: {outcomes}."
        )
        for heading, key in (("declined because", "declined_by_reason"), ("failed", "failed")):
            if told[key]:
                lines.append(_table(heading, "", [(k, str(v)) for k, v in told[key].items()]))
    return lines


def is_of_cases(told: Any) -> bool:
    """Whether a part of a record of pairs is one direction's."""
    return isinstance(told, Mapping) and "cases_run" in told


def _isolation(record: Record) -> list[str]:
    rows = [(run["name"], run["found_outcomes"]) for run in record["runs"]]
    unexpected = [run["name"] for run in record["runs"] if run["found_outcomes"] != run["outcomes"]]
    verdict = "as expected" if not unexpected else f"NOT as expected: {', '.join(unexpected)}"
    return [f"Real faults, and what became of each test: {verdict}.", _table("run", "", rows)]


def _table(first: str, second: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {first} | {second} |", "| --- | --- |"]
    return "\n".join(lines + [f"| {_cell(one)} | {_cell(other)} |" for one, other in rows])


def _cell(text: str) -> str:
    line = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= _REASON_CHARS else line[:_REASON_CHARS].rstrip() + " ..."


# The end of a record's name -> its title, and what is told of it.
_SECTIONS: dict[str, tuple[str, Callable[[Record], list[str]]]] = {
    "tests": ("Tests and `tilewright verify`", _tests),
    "sanitizer": ("compute-sanitizer", _sanitizer),
    "pairs": ("Pairs of attention's features", _pairs),
    "isolation": ("Isolation", _isolation),
}


if __name__ == "__main__":
    print(page(), end="")
