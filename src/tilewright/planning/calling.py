"""A graph as a function: declared inside ``with``, then called with buffers in a fixed order.

Operands are named canonically, "operation name::port" ("conv2d::image"), or by a tensor's own
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from tilewright.errors import BindingError, GraphError
from tilewright.graph.operation import walk
from tilewright.graph.tensor import Tensor
from tilewright.planning.selection import PlanSelection

Self = TypeVar("Self", bound="CallableGraph")


class CallableGraph(PlanSelection):
    """Adds ``with``, ``set_io_tuples`` and ``graph(*inputs)``."""

    _io_tuples: tuple[tuple[str, ...], tuple[str, ...]] | None

    def build(self) -> None:
        """Build the best plan; see ``Graph``."""
        raise NotImplementedError

    def execute(self, variant_pack: Mapping[Any, Any], workspace: Any = None) -> None:
        """Run the selected plan; see ``Graph``."""
        raise NotImplementedError

    def get_workspace_size(self) -> int:
        """Bytes of workspace; see ``Graph``."""
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.build()

    def set_io_tuples(self, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Fix the order of a call's inputs and of its results, by tensor or canonical name.

        Raises:
            GraphError: for what is no list of names, or a name that the graph does not have.
        """
        for given in (inputs, outputs):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise GraphError(f"set_io_tuples: got {given!r}; expected a list of tensors' names")
        names = tuple(inputs), tuple(outputs)
        for name in (*names[0], *names[1]):
            self.tensor_named(name)
        self._io_tuples = names

    def tensor_named(self, name: str) -> Tensor:
        """The tensor with this name, or on this port ("operation name::port").

        Raises:
            GraphError: if no tensor or several have the name.
        """
        if not isinstance(name, str):
            raise GraphError(f"graph {self.name!r}: got {name!r}; expected a tensor's name")
        found = {id(t): t for t in self.tensors if t.name == name}
        operation_name, _, port = name.rpartition("::")
        for operation in walk(self.operations):
            if operation_name and operation.name == operation_name:
                on_port = operation.inputs.get(port) or operation.outputs.get(port)
                if on_port is not None:
                    found[id(on_port)] = on_port
        if len(found) != 1:
            state = "no tensor" if not found else "several tensors"
            raise GraphError(f"graph {self.name!r}: {state} named {name!r}")
        return next(iter(found.values()))

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph on ``inputs`` in the order of ``set_io_tuples``; returns new outputs.

        Without ``set_io_tuples`` the order is that of declaration. Allocates the outputs and the
        workspace: use ``execute`` where nothing may be allocated. One output comes alone,
        several as a tuple.

        Raises:
            BindingError: if the number of inputs is wrong or one does not fit.
        """
        import torch

        from tilewright.torch_dtypes import to_torch

        self.build()
        if self._io_tuples is None:
            sources = [t for t in self.inputs() if t.value is None]
            results = self.outputs()
        else:
            sources = [self.tensor_named(name) for name in self._io_tuples[0]]
            results = [self.tensor_named(name) for name in self._io_tuples[1]]
        if len(inputs) != len(sources):
            names = ", ".join(tensor.label() for tensor in sources)
            raise BindingError(
                f"graph {self.name!r}: {len(inputs)} inputs given; expected {len(sources)}: {names}"
            )
        device = self._torch_device()
        outputs = {
            tensor.uid: torch.empty_strided(
                tensor.dim, tensor.stride, dtype=to_torch(tensor.data_type), device=device
            )
            for tensor in self.outputs()
        }
        pack = {tensor.uid: buffer for tensor, buffer in zip(sources, inputs, strict=True)}
        size = self.get_workspace_size()
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        self.execute({**pack, **outputs}, workspace)
        returned = tuple(outputs[tensor.uid] for tensor in results)
        return returned[0] if len(returned) == 1 else returned
