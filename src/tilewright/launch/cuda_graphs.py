"""A call as nodes of a CUDA graph that the caller owns, built through the driver API.

``populate`` adds a chain of kernel nodes, one a kernel of the plan, to an empty graph; ``update``
gives the nodes of such a graph the parameters of another call. The driver copies parameters, so a
call's blocks are free afterwards; the buffers that they point to are the caller's to keep.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from tilewright.errors import BindingError
from tilewright.launch.cuda_driver import check, driver
from tilewright.launch.driver_launch import (
    KernelCall,
    LaunchAttribute,
    cluster_attributes,
    device_context,
)
from tilewright.launch.kernel_frames import BoundLaunch, BoundPlan

_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of the driver API."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def graph_handle(cuda_graph: Any) -> int:
    """A CUDA graph as the driver knows it: an int, or what ``raw_cuda_graph()`` gives.

    Raises:
        BindingError: if it is neither.
    """
    raw = getattr(cuda_graph, "raw_cuda_graph", None)
    if raw is not None:
        cuda_graph = raw()
    if isinstance(cuda_graph, int) and not isinstance(cuda_graph, bool) and cuda_graph > 0:
        return cuda_graph
    raise BindingError(
        f"cuda_graph: got {cuda_graph!r}; expected a cudaGraph_t as an int, or an object with "
        "raw_cuda_graph()"
    )


def populate(bound: BoundPlan, cuda_graph: int, device_index: int) -> None:
    """Add the bound kernels to an empty graph, each after the one before.

    Raises:
        BindingError: if the graph has nodes already.
        LaunchError: if the driver refuses; the graph is empty then.
    """
    count = _node_count(cuda_graph)
    if count:
        raise BindingError(
            f"cuda_graph: it has {count} nodes; expected an empty graph. Add it to another as a "
            "child node"
        )
    added: list[ctypes.c_void_p] = []
    try:
        with device_context(device_index):
            for launch in bound.launches:
                node = ctypes.c_void_p()
                before = (ctypes.c_void_p * 1)(added[-1]) if added else None
                status = driver().cuGraphAddKernelNode_v2(
                    ctypes.byref(node),
                    ctypes.c_void_p(cuda_graph),
                    before,
                    ctypes.c_size_t(len(added[-1:])),
                    ctypes.byref(_params(launch)),
                )
                check(status, f"kernel {launch.call.name!r}: adding its node")
                added.append(node)
                _set_cluster(node, launch.call)
    except BaseException:
        for node in added:
            driver().cuGraphDestroyNode(node)
        raise


def update(
    bound: BoundPlan, cuda_graph: int, device_index: int, instance: int | None = None
) -> None:
    """Give the nodes of a populated graph, and of an instance of it, the bound parameters.

    Raises:
        BindingError: if the graph is not a chain of as many kernels; nothing is changed then.
        LaunchError: if the driver refuses.
    """
    nodes = _chain(cuda_graph)
    if nodes is None or len(nodes) != len(bound.launches):
        raise BindingError(
            f"cuda_graph: it is no chain of {len(bound.launches)} kernels, which is what the plan "
            "adds to a graph; expected one that populate_cuda_graph filled"
        )
    with device_context(device_index):
        for node, launch in zip(nodes, bound.launches, strict=True):
            params = _params(launch)
            status = driver().cuGraphKernelNodeSetParams_v2(node, ctypes.byref(params))
            check(status, f"kernel {launch.call.name!r}: updating its node")
            if instance is not None:
                status = driver().cuGraphExecKernelNodeSetParams_v2(
                    ctypes.c_void_p(instance), node, ctypes.byref(params)
                )
                check(status, f"kernel {launch.call.name!r}: updating its node in an instance")


def _set_cluster(node: ctypes.c_void_p, call: KernelCall) -> None:
    for told in cluster_attributes(call.cluster):
        status = driver().cuGraphKernelNodeSetAttribute(
            node, told.id, ctypes.byref(told, LaunchAttribute.value.offset)
        )
        check(status, f"kernel {call.name!r}: the cluster of its node")


def _params(launch: BoundLaunch) -> KernelNodeParams:
    call = launch.call
    grid, block, shared_bytes = call.streams.geometry
    return KernelNodeParams(
        call.handle, grid, block, shared_bytes, None, launch.extra_address, None, None
    )


def _node_count(cuda_graph: int) -> int:
    count = ctypes.c_size_t()
    status = driver().cuGraphGetNodes(ctypes.c_void_p(cuda_graph), None, ctypes.byref(count))
    check(status, "cuda_graph: counting its nodes")
    return count.value


def _chain(cuda_graph: int) -> Sequence[ctypes.c_void_p] | None:
    """The nodes in order, if they are kernels, each after the one before; else None."""
    count = ctypes.c_size_t(_node_count(cuda_graph))
    if not count.value:
        return []
    graph, total = ctypes.c_void_p(cuda_graph), count.value
    roots, found = (ctypes.c_void_p * total)(), ctypes.c_size_t(total)
    check(
        driver().cuGraphGetRootNodes(graph, roots, ctypes.byref(found)),
        "cuda_graph: its first node",
    )
    nodes: list[ctypes.c_void_p] = []
    following, number = roots, found.value
    while number == 1 and len(nodes) < total:
        node = ctypes.c_void_p(following[0])
        kind = ctypes.c_int()
        check(driver().cuGraphNodeGetType(node, ctypes.byref(kind)), "cuda_graph: a node's type")
        if kind.value != _KERNEL_NODE:
            return None
        nodes.append(node)
        following, number = _dependents(node, total)
    return nodes if len(nodes) == total and number == 0 else None


def _dependents(node: ctypes.c_void_p, most: int) -> tuple[Any, int]:
    following, count = (ctypes.c_void_p * most)(), ctypes.c_size_t(most)
    # CUDA 13 renamed it: the newer form has the edges' data, which may be left out.
    library = driver()
    if hasattr(library, "cuGraphNodeGetDependentNodes_v2"):
        status = library.cuGraphNodeGetDependentNodes_v2(node, following, None, ctypes.byref(count))
    else:
        status = library.cuGraphNodeGetDependentNodes(node, following, ctypes.byref(count))
    check(status, "cuda_graph: the nodes after one")
    return following, count.value
