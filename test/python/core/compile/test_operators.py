"""Each registered operator by itself: schema, fake, autograd, dispatch with dynamic shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewright import ops

pytestmark = pytest.mark.L0

OPERATORS = torch.ops.tilewright
NAMES = (
    *("sdpa", "sdpa_backward", "rms_norm", "rms_norm_backward", "layer_norm"),
    *("layer_norm_backward", "rope", "linear", "linear_backward", "group_norm"),
    "group_norm_backward",
)
_FORMS = ("dense", "masked", "packed", "packed_token_major", "paged")


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def attention_arguments(form: str, generator: torch.Generator) -> dict[str, Any]:
    """Every argument of ``tilewright::sdpa`` but the last, in the operator's order."""
    tensors: dict[str, Any] = dict.fromkeys(
        ("q", "k", "v", "bias", "sink", "seed", "offset", "seqlens_q", "seqlens_kv")
    )
    tensors |= dict.fromkeys(("cu_q", "cu_kv", "k_table", "v_table"))
    options: dict[str, Any] = {"scale": None, "causal": True, "align": "top_left"}
    options |= {"left": 3, "right": None, "alibi": False, "soft_cap": None, "dropout_p": 0.0}
    options |= {"deterministic": False, "max_q": None, "max_kv": None, "token_major": False}
    if form.startswith("packed"):
        tensors |= {"q": draw(generator, 5, 4, 8)}
        tensors |= {name: draw(generator, 7, 2, 8) for name in ("k", "v")}
        tensors |= {"cu_q": integers(0, 2, 5).view(3, 1, 1, 1)}
        tensors |= {"cu_kv": integers(0, 4, 7).view(3, 1, 1, 1)}
        options |= {"max_q": 3, "max_kv": 4, "token_major": form.endswith("token_major")}
        return tensors | options | {"engine": None}
    tensors |= {"q": draw(generator, 2, 5, 4, 8).transpose(1, 2)}
    tensors |= {name: draw(generator, 2, 2, 7, 8) for name in ("k", "v")}
    if form == "masked":
        tensors |= {"bias": draw(generator, 1, 4, 5, 7), "sink": draw(generator, 1, 4, 1, 1)}
        tensors |= {"seed": integers(5).view(1, 1, 1, 1), "offset": integers(7).view(1, 1, 1, 1)}
        tensors |= {"seqlens_q": integers(5, 3).view(2, 1, 1, 1)}
        tensors |= {"seqlens_kv": integers(4, 7).view(2, 1, 1, 1)}
        options |= {"align": "bottom_right", "alibi": True, "soft_cap": 4.0, "dropout_p": 0.25}
    if form == "paged":
        tensors |= {name: draw(generator, 6, 4, 2, 8).transpose(1, 2) for name in ("k", "v")}
        table = torch.tensor([[3, 1], [0, 5]], dtype=torch.int32).view(2, 1, 2, 1)
        tensors |= {"k_table": table, "v_table": table.flip(0)}
        tensors |= {"seqlens_q": integers(5, 5).view(2, 1, 1, 1)}
        tensors |= {"seqlens_kv": integers(6, 8).view(2, 1, 1, 1)}
        options |= {"max_kv": 8}
    return tensors | options | {"engine": None}


