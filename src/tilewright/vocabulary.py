"""Module-level functions of the public graph vocabulary."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from tilewright.dtypes import DataType
from tilewright.errors import GraphError, NotSupportedError
from tilewright.graph.enums import heur_mode
from tilewright.planning.devices import DeviceProperties, device_properties
from tilewright.planning.graph import Graph

data_type = DataType
cudnnGraphNotSupportedError = NotSupportedError

# The level of the vocabulary that this version speaks: major * 10000 + minor * 100 + patch.
VOCABULARY_VERSION = 92200

GraphAndTensors = tuple[Graph, Sequence[Any]]
GraphFunction = Callable[..., GraphAndTensors]


def create_handle(device: Any = None) -> Any:
    """A handle: a device (default: the current GPU, else the CPU) and a stream."""
    from tilewright.launch import handles

    return handles.create_handle(device)


def destroy_handle(handle: Any) -> None:
    """End a handle; using it later raises BindingError."""
    from tilewright.launch import handles

    handles.destroy_handle(handle)


def set_stream(handle: Any, stream: Any) -> None:
    """Send later work of ``handle`` to ``stream`` (an int, a torch stream, or None)."""
    from tilewright.launch import handles

    handles.set_stream(handle, stream)


def get_stream(handle: Any) -> int | None:
    """The stream set on ``handle``; None if none was."""
    from tilewright.launch import handles

    return handles.get_stream(handle)


def backend_version() -> int:
    """The loaded cuDNN library's version, or the vocabulary's own level where none is loaded."""
    return VOCABULARY_VERSION


def backend_version_string() -> str:
    """``backend_version`` as "major.minor.patch"."""
    version = backend_version()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def get_last_error_string() -> str:
    """Always empty: every failure is raised, none is left behind."""
    return ""


def create_kernel_cache() -> dict[Any, Any]:
    """What ``Graph(kernel_cache=...)`` takes; compiled kernels are in a store of the user's."""
    return {}


def create_device_properties(device: Any = None) -> DeviceProperties:
    """The properties of ``device`` (default: that of ``create_handle``).

    Raises:
        BindingError: if ``device`` is no device, or CUDA's and torch finds none.
    """
    from tilewright.launch import handles

    return device_properties(
        handles.default_device() if device is None else handles.as_device(device)
    )


def jit(
    function: GraphFunction | None = None, *, heur_modes: Sequence[heur_mode] = (heur_mode.A,)
) -> Any:
    """Decorate a function that returns (graph, tensors): the graph comes back built.

    The decorated function returns (graph, uids of the tensors).
    """
    if function is None:
        return functools.partial(jit, heur_modes=heur_modes)
    declare = function

    @functools.wraps(declare)
    def build(*arguments: Any, **keywords: Any) -> tuple[Graph, list[int]]:
        graph, tensors = declare(*arguments, **keywords)
        if not graph.is_built:
            graph.build(heur_modes)
        return graph, [tensor if isinstance(tensor, int) else tensor.uid for tensor in tensors]

    return build


def graph_cache(
    key_fn: Callable[..., Hashable], maxsize: int = 256
) -> Callable[[GraphFunction], GraphFunction]:
    """Decorate a graph function: results are kept by ``key_fn(*args, **kwargs)``.

    The least recently used of more than ``maxsize`` results is dropped.

    Raises:
        GraphError: if ``maxsize`` is under 1.
    """
    if maxsize < 1:
        raise GraphError(f"graph_cache: maxsize is {maxsize}; expected at least 1")

    def decorate(function: GraphFunction) -> GraphFunction:
        kept: collections.OrderedDict[Hashable, GraphAndTensors] = collections.OrderedDict()

        @functools.wraps(function)
        def cached(*arguments: Any, **keywords: Any) -> GraphAndTensors:
            key = key_fn(*arguments, **keywords)
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
            result = function(*arguments, **keywords)
            kept[key] = result
            if len(kept) > maxsize:
                kept.popitem(last=False)
            return result

        return cached

    return decorate


@contextlib.contextmanager
def declare_graph(handle: Any = None, **keywords: Any) -> Iterator[tuple[Graph, Any]]:
    """``with tilewright.graph(handle, ...) as (g, handle)``: a new graph on a handle."""
    yield Graph(handle=handle, **keywords), handle
