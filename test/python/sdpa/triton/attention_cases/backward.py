"""The backward of a case: the same operands, what the forward left, and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attention_cases.case import Case
from attention_cases.running import Declared, _starts, large_score_error
from tilewright.oracle import evaluate, layout
from tilewright.oracle.tolerances import default_tolerance
from tilewright.testing import assert_close
from tilewright.torch_dtypes import to_torch

_FORWARD_ONLY = ("generate_stats", "stats_use_log2", "score_max", "score_sum_exp")
_SIDES = {"dQ": "q", "dK": "k", "dV": "v"}


def backward_case(case: Case) -> Case:
    """The nearest case that has a backward here: no pages, Stats in natural logarithms."""
    place = "ragged" if case.place.startswith("paged") else case.place
    return replace(case, place=place, stats="natural")


class DeclaredBackward(Declared):
    """A graph of one sdpa_backward with its operands' buffers.

    The forward's results are the oracle's, rounded to the types that a forward stores.
    """

    def __init__(
        self, case: Case, device: str, *, is_deterministic: bool = False, start: str = "unknown"
    ) -> None:
        self.is_deterministic = is_deterministic
        super().__init__(case, device, start=start)

    def _declare(self) -> None:
        self.graph.sdpa = self._declare_backward
        super()._declare()

    def _declare_backward(self, q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        case = self.case
        arguments = {n: value for n, value in arguments.items() if n not in _FORWARD_ONLY}
        forward = Declared(case, "cpu")
        forward.graph.validate()
        made = evaluate(forward.graph, {t.uid: b for t, b in forward.inputs.items()})
        left = {name: made[tensor.uid] for name, tensor in forward.outputs.items()}
        heads, (_, depth_v) = case.heads[0], case.sizes
        dim = (case.batch, heads, case.rows, depth_v)
        o = self._row_operand("o", left["O"], self.dtype)
        d_o = self._row_operand("dO", self.normal(*dim).double(), self.dtype)
        stats = self._row_operand("stats", left["Stats"], torch.float32)
        given = {}
        for port, argument in (("dBias", "bias"), ("dSink_token", "sink_token")):
            if argument in arguments:
                given[port] = self.graph.tensor(name=port)
        gradients = self.graph.sdpa_backward(
            q,
            k,
            v,
            o,
            d_o,
            stats,
            use_deterministic_algorithm=self.is_deterministic,
            **given,
            **arguments,
        )
        for name, tensor in zip(_SIDES, gradients, strict=True):
            self._gradient(name, tensor, {"dQ": q, "dK": k, "dV": v}[name])
        for name, tensor in given.items():
            source = arguments["bias" if name == "dBias" else "sink_token"]
            tensor.set_output(True).set_data_type(source.data_type).set_dim(source.dim)
            tensor.set_stride(torch.empty(source.dim).stride())
            self.outputs[name] = tensor
        return None, None

    def output(self, name: str, tensor: Any, dim: tuple[int, int, int, int]) -> None:
        """The forward's outputs are inputs here."""

    def _row_operand(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> Any:
        """An operand with a row a query, laid out as the forward lays out O and Stats."""
        case = self.case
        heads, rows, width = values.shape[1:]
        if case.place != "ragged":
            is_plain = case.layout == "expanded" or name == "stats"
            plain = torch.empty(values.shape, dtype=dtype)
            buffer = plain if is_plain else self.laid_out(tuple(values.shape), dtype)
            buffer.copy_(values)
            if case.values == "hidden_nan":
                for batch, length in enumerate(self.len_q):
                    buffer[batch, :, length:] = torch.nan
            return self.bind(buffer, name=name)
        starts = _starts(self.len_q)
        tokens = torch.empty(starts[-1], heads, width, dtype=dtype)
        for batch, length in enumerate(self.len_q):
            start = starts[batch]
            tokens[start : start + length] = values[batch, :, :length].transpose(0, 1)
        unit = heads * width
        tensor = self.graph.tensor(
            tuple(values.shape),
            (max(rows, 1) * unit, width, unit, 1),
            dtype,
            name=name,
            ragged_offset=self._offsets(starts),
            ragged_offset_multiplier=unit,
        )
        self.inputs[tensor] = tokens.reshape(-1)
        return tensor

    def _terms_of_bias(self, tensor: Any) -> float:
        """The largest root of a sum of squares of the terms that one element of dBias adds up."""
        case = self.case
        extents = (case.batch, case.heads[0], case.rows, case.keys)
        summed = [n for n, extent in enumerate(extents) if tensor.dim[n] != extent]
        if not summed:
            return 0.0
        whole = self._with_whole_bias()
        whole.graph.validate()
        made = evaluate(whole.graph, {t.uid: b for t, b in whole.inputs.items()})
        terms = made[whole.outputs["dBias"].uid].nan_to_num(0.0, 0.0, 0.0).square()
        return float(terms.sum(summed).max().sqrt()) if terms.numel() else 0.0

    def _with_whole_bias(self) -> DeclaredBackward:
        return WholeBias(self.case, "cpu", is_deterministic=self.is_deterministic)

    def _gradient(self, name: str, tensor: Any, source: Any) -> None:
        case = self.case
        dim = source.dim
        tensor.set_output(True).set_name(name).set_dim(dim)
        tensor.set_data_type("float32" if case.out == "float32" else self.dtype)
        if source.ragged_offset is not None:
            starts = _starts(self.len_q if name == "dQ" else self.len_kv)
            unit = dim[1] * dim[3]
            tensor.set_stride((max(dim[2], 1) * unit, dim[3], unit, 1))
            tensor.set_ragged_offset(self._offsets(starts)).set_ragged_offset_multiplier(unit)
        elif case.layout == "expanded":
            tensor.set_stride(torch.empty(dim).stride())
        else:
            tensor.set_stride(self.laid_out(dim, torch.float32).stride())
        self.outputs[name] = tensor

    def _offsets(self, starts: list[int]) -> Any:
        kind = torch.int32 if self.case.index == "int32" else torch.int64
        return self.bind(torch.tensor(starts, dtype=kind).view(-1, 1, 1, 1))

    def _span(self, tensor: Any) -> int:
        if tensor.ragged_offset is not None:
            lengths = self.len_q if tensor.name == "dQ" else self.len_kv
            return max(_starts(lengths)[-1] * tensor.dim[1] * tensor.dim[3], 1)
        return super()._span(tensor)

    def _check(self, name: str, tensor: Any, raw: torch.Tensor, expected: torch.Tensor) -> None:
        case = self.case
        lengths = self.len_q if name == "dQ" else self.len_kv
        guard = (raw.numel() - self._span(tensor)) // 2
        inner = raw[guard : raw.numel() - guard]
        offset = None
        if tensor.ragged_offset is not None:
            offset = self.inputs[tensor.ragged_offset]
        got = layout.load(tensor, inner, offset)
        live = torch.ones(tensor.dim, dtype=torch.bool)
        touched = torch.zeros(raw.numel(), dtype=torch.bool)
        for batch in range(tensor.dim[0]):
            start, rows = batch * tensor.stride[0], tensor.dim[2]
            if offset is not None:
                start = int(offset.reshape(-1)[batch]) * tensor.ragged_offset_multiplier
                rows = lengths[batch]
                live[batch, :, rows:] = False
            touched.as_strided(
                (tensor.dim[1], rows, tensor.dim[3]), tensor.stride[1:], guard + start
            ).fill_(True)
        got = torch.where(live, got.double(), expected)
        # P and dS are rounded to the operands' type on the way, whatever the gradient's type is.
        tol = max(default_tolerance(self.dtype), default_tolerance(to_torch(tensor.data_type)))
        if case.values == "large":
            # Stats of thousands come rounded to float32, by up to 2^-12: P is that far off.
            tol = max(tol, 2**-10)
            # And the scores that P is made of, as in the forward, by their sums' roundings.
            tol += large_score_error(case)
        if name == "dBias":
            # Where it sums what cancels, errors are those of the terms and not of their sum.
            scale = max(float(expected.abs().nan_to_num(0.0, 0.0).max()), 1.0)
            tol *= max(self._terms_of_bias(tensor) / scale, 1.0)
        assert_close(got, expected, tol=tol, name=f"{name} of {case}")
        assert torch.isnan(raw[~touched]).all(), f"{name} of {case}: bytes beside it changed"


class WholeBias(DeclaredBackward):
    """The same case with the bias of every score written out: its gradient is not summed."""

    def bias(self) -> torch.Tensor | None:
        bias = super().bias()
        case = self.case
        whole = (case.batch, case.heads[0], case.rows, case.keys)
        return None if bias is None else bias.expand(whole).contiguous()
