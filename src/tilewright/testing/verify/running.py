"""Run the cases of a family, and the detectors on those that ask for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.oracle.compare import assert_close
from tilewright.oracle.tolerances import default_tolerance
from tilewright.testing import detectors
from tilewright.testing.detectors.allocation import ALLOCATION, FilledAllocations
from tilewright.testing.detectors.artifacts import ARTIFACTS
from tilewright.testing.detectors.beside import BESIDE, Busy, reason_against
from tilewright.testing.detectors.frames import FRAMES
from tilewright.testing.detectors.guards import NAN_PATTERN, differing
from tilewright.testing.detectors.refusal import UNTOUCHED
from tilewright.testing.detectors.subject import Subject, Tensors
from tilewright.testing.detectors.verdict import Outcome, Verdict
from tilewright.testing.detectors.wide import WIDE
from tilewright.testing.verify.case import Case, Family
from tilewright.testing.verify.interpreter import is_interpreting, without_self_copies
from tilewright.testing.verify.pictures import ErrorMap, error_map
from tilewright.testing.verify.results import VALUES, Check, Status
from tilewright.testing.verify.subjects import MakeSubject, operands_for_graph

_STATUS = {
    Outcome.HELD: Status.HELD,
    Outcome.BROKEN: Status.BROKEN,
    Outcome.DECLINED: Status.DECLINED,
}
Run = Callable[[], Verdict]
# What a callable may raise: one that calls sys.exit must not end the run, with a status of its own.
_ANY = (Exception, SystemExit)
# How many times the error of a plain computation in the same type a result may have.
_PLAIN_FACTOR = 2.0


def cases_of(
    family: Family, level: str, names: Sequence[str] = (), *, is_beside: bool = False
) -> list[Case]:
    """The cases that a level takes ("L0" the quick ones, "L1" all), of those names if any.

    Long ones only where calls are made beside another process.
    """
    most = int(level.removeprefix("L"))
    return [
        case
        for case in family.cases
        if case.level <= most
        and (not names or case.name in names)
        and (is_beside or not case.is_long)
    ]


def run_family(
    family: Family,
    make_subject: MakeSubject,
    *,
    level: str = "L0",
    names: Sequence[str] = (),
    seed: int = 0,
    device: torch.device | str = "cpu",
    deviations: Mapping[str, str] | None = None,
    is_graph: bool = False,
    engine: str | None = None,
    left_out: Collection[str] = (),
    is_beside: bool = False,
    other: Busy | None = None,
) -> Iterator[list[Check]]:
    """The checks of each case in turn.

    Args:
        names: only cases of these names; all if there are none.
        left_out: saved operands that the subject does without.
        deviations: by a case's tag or a rule, what the subject is known to do otherwise.
        is_graph: the subject declares graphs; ``engine`` is the one that was asked for.
        is_beside: long cases are called beside the process ``other``.
    """
    for case in cases_of(family, level, names, is_beside=is_beside):
        reason = reason_against(torch.device(device)) if other is None else None
        if case.is_long and reason is not None:
            # Before its operands, which take a while, are drawn.
            yield [_check(family, case, BESIDE.declined(reason), deviations)]
            continue
        # The name is part of the seed, so that a case keeps its numbers when others come or go.
        mixed = random.Random(f"{seed}:{family.name}:{case.name}").getrandbits(63)
        operands = case.make(torch.Generator().manual_seed(mixed))
        operands = {
            name: tensor.to(device) for name, tensor in operands.items() if name not in left_out
        }
        subject = make_subject(family, case)
        as_graph = is_graph and family.function is None
        given = operands_for_graph(family, operands) if as_graph else operands
        if case.others is not None:
            changed = {**operands, **case.others(operands)}
            others = operands_for_graph(family, changed) if as_graph else changed
            told = {n: t.to(device) for n, t in others.items() if n in case.others(operands)}
            subject = dataclasses.replace(subject, others=told)
        if case.is_long:
            run = functools.partial(detectors.beside_another_process, subject, given, other)
            found = _verdicts({"beside_another_process": run}, is_wrong=False)
            yield [_check(family, case, verdict, deviations) for verdict in found]
            continue
        known = (deviations or {}).get(case.tag) if case.tag else None
        values = _check_values(family, case, subject, given, operands, known, as_graph)
        checks = [values]
        if case.is_detected and values.status is not Status.DECLINED:
            is_wrong = values.status is not Status.HELD
            runs = _runs(family, case, subject, given, as_graph, engine)
            found = _verdicts(runs, is_wrong)
            checks += [_check(family, case, verdict, deviations) for verdict in found]
        yield checks


def _check(
    family: Family, case: Case, verdict: Verdict, deviations: Mapping[str, str] | None
) -> Check:
    status, text = _STATUS[verdict.outcome], verdict.text
    known = (deviations or {}).get(verdict.rule)
    if status is Status.BROKEN and known is not None:
        status, text = Status.DEVIATES, f"{known}. Seen: {text}"
    return Check(family.name, case.name, verdict.rule, verdict.detector, status, text)


def _check_values(
    family: Family,
    case: Case,
    subject: Subject,
    given: Tensors,
    operands: Tensors,
    known: str | None,
    is_graph: bool,
) -> Check:
    def check(status: Status, text: str, picture: ErrorMap | None = None) -> Check:
        if status is Status.BROKEN and known is not None:
            status, text = Status.DEVIATES, f"{known}. Seen: {text}"
        return Check(family.name, case.name, VALUES, "float64 reference", status, text, picture)

    expected = case.expected(operands)
    kept = {name: tensor.clone() for name, tensor in given.items()}
    try:
        # What it leaves unwritten is NaN, in every run.
        with FilledAllocations(NAN_PATTERN) if not is_graph else contextlib.nullcontext():
            results = subject.call(given)
    except NotSupportedError as error:
        return check(Status.DECLINED, " ".join(str(error).split()))
    except _ANY as error:
        return check(Status.BROKEN, f"it raised {type(error).__name__}: {_first_line(error)}")
    written = [name for name, tensor in given.items() if _put_back(tensor, kept[name])]
    if written:
        return check(Status.BROKEN, f"operand {written[0]} was written")
    picture = None
    errors = []
    for name, want in expected.items():
        if name not in results:
            return check(Status.BROKEN, f"it returned no {name}")
        got = results[name]
        if is_graph and got.shape != want.shape and got.numel() == want.numel():
            # A graph's operands, and with them some results, have axes of extent 1 more.
            want = want.reshape(got.shape)
        try:
            tolerance = _tolerance(case, name, got, want, operands)
            bound = tolerance * _size(want)
            picture = error_map(name, got, want, bound)
            assert_close(got, want, tol=tolerance, name=name)
        except AssertionError as error:
            guess = _guess(case, operands, results)
            parts = [f"{name} matches this instead: {guess}"] if guess else []
            return check(Status.BROKEN, "\n".join([*parts, *str(error).splitlines()]), picture)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"{name} cannot be compared: {_first_line(error)}"
            return check(Status.BROKEN, what)
        distance = (_finite(got.double()) - _finite(want)).abs()
        largest = float(distance.max()) if distance.numel() else 0.0
        errors.append(f"{name}: error {largest:.2g}, allowed {bound:.2g}")
    return check(Status.HELD, "; ".join(errors), picture)


def _put_back(tensor: torch.Tensor, kept: torch.Tensor) -> bool:
    """True if the tensor was written; it then has its old values again, as far as they fit."""
    if not bool(differing(tensor, kept).any()):
        return False
    if 0 not in tensor.stride():
        tensor.copy_(kept)
    return True


def _tolerance(
    case: Case, name: str, got: torch.Tensor, want: torch.Tensor, operands: Tensors
) -> float:
    """That of the result's type, or twice the error of the case's plain computation."""
    tolerance = default_tolerance(got.dtype)
    if case.plain is None:
        return tolerance
    plain = case.plain(operands)[name].double()
    error = float((_finite(plain) - _finite(want)).abs().max())
    return max(tolerance, _PLAIN_FACTOR * error / _size(want))


def _size(want: torch.Tensor) -> float:
    """What a tolerance is relative to: the largest finite magnitude, or 1."""
    return max(float(_finite(want).abs().max()) if want.numel() else 0.0, 1.0)


def _finite(values: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isfinite(values), values, 0.0)


def _guess(case: Case, operands: Tensors, results: Mapping[str, torch.Tensor]) -> str | None:
    """What the results are instead, if one of the case's guesses fits them."""
    for what, reference in case.guesses.items():
        try:
            for name, want in reference(operands).items():
                tolerance = default_tolerance(results[name].dtype)
                assert_close(results[name], want, tol=tolerance, name=name)
        except (AssertionError, KeyError, IndexError, ValueError, RuntimeError):
            continue
        return what
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _runs(
    family: Family,
    case: Case,
    subject: Subject,
    given: Tensors,
    is_graph: bool,
    engine: str | None,
) -> dict[str, Run]:
    """What runs each detector, by its name."""
    wrong = None if is_graph or case.wrong is None else case.wrong(given)
    # A reference reads operands as the family has them.
    expected = case.expected if not is_graph or family.is_reference_of_graph else None
    return {
        "untouched_on_refusal": lambda: _refusals(subject, given, wrong),
        "no_allocation": lambda: _allocations(subject, given),
        "no_synchronization": lambda: detectors.no_synchronization(subject, given),
        "wide_strides": lambda: _wide(subject, given),
        "storage_bound": lambda: detectors.storage_bound(subject, given),
        "nothing_outside_read": lambda: detectors.nothing_outside_read(subject, given),
        "alias_refusal": lambda: detectors.alias_refusal(subject, given),
        "optional_operands": lambda: detectors.optional_operands(subject, given),
        "stream_order": lambda: detectors.stream_order(subject, given),
        "replay_freshness": lambda: detectors.replay_freshness(subject, given, expected),
        "frame_independence": lambda: _frames(subject, given),
        "every_element_written": lambda: detectors.every_element_written(subject, given),
        "guards_unchanged": lambda: detectors.guards_unchanged(subject, given),
        "torn_artifacts_are_misses": lambda: _artifacts(subject, given),
        "no_silent_fallback": lambda: detectors.no_silent_fallback(subject, given, engine),
        "determinism": lambda: detectors.determinism(subject, given),
    }


