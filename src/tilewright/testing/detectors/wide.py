"""L4, wide addresses: strides past 32 bits, by sparse mapping on a CPU.

An operand is laid out with one axis gigabytes apart. Where its addresses would lead if they were
cut to 32 bits, in elements or in bytes, signed or not, lies a decoy: other numbers, as valid as the
right ones. A narrow index then gives a wrong result, not a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewright.oracle.tolerances import default_tolerance
from tilewright.testing.detectors.guards import differing
from tilewright.testing.detectors.sparse import untouched_bytes
from tilewright.testing.detectors.subject import (
    Layout,
    Operands,
    Subject,
    Tensors,
    as_subject,
    named,
    turned_round,
)
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

WIDE = Rule("L4", "wide strides")
# Elements: the first passes 2^31 and 2^32 after a few steps, the second at once.
STRIDES = (2**30, 2**32)
# Room before an operand for an address that was cut to a negative number.
_MARGIN_ELEMENTS = 2**31
_HALF, _WHOLE = 2**31, 2**32
# Rows stay on multiples of this many elements, as a vector load wants them.
_ROUNDING = 64
_LARGEST_BYTES = 2**45


@dataclass(frozen=True)
class WideOperand:
    """``view`` has the wide axis; ``decoys`` are elements where cut addresses lead."""

    view: torch.Tensor
    flat: torch.Tensor
    decoys: torch.Tensor


def wide_layout(dim: Sequence[int], axis: int, stride: int) -> tuple[int, ...]:
    """Packed strides (elements), but for ``axis``, which steps by ``stride`` and a bit more.

    The bit more is the room of all other axes, so that no cut address is a right one.
    """
    strides = [0] * len(dim)
    step = 1
    for position in reversed(range(len(dim))):
        if position != axis:
            strides[position] = step
            step *= dim[position]
    strides[axis] = stride + -(-step // _ROUNDING) * _ROUNDING
    return tuple(strides)


def wide_operand(layout: Layout, axis: int, stride: int) -> WideOperand:
    """Zeroed sparse storage of an operand with one wide axis, and where its decoys are.

    Raises:
        MemoryError: if there is no room.
    """
    strides = wide_layout(layout.dim, axis, stride)
    item = layout.dtype.itemsize
    span = 1 + sum((e - 1) * s for e, s in zip(layout.dim, strides, strict=True))
    total = span + 2 * _MARGIN_ELEMENTS
    if total * item > _LARGEST_BYTES:
        raise MemoryError(f"{total * item} bytes of address space are more than a process has")
    flat = untouched_bytes(total * item).view(layout.dtype)
    view = flat.as_strided(layout.dim, strides, _MARGIN_ELEMENTS)
    offsets = torch.zeros(layout.dim, dtype=torch.int64)
    for position, (extent, step) in enumerate(zip(layout.dim, strides, strict=True)):
        shape = [1] * len(layout.dim)
        shape[position] = extent
        offsets = offsets + (torch.arange(extent) * step).reshape(shape)
    right = offsets.flatten()
    cut = [_signed(right), right % _WHOLE, _signed(right * item) // item]
    cut.append((right * item) % _WHOLE // item)
    decoys = torch.unique(torch.cat(cut))
    decoys = decoys[~torch.isin(decoys, right)]
    inside = (decoys >= -_MARGIN_ELEMENTS) & (decoys < span + _MARGIN_ELEMENTS)
    return WideOperand(view, flat, decoys[inside] + _MARGIN_ELEMENTS)


def _signed(value: torch.Tensor) -> torch.Tensor:
    return (value + _HALF) % _WHOLE - _HALF


def wide_strides(
    target: Any,
    operands: Operands,
    names: Sequence[str] | None = None,
    strides: Sequence[int] = STRIDES,
    tolerance: float | None = None,
) -> Verdict:
    """Results are the same with any axis of any operand gigabytes apart (L4), on a CPU.

    Args:
        names: the operands to look at; by default all of two axes or more. Their last axis stays
            as it is. Code that writes is also given wide results, whose decoys it must not touch.
        strides: in elements, about; one after another.
        tolerance: relative to the largest magnitude (or 1); by default twice that of the type,
            since a layout may take another order of sums.
    """
    subject, given = as_subject(target), named(operands)
    if any(tensor.device.type != "cpu" for tensor in given.values()):
        return WIDE.declined("sparse mapping is for operands on a CPU")
    if subject.has_fixed_layout:
        return WIDE.declined("its layout is fixed at declaration; declare it with wide strides")
    expected = subject.call(given)
    seen = 0
    refused: list[str] = []
    try:
        for stride in strides:
            for name, axis in _axes(given, names):
                wide = wide_operand(Layout.of(given[name]), axis, stride)
                wide.flat[wide.decoys] = _decoy_values(given[name], len(wide.decoys))
                wide.view.copy_(given[name])
                what = f"{name} with a stride of {wide.view.stride(axis)} on axis {axis}"
                changed = {**given, name: wide.view}
                problem = _compare(subject, changed, expected, tolerance, refused, what)
                if problem:
                    return WIDE.broken(f"{what}: {problem}")
                seen += 1
            problem, count = _wide_results(subject, given, expected, stride, tolerance)
            seen += count
            if problem:
                return WIDE.broken(problem)
    except MemoryError as error:
        return WIDE.declined(str(error))
    if refused and len(refused) == seen:
        return WIDE.declined(f"wide strides are refused: {refused[0]}")
    return WIDE.held(f"{seen} layouts, up to {max(strides)} elements a step, read no decoy")


def _axes(operands: Tensors, names: Sequence[str] | None) -> list[tuple[str, int]]:
    return [
        (name, axis)
        for name, tensor in operands.items()
        if (tensor.dim() > 1 if names is None else name in names)
        for axis in range(tensor.dim() - 1)
        if tensor.shape[axis] > 1 and 0 not in tensor.stride()
    ]


def _decoy_values(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Valid values of the operand, in another order and other than its own."""
    values = turned_round(tensor)
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        values = values * -0.75 + 0.125
    return values.repeat(-(-count // max(values.numel(), 1)))[:count]


def _compare(
    subject: Subject,
    operands: Tensors,
    expected: Tensors,
    tolerance: float | None,
    refused: list[str],
    what: str,
) -> str | None:
    from tilewright.errors import NotSupportedError

    try:
        results = subject.call(operands)
    except NotSupportedError as error:
        refused.append(f"{what}: {error}")
        return None
    except MemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return different(results, expected, tolerance)


def different(results: Tensors, expected: Tensors, tolerance: float | None = None) -> str | None:
    """How results differ from expected ones by more than a tolerance, or None."""
    from tilewright.errors import OracleError
    from tilewright.oracle.compare import assert_close

    for name, want in expected.items():
        got = results[name]
        if got.shape != want.shape:
            return f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        if got.dtype is want.dtype and not bool(differing(got, want).any()):
            continue
        # An expected value may be a float64 reference: the result's type is what was rounded to.
        tol = 2 * default_tolerance(got.dtype) if tolerance is None else tolerance
        try:
            assert_close(got.double(), want.double(), tol=tol, name=name)
        except OracleError as error:
            return str(error)
    return None


def _wide_results(
    subject: Subject, given: Tensors, expected: Tensors, stride: int, tolerance: float | None
) -> tuple[str | None, int]:
    """Results with a wide axis: right values there, and no decoy written."""
    from tilewright.errors import NotSupportedError

    if subject.declare is None:
        return None, 0
    seen = 0
    for name, axis in _axes(expected, None):
        wide = wide_operand(Layout.of(expected[name]), axis, stride)
        marks = _decoy_values(expected[name], len(wide.decoys)).to(expected[name].dtype)
        wide.flat[wide.decoys] = marks
        results = {k: torch.empty_like(v) for k, v in expected.items()}
        results[name] = wide.view
        what = f"result {name} with a stride of {wide.view.stride(axis)} on axis {axis}"
        try:
            subject.declare(given, results).execute(given, results)
        except NotSupportedError:
            continue
        except Exception as error:
            return f"{what}: {type(error).__name__}: {error}", seen
        problem = different(results, expected, tolerance)
        if problem:
            return f"{what}: {problem}", seen
        if bool(differing(wide.flat[wide.decoys], marks).any()):
            return f"{what}: bytes at an address cut to 32 bits were written", seen
        seen += 1
    return None, seen


assert_wide_strides = asserting(wide_strides)
