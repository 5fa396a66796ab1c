"""Attention backward on a GPU against PyTorch's flash and cuDNN attention, and FA-cute's.

    python benchmark/attention_backward_gpu.py

16,384 tokens in bfloat16, as many heads as make 2048 channels; TFLOP/s count the five products of
2 S^2 D a head, half of that under a causal mask. One run measures everything, on the same inputs,
medians of interleaved rounds with a cold L2; it writes attention_backward.csv under
benchmark/results/<device>/. "quick" is what is planned without, "fixed" with
``use_deterministic_algorithm``, at the first length alone; Triton's plans stand beside those of the
engine that is faster. At the first length cuDNN is called through its own front end as well, where
that is installed. Processes of their own compile ahead.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import cudnn_frontend
import flash_cute
import torch
import torch.nn.functional as F
from results import Table
from timing import Call, device_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewright as tw

TOKENS, CHANNELS = 16384, 2048
DEPTHS = (128, 64, 256)
# The first one has both modes and more rounds.
LENGTHS = (8192, 2048, 16384)
ROUNDS = {LENGTHS[0]: 7}
FEWER_ROUNDS = 3
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
CUTE = "FA-cute"
# What the slowest front end takes on the host for a call.
HOST_US = 1500.0
GRADIENTS = ("dQ", "dK", "dV")
MODES = (("quick", False), ("fixed", True))
# Engines that are left out: none, and the one before Triton.
BARRED: tuple[tuple[str, ...], ...] = ((), ("hopper",))
# Processes that compile ahead.
COMPILERS = 12
# Gradients of random operands: what bfloat16's rounding of P and dS allows.
TOLERANCE = 2e-2


def declare(
    pack: dict[str, torch.Tensor],
    causal: bool,
    is_deterministic: bool,
    handle: Any = None,
) -> Any:
    """A graph of one backward."""
    q = pack["q"]
    graph = tw.Graph(io_data_type=q.dtype, intermediate_data_type="float32", handle=handle)
    inputs = [
        graph.tensor(pack[n].shape, pack[n].stride(), pack[n].dtype, name=n)
        for n in ("q", "k", "v", "o", "dO", "stats")
    ]
    made = graph.sdpa_backward(
        *inputs,
        attn_scale=q.shape[3] ** -0.5,
        use_causal_mask=causal,
        use_deterministic_algorithm=is_deterministic,
    )
    for name, tensor in zip(GRADIENTS, made, strict=True):
        tensor.set_output(True).set_name(name)
    return graph


def compile_ahead(
    engine: str, depth: int, causal: bool, is_deterministic: bool, target: tuple[int, int], sms: int
) -> None:
    """Compile what an engine has for a head size into the compiler's cache."""
    from tilewright.engines.compiled.compiler import compile_kernel
    from tilewright.engines.hopper import engine as hopper
    from tilewright.engines.triton import engine as triton

    length = LENGTHS[0]
    shape = (TOKENS // length, CHANNELS // depth, length, depth)
    names = dict.fromkeys(("q", "k", "v", "o", "dO"), (shape, torch.bfloat16))
    names["stats"] = ((*shape[:3], 1), torch.float32)
    pack = {n: torch.empty(dim, dtype=kind, device="meta") for n, (dim, kind) in names.items()}
    graph = declare(pack, causal, is_deterministic, tw.create_handle("cpu"))
    graph.validate()
    try:
        family = {"hopper": hopper, "triton": triton}[engine].ENGINE.family(graph)
        plan = family.plan(graph, family.propose(graph, sms)[0].knobs, sms)
        for kernel in plan.kernels:
            compile_kernel(kernel.spec, target)
    except tw.NotSupportedError as error:
        print(f"{engine} has no plan: {error}")


def measure(table: Table, depth: int, length: int, causal: bool) -> None:
    """One row a peer and a plan, after a comparison of their gradients."""
    shape = (TOKENS // length, CHANNELS // depth, length, depth)
    generator = torch.Generator("cuda").manual_seed(depth + length)
    q, k, v, d_o = (
        torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(4)
    )
    o, stats = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    pack = {"q": q, "k": k, "v": v, "o": o.contiguous(), "dO": d_o}
    pack |= {"stats": stats.reshape(*shape[:3], 1).contiguous()}
    leaf_q, leaf_k, leaf_v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    leaves = (leaf_q, leaf_k, leaf_v)
    calls: dict[str, Call] = {}
    for name, backend in PEERS.items():
        try:
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(leaf_q, leaf_k, leaf_v, is_causal=causal)
            calls[name] = functools.partial(
                torch.autograd.grad, out, leaves, d_o, retain_graph=True
            )
            calls[name]()
        except RuntimeError as error:
            print(f"{name} does not take {shape}: {error}")
            calls.pop(name, None)
    reference = next(iter(calls.values()))()
    cute = flash_cute.backward(q, k, v, d_o, causal)
    if cute is not None:
        calls[CUTE] = cute
    if length == LENGTHS[0]:
        made = {name: torch.empty_like(q) for name in GRADIENTS}
        front = functools.partial(cudnn_frontend.backward, pack, made, causal)
        calls |= cudnn_frontend.peer(front, [*made.values()], reference, TOLERANCE)
    modes = MODES if length == LENGTHS[0] else MODES[:1]
    for (mode, is_deterministic), barred in itertools.product(modes, BARRED):
        graph = declare(pack, causal, is_deterministic)
        graph.deselect_engines([*barred])
        graph.build()
        name = f"tilewright {graph.selected_engine} {mode}"
        if name in calls:
            continue
        outputs = {n: torch.full_like(q, torch.nan) for n in GRADIENTS}
        size = max(graph.get_workspace_size(), 1)
        frame = graph.bind({**pack, **outputs}, torch.empty(size, dtype=torch.uint8, device="cuda"))
        frame.launch()
        for found, expected in zip(outputs.values(), reference, strict=True):
            worst = (found.float() - expected.float()).abs().max() / expected.abs().max()
            if not worst <= TOLERANCE:
                raise SystemExit(f"{name} at {shape}: error {worst}")
        calls[name] = frame.launch
    flops = 10 * TOKENS * CHANNELS * length / (2 if causal else 1)
    times = device_ms(calls, rounds=ROUNDS.get(length, FEWER_ROUNDS), host_us=HOST_US)
    # cuDNN is called in two ways; the quicker one counts.
    cudnn = min((ms for name, ms in times.items() if "cudnn" in name), default=None)
    for name, ms in times.items():
        table.add(
            depth=depth,
            length=length,
            causal=int(causal),
            who=f"torch {name}" if name in PEERS else name,
            ms=f"{ms:.3f}",
            tflop_s=f"{flops / ms / 1e9:.0f}",
            of_cudnn=f"{cudnn / ms:.2f}" if cudnn else "",
            of_cute=f"{times[CUTE] / ms:.2f}" if CUTE in times else "",
            of_flash=f"{times['flash'] / ms:.2f}" if "flash" in times else "",
        )


def main() -> None:
    start = time.perf_counter()
    table = Table("attention_backward", "python benchmark/attention_backward_gpu.py")
    target = torch.cuda.get_device_capability()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    cases = itertools.product(DEPTHS, (False, True), ("hopper", "triton"), (False, True))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(COMPILERS, mp_context=spawn) as pool:
        ahead = {
            case: pool.submit(compile_ahead, case[2], case[0], case[1], case[3], target, sms)
            for case in cases
        }
        for length, depth in itertools.product(LENGTHS, DEPTHS):
            for case, future in ahead.items():
                if case[0] == depth:
                    future.result()
            for causal in (False, True):
                measure(table, depth, length, causal)
            print(f"{depth} at {length}: {time.perf_counter() - start:.0f} s", flush=True)
            table.write()


if __name__ == "__main__":
    main()
