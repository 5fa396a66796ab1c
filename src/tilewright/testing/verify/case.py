"""Families and cases: what is called, with which operands, and what is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.testing.detectors.subject import Tensors

Reference = Callable[[Tensors], dict[str, torch.Tensor]]
# Changes drawn operands in place, or adds some.
Edit = Callable[[dict[str, torch.Tensor]], None]


@dataclass(frozen=True)
class Case:
    """One call of a family.

    Attributes:
        name: unique in the family.
        make: draws the operands on the CPU; the same generator state gives the same operands.
        options: what is passed beside the operands, by the family's keyword.
        expected: operands -> results by name, float64.
        level: 0 or 1; a run at level L0 takes those of level 0.
        is_detected: the detectors run on it, beside the comparison with the reference.
        tag: names what a callable may declare that it does otherwise.
        guesses: what a wrong result may be instead, in words -> reference; a match is reported.
        wrong: operands that must be refused, in words -> what is changed.
        plain: the plain computation in the operands' own type, where its error is more than a
            type's default tolerance: a result may have twice that error.
        others: operands -> other valid values of those that cannot hold just any.
        is_long: it takes about a millisecond on a GPU, for calls beside another process alone; it
            has no reference that ends in time, so it is held against itself.
    """

    name: str
    make: Callable[[torch.Generator], dict[str, torch.Tensor]]
    options: Mapping[str, Any]
    expected: Reference
    level: int = 0
    is_detected: bool = False
    tag: str = ""
    guesses: Mapping[str, Reference] = field(default_factory=dict)
    wrong: Callable[[Tensors], dict[str, dict[str, torch.Tensor]]] | None = None
    plain: Reference | None = None
    others: Callable[[Tensors], dict[str, torch.Tensor]] | None = None
    is_long: bool = False


def long(case: Case) -> Case:
    """The case as one for calls beside another process alone."""
    return dataclasses.replace(case, is_long=True, is_detected=False)


@dataclass(frozen=True)
class Family:
    """One kind of function.

    Attributes:
        name: as it is given on the command line.
        signature: how a callable of this family is called, and what it returns.
        cases: all of them, both levels.
        invoke: (callable, operands, options, out) -> results by name; ``out`` is results to write
            into, or None.
        keywords: (operands, options) -> the optional arguments that this call needs.
        declare: (graph, tensors by name, options) -> result tensors by name, for our engines.
        for_graph: operands -> operands as ``declare`` takes them, where they differ.
        function: what our engines are called by in place of a graph: a callable of this family that
            takes ``engine`` too.
        is_reference_of_graph: False if the references cannot read operands as the graph takes them.
        saved: operands that a callable may do without, as results that a forward pass saved.
    """

    name: str
    signature: str
    cases: tuple[Case, ...]
    invoke: Callable[[Callable[..., Any], Tensors, Mapping[str, Any], Any], dict[str, torch.Tensor]]
    keywords: Callable[[Tensors, Mapping[str, Any]], set[str]]
    declare: Callable[[Any, Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None
    for_graph: Callable[[Tensors], dict[str, torch.Tensor]] = dict
    function: Callable[..., Any] | None = None
    is_reference_of_graph: bool = True
    saved: tuple[str, ...] = ()


def packed_strides(dim: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides without gaps."""
    strides: list[int] = []
    step = 1
    for extent in reversed(dim):
        strides.insert(0, step)
        step *= max(extent, 1)
    return tuple(strides)


def label(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).removeprefix("torch.")
