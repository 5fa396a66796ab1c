"""What ops.sdpa and its relatives refuse, naming the argument, before anything is written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright import ops

pytestmark = pytest.mark.L0


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("rank", {"q": torch.zeros(2, 3, 8)}, "q: shape (2, 3, 8) has 3 axes; expected 4"),
    ("no tensor", {"k": [1]}, "k: got list; expected a torch tensor"),
    ("integer", {"q": torch.zeros(1, 2, 3, 8, dtype=torch.int32)}, "q: data type torch.int32"),
    ("heads", {"q": torch.zeros(1, 3, 3, 8)}, "q: 3 heads with 2 KV heads"),
    ("no query head", {"q": torch.zeros(1, 0, 3, 8)}, "q: 0 heads with 2 KV heads"),
    ("no value", {"v": torch.zeros(1, 2, 3, 0)}, "v: its last axis, the head size, is 0"),
    ("head size", {"k": torch.zeros(1, 2, 3, 4)}, "k: shape (1, 2, 3, 4); expected (1, 2, 3, 8)"),
    ("keys", {"v": torch.zeros(1, 2, 4, 8)}, "v: shape (1, 2, 4, 8); expected (1, 2, 3, 8)"),
    ("align", {"align": "middle"}, "align: got 'middle'; accepted are 'top_left', 'bottom_right'"),
    ("window", {"window": (-1, 0)}, "window: got (-1, 0)"),
    ("dropout", {"dropout_p": 1.0}, "dropout_p: got 1.0; expected 0 <= dropout_p < 1"),
    ("cap", {"soft_cap": 0.0}, "soft_cap: got 0.0; expected a finite number > 0"),
    (
        "no cap",
        {"soft_cap": math.inf},
        "soft_cap: got inf; expected a finite number that float32 holds",
    ),
    ("window of flags", {"window": (True, 0)}, "window: got (True, 0)"),
    ("window type", {"window": 3}, "window: got 3; expected (left, right)"),
    ("scale type", {"scale": "a"}, "scale: got 'a'; expected a number"),
    ("huge scale", {"scale": 1e300}, "scale: got 1e+300; expected a finite number that float32"),
    ("scale no float holds", {"scale": 10**400}, "expected a finite number that float32 holds"),
    ("dropout type", {"dropout_p": None}, "dropout_p: got None; expected a number"),
    ("scale", {"scale": math.nan}, "scale: got nan; expected a finite number"),
    (
        "mask type",
        {"mask": torch.zeros(3, 3)},
        "mask: data type torch.float32; expected torch.bool",
    ),
    ("mask shape", {"mask": torch.zeros(2, 3, dtype=torch.bool)}, "does not broadcast"),
    ("bias", {"bias": torch.zeros(3, 4)}, "bias: shape (3, 4) does not broadcast to (1, 2, 3, 3)"),
    ("sink", {"sink": torch.zeros(3)}, "sink: shape (3,); expected (2,): one sink a query head"),
    ("lengths", {"seqlens_kv": torch.zeros(2, dtype=torch.int32)}, "seqlens_kv: shape (2,)"),
    ("length type", {"seqlens_q": torch.zeros(1)}, "seqlens_q: data type torch.float32"),
    ("gate", {"gate": torch.zeros(1)}, "gate: shape (1,); expected (1, 2, 3, 8): O's shape"),
    (
        "gate type",
        {"gate": torch.zeros(1, 2, 3, 8, dtype=torch.int32)},
        "gate: data type torch.int32; expected one of",
    ),
    ("seed", {"dropout_p": 0.1, "seed": 1.5}, "seed: got 1.5; expected a 64-bit int"),
    ("flag", {"causal": "bottom_right"}, "causal: got 'bottom_right'; expected True or False"),
    ("flag of a tensor", {"alibi": torch.ones(1)}, "alibi: got tensor([1.]); expected True"),
    ("flag of a number", {"deterministic": 2}, "deterministic: got 2; expected True or False"),
    ("stats", {"return_stats": "log2"}, "return_stats: got 'log2'; expected True or False"),
    ("engine", {"engine": ["aten"]}, "engine: got ['aten']; expected an engine's name, or None"),
    (
        "nested",
        {"q": torch.nested.nested_tensor([torch.zeros(2, 3, 8)])},
        "q: a nested tensor; expected one of one shape",
    ),
    ("device", {"k": torch.zeros(1, 2, 3, 8, device="meta")}, "k: on meta; expected cpu"),
]


@pytest.mark.parametrize(
    ("change", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {name: torch.zeros(1, 2, 3, 8) for name in ("q", "k", "v")} | change
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    with pytest.raises(tw.BindingError) as caught:
        ops.sdpa(q, k, v, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["seed", "offset", "seqlens_q", "seqlens_kv", "cu_q", "cu_kv"])
def test_operands_that_change_before_the_backward_are_found_out(name: str) -> None:
    packed = name.startswith("cu")
    q, k, v = (draw(31 + i, *((6, 1, 8) if packed else (2, 1, 6, 8))) for i in range(3))
    q.requires_grad_()
    if packed:
        changed, kept = torch.tensor([0, 3, 6]), torch.tensor([0, 3, 6])
        prefixes = (changed, kept) if name == "cu_q" else (kept, changed)
        o = ops.sdpa_varlen(q, k, v, *prefixes, 6, 6)
    elif name.startswith("seqlens"):
        changed = torch.tensor([6, 3])
        o = ops.sdpa(q, k, v, **{name: changed})
    else:
        changed = torch.tensor(7)
        o = ops.sdpa(q, k, v, dropout_p=0.5, **{"seed": 1, name: changed})
    changed.sub_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("spoil", ["alias", "engine"])
def test_a_refused_packed_call_leaves_out_as_it_was(spoil: str) -> None:
    q = draw(32, 6, 2, 8)
    kept, prefix = q.clone(), torch.tensor([0, 2, 5])
    out, engine = (q, None) if spoil == "alias" else (torch.ones(6, 2, 8), "hopper")
    before = out.clone()
    with pytest.raises((tw.BindingError, tw.NotSupportedError)):
        ops.sdpa_varlen(q, q, q, prefix, prefix, 3, 3, out=out, engine=engine)
    assert torch.equal(out, before) and torch.equal(q, kept)
    # Rows of no sequence are written all the same.
    ops.sdpa_varlen(q, q, q, prefix, prefix, 3, 3, out=(filled := torch.ones(6, 2, 8)))
    assert torch.equal(filled[5], torch.zeros(2, 8)) and filled[:5].abs().min() > 0


def test_flags_may_be_numpys() -> None:
    q, yes = draw(41, 1, 2, 3, 8), np.bool_(True)
    found = ops.sdpa(q, q, q, causal=yes, return_stats=yes)
    expected = ops.sdpa(q, q, q, causal=True, return_stats=True)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with pytest.raises(tw.BindingError, match="causal: got 'no'"):
        ops.sdpa_decode(q, q, q, torch.tensor([3]), causal="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pages", "page", "named"),
    [(0, 3, "page_table: shape (1, 0)"), (2, 0, "k_pages: shape (2, 0,")],
)
def test_a_paged_call_names_what_has_no_room_for_a_token(pages: int, page: int, named: str) -> None:
    q, kv = torch.zeros(1, 2, 1, 4), torch.zeros(2, page, 2, 4)
    table = torch.zeros(1, pages, dtype=torch.int32)
    with pytest.raises(tw.BindingError) as caught:
        ops.sdpa_paged(q, kv, kv, table, torch.tensor([0]))
    assert named in str(caught.value)


def test_a_paged_call_names_a_sink_that_is_none() -> None:
    q, pages = torch.zeros(1, 2, 1, 4), torch.zeros(2, 3, 2, 4)
    with pytest.raises(tw.BindingError, match="sink: got float; expected a torch tensor"):
        ops.sdpa_paged(q, pages, pages, torch.tensor([[0, 1]]), torch.tensor([5]), sink=0.5)


def test_a_paged_call_declines_every_operand_that_requires_grad() -> None:
    q, pages = torch.zeros(1, 2, 1, 4), torch.zeros(2, 3, 2, 4)
    table, lengths = torch.tensor([[0, 1]]), torch.tensor([5])
    for given in ({"sink": torch.zeros(2)}, {"bias": torch.zeros(1, 2, 1, 6)}):
        for operand in given.values():
            operand.requires_grad_()
        with pytest.raises(tw.NotSupportedError, match="an operand requires grad"):
            ops.sdpa_paged(q, pages, pages, table, lengths, **given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"soft_cap": 1e-40}, "soft_cap: got 1e-40"),
        ({"window": (2**63 - 1, 0)}, "window: got"),
        ({"out": torch.empty(1, 1, 1, 1).expand(1, 2, 5, 8)}, "out: shape .* overlap"),
        ({"out": torch.empty(1, 2, 5, 8, device="meta")}, "out: on meta"),
        ({"out": torch.empty(1, 2, 5, 8, requires_grad=True)}, "out: requires grad"),
        (
            {"out": torch.empty(1, 2, 5, 8, dtype=torch.float8_e4m3fn)},
            "out: data type torch.float8",
        ),
    ],
)
def test_what_an_engine_would_trip_over_is_refused(given: dict[str, Any], named: str) -> None:
    q = torch.ones(1, 2, 5, 8)
    with pytest.raises(tw.BindingError, match=named):
        ops.sdpa(q, q, q, **given)


def test_lengths_that_a_function_needs_are_no_option() -> None:
    q, pages, table = torch.ones(1, 2, 1, 8), torch.ones(2, 4, 2, 8), torch.tensor([[0, 1]])
    none: Any = None
    for _ in range(2):
        with pytest.raises(tw.BindingError, match="seqlens_kv: got NoneType"):
            ops.sdpa_decode(q, q, q, none)
        with pytest.raises(tw.BindingError, match="seqlens_kv: got NoneType"):
            ops.sdpa_paged(q, pages, pages, table, none)


@pytest.mark.parametrize("through", ["dense", "fused", "packed"])
def test_a_second_derivative_is_refused(through: str) -> None:
    # Of a sum, whose own gradient requires none: it is a function of the operands all the same.
    x = draw(34, 1, 2, 4, 8).requires_grad_()
    if through == "packed":
        prefix = torch.tensor([0, 2])
        o = ops.sdpa_varlen(x[0], x[0], x[0], prefix, prefix, 2, 2)
    else:
        o = ops.sdpa(x, x, x, alibi=through == "dense")
    (grad,) = torch.autograd.grad(o.sum(), x, create_graph=True)
    with pytest.raises(tw.NotSupportedError, match="sdpa: a second derivative"):
        torch.autograd.grad(grad.square().sum(), x)
