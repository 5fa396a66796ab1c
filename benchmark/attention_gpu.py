"""Attention forward on a GPU: dense, windowed, ragged and decoding, against PyTorch and cuDNN.

    python benchmark/attention_gpu.py [--build] [dense-64-none ..] [window] ..

bfloat16. Dense cases have 16,384 tokens and 2048 channels; TFLOP/s count two products of
2 S^2 D a head, half of that under a causal mask. A window's time is also given over its visible
fraction of the triangle's (of_visible). Ragged lengths come from a heavy tail, 64k tokens in all.
Decoding reads the keys and values of 8 sequences, 32 query and 8 key heads of 128, as long as
declared, unevenly so or all a quarter, TB/s of what has to be read; pages are set beside the same
keys without pages as well (of_dense, the time of those over it). cuDNN is called through PyTorch
and through its own front end, where that is installed; ratios are to the quicker. One run measures
everything, on the same inputs, medians of interleaved rounds with a cold L2, after a comparison of
results. Writes attention.csv under benchmark/results/<device>/. With --build it only compiles, so
that parts can do so side by side.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import cudnn_frontend
import torch
import torch.nn.functional as F
from results import Table
from timing import Call, device_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewright as tw

TOKENS, CHANNELS = 16384, 2048
ENGINE = "triton"
DEPTHS, LENGTHS, MASKS = (128, 64, 256), (2048, 4096, 8192, 16384), ("none", "causal")
PAGES = (0, 16, 128)
# Promised, so that no plan for other addresses is compiled.
ALIGNMENT_BYTES = 16
# Seconds for compiling everything, parts side by side, before anything is measured.
BUILD_S = 30.0
# Of long calls, and of those that take microseconds.
ROUNDS, DECODE_ROUNDS = 7, 25
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# Results of unit-variance operands: what bfloat16's rounding of P and O allows.
TOLERANCE = 3e-2
RAGGED_TOKENS, LONGEST, SHORTEST = 65536, 8192, 16
WINDOW, WINDOW_LENGTH = 1024, 16384
DECODE = {"batch": 8, "heads": 32, "heads_kv": 8, "depth": 128}
# Lengths of the sequences that decode, of the longest that is declared.
SHARES = {
    "even": (1.0,) * 8,
    "uneven": (1.0, 0.125, 0.0625, 0.5, 0.03, 0.125, 0.25, 0.004),
    "quarter": (0.25,) * 8,
}


def normal(*dim: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(dim, generator=generator, device="cuda").bfloat16()


class Problem:
    """A graph of one attention operation with its buffers, built anew for each engine."""

    def __init__(self) -> None:
        self.operands: dict[str, torch.Tensor] = {}
        self.offsets: dict[str, tuple[str, int, tuple[int, ...], tuple[int, ...]]] = {}
        self.masks: dict[str, Any] = {}
        self.out = torch.empty(0)

    def frame(self) -> Any:
        """Bound to new workspace."""
        q = self.operands["q"]
        graph = tw.Graph(io_data_type=q.dtype, intermediate_data_type="float32")
        declared: dict[str, Any] = {}
        for name, buffer in self.operands.items():
            declared[name] = self._declare(graph, name, buffer, declared)
        masks = {
            key: declared[value] if isinstance(value, str) else value
            for key, value in self.masks.items()
        }
        o, _ = graph.sdpa(
            *(declared[name] for name in "qkv"),
            attn_scale=q.shape[-1] ** -0.5,
            is_inference=True,
            **masks,
        )
        o.set_output(True).alignment_value = ALIGNMENT_BYTES
        if "q" in self.offsets:
            prefix, unit, dim, stride = self.offsets["q"]
            o.set_dim(dim).set_stride(stride).set_ragged_offset(declared[prefix])
            o.set_ragged_offset_multiplier(unit)
        # The engine for SM90 has a benchmark of its own.
        graph.deselect_engines(["hopper"])
        graph.build()
        if graph.selected_engine != ENGINE:
            raise SystemExit(f"{graph.selected_engine} was taken: {graph.explain()}")
        self.out.fill_(torch.nan)
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8).cuda()
        pack = {declared[name]: buffer for name, buffer in self.operands.items()}
        return graph.bind({**pack, o: self.out}, workspace)

    def _declare(self, graph: Any, name: str, buffer: torch.Tensor, declared: Any) -> Any:
        more: dict[str, Any] = {"alignment_value": ALIGNMENT_BYTES} if name in "qkv" else {}
        if name not in self.offsets:
            return graph.tensor(buffer.shape, buffer.stride(), buffer.dtype, name=name, **more)
        prefix, unit, dim, stride = self.offsets[name]
        more |= {"ragged_offset": declared[prefix], "ragged_offset_multiplier": unit}
        return graph.tensor(dim, stride, buffer.dtype, name=name, **more)


def measure(
    table: Table | None,
    case: dict[str, Any],
    problem: Problem,
    peers: dict[str, Call],
    amount: float,
    unit: str,
    expected: torch.Tensor | None = None,
    visible: dict[str, float] | None = None,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """One row a kernel; ``amount`` is what each does, in ``unit`` a second times 1e12.

    ``visible``: milliseconds that a kernel's time is set beside, by its name.
    """
    frame = problem.frame()
    if table is None:
        return {}
    if expected is None:
        expected = next(iter(peers.values()))()
    frame.launch()
    error = (problem.out.float() - expected.float()).abs().max().item()
    if not error <= TOLERANCE * max(1.0, expected.float().abs().max().item()):
        raise SystemExit(f"{case}: error {error}")
    times = device_ms({**peers, f"tilewright {ENGINE}": frame.launch}, rounds=rounds)
    for name, ms in times.items():
        row = {**case, "who": name, "ms": f"{ms:.4f}", "rate": f"{amount / ms / 1e9:.4g}"}
        row["unit"] = unit
        for peer in ("cudnn", "flash", "copy", "dense"):
            # cuDNN is called in two ways; the quicker one counts.
            least = min((times[name] for name in times if peer in name), default=None)
            row[f"of_{peer}"] = "" if least is None else f"{least / ms:.2f}"
        beside = (visible or {}).get(name)
        row["of_visible"] = "" if beside is None else f"{ms / beside:.2f}"
        table.add(**row)
    return times


def torch_peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> dict:
    """PyTorch's kernels that take the call."""
    calls: dict[str, Call] = {}

    def run(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    for name, backend in PEERS.items():
        try:
            run(backend)
        except RuntimeError as error:
            print(f"{name} does not take {tuple(q.shape)} {options}: {error}")
            continue
        calls[f"torch {name}"] = functools.partial(run, backend)
    return calls


def dense(table: Table | None, depth: int, mask: str) -> None:
    for length in LENGTHS:
        shape = (TOKENS // length, CHANNELS // depth, length, depth)
        problem = Problem()
        problem.operands = {name: normal(*shape, seed=ord(name)) for name in "qkv"}
        problem.out = torch.empty(shape, device="cuda").bfloat16()
        q, k, v = problem.operands.values()
        is_causal = mask == "causal"
        problem.masks = {"use_causal_mask": is_causal}
        flops = 4 * TOKENS * CHANNELS * length / (2 if is_causal else 1)
        case = {"kind": "dense", "depth": depth, "length": length, "mask": mask}
        peers = {} if table is None else torch_peers(q, k, v, is_causal=is_causal)
        if table is not None:
            out = torch.empty_like(q)
            front = functools.partial(cudnn_frontend.attention, q, k, v, out, is_causal)
            reference = next(iter(peers.values()))()
            peers |= cudnn_frontend.peer(front, [out], [reference], TOLERANCE)
        measure(table, case, problem, peers, flops, "TFLOP/s")


def window(table: Table | None) -> None:
    """A causal window: its time beside that of the whole triangle, by visible fraction."""
    depth = 128
    shape = (1, CHANNELS // depth, WINDOW_LENGTH, depth)
    problem = Problem()
    problem.operands = {name: normal(*shape, seed=ord(name)) for name in "qkv"}
    problem.out = torch.empty(shape, device="cuda").bfloat16()
    q, k, v = problem.operands.values()
    whole = 4 * WINDOW_LENGTH * CHANNELS * WINDOW_LENGTH / 2
    seen = WINDOW * WINDOW_LENGTH - WINDOW * (WINDOW - 1) / 2
    fraction = seen / (WINDOW_LENGTH * (WINDOW_LENGTH + 1) / 2)
    visible: dict[str, float] = {}
    for width in (None, WINDOW):
        problem.masks = {"use_causal_mask": True}
        peers = {} if table is None else torch_peers(q, k, v, is_causal=True)
        if width is not None:
            problem.masks["sliding_window_length"] = width
            rows = [x.transpose(1, 2) for x in (q, k, v)]
            arguments = (None, None, WINDOW_LENGTH, WINDOW_LENGTH, 0.0, True, False)
            options = {"window_size_left": width - 1, "window_size_right": 0}

            def flash(options: Any = options, rows: Any = rows, arguments: Any = arguments) -> Any:
                made = torch.ops.aten._flash_attention_forward(*rows, *arguments, **options)
                return made[0].transpose(1, 2)

            peers = {"torch flash": flash}
        if table is not None:
            out = torch.empty_like(q)
            front = functools.partial(
                cudnn_frontend.attention, q, k, v, out, causal=True, window=width
            )
            peers |= cudnn_frontend.peer(front, [out], [next(iter(peers.values()))()], TOLERANCE)
        case = {"kind": "window", "depth": depth, "length": WINDOW_LENGTH}
        case["mask"] = "causal" if width is None else f"window {width}"
        amount = whole if width is None else whole * fraction
        times = measure(table, case, problem, peers, amount, "TFLOP/s", visible=visible)
        visible = {name: ms * fraction for name, ms in times.items()}


def heavy_tail() -> list[int]:
    """Lengths of a Pareto distribution of exponent 1 / 1.1, cut at LONGEST."""
    generator = torch.Generator().manual_seed(3)
    lengths: list[int] = []
    while sum(lengths) < RAGGED_TOKENS:
        share = 1 - torch.rand(1, generator=generator).item()
        lengths.append(int(min(LONGEST, SHORTEST * share**-1.1)))
    lengths[-1] -= sum(lengths) - RAGGED_TOKENS
    if lengths[-1] < SHORTEST:
        rest = lengths.pop()
        lengths[-1] += rest
    return lengths


def ragged(table: Table | None, mask: str) -> None:
    lengths, depth = heavy_tail(), 128
    heads, batch, longest = CHANNELS // depth, len(lengths), max(lengths)
    prefix = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    tokens = [normal(RAGGED_TOKENS, heads, depth, seed=ord(name)) for name in "qkv"]
    problem = Problem()
    problem.operands = {"prefix": prefix.view(-1, 1, 1, 1), **dict(zip("qkv", tokens, strict=True))}
    dim = (batch, heads, longest, depth)
    layout = (dim, (longest * CHANNELS, depth, CHANNELS, 1))
    problem.offsets = {name: ("prefix", CHANNELS, *layout) for name in "qkv"}
    problem.out = torch.empty_like(tokens[0])
    bounds = {f"max_total_seq_len_{side}": RAGGED_TOKENS for side in ("q", "kv")}
    bounds |= {f"cu_seq_len_{side}": "prefix" for side in ("q", "kv")}
    is_causal = mask == "causal"
    problem.masks = {"use_causal_mask": is_causal, "use_padding_mask": True, **bounds}

    def flash() -> torch.Tensor:
        sizes = (prefix, prefix, longest, longest, 0.0, is_causal, False)
        return torch.ops.aten._flash_attention_forward(*tokens, *sizes)[0]

    flops = 4 * CHANNELS * sum(n * n for n in lengths) / (2 if is_causal else 1)
    case = {"kind": "ragged", "depth": depth, "length": f"{batch} of {longest} at most"}
    case["mask"] = mask
    peers: dict[str, Call] = {"torch flash": flash}
    if table is not None:
        out = torch.empty_like(tokens[0])
        front = functools.partial(cudnn_frontend.packed, *tokens, out, prefix, longest, is_causal)
        peers |= cudnn_frontend.peer(front, [out], [flash()], TOLERANCE)
    measure(table, case, problem, peers, flops, "TFLOP/s")


def decode(table: Table | None, page: int) -> None:
    batch, heads, heads_kv, depth = DECODE.values()
    for length in (4096, 32768):
        q = normal(batch, heads, 1, depth, seed=1)
        k, v = (normal(batch, heads_kv, length, depth, seed=seed) for seed in (2, 3))
        for kind, shares in SHARES.items():
            used = torch.tensor([int(length * share) for share in shares]).int().cuda()
            moved = int(used.sum()) * heads_kv * depth * 2 * 2
            source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
            peers = {"torch copy": functools.partial(torch.empty_like(source).copy_, source)}
            if kind == "even" and table is not None:
                peers |= torch_peers(q, k, v, enable_gqa=True)
            expected = None if table is None else decoded(q, k, v, used)
            if expected is not None and not page:
                # PyTorch has no call of cuDNN for lengths of their own.
                out = torch.empty_like(q)
                lengths = None if kind == "even" else (torch.ones_like(used), used)
                front = functools.partial(cudnn_frontend.attention, q, k, v, out, lengths=lengths)
                peers |= cudnn_frontend.peer(front, [out], [expected], TOLERANCE)
            if page and table is not None:
                # The same sequences, whose keys and values are not in pages.
                peers["dense keys"] = decode_problem(q, k, v, used, 0).frame().launch
            problem = decode_problem(q, k, v, used, page)
            case = {"kind": "decode", "depth": depth, "length": length}
            case["mask"] = kind + (f", page {page}" * bool(page))
            measure(table, case, problem, peers, moved, "TB/s", expected, rounds=DECODE_ROUNDS)


def decode_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, page: int
) -> Problem:
    problem = Problem()
    batch, heads_kv, length, depth = k.shape
    problem.masks = {"use_padding_mask": True, "seq_len_q": "ones", "seq_len_kv": "used"}
    lengths = {"ones": torch.ones_like(used), "used": used}
    problem.operands = {name: value.view(-1, 1, 1, 1) for name, value in lengths.items()}
    problem.operands["q"] = q
    problem.out = torch.empty_like(q)
    if not page:
        problem.operands |= {"k": k, "v": v}
        return problem
    entries = length // page
    order = torch.randperm(batch * entries, device="cuda")
    for name, dense_keys in (("k", k), ("v", v)):
        pages = dense_keys.view(batch, heads_kv, entries, page, depth).transpose(1, 2)
        container = torch.empty(batch * entries, heads_kv, page, depth, device="cuda").bfloat16()
        container[order] = pages.reshape(-1, heads_kv, page, depth)
        problem.operands[name] = container
        problem.operands[f"{name}_table"] = order.int().view(batch, 1, entries, 1)
        problem.masks[f"paged_attention_{name}_table"] = f"{name}_table"
    problem.masks["paged_attention_max_seq_len_kv"] = length
    return problem


def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """In float32, a sequence at a time."""
    out = torch.empty(q.shape, device="cuda")
    for batch, length in enumerate(used.tolist()):
        keys, values = (
            x[batch, :, :length].float().repeat_interleave(q.shape[1] // k.shape[1], 0)
            for x in (k, v)
        )
        scores = q[batch].float() @ keys.transpose(1, 2) * q.shape[3] ** -0.5
        out[batch] = scores.softmax(-1) @ values
    return out


PARTS: dict[str, Callable[[Table | None], None]] = {
    **{
        f"dense-{depth}-{mask}": functools.partial(dense, depth=depth, mask=mask)
        for depth in DEPTHS
        for mask in MASKS
    },
    "window": window,
    **{f"ragged-{mask}": functools.partial(ragged, mask=mask) for mask in MASKS},
    **{f"decode-{page}": functools.partial(decode, page=page) for page in PAGES},
}


def build(names: list[str]) -> None:
    """Compile what the parts need into the store, each in a process of its own."""
    command = [sys.executable, __file__, "--build"]
    children = [subprocess.Popen([*command, name], stdout=subprocess.DEVNULL) for name in names]
    end = time.monotonic() + BUILD_S
    for child in children:
        try:
            child.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            # What is missing is compiled when it is measured.
            child.kill()
            child.wait()


def main() -> None:
    names = [name for name in sys.argv[1:] if name != "--build"] or list(PARTS)
    table = Table("attention", " ".join(["python benchmark/attention_gpu.py", *sys.argv[1:]]))
    if "--build" in sys.argv:
        for name in names:
            PARTS[name](None)
        return
    build(names)
    for name in names:
        PARTS[name](table)
        # Rows are kept as they come.
        table.write()


if __name__ == "__main__":
    main()
