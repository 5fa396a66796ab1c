"""Declare a case, draw its operands, run it on an engine, and hold it to the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tilewright as tw
from attention_cases.case import Case
from tilewright.graph.enums import knob_type
from tilewright.oracle import evaluate, layout
from tilewright.oracle.tolerances import default_tolerance
from tilewright.testing import assert_close
from tilewright.torch_dtypes import to_torch

# Elements around each output that no kernel may touch.
GUARD = 64
# What wide accesses need, and what buffers that lie so promise.
ALIGNMENT_BYTES = 16
# What queries and keys are multiplied by for scores in the thousands.
LARGE = 40.0
_INDEX = {"int32": torch.int32, "int64": torch.int64}


class Declared:
    """A graph of one attention operation with its operands' buffers, on the CPU until ``run``.

    ``start``: "promised" declares an alignment of 16 bytes where a buffer starts so, and a plan for
    other addresses is not compiled; "odd" puts q, k and v one element further on the device, where
    such a plan is what runs; "unknown" does neither.
    """

    def __init__(self, case: Case, device: str, *, start: str = "unknown") -> None:
        self.case = case
        self.device = device
        self.start = start
        self.generator = torch.Generator().manual_seed(case.seed * 7919 + case.rows)
        self.dtype = getattr(torch, case.dtype)
        self.graph = tw.Graph(
            io_data_type=self.dtype,
            intermediate_data_type="float32",
            handle=tw.create_handle(device),
        )
        self.inputs: dict[Any, torch.Tensor] = {}
        self.outputs: dict[str, Any] = {}
        self._declare()
        if start == "promised":
            self._promise()

    def _promise(self) -> None:
        for tensor, buffer in self.inputs.items():
            start_bytes = buffer.storage_offset() * buffer.element_size()
            if tensor.name and start_bytes % ALIGNMENT_BYTES == 0:
                tensor.alignment_value = ALIGNMENT_BYTES
        for tensor in self.outputs.values():
            tensor.alignment_value = ALIGNMENT_BYTES

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def bind(self, buffer: torch.Tensor, **options: Any) -> Any:
        """Declare an input as its buffer lies."""
        tensor = self.graph.tensor(buffer.shape, buffer.stride(), buffer.dtype, **options)
        self.inputs[tensor] = buffer
        return tensor

    def scalar(self, value: float, where: str, dtype: torch.dtype = torch.float32) -> Any:
        if where == "device":
            return self.bind(torch.full((1, 1, 1, 1), value, dtype=dtype))
        return self.graph.tensor_scalar(value)

    def _declare(self) -> None:
        case, graph = self.case, self.graph
        heads, heads_kv = case.heads
        depth, depth_v = case.sizes
        batch, rows, keys = case.batch, case.rows, case.keys
        index = _INDEX[case.index]
        arguments: dict[str, Any] = {}
        self.len_q, self.len_kv = [rows] * batch, [keys] * batch
        if case.lengths != "none":
            self.len_q = self.integers(0, rows + 1, batch).tolist()
            self.len_kv = self.integers(0, keys + 1, batch).tolist()
            arguments["use_padding_mask"] = True
            for side, lengths in (("q", self.len_q), ("kv", self.len_kv)):
                if case.lengths == "lengths":
                    given = torch.tensor(lengths, dtype=index).view(-1, 1, 1, 1)
                    arguments[f"seq_len_{side}"] = self.bind(given)
                else:
                    sums = torch.tensor([0, *lengths]).cumsum(0).to(index).view(-1, 1, 1, 1)
                    arguments[f"cu_seq_len_{side}"] = self.bind(sums)
        if case.place == "ragged" and case.index == "int32":
            arguments["max_total_seq_len_q"] = sum(self.len_q)
        q = self.operand("q", batch, heads, rows, depth, self.len_q)
        if case.place.startswith("paged"):
            k, v = self.pages("k", depth, arguments), self.pages("v", depth_v, arguments)
            arguments["paged_attention_max_seq_len_kv"] = keys
        else:
            k = self.operand("k", batch, heads_kv, keys, depth, self.len_kv)
            v = self.operand("v", batch, heads_kv, keys, depth_v, self.len_kv)
        arguments |= _band(case)
        arguments["use_alibi_mask"] = case.alibi
        scale = depth**-0.5
        if case.scale in ("host", "device"):
            arguments["attn_scale"] = self.scalar(scale, case.scale)
        else:
            arguments["attn_scale"] = -scale if case.scale == "negative" else scale
        bias = self.bias()
        if bias is not None:
            arguments["bias"] = self.bind(bias)
        if case.block_mask:
            tiles = ((rows + 127) // 128, (keys + 1023) // 1024)
            bits = self.integers(0, 256, batch, heads, *tiles)
            arguments["block_mask"] = self.bind(bits.to(torch.uint8))
        if case.sink != "none":
            kind = torch.float32 if case.sink == "float32" else self.dtype
            arguments["sink_token"] = self.bind(self.normal(1, heads, 1, 1).to(kind))
        if case.soft_cap != "none":
            arguments["score_mod"] = _soft_cap(case.soft_cap)
        if case.dropout == "mask":
            # For all heads, or with heads of its own.
            axis = case.heads[0] if case.heads[0] == 4 else 1
            kept = self.integers(0, 2, batch, axis, rows, keys).to(self.dtype)
            arguments["dropout"] = (self.bind(kept), self.scalar(1.25, "device"))
        elif case.dropout != "none":
            where = "device" if case.dropout == "philox_device" else "host"
            seeds = [
                self.scalar(int(self.integers(0, 2**31 - 1, 1)), where, torch.int64)
                for _ in range(2)
            ]
            arguments["dropout"] = (0.3, *seeds)
        if case.dropout == "philox_device" and type(self) is Declared:
            arguments["rng_dump"] = graph.tensor(name="rng_dump")
        if case.stats == "all":
            arguments["score_max"] = graph.tensor(name="score_max")
            arguments["score_sum_exp"] = graph.tensor(name="score_sum_exp")
        arguments["stats_use_log2"] = case.stats == "log2"
        o, stats = graph.sdpa(q, k, v, generate_stats=case.stats != "none", **arguments)
        self.output("O", o, (batch, heads, rows, depth_v))
        if stats is not None:
            self.output("Stats", stats, (batch, heads, rows, 1))
        for port in ("score_max", "score_sum_exp"):
            if port in arguments:
                self.output(port, arguments[port], (batch, heads, rows, 1))
        if "rng_dump" in arguments:
            self.output("rng_dump", arguments["rng_dump"], (batch, heads, rows, keys))
        self._hide_nan()

    def operand(
        self, name: str, batch: int, heads: int, rows: int, width: int, lengths: list[int]
    ) -> Any:
        """q, k or v as the case lays it out."""
        ragged = self.case.place == "ragged" or (self.case.place == "ragged_kv" and name != "q")
        factor = LARGE if self.case.values == "large" and name != "v" else 1.0
        if not ragged:
            buffer = self.laid_out((batch, heads, rows, width), self.dtype)
            if self.case.layout != "expanded":
                buffer.copy_(self.normal(batch, heads, rows, width) * factor)
            return self.bind(buffer, name=name)
        # Tokens of all sequences one after another, (T, H, X), with a gap before some of them.
        starts = _starts(lengths)
        tokens = self.normal(starts[-1], heads, width).to(self.dtype) * factor
        offsets = torch.tensor(starts, dtype=_INDEX[self.case.index]).view(-1, 1, 1, 1)
        unit = heads * width
        tensor = self.graph.tensor(
            (batch, heads, rows, width),
            (max(rows, 1) * unit, width, unit, 1),
            self.dtype,
            name=name,
            ragged_offset=self.bind(offsets),
            ragged_offset_multiplier=unit,
        )
        self.inputs[tensor] = tokens.reshape(-1)
        return tensor

    def pages(self, name: str, width: int, arguments: dict[str, Any]) -> Any:
        """A container with a table of its own; entries past a length name no page."""
        case = self.case
        # The two containers differ in page size and in order.
        page = int(case.place.removeprefix("paged_").removesuffix("_packed"))
        page = page * 2 if name == "v" and case.index == "int64" else page
        entries = -(-case.keys // page) + 1
        pages = case.batch * entries
        container = self.laid_out((pages, case.heads[1], page, width), self.dtype)
        if case.layout != "expanded":
            container.copy_(self.normal(pages, case.heads[1], page, width))
        order = torch.randperm(pages, generator=self.generator).view(case.batch, 1, entries, 1)
        port = f"paged_attention_{name}_table"
        if case.place.endswith("_packed"):
            used = [-(-length // page) for length in self.len_kv]
            arguments[port] = self.packed_table(order, used)
            return self.bind(container, name=name)
        for number, length in enumerate(self.len_kv):
            order[number, 0, -(-length // page) :] = 2**30
        arguments[port] = self.bind(order.to(_INDEX[case.index]))
        return self.bind(container, name=name)

    def packed_table(self, order: torch.Tensor, used: list[int]) -> Any:
        """A table whose rows, as long as they are used, lie one after another in a wild buffer."""
        index = _INDEX[self.case.index]
        rows = [row.reshape(-1)[:count] for row, count in zip(order, used, strict=True)]
        wild = torch.full((2 + sum(used),), 2**30)
        wild[1:-1] = torch.cat(rows)
        offsets = torch.tensor(_starts(used), dtype=index).view(-1, 1, 1, 1)
        tensor = self.graph.tensor(
            order.shape, (1, 1, 1, 1), index, ragged_offset=self.bind(offsets)
        )
        self.inputs[tensor] = wild.to(index)[1:-1]
        return tensor

    def laid_out(self, dim: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized view of the case's layout; gaps hold NaN."""
        batch, heads, rows, width = dim
        layout_name = self.case.layout
        if layout_name == "expanded":
            # One sequence's values stand for all.
            values = self.normal(1, heads, rows, width).to(dtype)
            return values.expand(dim)
        if layout_name == "bshd":
            return torch.full((batch, rows, heads, width), torch.nan, dtype=dtype).transpose(1, 2)
        if layout_name == "gaps":
            wide = torch.full((batch, rows, heads + 1, width + 8), torch.nan, dtype=dtype)
            return wide[:, :, :heads, 8:].transpose(1, 2)
        if layout_name == "stepped":
            wide = torch.full((batch, heads, rows, 2 * width + 1), torch.nan, dtype=dtype)
            return wide[..., 1 : 2 * width : 2]
        return torch.full(dim, torch.nan, dtype=dtype)

    def bias(self) -> torch.Tensor | None:
        case = self.case
        heads = case.heads[0]
        shapes = {
            "full": (case.batch, heads, case.rows, case.keys),
            "keys": (1, 1, 1, case.keys),
            "rows": (case.batch, 1, case.rows, 1),
            "heads": (1, heads, 1, 1),
            "hiding": (1, 1, case.rows, case.keys),
        }
        if case.bias == "none":
            return None
        bias = self.normal(*shapes[case.bias])
        if case.bias == "hiding":
            bias[self.integers(0, 3, *bias.shape) == 0] = -torch.inf
            bias[:, :, : case.rows // 4] = -torch.inf
        return bias.to(self.dtype if case.bias in ("full", "hiding") else torch.float32)

    def output(self, name: str, tensor: Any, dim: tuple[int, int, int, int]) -> None:
        """Mark an output; where queries are ragged it is too, Stats head by head."""
        case = self.case
        tensor.set_output(True).set_name(name).set_dim(dim)
        tensor.set_data_type("float32" if name != "O" or case.out == "float32" else self.dtype)
        _, heads, rows, width = dim
        if case.place != "ragged" or name == "rng_dump":
            sample = self.laid_out(dim, torch.float32) if case.layout != "expanded" else None
            tensor.set_stride(torch.empty(dim).stride() if sample is None else sample.stride())
        else:
            starts = _starts(self.len_q)
            if name == "O":
                unit, stride = (
                    heads * width,
                    (max(rows, 1) * heads * width, width, heads * width, 1),
                )
            elif case.index == "int64":
                # Head-major: the tokens of a head follow one another.
                unit, stride = 1, (rows, max(starts[-1], 1), 1, 1)
            else:
                unit, stride = heads, (max(rows, 1) * heads, 1, heads, 1)
            offsets = torch.tensor(starts, dtype=_INDEX[case.index]).view(-1, 1, 1, 1)
            tensor.set_stride(stride).set_ragged_offset(self.bind(offsets))
            tensor.set_ragged_offset_multiplier(unit)
        self.outputs[name] = tensor

    def _hide_nan(self) -> None:
        """NaN in keys and values past a length; under a band, in the last value too."""
        case = self.case
        if case.values != "hidden_nan" or case.place != "dense" or case.layout == "expanded":
            return
        for tensor, buffer in self.inputs.items():
            if tensor.name not in ("k", "v"):
                continue
            for batch, length in enumerate(self.len_kv):
                buffer[batch, :, length:] = torch.nan
            if tensor.name == "v" and case.band in ("causal", "window") and case.keys:
                buffer[:, :, -1] = torch.nan
                buffer[:, 0, -1] = torch.inf

    def run(self, execute: Callable[[Any, dict[Any, torch.Tensor]], None]) -> None:
        """Execute between guards and compare every output with the oracle.

        Raises:
            AssertionError: for a wrong value, or a byte beside the declared elements.
        """
        pack = {}
        for tensor, buffer in self.inputs.items():
            is_moved = self.start == "odd" and tensor.name in ("q", "k", "v")
            pack[tensor] = _on(buffer, self.device, further=int(is_moved))
        raws = {}
        for tensor in self.outputs.values():
            span = self._span(tensor)
            raw = torch.full((span + 2 * GUARD,), torch.nan, dtype=to_torch(tensor.data_type))
            raws[tensor] = raw.to(self.device)
            pack[tensor] = raws[tensor][GUARD : GUARD + span]
        execute(self.graph, pack)
        expected = evaluate(self.graph, {t.uid: b for t, b in self.inputs.items()})
        for name, tensor in self.outputs.items():
            raw = raws[tensor].cpu()
            self._check(name, tensor, raw, expected[tensor.uid])

    def _span(self, tensor: Any) -> int:
        if tensor.ragged_offset is not None:
            width = tensor.dim[3]
            return max(_starts(self.len_q)[-1] * self.case.heads[0] * width, 1)
        return 1 + sum((n - 1) * s for n, s in zip(tensor.dim, tensor.stride, strict=True))

    def _check(self, name: str, tensor: Any, raw: torch.Tensor, expected: torch.Tensor) -> None:
        inner = raw[GUARD : raw.numel() - GUARD]
        offset = None
        if tensor.ragged_offset is not None:
            offset = self.inputs[tensor.ragged_offset]
        got = layout.load(tensor, inner, offset)
        live = torch.ones(tensor.dim, dtype=torch.bool)
        if offset is not None:
            for batch, length in enumerate(self.len_q):
                live[batch, :, length:] = False
        got = torch.where(live, got.double(), expected)
        # P is rounded to the operands' type on the way, whatever O's type is.
        kind = self.dtype if name == "O" else tensor.data_type
        tol = default_tolerance(kind)
        if self.case.values == "large":
            tol += large_score_error(self.case)
        assert_close(got, expected, tol=tol, name=f"{name} of {self.case}")
        touched = torch.zeros(raw.numel(), dtype=torch.bool)
        for batch in range(tensor.dim[0]):
            start = batch * tensor.stride[0]
            rows = tensor.dim[2]
            if offset is not None:
                start = int(offset.reshape(-1)[batch]) * tensor.ragged_offset_multiplier
                rows = self.len_q[batch]
            touched.as_strided(
                (tensor.dim[1], rows, tensor.dim[3]), tensor.stride[1:], GUARD + start
            ).fill_(True)
        assert torch.isnan(raw[~touched]).all(), f"{name} of {self.case}: bytes beside it changed"


def large_score_error(case: Case) -> float:
    """How far float32 leaves a score off, where queries and keys are large.

    A score is `depth` products of deviation LARGE**2, times depth**-0.5, each rounded to float32;
    weights and their sums change by as much, relatively.
    """
    return 2.0**-23 * LARGE**2 * float(case.sizes[0]) ** 0.5


def select_split(graph: Any) -> bool:
    """Select the plan in which keys are split, wherever it is ranked; whether there is one."""
    for index, plan in enumerate(graph.plans):
        if plan.engine_name == "triton" and dict(plan.knobs).get(knob_type.SPLIT_K, 0) > 1:
            graph.select_plan(index)
            return True
    return False


def _on(buffer: torch.Tensor, device: str, *, further: int = 0) -> torch.Tensor:
    """A copy on the device with the same strides, gaps included, and elements in front of it."""
    if device == "cpu":
        return buffer
    storage = torch.empty(0, dtype=buffer.dtype).set_(buffer.untyped_storage())
    moved = torch.empty(further + storage.numel(), dtype=buffer.dtype, device=device)
    moved[further:] = storage
    return moved.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset() + further)


