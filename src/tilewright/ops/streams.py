"""The argument ``stream`` of the functions: everything that a call does goes there.

A function does more than launch its plan: it joins masks, packs lengths, makes results and converts
gradients. On another stream than the kernel's each of these would be a race.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tilewright.launch.context import device_and_stream
from tilewright.launch.handles import as_stream_pointer
from tilewright.ops.custom import is_traced

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def on_its_stream(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function whose first operand is on the device, with its ``stream`` current meanwhile.

    The backward runs there too: autograd keeps to the stream of the forward. Traced calls, which
    refuse a stream, and other devices are left to the function.
    """

    @functools.wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        stream = options.get("stream")
        if stream is None:
            return function(*arguments, **options)
        operand = arguments[0] if arguments else next(iter(options.values()))
        if not isinstance(operand, torch.Tensor) or operand.device.type == "cpu":
            return function(*arguments, **options)
        if is_traced(operand):
            return function(*arguments, **options)
        with device_and_stream(operand.device, as_stream_pointer(stream)):
            options["stream"] = None
            return function(*arguments, **options)

    return call
