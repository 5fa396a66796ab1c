"""What reaches ``ops.sdpa`` for each mask: the cheapest words that say the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers", exc_type=ModuleNotFoundError)

from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from tilewright import ops
from tilewright.errors import BindingError
from tilewright.integrations import transformers as integration

pytestmark = pytest.mark.L0

CAUSAL = masking_utils.causal_mask_function
FULL = masking_utils.bidirectional_mask_function
HEADS, WIDTH = 2, 8


class Module(torch.nn.Module):
    """What the attention function is called with as the layer."""

    is_causal = True


def padding(*lengths: int, size: int, left: bool = False) -> torch.Tensor:
    columns = torch.arange(size)
    if left:
        return torch.stack([columns >= size - length for length in lengths])
    return torch.stack([columns < length for length in lengths])


def attend(
    monkeypatch: pytest.MonkeyPatch,
    mask: torch.Tensor | None,
    rows: int,
    keys: int,
    *,
    batch: int = 2,
    **arguments: Any,
) -> dict[str, Any]:
    """The arguments that one call of the attention function passes to ``ops.sdpa``.

    The result is also held to that of the mask spelled out, given as it is.
    """
    generator = torch.Generator().manual_seed(rows * 100 + keys)
    q = torch.randn(batch, HEADS, rows, WIDTH, generator=generator)
    k, v = (torch.randn(batch, HEADS, keys, WIDTH, generator=generator) for _ in range(2))
    seen: list[dict[str, Any]] = []
    real = ops.sdpa

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
        seen.append({"keys": k.shape[2], **given})
        return real(q, k, v, **given)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "sdpa", spy)
        out, weights = integration.attention_forward(Module(), q, k, v, mask, **arguments)
    assert weights is None and len(seen) == 1
    assert out.shape == (batch, rows, HEADS, WIDTH) and out.is_contiguous()
    if mask is not None and mask.dtype is torch.bool:
        plain = real(q, k, v, mask=mask.clone()[..., :keys])
        torch.testing.assert_close(out.transpose(1, 2), plain, atol=1e-6, rtol=1e-5)
    absent = {"scale": None, "soft_cap": None, "sink": None, "dropout_p": 0.0}
    assert {name: seen[0].pop(name) for name in absent} == absent
    return seen[0]


def make_mask(function: Callable[..., Any], rows: int, keys: int, **more: Any) -> Any:
    more.setdefault("batch_size", 2)
    return integration.attention_mask(q_length=rows, kv_length=keys, mask_function=function, **more)


def test_register_sets_both_functions_under_one_name() -> None:
    integration.register()
    integration.register("another_name")
    for name in (integration.NAME, "another_name"):
        assert AttentionInterface()[name] is integration.attention_forward
        assert AttentionMaskInterface()[name] is integration.attention_mask


def test_no_mask_and_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_mask(CAUSAL, 5, 5) is None
    assert attend(monkeypatch, None, 5, 5) == {"causal": True, "keys": 5}


def test_no_mask_and_not_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_mask(FULL, 5, 7, allow_is_causal_skip=False, allow_is_bidirectional_skip=True) is (
        None
    )
    assert attend(monkeypatch, None, 5, 7, is_causal=False) == {"keys": 7}


def test_one_row_sees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_mask(CAUSAL, 1, 7, q_offset=6) is None
    assert attend(monkeypatch, None, 1, 7) == {"keys": 7}


def test_an_empty_static_cache_is_cut_to_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_mask(CAUSAL, 4, 9) is None
    assert attend(monkeypatch, None, 4, 9) == {"causal": True, "keys": 4}


def test_tokens_after_a_cache_are_causal_from_the_bottom(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = make_mask(CAUSAL, 3, 8, q_offset=5)
    assert attend(monkeypatch, mask, 3, 8) == {
        "causal": True,
        "align": "bottom_right",
        "keys": 8,
    }


@pytest.mark.parametrize("function", [CAUSAL, FULL], ids=["causal", "full"])
def test_padding_on_the_right_becomes_lengths(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = make_mask(
        function, 6, 6, attention_mask=padding(6, 2, size=6), allow_is_causal_skip=False
    )
    given = attend(monkeypatch, mask, 6, 6)
    assert given.pop("seqlens_kv").tolist() == [6, 2]
    causal = {"causal": True} if function is CAUSAL else {}
    assert given == {"align": "top_left", "keys": 6, **causal}


@pytest.mark.parametrize("function", [CAUSAL, FULL], ids=["causal", "full"])
def test_padding_on_the_left_stays_a_mask(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = make_mask(
        function, 6, 6, attention_mask=padding(6, 2, size=6, left=True), allow_is_causal_skip=False
    )
    given = attend(monkeypatch, mask, 6, 6)
    assert given.pop("mask").shape == (2, 1, 6, 6)
    assert given == {"keys": 6}


def test_padding_after_a_cache_stays_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths would move the diagonal of a bottom-right alignment."""
    mask = make_mask(CAUSAL, 3, 8, q_offset=5, attention_mask=padding(8, 6, size=8))
    assert "mask" in attend(monkeypatch, mask, 3, 8)


def test_a_padding_mask_that_is_shorter_than_a_static_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = make_mask(CAUSAL, 4, 9, attention_mask=padding(4, 3, size=4))
    given = attend(monkeypatch, mask, 4, 9)
    assert given["seqlens_kv"].tolist() == [4, 3]