def _verdicts(runs: Mapping[str, Run], is_wrong: bool) -> Iterator[Verdict]:
    """What each detector says; an exception of the subject is a broken verdict."""
    for name, run in runs.items():
        try:
            if is_wrong and name in _COMPARING:
                verdict = Verdict(_RULES[name], name.replace("_", " "), Outcome.DECLINED, _WRONG)
            else:
                verdict = run()
        except NotSupportedError as error:
            text = " ".join(str(error).split())
            verdict = Verdict(_RULES[name], name, Outcome.DECLINED, text)
        except _ANY as error:
            text = f"it raised {type(error).__name__}: {_first_line(error)}"
            verdict = Verdict(_RULES[name], name, Outcome.BROKEN, text)
        yield verdict


def _wide(subject: Subject, given: Tensors) -> Verdict:
    with without_self_copies() as can_be_sparse:
        if not can_be_sparse:
            return WIDE.declined("this version of Triton's interpreter copies whole storages")
        return detectors.wide_strides(subject, given)


def _frames(subject: Subject, given: Tensors) -> Verdict:
    if is_interpreting():
        return FRAMES.declined("Triton's interpreter itself is not safe in two threads")
    return detectors.frame_independence(subject, given)


def _refusals(subject: Subject, given: Tensors, wrong: Any) -> Verdict:
    if wrong == {}:
        return UNTOUCHED.declined("no operands of this family are wrong together")
    return detectors.untouched_on_refusal(subject, given, wrong)


