"""Attention declared on a graph and run by the ATen engine's kernel, and a dense reference.

Each output of a run lies in a larger buffer of sentinel bytes; a run checks that nothing but the
declared elements changed, that no input changed, and that no declared element was left out.
Helpers that lie here are importable.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright
from tilewright.dtypes import DataType
from tilewright.engines.aten import attention_fused
from tilewright.engines.aten.attention import prepare_sdpa, prepare_sdpa_backward
from tilewright.engines.aten.attention_compose import compose_backward, compose_forward
from tilewright.engines.aten.attention_fp8 import compose_fp8_backward, compose_fp8_forward
from tilewright.engines.aten.attention_mxfp8 import compose_mxfp8_backward, compose_mxfp8_forward
from tilewright.engines.aten.attention_spec import read_spec
from tilewright.torch_dtypes import to_torch

sys.path.insert(0, str(Path(__file__).parent))

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_PREPARED = {"sdpa": prepare_sdpa, "sdpa_backward": prepare_sdpa_backward}
_EIGHT_BIT = {
    "sdpa_fp8": compose_fp8_forward,
    "sdpa_fp8_backward": compose_fp8_backward,
    "sdpa_mxfp8": compose_mxfp8_forward,
    "sdpa_mxfp8_backward": compose_mxfp8_backward,
}
_GUARD_ELEMENTS = 16
# NaN with all bits set in every floating type: no result has these bytes.
_SENTINEL = 0xFF


@dataclasses.dataclass
class Ragged:
    """A packed operand: what lies in memory, its declared dim and stride, and its offsets."""

    data: Tensor
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: Tensor
    multiplier: int = 1


class Runner:
    """Declares one attention operation and runs it once."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.way = "prepared"
        # Off for operands whose copy would not fit into memory.
        self.checks_inputs = True

    def run(
        self,
        kind: str,
        operands: dict[str, Tensor | Ragged],
        *,
        outputs: dict[str, Any] | None = None,
        given: tuple[str, ...] = (),
        program: Any = None,
        bprop: Any = None,
        extra: dict[str, Tensor] | None = None,
        tiled: tuple[str, ...] = (),
        **options: Any,
    ) -> dict[str, Tensor]:
        """The outputs by port, after the checks above.

        ``operands`` are tensor arguments of the graph method, ``options`` the others. ``outputs``
        gives strides, a Ragged layout or a data type to an output; ``given`` names outputs that are
        passed in. ``program`` declares a score program and ``bprop`` its gradient's, both with the
        records of ``extra`` as their last argument. ``tiled`` operands are stored in F8_128x4.
        """
        outputs = outputs or {}
        graph = self.graph = tilewright.Graph(io_data_type=torch.float32)
        records = {name: _declare(graph, name, value) for name, value in operands.items()}
        for name in tiled:
            records[name].set_reordering_type(tilewright.tensor_reordering.F8_128x4)
        passed: dict[str, Any] = dict(records)
        operands = {**operands, **(extra or {})}
        records.update(
            (name, _declare(graph, name, value)) for name, value in (extra or {}).items()
        )
        if program is not None:
            options["score_mod"] = lambda inner, score: program.declare(inner, score, records)
        if bprop is not None:
            options["score_mod_bprop"] = lambda inner, d_score, score: bprop(
                inner, d_score, score, records
            )
        for port in given:
            passed[port] = graph.tensor(name=port)
        if "dropout_seed" in passed:
            probability = options.pop("probability")
            seed, offset = passed.pop("dropout_seed"), passed.pop("dropout_offset")
            options["dropout"] = (probability, seed, offset)
        elif "dropout_mask" in passed:
            options["dropout"] = (passed.pop("dropout_mask"), passed.pop("dropout_scale"))
        getattr(graph, kind)(**passed, **options)
        operation = graph.operations[-1]
        for port, record in operation.outputs.items():
            record.set_output(True)
            self._shape_output(graph, record, outputs.get(port))
            if port == "rng_dump":
                record.set_dim(_score_dim(operands, options))
        graph.validate()
        bound = {
            port: _storage(operands[_argument_of(records, record)])
            for port, record in operation.inputs.items()
        }
        held: dict[str, _Held] = {}
        for port, record in operation.outputs.items():
            held[port] = _Held(record, outputs.get(port))
            if record.ragged_offset is not None:
                bound[f"{port}.ragged_offset"] = outputs[port].offsets
        for port, record in operation.inputs.items():
            if record.ragged_offset is not None:
                bound[f"{port}.ragged_offset"] = operands[_argument_of(records, record)].offsets
        watched = bound if self.checks_inputs else {}
        before = {port: _bytes_of(tensor).clone() for port, tensor in watched.items()}
        kernel = self._kernel(operation)
        kernel(bound, {port: entry.view for port, entry in held.items()})
        for port, tensor in watched.items():
            assert torch.equal(_bytes_of(tensor), before[port]), f"input {port} was changed"
        for port, entry in held.items():
            entry.check_guards(port)
        return {port: entry.view for port, entry in held.items()}

    def _kernel(self, operation: Any) -> Callable[..., None]:
        if self.way == "prepared" and operation.kind in _PREPARED:
            return _PREPARED[operation.kind](operation, _CPU)
        on_host = self.way != "device"
        if operation.kind in _EIGHT_BIT:
            return _EIGHT_BIT[operation.kind](operation, _CPU, on_host)
        compose = compose_backward if "backward" in operation.kind else compose_forward
        return compose(operation, read_spec(operation), _CPU, on_host)

    def _shape_output(self, graph: Any, record: Any, wish: Any) -> None:
        if isinstance(wish, Ragged):
            record.set_dim(wish.dim).set_stride(wish.stride)
            record.set_data_type(wish.data.dtype)
            record.set_ragged_offset(_declare(graph, record.name + "_offset", wish.offsets))
            record.set_ragged_offset_multiplier(wish.multiplier)
        elif isinstance(wish, tuple):
            record.set_stride(wish)
        elif wish is not None:
            record.set_data_type(wish)


