"""Plain calls in one flat function: the same launches and the same refusals as the binder's way."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch_samples.norm import (
    ROWS,
    WIDTH,
    fresh,
    norm_graph,
    norm_plan,
    operands,
    outcome,
    slots,
)
from torch.testing._internal.two_tensor import TwoTensor

import tilewright as tw
from tilewright.launch.direct import DirectCalls

pytestmark = pytest.mark.L0

# The fixture takes its place.
is_first = DirectCalls._is_first

STEPS = 300


def test_one_call_fills_and_launches_as_declared(fake_driver: Any, norm: Any) -> None:
    built = norm()
    pack = operands()
    built.execute(pack)
    (first,) = fake_driver.take()
    assert (first.function, first.grid, first.stream) == (0x1000, (5, 1, 1), 1000)
    x, scale, y = (pack[name].data_ptr() for name in ("x", "scale", "y"))
    wanted = struct.pack("<Qi4xQf4xQqQQ", x, 7, y + 8, 0.25, scale, -3, 0, 0)
    assert first.parameters == wanted
    # Again, on another stream, and with other buffers: all by the same function.
    call = built._direct.current
    built.execute(pack, None, 77)
    other = operands()
    built.execute(other)
    again, moved = fake_driver.take()
    assert again.parameters == wanted and again.stream == 77
    assert moved.parameters[:8] == struct.pack("<Q", other["x"].data_ptr())
    assert built._direct.current is call and call(pack, None, None) is True


@pytest.mark.parametrize("stride", [None, (2 * WIDTH, 2)])
def test_a_view_that_is_negated_when_it_is_read_is_refused(
    stride: Any, fake_driver: Any, build: Any, make_kernel: Any
) -> None:
    # Its address and its layout are those of the numbers that it is the negative of.
    graph = norm_graph(stride or ())
    built = build(graph, norm_plan(make_kernel, graph))
    pack = fresh(stride)
    negated = {**pack, "x": torch._neg_view(pack["x"])}
    for warm in range(2):
        for run in (lambda p: built.execute(p), lambda p: built.bind(p).launch()):
            kind, message = outcome(fake_driver, functools.partial(run, negated))
            assert kind == "BindingError" and "give tensor.resolve_neg()" in message, warm
            assert len(outcome(fake_driver, functools.partial(run, pack))) == 1


def test_a_frame_without_a_stream_goes_to_its_graphs_handle(fake_driver: Any, norm: Any) -> None:
    # L8: the given stream, or the handle's, or the current one.
    built, handle, pack = norm(), tw.create_handle("cpu"), operands()
    for _ in range(2):  # Bound by the binder, and by the function made for such packs.
        frame = built.bind(pack, None, handle)
        for set_to, given, expected in ((None, None, 1000), (77, None, 77), (77, 5, 5)):
            handle.stream = set_to
            frame.launch(given)
            assert [launched.stream for launched in fake_driver.take()] == [expected]
    tw.destroy_handle(handle)
    with pytest.raises(tw.BindingError, match="handle: it was destroyed"):
        frame.launch()


def test_a_function_is_made_for_the_second_call(
    fake_driver: Any, build: Any, make_kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = norm_graph()
    built = build(graph, norm_plan(make_kernel, graph))
    monkeypatch.setattr(DirectCalls, "_is_first", is_first)
    pack = operands()
    for number in range(3):
        built.execute(pack)
        built.bind(pack).launch()
        executed, launched = fake_driver.take()
        assert executed == launched
        assert (len(built._direct._functions), len(built._direct._binds)) == (min(number, 1),) * 2
    # Other keys are another function's.
    by_uid = {t.uid: pack[t.name] for t in (*graph.inputs(), *graph.outputs()) if t.name in pack}
    for number in range(2):
        built.execute(by_uid)
        assert len(built._direct._functions) == 1 + number


def test_what_is_plain_runs_the_short_way_and_nothing_else_does(
    fake_driver: Any, build: Any, make_kernel: Any
) -> None:
    graph = norm_graph()
    built = build(graph, norm_plan(make_kernel, graph))
    pack = operands()
    by_tensor = {t: pack[t.name] for t in (*graph.inputs(), *graph.outputs()) if t.name in pack}
    by_uid = {tensor.uid: buffer for tensor, buffer in by_tensor.items()}
    learned = pack | {"scale": torch.nn.Parameter(pack["scale"])}
    plain = [pack, by_tensor, by_uid, dict(reversed(pack.items())), learned]
    for each in plain:
        built.execute(each)
        assert built._direct.current(each, None, None)
        assert built._direct.current(each, torch.empty(0, dtype=torch.uint8), None)
    special = [
        {**pack, None: None},
        {**pack, "unknown": 3},
        {**pack, "x": pack["x"].data_ptr()},
        {**pack, "epsilon": torch.full((1, 1, 1, 1), 0.5)},
        type("Pack", (dict,), {})(pack),
    ]
    for each in special:
        (launched,) = outcome(fake_driver, functools.partial(built.execute, each))
        assert not built._direct.current(each, None, None)
        assert not built._direct.other(each, None, None)
        epsilon = 0.5 if "epsilon" in each else 0.25
        assert launched.parameters[24:28] == struct.pack("<f", epsilon)


@pytest.mark.parametrize("way", ["execute", "bind"])
def test_a_key_that_only_equals_a_uid_is_refused(
    way: str, fake_driver: Any, build: Any, make_kernel: Any
) -> None:
    # True == 1.0 == 1, and a dict finds each under each.
    graph = norm_graph()
    built = build(graph, norm_plan(make_kernel, graph))
    pack = operands()
    tensors = [t for t in (*graph.inputs(), *graph.outputs()) if t.name in pack]
    by_uid: dict[Any, Any] = {tensor.uid: pack[tensor.name] for tensor in tensors}
    assert {0, 1} & set(by_uid)
    call = getattr(built, way)
    for _ in range(2):
        call(by_uid)
        for uid in by_uid:
            for key in (float(uid), bool(uid)):
                if key == uid:
                    other = {key if known == uid else known: by_uid[known] for known in by_uid}
                    with pytest.raises(tw.BindingError, match="expected a graph tensor, a uid"):
                        call(other)


def test_a_missing_operand_is_never_filled_in(fake_driver: Any, norm: Any) -> None:
    # A default dictionary would hand one out.
    built = norm()
    pack = operands()
    built.execute(pack)
    del pack["scale"]
    padded = collections.defaultdict(lambda: torch.zeros(1, WIDTH), {**pack, "other": 3})
    for lacking in (padded, pack):
        with pytest.raises(tw.BindingError, match=r"'scale'.*no buffer"):
            built.execute(lacking)


def test_a_nested_tensor_is_refused_however_often_a_plan_was_called(
    fake_driver: Any, norm: Any
) -> None:
    # It is contiguous and has elements enough, and torch's guard ends the process at one.
    built, pack = norm(), operands()
    nested = {**pack, "x": torch.nested.nested_tensor([pack["x"]])}
    for _ in range(3):
        for run in (lambda p: built.execute(p), lambda p: built.bind(p).launch()):
            kind, message = outcome(fake_driver, functools.partial(run, nested))
            assert kind == "BindingError" and "'x': a nested tensor" in message
            assert len(outcome(fake_driver, functools.partial(run, pack))) == 1


def test_a_tensor_without_memory_is_refused(fake_driver: Any, norm: Any) -> None:
    # Its address is 0: another's that holds tensors, one of a fake mode, and one of zeros.
    built, pack = norm(), operands()
    fake = torch._subclasses.FakeTensorMode().from_tensor(pack["x"])
    zeros = torch._efficientzerotensor((ROWS, WIDTH))
    for other in (TwoTensor(pack["x"], pack["x"]), fake, zeros):
        for _ in range(3):
            for run in (lambda p: built.execute(p), lambda p: built.bind(p).launch()):
                kind, message = outcome(fake_driver, functools.partial(run, {**pack, "x": other}))
                assert kind == "BindingError" and "'x': a null pointer" in message
                assert len(outcome(fake_driver, functools.partial(run, pack))) == 1


def test_a_storage_that_shrank_to_where_another_was_is_refused(
    fake_driver: Any, build: Any, make_kernel: Any
) -> None:
    # L1, L5: the address was looked at before, with more bytes behind it. Allocations of this size
    # are mapped pages of their own, so the next one of as many pages lies where one was freed.
    wide = 1 << 22
    span = (ROWS - 1) * wide + WIDTH
    graph = norm_graph((wide, 1))
    built = build(graph, norm_plan(make_kernel, graph))
    layout = ((ROWS, WIDTH), (wide, 1))
    pack = operands() | {"y": torch.empty(span).as_strided(*layout)}
    landed = 0
    for _ in range(5):
        large = torch.empty(2 * span).as_strided(*layout)
        pack["x"] = torch.empty(span).as_strided(*layout)
        assert len(outcome(fake_driver, functools.partial(built.execute, pack))) == 1
        assert built._direct.current(pack, None, None)
        before = pack.pop("x").data_ptr()
        large.untyped_storage().resize_(4 * span - 4)
        landed += large.data_ptr() == before
        pack["x"] = large
        for run in (lambda: built.execute(pack), lambda: built.bind(pack).launch()):
            kind, message = outcome(fake_driver, run)
            assert kind == "BindingError" and f"owns {4 * span - 4} bytes" in message
    assert landed, "no storage came to lie where another was: this shows nothing"


def test_one_look_tells_whether_operands_are_as_before(fake_driver: Any, norm: Any) -> None:
    built, pack = norm(), operands()
    built.execute(pack)
    names = built._direct.current.__globals__
    are_as_last = names["are_as_last"]
    x, scale, y = pack.values()
    assert are_as_last(x, scale, y) and are_as_last(y.clone(), scale.clone(), x)
    others = [torch._neg_view(x), x.view(torch.int32), x.to("meta"), torch.nn.Parameter(x)]
    others += [x[1:], x.flatten(), x.t(), x[:, ::2], x.t().contiguous().t(), x.numpy(), None]
    for other in others:
        assert not are_as_last(other, scale, y)
        assert not are_as_last(x, scale, other)
    # Parameters in turn with plain tensors: both are known, and no third guard is made.
    learned = pack | {"scale": torch.nn.Parameter(scale)}
    for _ in range(3):
        for given in (pack, learned):
            built.execute(given)
        assert names["are_as_before"] is are_as_last
        assert names["are_as_last"](*learned.values())
    x.t_()
    assert not are_as_last(x, scale, y)


def test_each_operand_is_looked_at_where_torch_has_no_guard(
    fake_driver: Any, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    built, pack = norm(), operands()
    for _ in range(2):
        built.execute(pack)
        assert built._direct.current(pack, None, None) and len(fake_driver.take()) == 2
        for other in (torch._neg_view(pack["x"]), pack["x"].double(), pack["x"][1:]):
            assert not built._direct.current({**pack, "x": other}, None, None)


def changes(draw: random.Random, pack: dict[str, Any]) -> dict[str, Any]:
    """One more state of a pack: other buffers, views, types, or a change in place."""
    name = draw.choice(list(pack))
    buffer, other = pack[name], pack[draw.choice(list(pack))]
    wide = torch.zeros(2 * ROWS * WIDTH + 8)
    skip = -wide.data_ptr() % 16 // 4
    new: list[Callable[[], Any]] = [
        lambda: torch.nested.nested_tensor([buffer, buffer]),
        lambda: operands()[name],
        lambda: wide[skip : skip + buffer.numel()].view(buffer.shape),
        lambda: wide[skip + 1 : skip + 1 + buffer.numel()].view(buffer.shape),
        lambda: wide[: 2 * buffer.numel()].view(-1, 2)[:, 0].view(buffer.shape),
        lambda: buffer.flatten(),
        lambda: buffer[..., : WIDTH - 1],
        lambda: torch.cat([buffer, buffer]),
        lambda: buffer.double(),
        lambda: buffer.t(),
        lambda: other,
        lambda: torch.nn.Parameter(buffer.detach().clone()),
        lambda: torch.empty(0),
        lambda: torch.empty(buffer.shape, device="meta"),
        lambda: buffer.data_ptr(),
        lambda: None,
        lambda: buffer.numpy(),
    ]
    in_place: list[Callable[[], Any]] = [
        lambda: buffer.resize_(1, WIDTH - 1),
        lambda: buffer.resize_(ROWS, WIDTH),
        lambda: buffer.as_strided_((ROWS, WIDTH), (1, ROWS)),
        lambda: buffer.as_strided_((ROWS, WIDTH), (0, 1)),
        lambda: buffer.set_(other),
        lambda: setattr(buffer, "data", buffer.view(torch.int32)),
        lambda: setattr(buffer, "data", buffer.detach().clone().flatten()[: WIDTH - 1]),
        lambda: buffer.untyped_storage().resize_(4 * WIDTH),
    ]
    if type(buffer) is torch.Tensor and draw.random() < 0.4:
        with contextlib.suppress(RuntimeError, TypeError):
            draw.choice(in_place)()
        return pack
    try:
        return {**pack, name: draw.choice(new)()}
    except (RuntimeError, AttributeError, TypeError):
        return pack


@pytest.mark.parametrize("stride", [(), (WIDTH + 2, 1)], ids=["packed", "gaps"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_both_ways_agree_on_whatever_comes(
    fake_driver: Any, build: Any, make_kernel: Any, seed: int, stride: Any
) -> None:
    # L1, L5, L6: views, types, short buffers, aliases, and changes in place between calls.
    graph = norm_graph(stride)
    at = slots(graph)
    general = norm_plan(make_kernel, graph, 2)
    plan = norm_plan(make_kernel, graph, needs_aligned=(at["x"], at["y"]), fallback=general)
    short, long = (build(graph, plan) for _ in range(2))
    long._direct = None
    draw = random.Random(seed)
    seen = {"short": 0, "long": 0, "refused": 0}
    pack = fresh(stride)
    for step in range(STEPS):
        if draw.random() < 0.4:
            pack = fresh(stride)
        for _ in range(draw.choice((0, 0, 1, 1, 2))):
            pack = changes(draw, pack)
        expected = outcome(fake_driver, functools.partial(long.execute, pack))
        found = outcome(fake_driver, functools.partial(short.execute, pack))
        assert found == expected
        if step % 3 == 0:
            # Its frame, too; what it binds is launched once only.
            assert outcome(fake_driver, lambda: short.bind(pack).launch()) == expected  # noqa: B023
            was_short = short._direct.bind(pack, None) is not None
            assert was_short == bool(
                type(found) is list and short._direct.current(pack, None, None)
            )
        is_short = type(found) is list and short._direct.current(pack, None, None)
        seen["refused" if type(found) is tuple else "short" if is_short else "long"] += 1
    assert min(seen.values()) > STEPS // 50, seen