def _allocations(subject: Subject, given: Tensors) -> Verdict:
    verdict = detectors.no_allocation(subject, given)
    if verdict.is_broken and is_interpreting():
        return ALLOCATION.declined(f"Triton's interpreter itself allocates: {verdict.text}")
    return verdict


def _artifacts(subject: Subject, given: Tensors) -> Verdict:
    if subject.artifacts is None:
        return ARTIFACTS.declined("it stores no artifacts")
    return subject.artifacts(given)


# These compare results, so wrong ones would only show once more.
_COMPARING = frozenset(
    {
        "alias_refusal",
        "determinism",
        "frame_independence",
        "nothing_outside_read",
        "replay_freshness",
        "wide_strides",
    }
)
_WRONG = "not looked at: the values are wrong already"
_RULES: dict[str, Any] = {
    "untouched_on_refusal": "L1",
    "no_allocation": "L2",
    "no_synchronization": "L3",
    "wide_strides": "L4",
    "storage_bound": "L5",
    "nothing_outside_read": "L5",
    "alias_refusal": "L6",
    "optional_operands": "L7",
    "stream_order": "L8",
    "replay_freshness": "L9",
    "frame_independence": "L10",
    "every_element_written": "L11",
    "guards_unchanged": "L11",
    "torn_artifacts_are_misses": "L12",
    "no_silent_fallback": "L13",
    "determinism": "same",
    "beside_another_process": "beside",
}
RULES = (*(f"L{number}" for number in range(1, 14)), "same", "beside")
