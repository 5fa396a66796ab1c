"""Subjects of a case: a stranger's callable, or a graph of ours on one engine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilewright.errors import NotSupportedError
from tilewright.testing.detectors.artifacts import ARTIFACTS, torn_artifacts_are_misses
from tilewright.testing.detectors.subject import (
    Declared,
    Layout,
    Subject,
    Tensors,
    graph_subject,
    takes,
    writing,
)
from tilewright.testing.detectors.verdict import Verdict
from tilewright.testing.verify.artifacts import examine_artifacts
from tilewright.testing.verify.case import Case, Family

MakeSubject = Callable[[Family, Case], Subject]


def load_target(text: str) -> Callable[..., Any]:
    """The callable that "package.module:name" or "file.py:name" stands for.

    Raises:
        ValueError: if it cannot be imported or is not callable; the message says which.
    """
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"{text!r}: expected module:callable or file.py:callable")
    try:
        if module_name.endswith(".py"):
            folder, file = os.path.split(os.path.abspath(module_name))
            sys.path.insert(0, folder)
            module_name = file.removesuffix(".py")
        elif "" not in sys.path and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        target: Any = importlib.import_module(module_name)
        for part in name.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{text!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ValueError(f"{text!r}: {type(error).__name__} at its import: {error}") from error
    if not callable(target):
        raise ValueError(f"{text!r}: {type(target).__name__} is not callable")
    found: Callable[..., Any] = target
    return found


def callable_maker(function: Callable[..., Any]) -> MakeSubject:
    """Subjects that call ``function`` as its family says."""

    def make(family: Family, case: Case) -> Subject:
        def require(operands: Tensors) -> None:
            for name in sorted(family.keywords(operands, case.options)):
                if not _accepts(function, name):
                    raise NotSupportedError(f"it has no argument {name!r}")

        def call(operands: Tensors) -> dict[str, torch.Tensor]:
            require(operands)
            with torch.no_grad():
                return family.invoke(function, operands, case.options, None)

        def write(operands: Tensors, results: Tensors) -> None:
            require(operands)
            given = tuple(results.values())
            out = given[0] if len(given) == 1 else given
            with torch.no_grad():
                family.invoke(function, operands, case.options, out)

        label = getattr(function, "__name__", type(function).__name__)
        notes = frozenset(getattr(function, "verify_notes", ()))
        declare = writing(write, notes) if takes(function, "out") else None
        return Subject(str(label), call, declare, artifacts=_artifacts_of(function))

    return make


def _artifacts_of(function: Callable[..., Any]) -> Callable[[Tensors], Verdict] | None:
    """What examines the file that ``function.verify_artifacts()`` names with its loader, if any."""
    store = getattr(function, "verify_artifacts", None)
    if store is None:
        return None

    def examine(operands: Tensors) -> Verdict:
        load, path = store()
        return torn_artifacts_are_misses(load, path)

    return examine


def does_without(function: Callable[..., Any], family: Family) -> frozenset[str]:
    """The saved operands of the family for which the callable has no argument."""
    return frozenset(name for name in family.saved if not _accepts(function, name))


def engine_maker(engine: str | None, device: torch.device) -> MakeSubject:
    """Subjects that declare a graph of the case for the operands that they get.

    ``engine`` None takes the best plan. A subject raises NotSupportedError where there is none.
    """

    examined: dict[str, str] = {}

    def make(family: Family, case: Case) -> Subject:
        if family.function is not None:
            return callable_maker(_our_function(family.function, engine))(family, case)
        built: dict[Any, Subject] = {}

        def graph_of(operands: Tensors, results: Tensors | None) -> Subject:
            key = tuple((n, Layout.of(t)) for n, t in {**operands, **(results or {})}.items())
            if key not in built:
                with _interpreting():
                    built[key] = graph_subject(
                        _declare(family, case.options, operands, results, engine, device)
                    )
            return built[key]

        def artifacts(operands: Tensors) -> Verdict:
            # Compiling takes seconds, and one case of a family shows what its kernels do.
            if family.name in examined:
                return ARTIFACTS.declined(f"looked at on the case {examined[family.name]!r}")
            examined[family.name] = case.name

            def fresh() -> Any:
                with _interpreting():
                    graph = _declare(family, case.options, operands, None, engine, device)
                    graph.build()
                return graph

            declaration = _declare(family, case.options, operands, None, None, device)
            declaration.validate()
            return examine_artifacts(declaration.serialize(), fresh, device)

        def declare(operands: Tensors, results: Tensors) -> Declared:
            subject = graph_of(operands, results)
            bound = subject.declare
            if bound is None:
                raise NotSupportedError("a graph always writes")
            return bound(operands, results)

        return Subject(
            engine or "the best plan",
            lambda operands: graph_of(operands, None).call(operands),
            declare,
            result_layouts=lambda operands: graph_of(operands, None).layouts(operands),
            artifacts=artifacts,
        )

    return make


def _our_function(function: Callable[..., Any], engine: str | None) -> Callable[..., Any]:
    """A function of ours on one engine; like a callable, it allocates what it works in."""

    @functools.wraps(function)
    def call(*operands: Any, **keywords: Any) -> Any:
        with _interpreting():
            return function(*operands, engine=engine, **keywords)

    call.verify_notes = frozenset({"ALLOCATES_TEMPORARIES"})  # type: ignore[attr-defined]
    return call


def operands_for_graph(family: Family, operands: Tensors) -> dict[str, torch.Tensor]:
    """Operands in the form in which our engines take them in this family."""
    return dict(operands) if family.function is not None else family.for_graph(operands)


def _declare(
    family: Family,
    options: Mapping[str, Any],
    operands: Tensors,
    results: Tensors | None,
    engine: str | None,
    device: torch.device,
) -> Any:
    import tilewright
    from tilewright.planning.table import ENGINE_TABLE

    dtype = next(t.dtype for t in operands.values() if t.dtype.is_floating_point)
    graph = tilewright.Graph(
        f"verify_{family.name}",
        io_data_type=dtype,
        intermediate_data_type=torch.float32,
        compute_data_type=torch.float32,
        handle=tilewright.create_handle(device),
    )
    tensors = {
        name: graph.tensor(t.shape, t.stride(), data_type=t.dtype, name=name)
        for name, t in operands.items()
    }
    if family.declare is None:
        raise NotSupportedError(f"{family.name} is declared by no graph here")
    for name, tensor in family.declare(graph, tensors, options).items():
        tensor.set_output(True).set_name(name)
        if results is not None:
            tensor.set_dim(results[name].shape).set_stride(results[name].stride())
            tensor.set_data_type(results[name].dtype)
    if engine is not None:
        graph.create_execution_plans()
        graph.deselect_engines([e.name for e in ENGINE_TABLE if e.name != engine])
    return graph


def _interpreting() -> Any:
    """Planning that takes the Triton engine in its interpreter too, if this process has that on."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return contextlib.nullcontext()
    from tilewright.engines.triton.engine import interpreting

    return interpreting()


def _accepts(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
