"""The binder's helpers by value, and ranges that touch, cross and miss by one byte."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

import tilewright as tw
from tilewright.launch import binder
from tilewright.launch.binder import Binder
from tilewright.launch.slots import make_slot
from tilewright.launch.workspace import plan_workspace
from tilewright.launch.workspace_binding import workspace_pointer, workspace_view

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")
_uids = itertools.count(100)


def slot(
    dim: Any,
    stride: Any = (),
    *,
    out: bool = False,
    data_type: str = "FLOAT",
    name: str = "",
    alignment: int = 4,
) -> Any:
    tensor = tw.Graph().tensor(
        dim,
        stride,
        data_type=tw.data_type[data_type],
        uid=next(_uids),
        name=name,
        alignment_value=alignment,
    )
    if not stride:
        tensor.set_stride(torch.empty(dim, device="meta").stride())
    return make_slot(tensor, is_output=out)


def test_a_packed_stride_is_what_torch_calls_contiguous() -> None:
    draw = random.Random(1)
    for _ in range(400):
        rank = draw.randint(1, 4)
        dim = tuple(draw.choice((1, 2, 3)) for _ in range(rank))
        stride, step = [0] * rank, 1
        for axis in reversed(range(rank)):
            stride[axis] = step if draw.random() < 0.85 else draw.randint(1, 9)
            step *= dim[axis]
        view = torch.empty(100).as_strided(dim, stride)
        assert binder._is_packed(slot(dim, stride)) == view.is_contiguous(), (dim, stride)
    # Empty tensors are all contiguous for torch, whatever the strides: never taken for packed.
    assert not binder._is_packed(slot((2, 0), (1, 1)))
    assert binder._is_packed(slot((2, 1, 3), (3, 77, 1)))


def test_steps_leave_singleton_axes_out() -> None:
    assert binder._steps(slot((2, 1, 3), (3, 77, 1))) == (3, 1)
    assert binder._steps(slot((1, 1), (5, 6))) == ()


def test_the_byte_range_of_a_slot() -> None:
    found = binder._byte_range(slot((2, 1, 3), (5, 10**18, 2), data_type="HALF"), 100, 120)
    assert (found.start, found.stop, found.dim) == (100, 120, (2, 1, 3))
    assert (found.stride_bytes, found.item_bytes) == ((10, 2, 4), 2)
    flat = binder._byte_range(slot((5,), (1,), data_type="FP4_E2M1"), 100, 103)
    assert (flat.dim, flat.stride_bytes, flat.item_bytes) == ((3,), (1,), 1)


def test_pairs_of_which_one_is_written() -> None:
    slots = [slot((1,)), slot((1,), out=True), slot((1,)), slot((1,), out=True)]
    shared = frozenset({(slots[1].uid, slots[0].uid)})
    assert binder._written_pairs(slots, shared) == (
        (1, 0, True),
        (1, 2, False),
        (1, 3, False),
        (3, 0, False),
        (3, 2, False),
    )


def bound(slots: Any, *buffers: Any, workspace: Any = None, **options: Any) -> Any:
    pack = {entry.uid: buffer for entry, buffer in zip(slots, buffers, strict=True)}
    return Binder(slots, CPU, **options).bind(pack, workspace)


def test_views_and_ranges_of_every_kind_of_buffer() -> None:
    memory = torch.arange(40.0)
    wide = slot((2, 3), (10, 2))
    for buffer in (
        memory[4:].as_strided((2, 3), (10, 2)),
        memory[4:],
        memory[4:30],
        memory.numpy()[4:],
        memory[4:].view(9, 4).t().t(),
        memory[4:].data_ptr(),
    ):
        found = bound([wide], buffer)
        start = memory.data_ptr() + 16
        assert (found.starts, found.stops) == ([start], [start + 4 * 15])
        expected = [[4.0, 6.0, 8.0], [14.0, 16.0, 18.0]]
        assert found.views[0].tolist() == expected
    # One element less than what is reached.
    with pytest.raises(tw.BindingError, match="owns 56 bytes"):
        bound([wide], memory[:14])
    bound([wide], memory[:15])
    codes = slot((3, 3), (3, 1), data_type="FP4_E2M1", alignment=1)
    data = torch.arange(9, dtype=torch.uint8)
    found = bound([codes], data[2:])
    assert found.views[0].tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert found.stops[0] - found.starts[0] == 7
    with pytest.raises(tw.BindingError, match="owns 4 bytes"):
        bound([codes], data[:4])
    # A ragged operand is bound as all that its buffer owns, bytes standing for an 8-bit type.
    for data_type, given in (("FP8_E4M3", torch.uint8), ("FP8_E4M3", torch.float8_e4m3fn)):
        packed = dataclasses.replace(slot((9,), data_type=data_type, alignment=1), is_ragged=True)
        found = bound([packed], torch.full((6,), 0x38, dtype=torch.uint8).view(given)[1:])
        assert found.views[0].dtype is torch.float8_e4m3fn
        assert found.views[0].float().tolist() == [1.0] * 5
        assert found.stops[0] - found.starts[0] == 5
    eight = slot((4,), data_type="FP8_E4M3", alignment=1)
    ones = bound([eight], torch.full((6,), 0x38, dtype=torch.uint8)).views[0]
    assert ones.dtype is torch.float8_e4m3fn and ones.float().tolist() == [1.0] * 4


def test_the_same_layout_is_accepted_again_at_another_address() -> None:
    entry = slot((2, 2), (2, 1))
    plan = Binder([entry], CPU)
    memory = torch.arange(20.0)
    for first in (0, 5, 9):
        found = plan.bind({entry.uid: memory[first : first + 8]})
        assert found.views[0].flatten().tolist() == [first, first + 1.0, first + 2.0, first + 3.0]
        start = memory.data_ptr() + 4 * first
        assert (found.starts, found.stops) == ([start], [start + 16])


@pytest.mark.parametrize("as_pointer", [False, True])
def test_addresses_are_multiples_of_the_alignment(as_pointer: bool) -> None:
    memory = torch.zeros(64)
    offset = (-memory.data_ptr() // 4) % 16
    entry = slot((4,), alignment=32)
    for shift in range(0, 17):
        buffer = memory[offset + shift : offset + shift + 4]
        given = buffer.data_ptr() if as_pointer else buffer
        if (memory.data_ptr() + 4 * (offset + shift)) % 32:
            with pytest.raises(tw.BindingError, match="not a multiple of 32 bytes"):
                bound([entry], given)
        else:
            found = bound([entry], given)
            assert found.starts == [buffer.data_ptr()]
            assert found.views[0].shape == (4,)
            assert found.views[0].data_ptr() == buffer.data_ptr()
    # No byte is touched of nothing, so its address does not matter.
    bound([slot((0,), alignment=32)], memory[offset + 1 : offset + 1])


def test_outputs_may_touch_but_not_share_a_byte() -> None:
    memory = torch.zeros(32)
    slots = [slot((4,)), slot((4,), out=True)]
    for first, second in itertools.product(range(9), range(9)):
        pair = memory[first : first + 4], memory[second : second + 4]
        if abs(first - second) < 4:
            with pytest.raises(tw.BindingError, match="overlap those of input"):
                bound(slots, *pair)
        else:
            bound(slots, *pair)
    # Interleaved views share a range and no byte.
    slots = [slot((4,), (2,)), slot((4,), (2,), out=True)]
    bound(slots, memory[0::2], memory[1::2])
    with pytest.raises(tw.BindingError, match="overlap"):
        bound(slots, memory[0::2], memory[2::2])


def test_in_place_takes_the_same_view_and_no_other() -> None:
    memory = torch.zeros(64)
    cases = [
        (((4,), (1,)), ((4,), (1,)), 0, "FLOAT", True),
        (((4,), (1,)), ((4,), (1,)), 1, "FLOAT", False),
        (((4,), (1,)), ((5,), (1,)), 0, "FLOAT", False),
        (((2, 2), (2, 1)), ((2, 2), (1, 2)), 0, "FLOAT", False),
        (((2, 1), (2, 9)), ((2, 1), (2, 5)), 0, "FLOAT", True),
        (((4,), (1,)), ((4,), (1,)), 0, "INT32", True),
        (((4,), (1,)), ((4,), (1,)), 0, "HALF", False),
    ]
    for given, written, shift, data_type, taken in cases:
        slots = [slot(*given), slot(*written, out=True, data_type=data_type)]
        shared = frozenset({(slots[1].uid, slots[0].uid)})
        target = memory[shift:].view(tw.torch_dtypes.to_torch(tw.data_type[data_type]))
        if taken:
            bound(slots, memory, target, in_place=shared)
        else:
            with pytest.raises(tw.BindingError, match="overlap"):
                bound(slots, memory, target, in_place=shared)
        with pytest.raises(tw.BindingError, match="overlap"):
            bound(slots, memory, target)


def test_a_workspace_lies_apart_and_is_large_enough() -> None:
    memory = torch.zeros(64)
    slots = [slot((4,))]
    operand = memory[16:20]
    for first, count in itertools.product(range(8, 24), (3, 4, 5)):
        given = memory[first : first + count]
        clash = first < 20 and first + 4 > 16
        if count < 4:
            with pytest.raises(tw.BindingError, match="12 bytes given; the plan needs 16"):
                bound(slots, operand, workspace=given, workspace_bytes=16)
        elif clash:
            with pytest.raises(tw.BindingError, match="overlap those of tensor"):
                bound(slots, operand, workspace=given, workspace_bytes=16)
        else:
            bound(slots, operand, workspace=given, workspace_bytes=16)
    for nothing in (None, 0):
        bound(slots, operand, workspace=nothing)
        with pytest.raises(tw.BindingError, match="none given; the plan needs 16"):
            bound(slots, operand, workspace=nothing, workspace_bytes=16)
    # What has no bytes may lie anywhere: a workspace of which none is needed, an empty operand.
    bound(slots, operand, workspace=memory[17:18])
    bound([slot((0,))], memory[17:17], workspace=memory[16:20], workspace_bytes=16)
    with pytest.raises(tw.BindingError, match="on meta"):
        bound(slots, operand, workspace=torch.zeros(9, device="meta"), workspace_bytes=16)


def test_the_view_of_a_workspace() -> None:
    memory = torch.arange(6, dtype=torch.int32)
    assert workspace_view(memory, 0, CPU) is None
    for size in (1, 4, 5, 8, 24):
        for given in (memory, memory.data_ptr(), memory.view(torch.uint8), memory.numpy()):
            found = workspace_view(given, size, CPU)
            assert found.dtype is torch.uint8 and found.numel() == size
            assert found.data_ptr() == memory.data_ptr()
    assert workspace_pointer(memory[1:]) == memory.data_ptr() + 4


def test_pieces_begin_at_multiples_of_256() -> None:
    plan = plan_workspace([("a", 1), ("b", 256), ("c", 257), ("d", 0), ("e", 10)])
    assert [(piece.name, piece.offset_bytes, piece.size_bytes) for piece in plan.pieces] == [
        ("a", 0, 1),
        ("b", 256, 256),
        ("c", 512, 257),
        ("d", 1024, 0),
        ("e", 1024, 10),
    ]
    assert plan.size_bytes == 1034
    assert plan_workspace([]).size_bytes == 0


def test_keys_of_a_pack_in_any_order_and_number() -> None:
    slots = [slot((1,), name="a"), slot((1,), name="b"), slot((1,), name="c", out=True)]
    plan = Binder(slots, CPU)
    buffers = [torch.full((1,), float(i)) for i in range(3)]
    for order in itertools.permutations(range(3)):
        for _ in range(2):
            for keys in ([entry.uid for entry in slots], ["a", "b", "c"]):
                found = plan.bind({keys[i]: buffers[i] for i in order})
                assert [view.item() for view in found.views] == [0.0, 1.0, 2.0]
        with pytest.raises(tw.BindingError, match="no buffer for this"):
            plan.bind({slots[i].uid: buffers[i] for i in order[:2]})
    # The same buffer twice is one; two are refused; both again, as packs are remembered.
    for _ in range(2):
        plan.bind({"a": buffers[0], slots[0].uid: buffers[0], "b": buffers[1], "c": buffers[2]})
        with pytest.raises(tw.BindingError, match="given two buffers"):
            plan.bind({"a": buffers[0], slots[0].uid: buffers[1], "b": buffers[1]})
        plan.bind({None: 1, "b": buffers[1], "z": 3, "c": buffers[2], "a": buffers[0]})
        with pytest.raises(tw.BindingError, match="key True"):
            plan.bind({True: buffers[0]})
        with pytest.raises(tw.BindingError, match=r"key 1\.5"):
            plan.bind({1.5: buffers[0]})


def test_the_order_of_keys_that_need_no_closer_look() -> None:
    graph = tw.Graph(io_data_type="float32")
    source = graph.tensor((1,), name="a")
    out = graph.neg(source).set_output(True).set_name("b")
    unset = out.uid
    graph.validate()
    slots = [make_slot(source, is_output=False), make_slot(out, is_output=True)]
    plan = Binder([*slots, slot((1,), name="c")], CPU)
    assert unset is not None
    assert plan.order_of((out, source, "c")) == (1, 0, 2)
    assert plan.order_of((source.uid, "c")) == (0, -1, 1)
    assert plan.order_of(("c",)) == (-1, -1, 0) and plan.order_of(()) == (-1, -1, -1)
    # One slot twice, at whichever place it is; no slot; a bool, which is no uid.
    for keys in (
        ("a", source),
        ("c", "b", out),
        ("b", "c", "c"),
        ("a", None),
        ("a", 10**6),
        (True,),
    ):
        assert plan.order_of(keys) is None
    # The uid of a tensor of a graph that is not validated can still change.
    other = tw.Graph(io_data_type="float32").tensor((1,), uid=source.uid)
    assert plan.order_of((other,)) is None


def test_layouts_of_two_slots() -> None:
    dense, turned = slot((2, 3), (3, 1)), slot((2, 3), (1, 2))
    plan = Binder(
        [
            dense,
            turned,
            slot((2, 3), (3, 1), data_type="INT32"),
            slot((2, 3), (3, 1), data_type="HALF"),
            slot((6,), (1,)),
            slot((1, 3), (99, 1)),
            slot((1, 3), (3, 1)),
        ],
        CPU,
    )
    assert [plan.is_packed(number) for number in range(7)] == [
        True,
        False,
        True,
        True,
        True,
        True,
        True,
    ]
    same = {(a, b) for a, b in itertools.product(range(7), range(7)) if plan.same_layout(a, b)}
    assert same == {(n, n) for n in range(7)} | {(0, 2), (2, 0), (5, 6), (6, 5)}


def test_a_workspace_is_aligned_where_bytes_of_it_are_needed() -> None:
    memory = torch.zeros(256, dtype=torch.uint8)
    first = -memory.data_ptr() % 64
    slots = [slot((1,))]
    operand = torch.zeros(1)
    bound(slots, operand, workspace=memory[first + 1 :], workspace_bytes=8)
    for shift in (0, 1, 4, 32, 63, 64):
        options = {"workspace": memory[first + shift :], "workspace_alignment_bytes": 64}
        bound(slots, operand, workspace_bytes=0, **options)
        if shift % 64:
            with pytest.raises(tw.BindingError, match="not a multiple of"):
                bound(slots, operand, workspace_bytes=8, **options)
        else:
            bound(slots, operand, workspace_bytes=8, **options)


def test_without_views_only_addresses_and_spans_count() -> None:
    memory = torch.arange(20.0)
    entry = slot((2, 2), (2, 1))
    plan = Binder([entry], CPU, needs_views=False)
    for buffer in (memory[3:7].view(2, 2), memory[3:], memory[3:].data_ptr()):
        found = plan.bind({entry.uid: buffer})
        start = memory.data_ptr() + 12
        assert (found.starts, found.stops) == ([start], [start + 16])
    with pytest.raises(tw.BindingError, match="owns 12 bytes"):
        plan.bind({entry.uid: memory[17:]})


def test_a_name_of_two_tensors_is_no_key_and_a_virtual_one_takes_no_buffer() -> None:
    slots = [slot((1,), name="x"), slot((1,), name="x")]
    one, two = torch.zeros(1), torch.ones(1)
    plan = Binder(slots, CPU, virtual_uids={7: "'mid'"})
    assert plan.bind({slots[0].uid: one, slots[1].uid: two}).views[1].item() == 1.0
    with pytest.raises(tw.BindingError, match="borne by several"):
        plan.bind({"x": one})
    with pytest.raises(tw.BindingError, match="'mid' is virtual"):
        plan.bind({slots[0].uid: one, slots[1].uid: two, 7: one})


def test_a_requiring_gradient_and_a_numpy_array_are_read_alike() -> None:
    entry = slot((3,))
    leaf = torch.arange(3.0).requires_grad_()
    found = bound([entry], leaf).views[0]
    assert not found.requires_grad and found.data_ptr() == leaf.data_ptr()
    assert bound([entry], np.arange(3, dtype=np.float32)).views[0].tolist() == [0.0, 1.0, 2.0]
