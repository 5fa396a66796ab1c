"""Plain attention calls like an earlier one: made into results by the plan that is there.

See ``repeats``. Plain is a forward without a mask, a gate or dropout, each of whose operands lies
where an argument does: lengths that were packed, or prefix sums that were cut out of others, are
copies, which each call makes anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilewright.ops.attention_call import forward_key, zeroing
from tilewright.ops.attention_records import Call
from tilewright.ops.declaring import are_aligned
from tilewright.ops.plan_cache import PlanKey, kept_key, run_again
from tilewright.ops.repeats import Operands, Repeats, Values

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
_Layout = tuple[tuple[int, ...], tuple[int, ...]]


class Arguments(NamedTuple):
    """What a function was given: tensors by the name of the operand that they become, and the rest.

    The last one of ``tensors`` is ``out``. ``repeats`` are those of the function.
    """

    repeats: Repeats[Way]
    names: tuple[str, ...]
    tensors: Operands
    values: Values

    def repeated(self) -> Result | None:
        """The result of a plain call like an earlier one, or None."""
        way = self.repeats.find(self.tensors, self.values)
        return None if way is None else way.go(self.tensors)

    def remember(self, call: Call, out: torch.Tensor, stats: torch.Tensor | None) -> None:
        """Keep the way of a forward ``call`` that wrote ``out`` and ``stats``, if it is plain."""
        way = _way_of(self, call, out, stats)
        if way is not None:
            self.repeats.keep(self.tensors, self.values, way)


def with_types_of(window: Any, *values: Any) -> Values:
    """``values`` and a window, whose sides' types count too."""
    sides = window if type(window) is tuple else ()
    return (window, *sides, *values, torch.are_deterministic_algorithms_enabled())


@dataclass(frozen=True)
class Way:
    """From a plain call's tensors to its result.

    ``operands`` are names, which of the tensors each is, and the (dim, stride) that it is read
    with, None for its own or where storage alone counts; ``extents`` are lengths that nobody gave.
    """

    key: PlanKey
    operands: tuple[tuple[str, int, _Layout | None], ...]
    extents: tuple[tuple[str, int, int], ...]
    o: tuple[_Layout, torch.dtype]
    stats: tuple[tuple[int, ...], torch.dtype] | None
    is_packed: bool

    def go(self, tensors: Operands) -> Result | None:
        """The result, or None if the plan is not kept or an operand not as it was."""
        pack: dict[str, Any] = {}
        for name, number, layout in self.operands:
            tensor: Any = tensors[number]
            if layout is not None:
                try:
                    tensor = tensor.as_strided(*layout)
                except RuntimeError:
                    # Its storage was made smaller: the checks name it.
                    return None
            pack[name] = tensor
        device = self.key.device
        out = tensors[-1]
        o = pack["o"] = self._new_output() if out is None else out
        if not are_aligned(device, pack.values()):
            return None
        for name, batch, extent in self.extents:
            pack[name] = torch.full((batch,), extent, dtype=torch.int32, device=device)
        fill = zeroing(o) if self.is_packed else None
        if self.stats is None:
            return o if run_again(self.key, pack, fill) else None
        shape, dtype = self.stats
        if self.is_packed:
            stats = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        else:
            stats = torch.empty(shape, dtype=dtype, device=device)
        pack["stats"] = stats
        return (o, stats) if run_again(self.key, pack, fill) else None

    def _new_output(self) -> torch.Tensor:
        (shape, stride), dtype = self.o
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.key.device)


def _way_of(
    arguments: Arguments, call: Call, out: torch.Tensor, stats: torch.Tensor | None
) -> Way | None:
    if call.options.dropout_p or call.stream is not None:
        return None
    if call.is_packed and arguments.tensors[-1] is not None:
        # It is filled whole; of packed operands a plan asks only for what sequences reach.
        return None
    outputs = {"o": out} if stats is None else {"o": out, "stats": stats}
    if not are_aligned(call.device, (*call.operands.values(), *outputs.values())):
        return None
    numbers: Mapping[str, int] = {name: i for i, name in enumerate(arguments.names)}
    operands, extents = [], []
    for name, operand in call.operands.items():
        number = numbers[name]
        if name == "v_table" and arguments.tensors[number] is None:
            number = numbers["k_table"]
        given = arguments.tensors[number]
        if given is None:
            if name not in ("seqlens_q", "seqlens_kv"):
                return None
            full = out.shape[2] if name == "seqlens_q" else call.operands["k"].shape[2]
            extents.append((name, operand.shape[0], full))
        elif given.data_ptr() != operand.data_ptr():
            return None
        else:
            operands.append((name, number, _seen_otherwise(given, operand)))
    key = forward_key(call, call.operands, outputs)
    plan_key = kept_key("sdpa", key, call.engine, call.device)
    if plan_key is None:
        return None
    return Way(
        plan_key,
        tuple(operands),
        tuple(extents),
        ((tuple(out.shape), out.stride()), out.dtype),
        None if stats is None else (_without_last(stats, call), stats.dtype),
        call.is_packed,
    )


def _seen_otherwise(given: torch.Tensor, operand: torch.Tensor) -> _Layout | None:
    """The layout to read an argument with; None if its own does, or both are plain storage."""
    if given.shape == operand.shape and given.stride() == operand.stride():
        return None
    if given.is_contiguous() and operand.is_contiguous() and given.numel() == operand.numel():
        return None
    return tuple(operand.shape), operand.stride()


def _without_last(stats: torch.Tensor, call: Call) -> tuple[int, ...]:
    """Stats' shape as it is returned: dense ones have no last axis of 1."""
    return tuple(stats.shape if call.is_packed else stats.shape[:-1])