def require_grad(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    changed = {
        name: arguments[name].detach().clone().requires_grad_()
        for name in names
        if arguments[name] is not None
    }
    return arguments | changed


def check(operator: Any, arguments: Any) -> None:
    given = tuple(arguments.values()) if isinstance(arguments, dict) else tuple(arguments)
    outcome = torch.library.opcheck(operator.default, given)
    assert set(outcome.values()) == {"SUCCESS"}


def test_these_operators_are_registered() -> None:
    assert ops.sdpa is not None
    registered = {
        schema.name.removeprefix("tilewright::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("tilewright::")
    }
    assert registered >= set(NAMES)


@pytest.mark.parametrize(
    ("form", "training"),
    [(form, training) for form in _FORMS for training in (False, True)][:-1],
)
def test_attention(form: str, training: bool) -> None:
    arguments = attention_arguments(form, torch.Generator().manual_seed(1))
    if training:
        arguments = require_grad(arguments, "q", "k", "v", "bias", "sink")
    check(OPERATORS.sdpa, arguments | {"want_stats": training})


@pytest.mark.parametrize("form", [form for form in _FORMS if form != "paged"])
@pytest.mark.parametrize("of_stats", [False, True])
def test_attention_backward(form: str, of_stats: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    arguments = attention_arguments(form, generator)
    o, stats = OPERATORS.sdpa(*arguments.values(), True)
    do = draw(generator, *o.shape)
    dstats = torch.where(torch.isfinite(stats), draw(generator, *stats.shape), 0.0)
    check(
        OPERATORS.sdpa_backward,
        (
            *(do, dstats if of_stats else None, o, stats, *arguments.values()),
            *(arguments["bias"] is not None, arguments["sink"] is not None),
        ),
    )


@pytest.mark.parametrize("with_parameters", [False, True])
def test_norms(with_parameters: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = draw(generator, 2, 8, 3).transpose(1, 2)
    weight, bias = draw(generator, 8), draw(generator, 8)
    if not with_parameters:
        weight = bias = None
    for name, offset, count in (("rms_norm", 1.0, 1), ("layer_norm", 0.0, 2)):
        forward, backward = getattr(OPERATORS, name), getattr(OPERATORS, f"{name}_backward")
        check(forward, (x, weight, bias, 1e-5, offset, False, None))
        y, *statistics = forward(x, weight, bias, 1e-5, offset, True, None)
        assert len(statistics) == count
        grad = draw(generator, *y.shape)
        check(backward, (grad, x, weight, bias, *statistics, 1e-5, offset, None))
        leaves = [t if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
        check(forward, (*leaves, 1e-5, offset, True, None))


@pytest.mark.parametrize("with_parameters", [False, True])
def test_group_norm(with_parameters: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    x = draw(generator, 2, 3, 4).transpose(1, 2)
    weight, bias = (draw(generator, 4) if with_parameters else None for _ in range(2))
    check(OPERATORS.group_norm, (x, weight, bias, 2, 1e-5, False, None))
    y, *statistics = OPERATORS.group_norm(x, weight, bias, 2, 1e-5, True, None)
    grad = draw(generator, *y.shape)
    check(OPERATORS.group_norm_backward, (grad, x, weight, bias, *statistics, 2, 1e-5, None))
    leaves = [t if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    check(OPERATORS.group_norm, (*leaves, 2, 1e-5, True, None))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("is_backward", [False, True])
def test_rope(interleaved: bool, is_backward: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    x = draw(generator, 2, 5, 3, 8).transpose(1, 2)
    cos, sin = draw(generator, 1, 1, 5, 3), draw(generator, 1, 1, 5, 3)
    check(OPERATORS.rope, (x, cos, sin, interleaved, 6, is_backward, None))
    leaf = x.clone().requires_grad_()
    check(OPERATORS.rope, (leaf, cos, sin, interleaved, 6, is_backward, None))


@pytest.mark.parametrize(("activation", "glu"), [(None, None), ("gelu", None), ("silu", "halves")])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(activation: str | None, glu: str | None, biased: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = draw(generator, 3, 4), draw(generator, 6, 4)
    bias = draw(generator, 6) if biased else None
    check(OPERATORS.linear, (x, weight, bias, activation, glu, False, None))
    y, product = OPERATORS.linear(x, weight, bias, activation, glu, True, None)
    grad = draw(generator, *y.shape)
    backward = (grad, x, weight, bias, product, activation, glu, None)
    check(OPERATORS.linear_backward, backward)
    leaves = [t if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    check(OPERATORS.linear, (*leaves, activation, glu, True, None))


def test_a_wrong_fake_is_found() -> None:
    """The check itself: a fake that forgets strides fails it."""
    x = torch.zeros(2, 3, 4).transpose(1, 2)
    wrong = torch.library.custom_op(
        "tilewright_test::wrong",
        lambda x: torch.empty_like(x).zero_(),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    wrong.register_fake(lambda x: x.new_empty(x.shape))
    with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
        torch.library.opcheck(wrong, (x,))
