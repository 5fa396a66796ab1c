"""A graph as a function: declared inside ``with``, then called with buffers in a fixed order.

An operand is named by its tensor's own name, or canonically by "operation name::port"
("conv2d::image"). A port is one of the operation's record, in letters of either case; those of a
pointwise operation are also known by the names of its method's arguments ("sum::a", "sum::b" of
``add``), and its result as "OUT_0". A name counts only where it means one tensor of the graph. An
operation without a name has no canonical ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from tilewright.errors import BindingError, GraphError
from tilewright.graph.enums import heur_mode
from tilewright.graph.operation import walk
from tilewright.graph.tensor import Tensor
from tilewright.planning.selection import PlanSelection

Names = tuple[str, ...]
Self = TypeVar("Self", bound="CallableGraph")


class CallableGraph(PlanSelection):
    """Adds ``with``, ``set_io_tuples`` and ``graph(*inputs)``."""

    # The order of a call's inputs and of its results; None is that of declaration.
    _io_tuples: tuple[Names | None, Names | None]
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
        fixed_inputs, fixed_outputs = self._io_tuples
        if inputs is not None:
            fixed_inputs = self._checked_names("inputs", inputs, self.inputs())
        if outputs is not None:
            fixed_outputs = self._checked_names("outputs", outputs, self.outputs())
        self._io_tuples = fixed_inputs, fixed_outputs

    def set_io_tuples(self, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        """Fix the order of a call's inputs and of its results, by tensor or canonical name.

        Call it after the operations and ``set_output``.

        Raises:
            GraphError: for what is no list of names, a name that the graph does not have, or one
                of a tensor that is no input (no output) of the graph.
        """
        self._io_tuples = (
            self._checked_names("inputs", inputs, self.inputs()),
            self._checked_names("outputs", outputs, self.outputs()),
        )

    def tensor_named(self, name: str) -> Tensor:
        """The tensor with this name, or on this port ("operation name::port", see above).

        Raises:
            GraphError: if no tensor or several have the name.
        """
        if not isinstance(name, str):
            raise GraphError(f"graph {self.name!r}: got {name!r}; expected a tensor's name")
        found = {id(t): t for t in self.tensors if t.name == name}
        operation_name, _, port = name.rpartition("::")
        for operation in walk(self.operations) if operation_name else ():
            if operation.name == operation_name:
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
        filled up with the outputs that it does not have, and returned; an output that no name
        means is put in under its uid. A second call with that dict writes into the same outputs.

        Raises:
            BindingError: if the number of inputs is wrong or one does not fit, two keys of a dict
                give one operand two buffers, or the graph was made with ``workspace_alloc=False``
                and no workspace is given.
            GraphError: for a name that the graph does not have.
        """
        self.build()
        if len(inputs) == 1 and isinstance(inputs[0], dict):
            named: dict[Any, Any] = inputs[0]
            given = self._by_uid(named)
            made = self._new_outputs(tensor for tensor in self.outputs() if tensor.uid not in given)
            self._run({**given, **made}, workspace, handle)
            for tensor in self.outputs():
                if tensor.uid in made:
                    named[self._shown_name(tensor)] = made[tensor.uid]
            return named
        fixed_inputs, fixed_outputs = self._io_tuples
        if fixed_inputs is None:
            sources = [tensor for tensor in self.inputs() if tensor.value is None]
        else:
            sources = [self.tensor_named(name) for name in fixed_inputs]
        if fixed_outputs is None:
            results = self.outputs()
        else:
            results = [self.tensor_named(name) for name in fixed_outputs]
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

    def _checked_names(self, side: str, names: Iterable[str], accepted: list[Tensor]) -> Names:
        """``names`` as a tuple, of tensors that are all among ``accepted``."""
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise GraphError(f"{side}: got {names!r}; expected a list of tensors' names")
        checked = tuple(names)
        for name in checked:
            named = self.tensor_named(name)
            if not any(named is tensor for tensor in accepted):
                known = ", ".join(repr(self._shown_name(tensor)) for tensor in accepted)
                raise GraphError(
                    f"graph {self.name!r}: {name!r} is none of its {side}; expected among {known}"
                )
        return checked

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

    def _by_uid(self, named: Mapping[Any, Any]) -> dict[int, Any]:
        given: dict[int, Any] = {}
        for key, buffer in named.items():
            uid = self._uid_of(key)
            if given.setdefault(uid, buffer) is not buffer:
                raise BindingError(
                    f"graph {self.name!r}: {key!r} and another key mean one operand and have two "
                    "buffers; expected one"
                )
        return given

    def _shown_name(self, tensor: Tensor) -> str | int:
        """A tensor's own name, else a canonical one, else the uid: what a call accepts as its key.

        A name that several tensors bear, and that of a port of an unnamed operation, is no key.
        """
        for name in self._names_of(tensor):
            try:
                self.tensor_named(name)
            except GraphError:
                continue
            return name
        return tensor.uid

    def _names_of(self, tensor: Tensor) -> Iterator[str]:
        """A tensor's own name, then its canonical ones, whether they mean it alone or not."""
        if tensor.name:
            yield tensor.name
        for operation in walk(self.operations):
            for port, held in (*operation.outputs.items(), *operation.inputs.items()):
                if held is tensor:
                    yield f"{operation.name}::{port}"

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
