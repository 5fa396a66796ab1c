"""Host time of a call with three operands, against a bare driver call and other front ends.

Beside them attention by the functions, ours and PyTorch's.

    python benchmark/launch_gpu.py

One run measures everything, medians of interleaved rounds; the operation is small, so the device
is never behind. cuDNN's own Python front end (nvidia-cudnn-frontend) is a peer where it can be
imported; its rows are left empty where it cannot. Writes benchmark/results/<device>/launch.csv.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import cudnn_frontend
import torch
import torch.nn.functional as F
from results import Table
from timing import Call, host_us

import tilewright as tw
from tilewright import ops
from tilewright.launch.cuda_driver import driver

WIDTH = 1024
CALLS = 100
ROUNDS = 40
PACKS = 16


def norm_graph(x: torch.Tensor) -> Any:
    graph = tw.Graph(io_data_type=x.dtype, intermediate_data_type="float32")
    source = graph.tensor(x.shape, x.stride(), name="x")
    scale = graph.tensor((1, x.shape[1]), name="scale")
    phase = tw.norm_forward_phase.INFERENCE
    y, _ = graph.rmsnorm(phase, source, scale, None, graph.tensor_scalar(1e-6))
    y.set_output(True).set_name("y")
    graph.build()
    return graph


def bare_launches(frame: Any) -> dict[str, Call]:
    """The driver calls of a frame's kernel on its packed parameters, with nothing around them."""
    bound = frame.bound.launches[0]
    call = bound._launch.call
    pointer, uint = ctypes.c_void_p, ctypes.c_uint
    classic = driver()["cuLaunchKernel"]
    classic.argtypes = [pointer, *([uint] * 7), pointer, pointer, pointer]
    grid, block, shared_bytes = call.streams.geometry
    stream = torch.cuda.current_stream().cuda_stream
    handle = ctypes.cast(call.function, pointer)
    first = (handle, *grid, *block, shared_bytes, pointer(stream), None, bound.extra._obj)
    second = (call.streams[stream], call.function, None, bound.extra)
    extended = call.launch
    return {
        "bare cuLaunchKernel": lambda: classic(*first),
        "bare cuLaunchKernelEx": lambda: extended(*second),
    }


def cudnn_calls(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> dict[str, Call | str]:
    """cuDNN's front end on the same operands: the call, or why there is none."""
    wide, other = weight.float(), x.flip(0).contiguous()
    makers: dict[str, Callable[[], Call | None]] = {
        "cuDNN front end, rmsnorm": lambda: cudnn_frontend.rms_norm(x, weight, y, 1e-6),
        "cuDNN front end, rmsnorm, weight in float32": lambda: cudnn_frontend.rms_norm(
            x, wide, y, 1e-6
        ),
        "cuDNN front end, product": lambda: cudnn_frontend.product(x, other, y),
    }
    expected = F.rms_norm(x.double(), (WIDTH,), weight.double(), 1e-6)
    made: dict[str, Call | str] = {}
    for name, make in makers.items():
        wanted = expected if "rmsnorm" in name else x.double() * other.double()
        made[name] = cudnn_frontend.checked(make, [y], [wanted], 2**-7)
    return made


def attention_calls() -> dict[str, Call]:
    """Attention that is over before the next call is made, by our functions and PyTorch's."""
    q, k, v = (torch.randn(1, 4, 64, 64, device="cuda").bfloat16() for _ in range(3))
    new, lengths = q[:, :, :1].contiguous(), torch.full((1,), 64, device="cuda").int()
    return {
        "ops.sdpa": lambda: ops.sdpa(q, k, v),
        "torch scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v),
        "ops.sdpa_decode": lambda: ops.sdpa_decode(new, k, v, lengths),
    }


def main() -> None:
    x, y = (torch.randn(32, WIDTH, device="cuda").bfloat16() for _ in range(2))
    weight = torch.ones(WIDTH, device="cuda").bfloat16()
    parameter = torch.nn.Parameter(weight.clone())
    graph = norm_graph(x)
    assert graph.selected_engine == "triton"
    pack = {"x": x, "scale": weight, "y": y}
    learned = pack | {"scale": parameter}
    many = [{"x": x.clone(), "scale": weight, "y": y.clone()} for _ in range(PACKS)]
    following = itertools.cycle(many).__next__
    frame = graph.bind(pack)
    calls: dict[str, Call] = {
        **bare_launches(frame),
        "frame.launch": frame.launch,
        "graph.execute": lambda: graph.execute(pack),
        "graph.execute, weight a Parameter": lambda: graph.execute(learned),
        f"graph.execute, {PACKS} sets of buffers in turn": lambda: graph.execute(following()),
        "graph.bind": lambda: graph.bind(pack),
        "ops.rms_norm": lambda: ops.rms_norm(x, weight),
        "torch rms_norm": lambda: F.rms_norm(x, (WIDTH,), weight),
        **attention_calls(),
    }
    peers = cudnn_calls(x, weight, y)
    calls |= {name: call for name, call in peers.items() if not isinstance(call, str)}
    times = host_us(calls, CALLS, ROUNDS)
    # The quicker one of the bare calls: the others are held to it.
    bare = min(value for name, value in times.items() if name.startswith("bare"))
    table = Table("launch", "python benchmark/launch_gpu.py")
    for name, value in times.items():
        ratio = f"{value / bare:.2f}"
        note = cudnn_frontend.versions() if name in peers else ""
        table.add(subject=name, host_us=f"{value:.2f}", ratio_to_bare=ratio, note=note)
    for name, call in peers.items():
        if isinstance(call, str):
            table.add(subject=name, host_us="", ratio_to_bare="", note=call)
    table.write()


if __name__ == "__main__":
    main()
