"""What a detector examines: any callable, a graph, or what declares a graph for given operands.

All become a `Subject`, which maps named operands to named results. One that can also write into
results that the caller owns has a `declare`; detectors that need that decline without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tilewright.testing.detectors.verdict import Verdict

Tensors = Mapping[str, torch.Tensor]
Operands = Tensors | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """One result: dim and stride in elements, and its type."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of a tensor."""
        return Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


@dataclass(frozen=True)
class Declared:
    """A call that writes into given results.

    ``execute(operands, results)`` checks and runs; ``bind(operands, results)`` checks and returns
    what launches. ``has_declaration`` tells that operands are held to a declaration made before.
    ``plan_name()`` names what ran, ``selected`` what was chosen.
    """

    execute: Callable[[Tensors, Tensors], None]
    bind: Callable[[Tensors, Tensors], Callable[[], None]]
    has_declaration: bool = False
    selected: str | None = None
    plan_name: Callable[[Tensors, Tensors], str] | None = None
    notes: frozenset[str] = frozenset()
    virtual: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Subject:
    """Code under examination.

    ``call(operands)`` returns fresh results by name. ``declare(operands, results)`` gives a
    `Declared` for operands and results of these layouts; None if the code only returns results.
    ``has_fixed_layout`` tells that it always runs one layout, whatever is declared. ``others`` has
    other valid values of operands that cannot hold just any (offsets, tables), for detectors that
    change operands in place. ``artifacts(operands)`` examines what it stores, for L12.
    """

    name: str
    call: Callable[[Tensors], dict[str, torch.Tensor]]
    declare: Callable[[Tensors, Tensors], Declared] | None = None
    has_fixed_layout: bool = False
    result_layouts: Callable[[Tensors], dict[str, Layout]] | None = None
    others: Tensors = field(default_factory=dict)
    artifacts: Callable[[Tensors], Verdict] | None = None

    def layouts(self, operands: Tensors) -> dict[str, Layout]:
        """The results' layouts for these operands; found by a call if nothing tells them."""
        if self.result_layouts is not None:
            return self.result_layouts(operands)
        return {name: Layout.of(result) for name, result in self.call(operands).items()}

    def change(self, name: str, tensor: torch.Tensor) -> None:
        """Other valid values in place, of the operand ``name``.

        Floats are scaled and reversed, other types are reversed, unless ``others`` tells.
        """
        if name in self.others:
            tensor.copy_(self.others[name])
            return
        other = turned_round(tensor).reshape(tensor.shape)
        if tensor.dtype.is_floating_point and tensor.element_size() > 1:
            other = other * 0.5 + (0.0625 if tensor.numel() > 1 else 0.0)
        tensor.copy_(other)


