"""What an engine decided for a graph, from the store: no family's file, no Triton, no compiler.

A record's key is the graph's own form without its names, the target with its multiprocessors, the
knobs, the digest of the sources that decide, and the compiler's environment. One record has the
proposals (or the reason of a decline), one for each set of knobs has what is launched.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
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

# What decides beside an engine's own files: modules and packages of tilewright.
_SHARED_SOURCES = ("engines/compiled", "engines/base.py", "launch", "graph", "dtypes.py")

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
            "sources": sources_digest(self.package),
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
    return {} if store is None else store.load_record(keys.facts(knobs))[0] or {}


def _save(keys: RecordKeys, knobs: Knobs | None, document: Any) -> None:
    store = current_store()
    if store is None:
        return
    facts = keys.facts(knobs)
    written = (str(store.folder), digest_of(facts))
    if written not in _written:
        if not store.has_record(facts):
            store.save_record(facts, document)
        _written.add(written)


def _knobs_document(knobs: Knobs) -> list[list[Any]]:
    return [[knob.name, value] for knob, value in knobs]


def _proposal(entry: Any) -> Proposal:
    return Proposal(
        tuple((knob_type[name], int(value)) for name, value in entry["knobs"]),
        float(entry["cost"]),
        frozenset(behavior_note[name] for name in entry["behavior_notes"]),
        frozenset(numeric_note[name] for name in entry["numeric_notes"]),
    )


@functools.cache
def sources_digest(package: str) -> str:
    """A digest of every file that decides what an engine of this package launches."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return "absent"
    own = found.submodule_search_locations[0]
    # .../tilewright/engines/<own>
    root = os.path.dirname(os.path.dirname(own))
    digest = hashlib.sha256()
    for top in (own, *(os.path.join(root, name) for name in _SHARED_SOURCES)):
        for path in [top] if top.endswith(".py") else sorted(_sources(top)):
            with open(path, "rb", buffering=0) as file:
                content = file.read()
            digest.update(f"{path[len(root) :]} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    with os.scandir(folder) as scan:
        for item in scan:
            if item.name.endswith(".py"):
                yield item.path
            elif item.is_dir() and item.name != "__pycache__":
                yield from _sources(item.path)
