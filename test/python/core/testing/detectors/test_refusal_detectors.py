"""L1, L5, L6 and L7: twins that write first, accept too much, or ask too late."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tilewright.errors import BindingError
from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome, Subject
from tilewright.testing.detectors.subject import Declared, Tensors, writing

pytestmark = pytest.mark.L0
Given = dict[str, torch.Tensor]
Out = torch.Tensor | None


def checks_first(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        raise TypeError("float32 only")
    if out is None:
        return a + b
    for other in (a, b):
        low, high = other.data_ptr(), other.data_ptr() + 4 * other.numel()
        if out.data_ptr() < high and low < out.data_ptr() + 4 * out.numel():
            raise ValueError("out overlaps an operand")
    return out.copy_(a + b)


def writes_first(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    out = torch.empty_like(a) if out is None else out
    out.view(-1)[0] = 0.0
    return checks_first(a, b, out)


def accepts_anything(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    out = torch.empty(a.shape) if out is None else out
    return out.copy_(a + b)


def allows_slices_of_nothing(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
    checks_first(a, b, out)
    if out is not None and a.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
        raise ValueError("one allocation")
    return checks_first(a, b, out)


def test_right_code_holds(operands: Given) -> None:
    assert detectors.untouched_on_refusal(checks_first, operands).outcome is Outcome.HELD
    assert detectors.alias_refusal(checks_first, operands).outcome is Outcome.HELD


def test_a_refusal_after_a_write_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match="refused only after result out had been written"):
        detectors.assert_untouched_on_refusal(writes_first, operands)


def test_wrong_operands_that_are_accepted_are_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match="a in float64: it was accepted"):
        detectors.assert_untouched_on_refusal(accepts_anything, operands)


def test_cases_of_the_caller_are_used(operands: Given) -> None:
    wrong = {"b cut": {**operands, "b": operands["b"][:, :3]}}
    verdict = detectors.untouched_on_refusal(checks_first, operands, wrong)
    assert verdict.outcome is Outcome.HELD
    assert "b cut" in verdict.text


def test_another_error_than_the_named_one_is_no_refusal(operands: Given) -> None:
    with pytest.raises(TypeError):
        detectors.untouched_on_refusal(checks_first, operands, errors=(BindingError,))


def test_an_alias_that_is_accepted_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match="out overlapping a: it was accepted"):
        detectors.assert_alias_refusal(accepts_anything, operands)


def test_disjoint_slices_that_are_refused_are_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match="disjoint slices of one allocation were refused"):
        detectors.assert_alias_refusal(allows_slices_of_nothing, operands)


def test_code_that_returns_has_no_alias(operands: Given) -> None:
    assert detectors.alias_refusal(torch.add, operands).outcome is Outcome.DECLINED


def stub(execute: Any) -> Subject:
    """An engine stub with a declaration of a and b (2, 6, 8)."""

    def call(operands: Tensors) -> dict[str, torch.Tensor]:
        return {"out": operands["a"] + operands["b"]}

    declared = Declared(execute, lambda a, r: lambda: execute(a, r), has_declaration=True)
    return Subject("stub", call, lambda operands, results: declared)


def strict(operands: Tensors, results: Tensors) -> None:
    for name, tensor in {**operands, **results}.items():
        if tensor.shape != (2, 6, 8):
            raise BindingError(f"{name}: {tuple(tensor.shape)}")
    results["out"].copy_(operands["a"] + operands["b"])


def believes_declarations(operands: Tensors, results: Tensors) -> None:
    whole = [operands[name].as_strided((2, 6, 8), (48, 8, 1)) for name in ("a", "b")]
    results["out"].copy_(whole[0] + whole[1])


def fills_in(operands: Tensors, results: Tensors) -> None:
    default = torch.zeros(2, 6, 8)
    results["out"].copy_(operands.get("a", default) + operands.get("b", default))


def test_a_strict_stub_holds(operands: Given) -> None:
    assert detectors.storage_bound(stub(strict), operands).outcome is Outcome.HELD
    assert detectors.optional_operands(stub(strict), operands).outcome is Outcome.HELD


def test_a_short_buffer_that_is_accepted_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match=r"a, one element short.*: it was accepted"):
        detectors.assert_storage_bound(stub(believes_declarations), operands)


def test_a_missing_operand_that_is_made_up_is_seen(operands: Given) -> None:
    with pytest.raises(AssertionError, match="without a: it was accepted"):
        detectors.assert_optional_operands(stub(fills_in), operands)


def test_a_buffer_for_a_virtual_tensor_that_is_ignored_is_seen(operands: Given) -> None:
    def ignores(given: Tensors, results: Tensors) -> None:
        strict({name: given[name] for name in ("a", "b")}, results)

    subject = stub(ignores)
    assert subject.declare is not None
    declared = dataclasses.replace(subject.declare(operands, {}), virtual=(7,))
    subject = dataclasses.replace(subject, declare=lambda operands, results: declared)
    with pytest.raises(AssertionError, match="virtual tensor 7: it was accepted"):
        detectors.assert_optional_operands(subject, operands)


def test_code_without_a_declaration_is_declined(operands: Given) -> None:
    subject = Subject("plain", stub(strict).call, writing(strict))
    for detector in (detectors.storage_bound, detectors.optional_operands):
        assert detector(subject, operands).outcome is Outcome.DECLINED
