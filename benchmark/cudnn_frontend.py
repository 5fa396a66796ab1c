"""cuDNN through its own Python front end (nvidia-cudnn-frontend), as a peer; absent if missing."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
# In a table, and why there is none where it is not installed.
NAME, ABSENT = "cudnn front end", "not installed"


@functools.cache
def module() -> Any:
    """The ``cudnn`` module, or None with the reason printed once."""
    try:
        return importlib.import_module("cudnn")
    except (ImportError, OSError) as error:
        print(f"cuDNN's front end is left out: {error}")
        return None


def versions() -> str:
    """The front end's version and that of cuDNN under it."""
    return f"{module().__version__} on {module().backend_version()}"


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


def checked(
    make: Callable[[], Call | None],
    made: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tolerance: float,
) -> Call | str:
    """The call that ``make`` gives, which fills ``made``, if it is right; else why there is none.

    Right is what differs from ``expected`` by no more than ``tolerance`` of its largest magnitude.
    """
    for tensor in made:
        tensor.fill_(torch.nan)
    try:
        call = make()
        if call is None:
            return ABSENT
        call()
        torch.cuda.synchronize()
    except Exception as error:  # The front end's errors have no common type.
        return f"{type(error).__name__}: {error}".splitlines()[0][:120]
    for found, wanted in zip(made, expected, strict=True):
        off = (found.double() - wanted.double()).abs().max().item()
        if not off <= tolerance * wanted.double().abs().max().item():
            return f"wrong by {off:.3g}"
    return call


def peer(
    make: Callable[[], Call | None],
    made: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    tolerance: float,
) -> dict[str, Call]:
    """The checked call by its name in a table; nothing, with the reason printed, if it fails."""
    call = checked(make, made, expected, tolerance)
    if not isinstance(call, str):
        return {NAME: call}
    if call != ABSENT:
        print(f"{NAME}, {tuple(made[0].shape)}: {call}", flush=True)
    return {}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    causal: bool = False,
    lengths: tuple[torch.Tensor, torch.Tensor] | None = None,
    window: int | None = None,
) -> Call | None:
    """Forward on (batch, heads, length, head size) operands into ``o``.

    ``lengths``, int32, are those of each sequence's queries and of its keys, ``window`` how many
    keys a query sees, its own among them.
    """
    if module() is None:
        return None
    columns = [count.view(-1, 1, 1, 1).contiguous() for count in lengths or ()]
    graph = new_graph(q.dtype)
    inputs = [graph.tensor_like(tensor) for tensor in (q, k, v, *columns)]
    out = forward(graph, inputs, q.shape[3], causal, window)
    out.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride()))
    return prepare(graph, dict(zip((*inputs, out), (q, k, v, *columns, o), strict=True)))


def forward(
    graph: Any, inputs: Sequence[Any], size: int, causal: bool, window: int | None = None
) -> Any:
    """O of declared q, k, v and, where sequences have their own, lengths of queries and of keys."""
    band = {} if window is None else {"sliding_window_length": window}
    named = dict(zip(("q", "k", "v", "seq_len_q", "seq_len_kv"), inputs, strict=False))
    out, _ = graph.sdpa(
        name="sdpa",
        **named,
        generate_stats=False,
        attn_scale=size**-0.5,
        use_causal_mask=causal,
        use_padding_mask="seq_len_q" in named,
        **band,
    )
    return out


def backward(
    pack: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor], causal: bool
) -> Call | None:
    """dQ, dK, dV of (batch, heads, length, head size) operands q, k, v, o, dO and stats."""
    if module() is None:
        return None
    q = pack["q"]
    graph = new_graph(q.dtype)
    inputs = {name: graph.tensor_like(tensor) for name, tensor in pack.items()}
    inputs["stats"].set_data_type(module().data_type.FLOAT)
    made = graph.sdpa_backward(
        name="sdpa_backward",
        q=inputs["q"],
        k=inputs["k"],
        v=inputs["v"],
        o=inputs["o"],
        dO=inputs["dO"],
        stats=inputs["stats"],
        attn_scale=q.shape[3] ** -0.5,
        use_causal_mask=causal,
    )
    buffers = {inputs[name]: tensor for name, tensor in pack.items()}
    for tensor, given in zip(made, gradients.values(), strict=True):
        tensor.set_output(True).set_dim(list(given.shape)).set_stride(list(given.stride()))
        buffers[tensor] = given
    return prepare(graph, buffers)


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
    out = forward(graph, [*inputs, length_q, length_kv], size, causal)
    out.set_output(True).set_dim(dim).set_stride(stride).set_ragged_offset(offset_of)
    keys = (*inputs, out, offset_of, length_q, length_kv)
    return prepare(
        graph, dict(zip(keys, (q, k, v, o, offsets, lengths, lengths.clone()), strict=True))
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, eps: float) -> Call | None:
    """RMSNorm over the last axis of x (rows, width) into y; the weight is (width,).

    cuDNN normalizes axes behind a batch axis of four, so a row is a sample.
    """
    if module() is None:
        return None
    rows, width = x.shape
    four = (rows, width, 1, 1)
    graph = new_graph(x.dtype)
    source = graph.tensor_like(x.view(four))
    scale = graph.tensor_like(weight.view(1, width, 1, 1))
    epsilon = torch.full((1, 1, 1, 1), eps)
    small = graph.tensor_like(epsilon)
    out, _ = graph.rmsnorm(
        name="norm",
        norm_forward_phase=module().norm_forward_phase.INFERENCE,
        input=source,
        scale=scale,
        epsilon=small,
    )
    out.set_output(True)
    buffers = {
        source: x.view(four),
        scale: weight.view(1, width, 1, 1),
        small: epsilon,
        out: y.view(four),
    }
    return prepare(graph, buffers)


def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Call | None:
    """c = a * b, elements of two axes: the smallest graph of three operands."""
    if module() is None:
        return None
    one = (1, *a.shape)
    graph = new_graph(a.dtype)
    first, second = graph.tensor_like(a.view(one)), graph.tensor_like(b.view(one))
    out = graph.mul(name="product", a=first, b=second)
    out.set_output(True)
    return prepare(graph, {first: a.view(one), second: b.view(one), out: c.view(one)})
