"""What rides along with a normalization: pointwise operations before and after it, and maxima.

Operations that make the norm's input run where a kernel has read its elements; those that follow
run before it stores. A maximum over everything (AMAX) is taken a program at a time, and joined by
a kernel of its own. Pure; needs no Triton.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilewright.engines.compiled.engine import CHAIN_KINDS
from tilewright.errors import NotSupportedError
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.operation import Operation
from tilewright.graph.operations.normalization import Normalization
from tilewright.graph.tensor import Tensor

# More operands would not fit the registers beside a row.
_MOST_READ = 8


@dataclass(frozen=True)
class Fusion:
    """A norm with what rides along.

    ``source`` is what the kernels read as x: the norm's input, or the first tensor of its dim
    that the operations before it read. ``reads`` are the further tensors that they read from
    memory, ``writes`` what they store, ``scalars`` what is passed by value.
    """

    norm: Operation
    source: Tensor
    before: tuple[Operation, ...] = ()
    after: tuple[Operation, ...] = ()
    maxima: tuple[Operation, ...] = ()
    reads: tuple[Tensor, ...] = ()
    writes: tuple[Tensor, ...] = ()
    scalars: tuple[Tensor, ...] = field(default=())

    @property
    def is_plain(self) -> bool:
        """True if the norm is alone."""
        return not (self.before or self.after or self.maxima)


def normalized_axes(norm: Operation) -> tuple[int, ...]:
    """The axes that a statistic is over; of batch normalizations all but the channel's."""
    if isinstance(norm, Normalization):
        return norm.normalized_axes()
    return tuple(axis for axis in range(norm.inputs["input"].rank) if axis != 1)


def fusion_of(graph: DeclaredGraph) -> Fusion:
    """The norm of a graph and what rides along.

    Raises:
        NotSupportedError: naming the operation or tensor and the rule.
    """
    norm = next(item for item in graph.operations if item.kind not in CHAIN_KINDS)
    dim = norm.inputs["input"].dim
    made = {out.uid: item for item in graph.operations for out in item.outputs.values()}
    for port, tensor in norm.inputs.items():
        if port != "input" and tensor.uid in made:
            raise NotSupportedError(
                f"tensor {tensor.label()} ({port}) is made by {made[tensor.uid].title()}; the "
                "normalization kernels read it from memory"
            )
    needed = _makers(norm.inputs["input"], made)
    others = [item for item in graph.operations if item is not norm]
    before = tuple(item for item in others if id(item) in needed)
    maxima = tuple(item for item in others if item.kind == "reduction")
    after = tuple(i for i in others if id(i) not in needed and i.kind == "pointwise")
    _require_known(others, norm, maxima)
    elementwise = (*before, *after)
    for item in elementwise:
        _require_elementwise(item, norm, dim)
    known = {norm.outputs["Y"].uid, *(item.outputs["out"].uid for item in elementwise)}
    read: dict[int, Tensor] = {}
    scalars: dict[int, Tensor] = {}
    for item in (*elementwise, *maxima):
        for tensor in item.inputs.values():
            if tensor.is_pass_by_value:
                scalars[tensor.uid] = tensor
            elif tensor.uid in made and tensor.uid not in known:
                raise NotSupportedError(
                    f"tensor {tensor.label()} is made by {made[tensor.uid].title()} and read by "
                    f"{item.title()}; of a norm the kernels pass on Y alone"
                )
            elif tensor.uid not in known:
                read[tensor.uid] = tensor
    if before:
        inputs = (tensor for item in before for tensor in item.inputs.values())
        whole = [t for t in inputs if t.uid in read and t.dim == dim]
        if not whole:
            raise NotSupportedError(
                f"{before[0].title()}: the operations before {norm.title()} read no tensor of "
                f"its input's dim {dim}"
            )
        source = whole[0]
    else:
        source = norm.inputs["input"]
    read.pop(source.uid, None)
    if len(read) > _MOST_READ:
        raise NotSupportedError(
            f"graph {graph.name!r} reads {len(read)} tensors beside those of {norm.title()}; the "
            f"normalization kernels take {_MOST_READ}"
        )
    writes = [item.outputs["out"] for item in elementwise]
    stored = tuple(tensor for tensor in writes if not tensor.is_virtual)
    return Fusion(
        norm, source, before, after, maxima, tuple(read.values()), stored, tuple(scalars.values())
    )


def _makers(tensor: Tensor, made: dict[int, Operation]) -> set[int]:
    """The ids of all operations that ``tensor`` comes from."""
    found: set[int] = set()
    open_tensors = [tensor]
    while open_tensors:
        item = made.get(open_tensors.pop().uid)
        if item is not None and id(item) not in found:
            found.add(id(item))
            open_tensors += item.inputs.values()
    return found


def _require_known(
    others: Iterable[Operation], norm: Operation, maxima: Iterable[Operation]
) -> None:
    for item in maxima:
        out = item.outputs["out"]
        if item.mode.name != "AMAX" or any(extent != 1 for extent in out.dim):
            raise NotSupportedError(
                f"{item.title()}: beside {norm.title()} the kernels take AMAX over everything; "
                f"this is {item.mode.name} to dim {out.dim}"
            )
        if out.is_virtual:
            raise NotSupportedError(
                f"tensor {out.label()} (out) is virtual; a maximum over everything is known only "
                "after the kernel"
            )
        source = item.inputs["input"]
        if source.dim != norm.inputs["input"].dim or not source.data_type.is_floating:
            raise NotSupportedError(
                f"tensor {source.label()} (input) has dim {source.dim} and data type "
                f"{source.data_type.name}; the kernels take AMAX of floating values of the dim "
                f"{norm.inputs['input'].dim}"
            )
    for item in others:
        if item.kind not in ("pointwise", "reduction"):
            raise NotSupportedError(
                f"{item.title()}: beside {norm.title()} the kernels take pointwise operations and "
                "AMAX over everything"
            )


def _require_elementwise(item: Operation, norm: Operation, dim: tuple[int, ...]) -> None:
    out = item.outputs["out"]
    if item.kind != "pointwise" or item.mode == "gen_index":
        raise NotSupportedError(
            f"{item.title()}: beside {norm.title()} the kernels take elementwise operations of "
            "values"
        )
    if out.dim != dim:
        raise NotSupportedError(
            f"tensor {out.label()} (out) has dim {out.dim}; beside {norm.title()} results have "
            f"its dim {dim}"
        )
