"""Damaged JSON graphs load and validate, or raise GraphError: no other exception, and no hang."""

from __future__ import annotations

import copy
import json
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tilewright.errors import GraphError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.json_form import fill_from_dict, fill_from_json, to_json

pytestmark = pytest.mark.L0
Samples = Mapping[str, Callable[[], DeclaredGraph]]

SEEDS = 20
MUTATIONS_A_SEED = 100
DEADLINE_S = 10
STRANGE_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "inf", "nan", "FLOAT", "NOT_SET", [], {}, [[]], {"a": {}}),
    *(0, 1, -1, 2, 3, 7, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), float("-inf")),
    *([0], [-1], [2**62] * 8, [1] * 9, [2**63 - 1], list(range(64)), ["1"], [None]),
)


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Fail, rather than hang, if the block takes longer."""

    def expire(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def loads_or_is_refused(text: str | bytes) -> bool:
    """True if the graph is right. Any exception but GraphError propagates."""
    graph = DeclaredGraph()
    try:
        with deadline(DEADLINE_S):
            fill_from_json(graph, text)
            graph.validate()
            to_json(graph)
            for operation in graph.operations:
                assert isinstance(operation.in_place, tuple)
    except GraphError as error:
        assert len(str(error)) < 5000
        return False
    return True


@pytest.fixture(scope="module")
def documents(declared_samples: Samples) -> list[dict[str, Any]]:
    found = []
    for declare in declared_samples.values():
        graph = declare()
        graph.validate()
        found.append(json.loads(to_json(graph)))
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside a document."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        if isinstance(entry, dict | list):
            yield from places(entry, (*path, key))
        else:
            yield (*path, key)


def container(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        document = document[key]
    return document


def mutate_structure(rng: random.Random, document: dict[str, Any]) -> dict[str, Any]:
    """Delete, replace, swap, duplicate, reorder or nest entries, one to four of them."""
    mutant = copy.deepcopy(document)
    for _ in range(rng.randint(1, 4)):
        found = list(places(mutant))
        if not found:
            return mutant
        path = rng.choice(found)
        holder, key = container(mutant, path), path[-1]
        other = rng.choice(found)
        match rng.randrange(8):
            case 0:
                del holder[key]
            case 1 | 2:
                holder[key] = copy.deepcopy(rng.choice(STRANGE_VALUES))
            case 3:
                # Swapped types, duplicated uids, and edges that close a cycle.
                holder[key] = copy.deepcopy(container(mutant, other)[other[-1]])
            case 4 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 5 if isinstance(holder, list):
                rng.shuffle(holder)
            case 6 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
                holder[key] += rng.choice((-1, 1, 2**32, -(2**32), 2**62))
            case 7 if isinstance(holder, dict):
                holder[f"{key}_{rng.randrange(3)}"] = holder[key]
    return mutant


def mutate_text(rng: random.Random, text: str) -> str:
    """Cut, repeat, overwrite or insert characters."""
    for _ in range(rng.randint(1, 3)):
        if not text:
            return text
        start = rng.randrange(len(text))
        end = min(len(text), start + rng.randint(1, 40))
        match rng.randrange(6):
            case 0:
                text = text[:start]
            case 1:
                text = text[:start] + text[end:]
            case 2:
                text = text[:end] + text[start:]
            case 3:
                text = text[:start] + rng.choice('{}[]",:0-9eE.\\ \x00\u00e9') + text[start + 1 :]
            case 4:
                text = text[:start] + str(rng.choice((10**20, -1, "NaN", "Infinity"))) + text[end:]
            case 5:
                text = text[:start] + rng.choice("0123456789") + text[start + 1 :]
    return text


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_damaged_document_is_a_graph_or_a_graph_error(
    documents: list[dict[str, Any]], seed: int
) -> None:
    rng = random.Random(seed)
    accepted = 0
    for count in range(MUTATIONS_A_SEED):
        document = rng.choice(documents)
        if count % 2:
            text = mutate_text(rng, json.dumps(document))
        else:
            text = json.dumps(mutate_structure(rng, document))
        try:
            accepted += loads_or_is_refused(text)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}\nfrom: {text}")
    # Both outcomes are reached, or the damage is too mild or too coarse to test anything.
    assert 0 < accepted < MUTATIONS_A_SEED


def test_the_samples_themselves_are_accepted(documents: list[dict[str, Any]]) -> None:
    assert all(loads_or_is_refused(json.dumps(document)) for document in documents)


def sample_of(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found = (d for d in documents if any(op["kind"] == kind for op in d["operations"]))
    return copy.deepcopy(next(found))


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [1, 100, 900, 100_000])
@pytest.mark.parametrize("field", ["dim", "name", "data_type"])
def test_deep_nesting_inside_a_field_is_refused(
    documents: list[dict[str, Any]], depth: int, field: str
) -> None:
    text = json.dumps(sample_of(documents, "matmul"))
    deep = "[" * depth + "]" * depth
    place = text.index(f'"{field}": ') + len(field) + 4
    assert not loads_or_is_refused(text[:place] + deep + ", " + text[place:].split(", ", 1)[1])


def test_deep_nesting_of_python_objects_is_refused(documents: list[dict[str, Any]]) -> None:
    document = sample_of(documents, "matmul")
    document["tensors"][0]["dim"] = nested(100_000)
    with pytest.raises(GraphError, match="expected an integer"):
        fill_from_dict(DeclaredGraph(), document)


@pytest.mark.parametrize("depth", [1, 2, 2000])
def test_programs_inside_programs_are_refused(documents: list[dict[str, Any]], depth: int) -> None:
    """A program is of pointwise operations, which have none: reading them must not recurse."""
    document = sample_of(documents, "sdpa")
    (attention,) = document["operations"]
    inner = attention["attributes"]["score_mod"]["operations"][0]
    for _ in range(depth):
        program = {"input": 1, "output": 2, "operations": [inner]}
        inner = {**inner, "attributes": {"mode": "exp", "score_mod": program}}
    attention["attributes"]["score_mod"]["operations"] = [inner]
    with pytest.raises(GraphError, match="no attribute 'score_mod'"):
        fill_from_dict(DeclaredGraph(), document)


def test_a_cycle_is_refused(documents: list[dict[str, Any]]) -> None:
    document = sample_of(documents, "pointwise")
    first, last = document["operations"][0], document["operations"][-1]
    first["inputs"]["in0"] = last["outputs"]["out"]
    assert not loads_or_is_refused(json.dumps(document))


def test_an_operation_that_reads_its_own_output_is_refused(
    documents: list[dict[str, Any]],
) -> None:
    document = sample_of(documents, "matmul")
    (product,) = document["operations"]
    product["inputs"]["A"] = product["outputs"]["C"]
    assert not loads_or_is_refused(json.dumps(document))


@pytest.mark.parametrize("extent", [0, 2**31, 2**62, 2**63 - 1])
def test_any_extent_in_every_place_is_answered(
    documents: list[dict[str, Any]], extent: int
) -> None:
    """One extent of one tensor at a time, over every kind, with the outputs left open."""
    for document in documents:
        made = {uid for op in document["operations"] for uid in op["outputs"].values()}
        for position, tensor in enumerate(document["tensors"]):
            for axis in range(len(tensor["dim"])):
                mutant = copy.deepcopy(document)
                for other in mutant["tensors"]:
                    other["stride"] = []
                    if other["uid"] in made and other["uid"] != tensor["uid"]:
                        other["dim"] = []
                mutant["tensors"][position]["dim"][axis] = extent
                text = json.dumps(mutant)
                try:
                    loads_or_is_refused(text)
                except Exception as error:
                    pytest.fail(f"{type(error).__name__}: {error}\nfrom: {text}")
