"""What an engine decided for a graph, from the store: no family's file, no Triton, no compiler.

A record's key is the graph's own form without its names, the target with its multiprocessors, the
knobs, and the compiler's environment. One record has the proposals (or the reason of a decline),
one for each set of knobs has what is launched. Each has the names of the source files that decided,
and their digest, which is compared with the files as they are.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from tilewright.artifact.environment import unloaded_environment
from tilewright.artifact.key import digest_of
from tilewright.artifact.location import current_store
from tilewright.engines.base import Knobs, Proposal
from tilewright.engines.compiled.resolved import ResolvedPlan, plan_of
from tilewright.errors import NotSupportedError
from tilewright.graph import json_form
from tilewright.graph.enums import behavior_note, knob_type, numeric_note
from tilewright.graph.graph import DeclaredGraph
from tilewright.records import record

# What decides beside an engine's own modules.
_SHARED = tuple(
    f"tilewright.{name}"
    for name in ("engines.compiled", "engines.base", "launch", "graph", "dtypes", "records")
)
# A source that was written later may not be what this process runs.
_STARTED_NS = time.time_ns()

# (folder, digest) of the records that this process wrote or saw: no need to look again.
_written: set[tuple[str, str]] = set()


@record(frozen=True)
class RecordKeys:
    """The keys of one graph's records on one target. ``family`` is the module that takes it."""

    package: str
    family: str
    form: dict[str, Any]
    names: tuple[str, ...]
    compute_capability: tuple[int, int]
    sm_count: int

    def facts(self, knobs: Knobs | None) -> dict[str, Any]:
        """The key of the proposals (no knobs), or of the plan with these knobs."""
        return {
            "graph": self.form,
            "engine": self.package,
            "family": self.family,
            "knobs": None if knobs is None else _knobs_document(knobs),
            "target": list(self.compute_capability),
            "sm_count": self.sm_count,
            "environment": dict(unloaded_environment("triton")),
        }


def record_keys(
    package: str,
    family: str,
    graph: DeclaredGraph,
    compute_capability: tuple[int, int],
    sm_count: int,
) -> RecordKeys:
    """The keys of a validated graph."""
    form = json_form.to_dict(graph)
    names = [form.pop("name")]
    for entry in (*form["tensors"], *form["operations"]):
        names.append(entry["name"])
        entry["name"] = ""
    return RecordKeys(package, family, form, tuple(names), compute_capability, sm_count)


def load_proposals(keys: RecordKeys) -> list[Proposal] | None:
    """The stored proposals, or None.

    Raises:
        NotSupportedError: the stored decline of a graph whose tensors have the same names.
    """
    document = _load(keys, None)
    try:
        if "declined" in document:
            if document["names"] == list(keys.names):
                raise NotSupportedError(str(document["declined"]))
            return None
        return [_proposal(entry) for entry in document["proposals"]]
    except (KeyError, TypeError, ValueError):
        return None


def save_proposals(keys: RecordKeys, proposals: Sequence[Proposal]) -> None:
    """Store what a family proposed."""
    entries = [
        {
            "knobs": _knobs_document(proposal.knobs),
            "cost": proposal.cost,
            "behavior_notes": sorted(note.name for note in proposal.behavior_notes),
            "numeric_notes": sorted(note.name for note in proposal.numeric_notes),
        }
        for proposal in proposals
    ]
    _save(keys, None, {"proposals": entries})


def save_decline(keys: RecordKeys, reason: str) -> None:
    """Store why a family declined; the reason names tensors, so they are kept with it."""
    _save(keys, None, {"declined": reason, "names": list(keys.names)})


def load_plan(keys: RecordKeys, knobs: Knobs) -> ResolvedPlan | None:
    """The stored plan, or None."""
    document = _load(keys, knobs)
    try:
        return plan_of(document)
    except (KeyError, TypeError, ValueError):
        return None


def save_plan(keys: RecordKeys, knobs: Knobs, plan: ResolvedPlan) -> None:
    """Store what a plan launches."""
    try:
        document = plan.to_document()
    except TypeError:
        # An argument of a kind that has no form: such a plan is made anew in each process.
        return
    _save(keys, knobs, document)


def _load(keys: RecordKeys, knobs: Knobs | None) -> Any:
    store = current_store()
    if store is None:
        return {}
    document = store.load_record(keys.facts(knobs), _is_current)[0]
    return {} if document is None else document["record"]


def _save(keys: RecordKeys, knobs: Knobs | None, document: Any) -> None:
    store = current_store()
    if store is None:
        return
    facts = keys.facts(knobs)
    written = (str(store.folder), digest_of(facts))
    if written in _written:
        return
    _written.add(written)
    files = _sources_of(keys.package)
    if files and not store.has_record(facts, _is_current):
        sources = {"files": list(files), "digest": sources_digest(files)}
        store.save_record(facts, {"sources": sources, "record": document})


def _knobs_document(knobs: Knobs) -> list[list[Any]]:
    return [[knob.name, value] for knob, value in knobs]


def _proposal(entry: Any) -> Proposal:
    return Proposal(
        tuple((knob_type[name], int(value)) for name, value in entry["knobs"]),
        float(entry["cost"]),
        frozenset(behavior_note[name] for name in entry["behavior_notes"]),
        frozenset(numeric_note[name] for name in entry["numeric_notes"]),
    )


def _is_current(document: Any) -> bool:
    """True if the sources that a record was made of are what they were."""
    try:
        sources = document["sources"]
        return bool(sources_digest(tuple(sources["files"])) == sources["digest"])
    except (KeyError, TypeError, ValueError, OSError):
        return False


@functools.cache
def sources_digest(files: tuple[str, ...]) -> str:
    """A digest of source files, given by their paths in the package.

    Raises:
        OSError: if one is not there.
    """
    root = _root()
    lines = [f"{name} {_file_digest(root + os.sep + name)}\n" for name in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@functools.cache
def _file_digest(path: str) -> str:
    """Of one file: the proposals and the plan of a graph come of nearly the same ones."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.sha256(file.read()).hexdigest()


def _sources_of(package: str) -> tuple[str, ...]:
    """The files that this process has loaded of an engine and of what engines share.

    None if one was written after the process started.
    """
    files = []
    for name, module in tuple(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if path is None or not path.endswith(".py"):
            continue
        if any(name == top or name.startswith(top + ".") for top in (package, *_SHARED)):
            try:
                if os.stat(path).st_mtime_ns > _STARTED_NS:
                    return ()
            except OSError:
                return ()
            files.append(os.path.relpath(path, _root()).replace(os.sep, "/"))
    return tuple(sorted(files))


@functools.cache
def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
