"""Docstrings of the functions and modules on torch tensors tell every argument and refusal."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import tilewright as tw
from tilewright import ops
from tilewright.graph.operation import operation_kinds

pytestmark = pytest.mark.L0

FUNCTIONS = [getattr(ops, name) for name in ops.__all__ if "plan" not in name]
ON_TENSORS = [function for function in FUNCTIONS if inspect.signature(function).parameters]
KINDS = sorted(operation_kinds().keys() - {"pointwise"})
# "Arguments as for ``sdpa``": the other docstring has the rest.
REFERENCE = re.compile(r"(?:as for|those of|for|what)\s+``(\w+)``")


def told_arguments(function: Callable[..., Any]) -> str:
    """A docstring, with those that it refers to."""
    text = inspect.getdoc(function) or ""
    others = {name for name in REFERENCE.findall(text) if name in ops.__all__}
    return "\n".join([text, *(inspect.getdoc(getattr(ops, name)) or "" for name in others)])


@pytest.mark.parametrize("function", ON_TENSORS, ids=lambda function: function.__name__)
def test_every_argument_and_refusal_is_told(function: Callable[..., Any]) -> None:
    text = told_arguments(function)
    names = inspect.signature(function).parameters
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []
    assert "BindingError: " in text and "NotSupportedError: " in text


@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_tells_what_it_refuses(kind: str) -> None:
    assert "Raises:\n    GraphError: " in (inspect.getdoc(getattr(tw.Graph, kind)) or "")


def test_there_are_functions() -> None:
    assert len(ON_TENSORS) >= 14 and len(KINDS) > 25


def test_an_argument_that_is_not_told_is_found() -> None:
    def half_told(first: int, second: int) -> None:
        """Take ``first``; others as for ``rms_norm``."""

    text = told_arguments(half_told)
    assert "second" not in text and "first" in text and "residual" in text