def _starts(lengths: list[int]) -> list[int]:
    """Where each sequence starts, in tokens, and where the last one ends."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def _band(case: Case) -> dict[str, Any]:
    bottom_right = tw.diagonal_alignment.BOTTOM_RIGHT
    return {
        "open": {},
        "causal": {"use_causal_mask": True},
        "bottom_right": {"use_causal_mask_bottom_right": True},
        "window": {"use_causal_mask": True, "sliding_window_length": 9},
        "band": {"diagonal_band_left_bound": 12, "diagonal_band_right_bound": 5},
        "band_bottom_right": {
            "diagonal_band_left_bound": 30,
            "diagonal_band_right_bound": 3,
            "diagonal_alignment": bottom_right,
        },
    }[case.band]


def _soft_cap(kind: str) -> Any:
    def score_mod(graph: Any, score: Any) -> Any:
        if kind == "relu":
            # A soft cap no more: squared, cut and shifted.
            cut = graph.relu(score, upper_clip=2.0)
            return graph.sub(graph.mul(cut, cut), graph.tensor_scalar(0.5))
        if kind == "index":
            # Keys far to the right count less, later heads more.
            row, col = graph.gen_index(score, 2), graph.gen_index(score, 3)
            is_far = graph.cmp_gt(col, graph.add(row, graph.tensor_scalar(4.0)))
            near = graph.add(score, graph.gen_index(score, 1))
            return graph.binary_select(graph.mul(score, graph.tensor_scalar(0.3)), near, is_far)
        if kind == "bare":
            return graph.tanh(score)
        # With a huge cap scores stay what they are.
        cap = graph.tensor_scalar(1e6 if kind == "huge" else 3.0)
        small = (
            graph.div(score, cap)
            if kind in ("div", "huge")
            else graph.mul(score, graph.tensor_scalar(0.3))
        )
        return graph.mul(graph.tanh(small), cap)

    return score_mod
