"""L1, L5, L6, L7: what a call must refuse, and that a refusal leaves every byte as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.graph.shapes import span_elements
from tilewright.testing.detectors.guards import (
    GUARD_BYTES,
    NAN_PATTERN,
    all_bytes,
    changed_names,
    copy_elements,
    differing,
    guard_all,
    guarded,
    views,
)
from tilewright.testing.detectors.subject import (
    Declared,
    Operands,
    Subject,
    Tensors,
    as_subject,
    named,
)
from tilewright.testing.detectors.verdict import Rule, Verdict, asserting

UNTOUCHED = Rule("L1", "untouched on refusal")
BOUND = Rule("L5", "storage bound")
ALIAS = Rule("L6", "alias refusal")
OPTIONAL = Rule("L7", "optional operands")
Errors = tuple[type[BaseException], ...]
# What any code may raise on operands that it does not take. An AssertionError would do for a
# stranger; a crash of the process would not come here.
ANY_ERROR: Errors = (Exception,)


def untouched_on_refusal(
    target: Any,
    operands: Operands,
    wrong: Mapping[str, Operands] | None = None,
    errors: Errors = ANY_ERROR,
) -> Verdict:
    """Wrong operands are refused before the first write (L1).

    ``wrong`` maps a few words to operands that have no meaning together; without it each operand
    in turn has another data type. Each must raise one of ``errors`` and change no byte.
    """
    subject, given = as_subject(target), named(operands)
    cases = wrong_types(given) if wrong is None else {k: named(v) for k, v in wrong.items()}
    outputs, declared = _prepare(subject, given)
    for what, bad in cases.items():
        problem = _refused(subject, declared, bad, outputs, errors)
        if problem:
            return UNTOUCHED.broken(f"{what}: {problem}")
    return UNTOUCHED.held(f"refused, and every byte left: {'; '.join(cases)}")


def wrong_types(operands: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """For each operand: all of them, with that one in another data type."""
    cases = {}
    for name, tensor in operands.items():
        other = torch.float16 if tensor.dtype is torch.float64 else torch.float64
        cases[f"{name} in {str(other).removeprefix('torch.')}"] = {
            **operands,
            name: tensor.to(other),
        }
    return cases


def storage_bound(target: Any, operands: Operands, errors: Errors = ANY_ERROR) -> Verdict:
    """A buffer that ends one element before the declaration does is refused (L5)."""
    subject, given = as_subject(target), named(operands)
    outputs, declared = _prepare(subject, given)
    if declared is None or not declared.has_declaration:
        return BOUND.declined("it declares nothing: its operands are all that it can be held to")
    for name in (*given, *outputs):
        is_input = name in given
        tensor = given[name] if is_input else outputs[name]
        span = span_elements(tensor.shape, tensor.stride())
        if span < 2:
            continue
        short = tensor.as_strided((span - 1,), (1,))
        bad = {**given, name: short} if is_input else given
        results = outputs if is_input else {**outputs, name: short}
        problem = _refused(subject, declared, bad, results, errors)
        if problem:
            return BOUND.broken(f"{name}, one element short of its declaration: {problem}")
    return BOUND.held(f"{len(given) + len(outputs)} buffers, each one element short, refused")


def alias_refusal(target: Any, operands: Operands, errors: Errors = ANY_ERROR) -> Verdict:
    """A result that partly overlaps an operand or another result is refused (L6).

    Disjoint slices of one allocation must be taken, and give the same.
    """
    subject, given = as_subject(target), named(operands)
    outputs, declared = _prepare(subject, given)
    if declared is None:
        return ALIAS.declined("it returns its results, which alias nothing of the caller's")
    count = 0
    for name, result in outputs.items():
        others = {**given, **{k: v for k, v in outputs.items() if k != name}}
        for other, tensor in others.items():
            shared = _overlapping(result, tensor)
            if shared is None:
                continue
            count += 1
            is_input = other in given
            bad = {**given, other: shared[1]} if is_input else given
            results = {**outputs, name: shared[0]}
            if not is_input:
                results[other] = shared[1]
            problem = _refused(subject, declared, bad, results, errors)
            if problem:
                return ALIAS.broken(f"{name} overlapping {other}: {problem}")
    problem = _disjoint_slices(subject, given, outputs)
    if problem:
        return ALIAS.broken(problem)
    return ALIAS.held(f"{count} overlaps refused, disjoint slices of one allocation taken")


def optional_operands(target: Any, operands: Operands, errors: Errors = ANY_ERROR) -> Verdict:
    """Presence is decided at declaration (L7).

    A missing operand or result is refused, and so is a buffer for a tensor that is virtual.
    """
    subject, given = as_subject(target), named(operands)
    outputs, declared = _prepare(subject, given)
    if declared is None or not declared.has_declaration:
        return OPTIONAL.declined("it declares nothing: its signature says what is optional")
    for name in (*given, *outputs):
        fewer = {k: v for k, v in given.items() if k != name}
        results = {k: v for k, v in outputs.items() if k != name}
        problem = _refused(subject, declared, fewer, results, errors)
        if problem:
            return OPTIONAL.broken(f"without {name}: {problem}")
    for key in declared.virtual:
        extra = {**given, str(key): torch.zeros(1)}
        problem = _refused(subject, declared, extra, outputs, errors)
        if problem:
            return OPTIONAL.broken(f"a buffer for virtual tensor {key}: {problem}")
    return OPTIONAL.held(f"refused without each of {', '.join((*given, *outputs))}")


def _prepare(
    subject: Subject, operands: Tensors
) -> tuple[dict[str, torch.Tensor], Declared | None]:
    if subject.declare is None:
        return {}, None
    layouts = subject.layouts(operands)
    outputs = {name: guarded(layout, NAN_PATTERN).view for name, layout in layouts.items()}
    return outputs, subject.declare(operands, outputs)


def _refused(
    subject: Subject,
    declared: Declared | None,
    operands: Tensors,
    outputs: Tensors,
    errors: Errors,
) -> str | None:
    """None if the call raised one of ``errors`` and changed nothing; else what it did."""
    buffers = {**operands, **{f"result {name}": result for name, result in outputs.items()}}
    before = {name: all_bytes(tensor) for name, tensor in buffers.items()}
    message = None
    try:
        if declared is None:
            subject.call(operands)
        else:
            declared.execute(operands, outputs)
    except errors as error:
        message = f"{type(error).__name__}: {error}"
    changed = changed_names(before, buffers)
    for name in changed:
        # The same memory again, for the next case.
        whole = torch.empty(0, dtype=torch.uint8, device=buffers[name].device)
        whole.set_(buffers[name].untyped_storage()).copy_(before[name])
    if message is None:
        return "it was accepted"
    if changed:
        return f"refused only after {', '.join(changed)} had been written ({message})"
    return None


def _overlapping(
    result: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Copies of both in one allocation, the result starting one element into the other."""
    size = result.element_size()
    if 0 in other.stride() or other.numel() < 2 or other.element_size() < size:
        return None
    spans = [span_elements(t.shape, t.stride()) * t.element_size() for t in (result, other)]
    raw = torch.zeros(sum(spans) + 64, dtype=torch.uint8, device=result.device)
    base = raw[: spans[1]].view(other.dtype).as_strided(other.shape, other.stride())
    base.copy_(other)
    start = other.element_size()
    shifted = raw[start : start + spans[0]].view(result.dtype)
    return shifted.as_strided(result.shape, result.stride()), base


