"""Calls like an earlier one: the same results and the same refusals as calls that are checked."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright import ops
from tilewright.ops import (
    attention_dispatch,
    attention_repeat,
    normalization,
    normalization_call,
    normalization_custom,
    plan_cache,
)
from tilewright.ops.repeats import Repeats

pytestmark = pytest.mark.L0

STEPS = 200
B, H, H_KV, S, KEYS, D, PAGE = 2, 4, 2, 3, 6, 8, 2


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense() -> dict[str, Any]:
    return {"q": randn(B, H, S, D), "k": randn(B, H_KV, KEYS, D), "v": randn(B, H_KV, KEYS, D)}


def packed() -> dict[str, Any]:
    return {
        "q": randn(B * S, H, D),
        "k": randn(B * KEYS, H_KV, D),
        "v": randn(B * KEYS, H_KV, D),
        "cu_seqlens_q": ints(0, 2, B * S),
        "cu_seqlens_kv": ints(0, 5, B * KEYS),
        "max_seqlen_q": 4,
        "max_seqlen_kv": 7,
    }


def paged() -> dict[str, Any]:
    return {
        "q": randn(B, H, S, D),
        "k_pages": randn(8, PAGE, H_KV, D),
        "v_pages": randn(8, PAGE, H_KV, D),
        "page_table": ints([0, 3, 5], [7, 2, 1]),
        "seqlens_kv": ints(6, 3),
    }


def norm() -> dict[str, Any]:
    return {"x": randn(B, S, D), "weight": randn(D)}


SINK = {"sink": lambda: randn(H)}
BIAS = {"bias": lambda: randn(S, KEYS)}
LENGTHS = {"seqlens_q": lambda: ints(3, 1), "seqlens_kv": lambda: ints(6, 2)}
OUT = {"out": lambda: torch.empty(B, H, S, D)}
VALUES: dict[str, tuple[Any, ...]] = {
    "causal": (True, True, 1, None),
    "scale": (0.5, 1, True, 1.0, float("nan")),
    "window": ((1, 2), (1, 2), (True, 2), [1, 2], (None, 0), (None,), 3),
    "alibi": (True, 1),
    "soft_cap": (2.0, 2, "2"),
    "align": ("bottom_right", "top_left", "middle"),
    "return_stats": (True, True, 1),
    "engine": ("aten", "none"),
}
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "sdpa": (ops.sdpa, dense, SINK | BIAS | LENGTHS | OUT),
    "sdpa_decode": (
        ops.sdpa_decode,
        lambda: dense() | {"seqlens_kv": ints(4, 5)},
        SINK | BIAS | OUT,
    ),
    "sdpa_varlen": (
        ops.sdpa_varlen,
        packed,
        SINK | {"out": lambda: torch.empty(B * S, H, D)},
    ),
    "sdpa_paged": (
        ops.sdpa_paged,
        paged,
        SINK | BIAS | OUT | {"v_page_table": lambda: ints([1, 2, 3], [4, 5, 6])},
    ),
    "rms_norm": (ops.rms_norm, norm, {"bias": lambda: randn(D)}),
    "layer_norm": (ops.layer_norm, norm, {"bias": lambda: randn(D)}),
}


def changed(draw: random.Random, value: Any) -> Any:
    """A tensor of other layout, type, kind or place; of other things, something else."""
    if not isinstance(value, torch.Tensor):
        return draw.choice((True, 0, "x", None, 2**70))
    spread = torch.empty(*value.shape, 2, dtype=value.dtype)[..., 1].copy_(value)
    made: list[Callable[[], Any]] = [
        value.clone,
        value.clone,
        lambda: spread,
        lambda: value.transpose(0, -1).contiguous().transpose(0, -1),
        lambda: value[:1].expand(value.shape),
        lambda: value[:1],
        lambda: value[..., :-1],
        lambda: value.unsqueeze(0),
        lambda: value.double() if value.is_floating_point() else value.long(),
        lambda: value.half(),
        lambda: torch.nn.Parameter(value.clone(), requires_grad=value.is_floating_point()),
        lambda: value.clone().requires_grad_(),
        lambda: torch._neg_view(-value),
        lambda: torch.nested.nested_tensor([value, value]),
        lambda: value.to("meta"),
        lambda: value.to_sparse(),
        lambda: value.numpy(),
        lambda: value.tolist(),
        lambda: None,
    ]
    try:
        return draw.choice(made)()
    except RuntimeError:
        return value


def mode(draw: random.Random) -> Any:
    """Mostly none."""
    modes: tuple[Any, ...] = (
        torch.no_grad,
        torch.inference_mode,
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        contextlib.nullcontext,
    )
    return draw.choice(modes)() if draw.random() < 0.3 else contextlib.nullcontext()


def outcome(run: Callable[[], Any]) -> Any:
    """Results and whether each has a gradient to make, or the refusal."""
    try:
        made = run()
    except (tw.TilewrightError, TypeError, ValueError) as error:
        return type(error).__name__, str(error).split("0x")[0]
    made = made if isinstance(made, tuple) else (made,)
    return [(t.detach().clone(), t.requires_grad, t.stride(), t.dtype) for t in made]


def same(left: Any, right: Any) -> bool:
    if type(left) is not list or type(right) is not list:
        return bool(type(left) is type(right) and left == right)
    pairs = zip(left, right, strict=True)
    return all(
        a[1:] == b[1:] and torch.equal(a[0].nan_to_num(7.0), b[0].nan_to_num(7.0)) for a, b in pairs
    )


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_both_ways_agree_on_whatever_comes(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, make, optional = FUNCTIONS[name]
    draw = random.Random(seed)
    torch.manual_seed(seed)
    ways = {"short": 0, "long": 0, "refused": 0}
    run_again = plan_cache.run_again

    def counted(*arguments: Any, **options: Any) -> bool:
        went = run_again(*arguments, **options)
        ways["short"] += went
        return went

    for module in (attention_repeat, normalization_call):
        monkeypatch.setattr(module, "run_again", counted)
    given = make()
    for _ in range(STEPS):
        if draw.random() < 0.4:
            given = make()
            for key in optional:
                if draw.random() < 0.3:
                    given[key] = optional[key]()
            for key in VALUES:
                if "norm" not in name and draw.random() < 0.1:
                    given[key] = draw.choice(VALUES[key])
        call = dict(given)
        for key in draw.sample(list(call), draw.choice((0, 0, 0, 1, 2))):
            call[key] = changed(draw, call[key])
        with mode(draw):
            with monkeypatch.context() as patch:
                for way in ("find", "keep"):
                    patch.setattr(Repeats, way, lambda *_: None)
                expected = outcome(functools.partial(function, **call))
            if draw.random() < 0.05:
                ops.clear_plan_cache()
            before = ways["short"]
            found = outcome(functools.partial(function, **call))
        assert same(found, expected), (call, found, expected)
        ways["refused"] += type(found) is tuple
        ways["long"] += type(found) is list and ways["short"] == before
    assert ways["short"] > STEPS // 10 and min(ways.values()) > 2, ways


def test_what_differs_in_one_thing_alone_is_told_apart() -> None:
    q, k, v, lengths = *dense().values(), ints(3, 1)
    short = ints(2, 1)
    for _ in range(3):
        # Of one shape, but in another place.
        rows = ops.sdpa(q, k, v, seqlens_q=short)
        keys = ops.sdpa(q, k, v, seqlens_kv=short)
        assert not rows[0, :, 2:].any() and keys[0, :, 2:].all()
        fewer = ops.sdpa(q, k[:, :, :2], v[:, :, :2], seqlens_kv=short)
        torch.testing.assert_close(keys, fewer)
        # Equal, but of another type.
        made = [ops.sdpa(*(t.to(dtype) for t in (q, k, v))) for dtype in (q.dtype, torch.double)]
        assert [o.dtype for o in made] == [q.dtype, torch.double]
        torch.testing.assert_close(made[0], made[1].float())
        ops.sdpa(q, k, v, window=(1, 2), scale=1.0)
        for wrong in ({"window": (True, 2)}, {"scale": True}):
            with pytest.raises(tw.BindingError, match=f"{next(iter(wrong))}: got"):
                ops.sdpa(q, k, v, **{"window": (1, 2), "scale": 1.0, **wrong})
    # An argument that may change and stay equal to itself is asked each time.
    rows, keys = (t[0].transpose(0, 1).contiguous() for t in (q, k))
    most = torch.tensor(KEYS)
    for _ in range(3):
        most.fill_(KEYS)
        ops.sdpa_varlen(rows, keys, keys, lengths[:1] * 0, lengths[:1] * 0, most, most)
        most.fill_(-1)
        with pytest.raises(tw.BindingError, match="max_seqlen_q: got"):
            ops.sdpa_varlen(rows, keys, keys, lengths[:1] * 0, lengths[:1] * 0, most, most)


def test_gradients_are_made_after_calls_that_made_none() -> None:
    given = dense()
    leaves = [torch.nn.Parameter(given["q"]), given["k"].requires_grad_(), given["v"]]
    for _ in range(3):
        with torch.no_grad():
            for _ in range(3):
                assert not ops.sdpa(*leaves).requires_grad
        assert ops.sdpa(*leaves).requires_grad


def test_a_known_call_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of each function, with new tensors and with parameters.
    for name, (function, make, _) in FUNCTIONS.items():
        first = make()
        expected = function(**first)
        with monkeypatch.context() as patch:
            for module in (attention_dispatch, normalization, normalization_custom):
                for checks in ("attention_forward", "norm_forward"):
                    patch.setattr(module, checks, None, raising=False)
            again = {k: t.clone() if isinstance(t, torch.Tensor) else t for k, t in first.items()}
            assert torch.equal(function(**again), expected), name
            whole = next(key for key in again if again[key].is_floating_point())
            again[whole] = torch.nn.Parameter(again[whole])
            with torch.no_grad():
                for _ in range(2):
                    assert torch.equal(function(**again), expected), name


def test_calls_that_are_remembered_are_bounded() -> None:
    calls: Repeats[int] = Repeats()
    x, y = torch.zeros(2), torch.zeros(3)
    for number in range(3000):
        calls.keep((x, y), (number,), number)
        assert calls.find((x, y), (number,)) == number
    assert len(calls._known) <= 1024 and len(calls._looks) <= 4
    # The same tensor twice: torch's guard never says yes, and is not made again and again.
    calls.keep((x, x), ("twice",), -1)
    looks = set()
    for _ in range(40):
        assert calls.find((x, x), ("twice",)) == -1
        looks.add(calls._looks[0])
    assert len(looks) == 16