def _argument_of(records: dict[str, Any], record: Any) -> str:
    return next(name for name, candidate in records.items() if candidate is record)


def _score_dim(operands: dict[str, Any], options: dict[str, Any]) -> tuple[int, ...]:
    q, k = operands["q"], operands["k"]
    keys = options.get("paged_attention_max_seq_len_kv") or k.shape[2]
    return (*q.shape[:3], keys)


def _declare(graph: Any, name: str, value: Tensor | Ragged) -> Any:
    if isinstance(value, Ragged):
        offsets = _declare(graph, name + "_offset", value.offsets)
        return graph.tensor(
            dim=value.dim,
            stride=value.stride,
            data_type=value.data.dtype,
            name=name,
            ragged_offset=offsets,
            ragged_offset_multiplier=value.multiplier,
        )
    return graph.tensor(dim=value.shape, stride=value.stride(), data_type=value.dtype, name=name)


def _storage(value: Tensor | Ragged) -> Tensor:
    return value.data.reshape(-1) if isinstance(value, Ragged) else value


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Held:
    """An output inside a buffer of sentinel bytes."""

    def __init__(self, record: Any, wish: Any) -> None:
        dtype = to_torch(record.data_type)
        self.is_ragged = isinstance(wish, Ragged)
        if self.is_ragged:
            self.span = wish.data.numel()
        else:
            steps = zip(record.dim, record.stride, strict=True)
            self.span = 1 + sum((extent - 1) * step for extent, step in steps)
            self.span = 0 if 0 in record.dim else self.span
        size = self.span + 2 * _GUARD_ELEMENTS
        self.buffer = torch.full((size * dtype.itemsize,), _SENTINEL, dtype=torch.uint8).view(dtype)
        if self.is_ragged:
            self.view = self.buffer[_GUARD_ELEMENTS : _GUARD_ELEMENTS + self.span]
            return
        self.view = self.buffer.as_strided(record.dim, record.stride, _GUARD_ELEMENTS)

    def check_guards(self, port: str) -> None:
        size = self.buffer.element_size()
        cells = self.buffer.view(torch.uint8).view(-1, size)
        untouched = (cells == _SENTINEL).all(1)
        if self.is_ragged:
            inside = untouched[_GUARD_ELEMENTS : _GUARD_ELEMENTS + self.span]
            self.untouched = inside.clone()
            outside = torch.cat((untouched[:_GUARD_ELEMENTS], untouched[-_GUARD_ELEMENTS:]))
        else:
            declared = torch.zeros(cells.shape[0], dtype=torch.bool)
            declared.as_strided(self.view.shape, self.view.stride(), _GUARD_ELEMENTS).fill_(True)
            assert not untouched[declared].any(), f"output {port} has elements that nobody wrote"
            outside = untouched[~declared]
        assert outside.all(), f"bytes around output {port} were written"


@dataclasses.dataclass
class Rule:
    """What acts on the scores of the dense reference; see ``reference``."""

    scale: float = 1.0
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    bias: Tensor | None = None
    alibi: bool = False
    hidden: Tensor | None = None
    len_q: list[int] | None = None
    len_kv: list[int] | None = None
    sink: Tensor | None = None
    keep: Tensor | None = None
    score_mod: Callable[[Tensor], Tensor] | None = None