def _disjoint_slices(subject: Subject, operands: Tensors, outputs: Tensors) -> str | None:
    everything = {**operands, **outputs}
    spans = {
        name: -(-span_elements(t.shape, t.stride()) * t.element_size() // GUARD_BYTES) * GUARD_BYTES
        for name, t in everything.items()
    }
    first = next(iter(everything.values()))
    raw = torch.zeros(sum(spans.values()), dtype=torch.uint8, device=first.device)
    placed: dict[str, torch.Tensor] = {}
    start = 0
    for name, tensor in everything.items():
        used = span_elements(tensor.shape, tensor.stride()) * tensor.element_size()
        flat = raw[start : start + used].view(tensor.dtype)
        placed[name] = flat.as_strided(tensor.shape, tensor.stride())
        start += spans[name]
        if name in operands:
            copy_elements(placed[name], tensor)
    inputs = {name: placed[name] for name in operands}
    results = {name: placed[name] for name in outputs}
    expected = subject.call(views(guard_all(operands, NAN_PATTERN)))
    try:
        if subject.declare is not None:
            subject.declare(inputs, results).execute(inputs, results)
    except Exception as error:
        return f"disjoint slices of one allocation were refused: {error}"
    for name, result in results.items():
        if bool(differing(result, expected[name]).any()):
            return f"{name}: another result where all operands are slices of one allocation"
    return None


assert_untouched_on_refusal = asserting(untouched_on_refusal)
assert_storage_bound = asserting(storage_bound)
assert_alias_refusal = asserting(alias_refusal)
assert_optional_operands = asserting(optional_operands)