def test_a_causal_window(monkeypatch: pytest.MonkeyPatch) -> None:
    function = masking_utils.sliding_window_causal_mask_function(3)
    mask = make_mask(function, 7, 7, local_size=3)
    assert mask.sum(-1).unique().tolist() == [1, 2, 3]
    assert attend(monkeypatch, mask, 7, 7) == {
        "causal": True,
        "align": "top_left",
        "window": (2, None),
        "keys": 7,
    }


def test_a_window_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    function = masking_utils.sliding_window_bidirectional_mask_function(2)
    mask = make_mask(function, 7, 7, local_size=2, allow_is_causal_skip=False)
    assert mask.sum(-1).max() == 5
    assert attend(monkeypatch, mask, 7, 7) == {"align": "top_left", "window": (2, 2), "keys": 7}


def test_a_chunked_pattern_stays_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    function = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    mask = make_mask(function, 7, 7, local_size=3)
    assert "mask" in attend(monkeypatch, mask, 7, 7)


def test_a_pattern_with_an_overlay_stays_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_two(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv < 2

    function = masking_utils.or_masks(CAUSAL, first_two)
    mask = make_mask(function, 7, 7, allow_is_causal_skip=False)
    assert "mask" in attend(monkeypatch, mask, 7, 7)


def test_the_union_of_a_window_and_a_causal_pattern_stays_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = masking_utils.or_masks(masking_utils.sliding_window_overlay(2), CAUSAL)
    mask = make_mask(function, 7, 7, local_size=2)
    assert mask.sum() > 28
    assert "mask" in attend(monkeypatch, mask, 7, 7)


def sliding_window_overlay(sliding_window: int) -> Callable[..., Any]:
    """Has the name and the closure of the function in Transformers, and another meaning."""

    def inner_mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv > q - 2 * sliding_window

    return inner_mask


def test_a_window_of_a_stranger_stays_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    function = masking_utils.and_masks(sliding_window_overlay(2), CAUSAL)
    mask = make_mask(function, 7, 7, local_size=2)
    assert "mask" in attend(monkeypatch, mask, 7, 7)


def test_a_static_cache_that_is_partly_filled_stays_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mask = make_mask(CAUSAL, 3, 12, q_offset=5)
    assert "mask" in attend(monkeypatch, mask, 3, 12)


def test_a_window_in_both_directions_after_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    function = masking_utils.sliding_window_bidirectional_mask_function(2)
    mask = make_mask(function, 3, 8, q_offset=5, local_size=2, allow_is_causal_skip=False)
    assert attend(monkeypatch, mask, 3, 8) == {"align": "bottom_right", "window": (2, 2), "keys": 8}


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_changed_in_place_is_passed_on(
    inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode(inference):
        mask = make_mask(CAUSAL, 3, 8, q_offset=5, batch_size=1)
        assert "mask" not in attend(monkeypatch, mask, 3, 8, batch=1)
        mask[0, 0, 0, 0] = False
        given = attend(monkeypatch, mask, 3, 8, batch=1)
    assert "mask" in given and "causal" not in given


@pytest.mark.parametrize("function", [CAUSAL, FULL], ids=["causal", "full"])
def test_inference_mode_keeps_the_lengths(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.inference_mode():
        present = padding(6, 2, size=6)
        mask = make_mask(function, 6, 6, attention_mask=present, allow_is_causal_skip=False)
        given = attend(monkeypatch, mask, 6, 6)
    assert given["seqlens_kv"].tolist() == [6, 2]


def test_a_slice_of_a_mask_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = make_mask(CAUSAL, 3, 8, q_offset=5)
    assert "mask" in attend(monkeypatch, mask[:, :, 1:], 2, 8)


def test_a_mask_for_more_keys_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = make_mask(CAUSAL, 3, 8, q_offset=5)
    given = attend(monkeypatch, mask, 3, 6)
    assert given["mask"].shape[-1] == 6


def test_a_float_mask_is_added_to_the_position_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    mask = torch.randn(2, 1, 4, 4, generator=generator)
    bias = torch.randn(1, HEADS, 4, 4, generator=generator)
    given = attend(monkeypatch, mask, 4, 4, position_bias=bias)
    torch.testing.assert_close(given["bias"], mask + bias)
    assert "causal" not in given and "mask" not in given


def test_a_position_bias_with_an_empty_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = torch.zeros(1, HEADS, 4, 9)
    given = attend(monkeypatch, None, 4, 9, position_bias=bias)
    assert given["bias"].shape == (1, HEADS, 4, 4)
    assert given["causal"] is True


def test_learned_queries_come_once_for_all_sequences() -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, HEADS, 3, WIDTH, generator=generator)
    k, v = (torch.randn(2, HEADS, 5, WIDTH, generator=generator) for _ in range(2))
    out, _ = integration.attention_forward(Module(), q, k, v, None, is_causal=False)
    both, _ = integration.attention_forward(
        Module(), q.repeat(2, 1, 1, 1), k, v, None, is_causal=False
    )
    assert torch.equal(out, both)


def test_an_integer_mask_is_refused() -> None:
    q = torch.zeros(1, 1, 2, WIDTH)
    with pytest.raises(BindingError, match=r"attention_mask: data type torch\.int64; expected"):
        integration.attention_forward(Module(), q, q, q, torch.ones(1, 1, 2, 2, dtype=torch.int64))


def test_a_head_mask_is_refused() -> None:
    q = torch.zeros(1, 1, 2, WIDTH)
    with pytest.raises(BindingError, match="head_mask"):
        integration.attention_forward(Module(), q, q, q, None, head_mask=torch.ones(1))