def turned_round(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in reverse order, (numel,), also of types that cannot be flipped as such."""
    flat = tensor.clone().flatten()
    if tensor.dtype.itemsize == 1:
        return flat.view(torch.uint8).flip(0).view(tensor.dtype)
    return flat.flip(0)


def named(operands: Operands) -> dict[str, torch.Tensor]:
    """Operands by name, without autograd; those of a sequence are "0", "1", ..."""
    if isinstance(operands, Mapping):
        return {name: tensor.detach() for name, tensor in operands.items()}
    return {str(position): tensor.detach() for position, tensor in enumerate(operands)}


def as_subject(target: Any) -> Subject:
    """A Subject as it is, a built or open ``Graph``, or a callable.

    Raises:
        TypeError: if the target is none of these.
    """
    if isinstance(target, Subject):
        return target
    if hasattr(target, "operations") and hasattr(target, "bind"):
        return graph_subject(target)
    if callable(target):
        return callable_subject(target)
    raise TypeError(
        f"target: got {type(target).__name__}; expected a callable, a Graph, or a Subject"
    )


def callable_subject(
    function: Callable[..., Any], results: Sequence[str] = (), name: str | None = None
) -> Subject:
    """``function(*operands)`` returns a tensor or a tuple of them.

    If it has an argument ``out``, it is also examined as one that writes: ``out`` is then one
    tensor, or a tuple if it returns one. ``results`` names what is returned ("out" or "out0",
    "out1", ... by default).
    """

    def call(operands: Tensors) -> dict[str, torch.Tensor]:
        return named_results(function(*operands.values()), results)

    def write(operands: Tensors, given: Tensors) -> None:
        out = tuple(given.values())
        function(*operands.values(), out=out[0] if len(out) == 1 else out)

    label = name or str(getattr(function, "__name__", type(function).__name__))
    return Subject(label, call, writing(write) if takes(function, "out") else None)


def writing(
    write: Callable[[Tensors, Tensors], None], notes: frozenset[str] = frozenset()
) -> Callable[[Tensors, Tensors], Declared]:
    """``Subject.declare`` of a function that writes and has nothing to declare but its notes."""
    bind = lambda operands, given: lambda: write(operands, given)  # noqa: E731
    declared = Declared(write, bind, notes=notes)
    return lambda operands, given: declared


def named_results(returned: Any, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """A returned tensor, tuple or mapping as results by name.

    Raises:
        TypeError: if something else was returned.
    """
    if isinstance(returned, Mapping):
        return dict(returned)
    several = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if not all(isinstance(entry, torch.Tensor) for entry in several):
        kinds = ", ".join(type(entry).__name__ for entry in several)
        raise TypeError(f"the callable returned ({kinds}); expected torch tensors")
    if not names:
        names = ("out",) if len(several) == 1 else [f"out{i}" for i in range(len(several))]
    return dict(zip(names, several, strict=True))


def takes(function: Callable[..., Any], argument: str) -> bool:
    """True if the function has an argument of this name; ``**keywords`` does not count."""
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def graph_subject(graph: Any) -> Subject:
    """A ``tilewright.Graph``; operands and results by tensor name, or by uid as text."""
    graph.build()
    inputs = [tensor for tensor in graph.inputs() if not tensor.is_pass_by_value]
    inputs += [t for t in graph.inputs() if t.is_pass_by_value and t.value is None]
    outputs = list(graph.outputs())

    def layouts(operands: Tensors) -> dict[str, Layout]:
        from tilewright.torch_dtypes import to_torch

        device = next((t.device for t in operands.values()), torch.device("cpu"))
        return {
            tensor_name(t): Layout(t.dim, t.stride, to_torch(t.data_type), device) for t in outputs
        }

    def pack(operands: Tensors, results: Tensors) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = {}
        for tensors, buffers in ((inputs, operands), (outputs, results)):
            for tensor in tensors:
                if tensor_name(tensor) in buffers:
                    found[tensor] = buffers[tensor_name(tensor)]
        known = {tensor_name(t) for t in (*inputs, *outputs)}
        found |= {_key(name): t for name, t in operands.items() if name not in known}
        return found

    def workspace(operands: Tensors) -> torch.Tensor:
        device = next((t.device for t in operands.values()), torch.device("cpu"))
        return torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)

    def execute(operands: Tensors, results: Tensors) -> None:
        graph.execute(pack(operands, results), workspace(operands))

    def bind(operands: Tensors, results: Tensors) -> Callable[[], None]:
        launch: Callable[[], None] = graph.bind(pack(operands, results), workspace(operands)).launch
        return launch

    def plan_name(operands: Tensors, results: Tensors) -> str:
        return str(graph.bind(pack(operands, results), workspace(operands)).plan_name)

    plan = graph._active_plan().plan
    declared = Declared(
        execute,
        bind,
        has_declaration=True,
        selected=plan.name,
        plan_name=plan_name,
        notes=frozenset(note.name for note in plan.behavior_notes),
        virtual=tuple(tensor.uid for tensor in graph.virtual_tensors()),
    )

    def call(operands: Tensors) -> dict[str, torch.Tensor]:
        results = {
            name: torch.empty_strided(at.dim, at.stride, dtype=at.dtype, device=at.device)
            for name, at in layouts(operands).items()
        }
        execute(operands, results)
        return results

    return Subject(
        graph.name,
        call,
        lambda operands, results: declared,
        has_fixed_layout=True,
        result_layouts=layouts,
    )


def tensor_name(tensor: Any) -> str:
    """The name by which detectors know a graph tensor."""
    return tensor.name or str(tensor.uid)


def _key(name: str) -> str | int:
    return int(name) if name.isdecimal() else name
