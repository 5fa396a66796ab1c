"""The argument ``stream`` of the functions: everything that a call does goes there.

A function does more than launch its plan: it joins masks, packs lengths, makes results and converts
gradients. On another stream than the kernel's each of these would be a race.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeGuard, TypeVar

import torch

from tilewright.launch.context import device_and_stream
from tilewright.launch.handles import as_stream_pointer
from tilewright.ops.autocast import Casts, is_autocast, to_float32, to_region_type
from tilewright.ops.custom import is_traced

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_its_stream(
    function: Callable[_Arguments, _Result], casts: Casts | None = None
) -> Callable[_Arguments, _Result]:
    """A function whose first operand is on the device, with its ``stream`` current meanwhile.

    The backward runs there too: autograd keeps to the stream of the forward. Traced calls, which
    refuse a stream, and other devices are left to the function. ``casts`` are made in regions of
    ``torch.autocast``.
    """
    order = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        stream = options.get("stream")
        if stream is not None:
            operand = arguments[0] if arguments else next(iter(options.values()))
            if _is_on_a_device(operand):
                options["stream"] = None
                with device_and_stream(operand.device, as_stream_pointer(stream)):
                    return call(*arguments, **options)
        if casts is not None and is_autocast():
            made: _Result = casts.call(function, order, arguments, options)
            return made
        return function(*arguments, **options)

    return call


def _is_on_a_device(operand: object) -> TypeGuard[torch.Tensor]:
    """True of a tensor whose work has a stream to go to."""
    if not isinstance(operand, torch.Tensor) or operand.device.type == "cpu":
        return False
    return not is_traced(operand)


def lowered(
    *names: str,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """``on_its_stream``, and under autocast with operands of these names in the region's type."""
    return lambda function: on_its_stream(function, to_region_type(names))


def widened(
    *names: str,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """``on_its_stream``, and under autocast with operands of these names in float32 on a GPU."""
    return lambda function: on_its_stream(function, to_float32(names))
