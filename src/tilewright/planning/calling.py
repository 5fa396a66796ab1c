"""A graph as a function: declared inside ``with``, then called with buffers in a fixed order.

Operands are named canonically, "operation name::port" ("conv2d::image"), or by a tensor's own
name.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from tilewright.errors import BindingError, GraphError
from tilewright.graph.enums import heur_mode
from tilewright.graph.operation import walk
from tilewright.graph.tensor import Tensor
from tilewright.planning.selection import PlanSelection

Self = TypeVar("Self", bound="CallableGraph")


class CallableGraph(PlanSelection):
    """Adds ``with``, ``set_io_tuples`` and ``graph(*inputs)``."""

    _io_tuples: tuple[tuple[str, ...], tuple[str, ...]] | None
    # What ``Graph`` was given for the end of ``with``: inputs, outputs and heuristic modes.
    _at_exit: tuple[Iterable[str] | None, Iterable[str] | None, Sequence[heur_mode] | None]
    _makes_workspace: bool

    def build(self, heur_modes: Sequence[heur_mode] = (heur_mode.A,)) -> None:
        """Build the best plan; see ``Graph``."""
        raise NotImplementedError

    def execute(
        self, variant_pack: Mapping[Any, Any], workspace: Any = None, handle: Any = None
    ) -> None:
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
        if kind is not None:
            return
        inputs, outputs, modes = self._at_exit
        self.build(*([] if modes is None else [modes]))
        if inputs is not None or outputs is not None:
            self.set_io_tuples(inputs or (), outputs or ())

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
        """The tensor with this name, or on this port ("operation name::port", see above).

        Raises:
            GraphError: if no tensor or several have the name.
        """
        if not isinstance(name, str):
            raise GraphError(f"graph {self.name!r}: got {name!r}; expected a tensor's name")
        found = {id(t): t for t in self.tensors if t.name == name}
        operation_name, _, port = name.rpartition("::")
        for operation in walk(self.operations):
            if operation_name and operation.name == operation_name:
                on_port = self._on_port(operation, port)
                if on_port is not None:
                    found[id(on_port)] = on_port
        if len(found) != 1:
            state = "no tensor" if not found else "several tensors"
            raise GraphError(f"graph {self.name!r}: {state} named {name!r}")
        return next(iter(found.values()))

    def __call__(self, *inputs: Any, handle: Any = None, workspace: Any = None) -> Any:
        """Run the graph on ``inputs`` in the order of ``set_io_tuples``; returns new outputs.

        Without ``set_io_tuples`` the order is that of declaration. Allocates the outputs and the
        workspace, if none is given: use ``execute`` where nothing may be allocated. One output
        comes alone, several as a tuple. A dict of names to buffers in place of the inputs is
        filled up with the outputs that it does not have, and returned.

        Raises:
            BindingError: if the number of inputs is wrong or one does not fit, or the graph was
                made with ``workspace_alloc=False`` and no workspace is given.
            GraphError: for a name that the graph does not have.
        """
        self.build()
        if len(inputs) == 1 and isinstance(inputs[0], dict):
            named: dict[Any, Any] = inputs[0]
            given = {self._uid_of(name): buffer for name, buffer in named.items()}
            made = self._new_outputs(tensor for tensor in self.outputs() if tensor.uid not in given)
            self._run({**given, **made}, workspace, handle)
            shown = {tensor.uid: self._shown_name(tensor) for tensor in self.outputs()}
            named.update({shown[uid]: buffer for uid, buffer in made.items()})
            return named
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
        outputs = self._new_outputs(self.outputs())
        pack = {tensor.uid: buffer for tensor, buffer in zip(sources, inputs, strict=True)}
        self._run({**pack, **outputs}, workspace, handle)
        returned = tuple(outputs[tensor.uid] for tensor in results)
        return returned[0] if len(returned) == 1 else returned

    def _on_port(self, operation: Any, port: str) -> Tensor | None:
        """The tensor on a port, whose letters may be of either case.

        A pointwise operation's are known by the names of its method's arguments too ("a" of
        ``add``), and its result as "OUT_0".
        """
        named: dict[str, Tensor] = {**operation.outputs, **operation.inputs}
        if port in named:
            return named[port]
        ports = {name.lower(): tensor for name, tensor in named.items()}
        port = port.lower()
        if operation.kind == "pointwise" and port not in ports:
            method = getattr(type(self), operation.mode)
            _self, *arguments = inspect.signature(method).parameters
            aliases = {name: f"in{number}" for number, name in enumerate(arguments)}
            port = (aliases | {"out_0": "out"}).get(port, port)
        return ports.get(port)

    def _uid_of(self, key: Any) -> int:
        if isinstance(key, Tensor):
            return key.uid
        return key if isinstance(key, int) else self.tensor_named(key).uid

    def _shown_name(self, tensor: Tensor) -> str:
        """A tensor's own name, or the canonical one of an output."""
        if tensor.name:
            return tensor.name
        for operation in walk(self.operations):
            for port, made in operation.outputs.items():
                if made is tensor:
                    return f"{operation.name}::{port}"
        return str(tensor.uid)

    def _new_outputs(self, tensors: Iterable[Tensor]) -> dict[int, Any]:
        import torch

        from tilewright.torch_dtypes import to_torch

        device = self._torch_device()
        return {
            tensor.uid: torch.empty_strided(
                tensor.dim, tensor.stride, dtype=to_torch(tensor.data_type), device=device
            )
            for tensor in tensors
        }

    def _run(self, pack: Mapping[int, Any], workspace: Any, handle: Any) -> None:
        import torch

        size = self.get_workspace_size()
        if workspace is None and size:
            if not self._makes_workspace:
                raise BindingError(
                    f"graph {self.name!r}: no workspace given; expected one of {size} bytes, since "
                    "the graph was made with workspace_alloc=False"
                )
            workspace = torch.empty(size, dtype=torch.uint8, device=self._torch_device())
        self.execute(pack, workspace, handle)