def reference(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> dict[str, Tensor]:
    """Dense float64 attention, differentiable; ``keep`` is 0 or the scale of each probability."""
    batch, heads, rows, _ = q.shape
    keys = k.shape[2]
    group = heads // k.shape[1]
    q, k, v = q.double(), k.double(), v.double()
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = rule.scale * (q @ k.transpose(2, 3))
    if rule.score_mod is not None:
        scores = rule.score_mod(scores)
    if rule.bias is not None:
        scores = scores + rule.bias.double()
    row, col = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    hidden = torch.zeros(batch, heads, rows, keys, dtype=torch.bool)
    padded = torch.zeros(batch, 1, rows, 1, dtype=torch.bool)
    offsets = torch.zeros(batch, 1, 1, 1)
    for b in range(batch):
        used_q = rule.len_q[b] if rule.len_q else rows
        used_kv = rule.len_kv[b] if rule.len_kv else keys
        diagonal = row + (used_kv - used_q if rule.bottom_right else 0)
        offsets[b] = used_kv - used_q if rule.bottom_right else 0
        hidden[b] |= (col >= used_kv) | (row >= used_q)
        padded[b, 0, used_q:] = True
        if rule.left is not None:
            hidden[b] |= col <= diagonal - rule.left
        if rule.right is not None:
            hidden[b] |= col > diagonal + rule.right
    if rule.alibi:
        slopes = torch.tensor([2.0 ** (-8.0 * (h + 1) / heads) for h in range(heads)])
        scores = scores + slopes.double().view(1, -1, 1, 1) * (col - row - offsets)
    if rule.hidden is not None:
        hidden |= rule.hidden
    scores = torch.where(hidden, -math.inf, scores)
    top = (
        scores.detach().amax(-1, keepdim=True)
        if keys
        else scores.new_full((batch, heads, rows, 1), -math.inf)
    )
    sink = None
    if rule.sink is not None:
        sink = rule.sink.double().view(1, heads, 1, 1)
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    stats = torch.where(padded, -math.inf, torch.log(total) + top)
    p = weights / torch.where(total == 0.0, 1.0, total)
    dropped = p if rule.keep is None else p * rule.keep.double()
    return {
        "O": dropped @ v,
        "Stats": stats,
        "score_max": torch.where(total == 0.0, -math.inf, top),
        "score_sum_exp": total,
        "P": p,
    }


def gradients(q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, rule: Rule) -> dict[str, Tensor]:
    """Float64 gradients of sum(O * dO) by autograd through ``reference``."""
    leaves = {"dQ": q, "dK": k, "dV": v, "dBias": rule.bias, "dSink_token": rule.sink}
    leaves = {
        port: leaf.detach().double().requires_grad_()
        for port, leaf in leaves.items()
        if leaf is not None
    }
    inner = dataclasses.replace(rule, bias=leaves.get("dBias"), sink=leaves.get("dSink_token"))
    o = reference(leaves["dQ"], leaves["dK"], leaves["dV"], inner)["O"]
    found = torch.autograd.grad((o * d_o.double()).sum(), list(leaves.values()), allow_unused=True)
    return {
        port: torch.zeros_like(leaf) if gradient is None else gradient
        for (port, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def close(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Require |found - expected| <= tolerance * max(|expected|.max(), 1), infinities equal."""
    found, expected = found.double(), expected.double()
    assert found.shape == expected.shape, f"{name}: {found.shape} and {expected.shape}"
    infinite = torch.isinf(expected)
    assert torch.equal(found[infinite], expected[infinite]), f"{name}: infinities differ"
    finite = expected[~infinite]
    if finite.numel() == 0:
        return
    bound = tolerance * max(finite.abs().max().item(), 1.0)
    error = (found[~infinite] - finite).abs().max().item()
    assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}"


class Bench:
    """What the tests of this folder share."""

    Rule = Rule
    Ragged = Ragged
    DataType = DataType
    reference = staticmethod(reference)
    gradients = staticmethod(gradients)
    close = staticmethod(close)

    def __init__(self) -> None:
        self.runner = Runner()

    def run(self, kind: str, operands: dict[str, Any], **options: Any) -> dict[str, Tensor]:
        """See ``Runner.run``."""
        return self.runner.run(kind, operands, **options)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(params=["prepared", "composed", "device"])
def ways(request: pytest.FixtureRequest, bench: Bench) -> Bench:
    """The kernel as prepared, the composition, and the composition whose host reads no length."""
    bench.runner.way = request.param
    return bench


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of calls of ATen's two fused functions."""
    counts = {"forward": 0, "backward": 0}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name, attribute in (("forward", "_flash"), ("backward", "_flash_backward")):
        function = getattr(attention_fused, attribute)
        monkeypatch.setattr(attention_fused, attribute, counting(name, function))
    return counts
