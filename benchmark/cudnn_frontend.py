"""cuDNN through its own Python front end (nvidia-cudnn-frontend), as a peer; absent if missing."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]


@functools.cache
def module() -> Any:
    """The ``cudnn`` module, or None with the reason printed once."""
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError) as error:
        print(f"cuDNN's front end is left out: {error}")
        return None


@functools.cache
def handle() -> Any:
    """One handle on the current stream."""
    made = module().create_handle()
    module().set_stream(handle=made, stream=torch.cuda.current_stream().cuda_stream)
    return made


def new_graph(dtype: torch.dtype) -> Any:
    """An empty graph that computes in float32."""
    types = module().data_type
    named = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}
    return module().pygraph(
        io_data_type=named[dtype],
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle(),
    )


def prepare(graph: Any, buffers: dict[Any, torch.Tensor]) -> Call:
    """Build a declared graph; a call runs it on these buffers, all that is known made before."""
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([module().heur_mode.A])
    graph.check_support()
    graph.build_plans()
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    return functools.partial(graph.execute, buffers, workspace, handle=handle())


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, causal: bool
) -> Call | None:
    """Forward on (batch, heads, length, head size) operands into ``o``."""
    if module() is None:
        return None
    graph = new_graph(q.dtype)
    inputs = [graph.tensor_like(tensor) for tensor in (q, k, v)]
    out, _ = graph.sdpa(
        name="sdpa",
        q=inputs[0],
        k=inputs[1],
        v=inputs[2],
        generate_stats=False,
        attn_scale=q.shape[3] ** -0.5,
        use_causal_mask=causal,
    )
    out.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride()))
    return prepare(graph, dict(zip((*inputs, out), (q, k, v, o), strict=True)))


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    sums: torch.Tensor,
    longest: int,
    causal: bool = True,
) -> Call | None:
    """Forward on packed (tokens, heads, head size) operands with int32 prefix sums."""
    if module() is None:
        return None
    batch, heads, size = sums.numel() - 1, q.shape[1], q.shape[2]
    unit = heads * size
    lengths = sums.diff().view(batch, 1, 1, 1).contiguous()
    offsets = (sums.long() * unit).view(batch + 1, 1, 1, 1).contiguous()
    graph = new_graph(q.dtype)
    dim, stride = [batch, heads, longest, size], [longest * unit, size, unit, 1]
    offset_of = graph.tensor_like(offsets)
    length_q, length_kv = graph.tensor_like(lengths), graph.tensor_like(lengths)
    inputs = []
    for name in "qkv":
        made = graph.tensor(name=name, dim=dim, stride=stride)
        made.set_ragged_offset(offset_of)
        inputs.append(made)
    out, _ = graph.sdpa(
        name="sdpa",
        q=inputs[0],
        k=inputs[1],
        v=inputs[2],
        generate_stats=False,
        attn_scale=size**-0.5,
        use_causal_mask=causal,
        use_padding_mask=True,
        seq_len_q=length_q,
        seq_len_kv=length_kv,
    )
    out.set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(offset_of)
    keys = (*inputs, out, offset_of, length_q, length_kv)
    return prepare(
        graph, dict(zip(keys, (q, k, v, o, offsets, lengths, lengths.clone()), strict=True))
    )
