"""The binder's rules L1, L5, L6, L7: rows G1, B4, B6, B9 and the alias half of B8."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tilewright as tw

pytestmark = pytest.mark.L0


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rules are the host's; on a machine with a GPU graphs would be planned for that.
    monkeypatch.setattr("tilewright.launch.handles.default_device", lambda: torch.device("cpu"))


def scaled_copy(dim: Any, stride: Any = (), dtype: Any = "float32") -> tuple[Any, Any, Any]:
    """A one-operation graph: out = in * 2, both with the given layout."""
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type=dtype)
    source = graph.tensor(dim, stride, name="source")
    out = graph.mul(source, graph.tensor_scalar(2.0)).set_output(True).set_name("out")
    if stride:
        out.set_dim(dim).set_stride(stride)
    graph.build()
    return graph, source, out


def product(dtype: Any = "float32") -> tuple[Any, Any, Any, Any]:
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type=dtype)
    a, b = graph.tensor((4, 4), name="a"), graph.tensor((4, 4), name="b")
    c = graph.matmul(a, b).set_output(True).set_name("c")
    graph.build()
    return graph, a, b, c


def test_a_buffer_is_read_in_the_declared_axis_order_even_when_shapes_agree() -> None:
    # G1: H == S, so a BSHD buffer has the shape of the BHSD declaration. Storage decides.
    batch, heads, length, depth = 2, 3, 3, 4
    stride = (heads * length * depth, depth, heads * depth, 1)
    graph, source, out = scaled_copy((batch, heads, length, depth), stride)
    storage = torch.arange(batch * heads * length * depth, dtype=torch.float32)
    bshd = storage.view(batch, length, heads, depth)
    result = torch.empty_like(bshd)
    graph.execute({source: bshd, out: result})
    assert torch.equal(result, bshd * 2)
    # The same storage under a packed declaration is read in storage order as well.
    packed, source, out = scaled_copy((batch, heads, length, depth))
    other = torch.empty(batch, heads, length, depth)
    packed.execute({source: bshd.transpose(1, 2), out: other})
    assert torch.equal(other.flatten(), storage * 2)


def test_keys_are_tensors_uids_names_and_other_graphs_tensors() -> None:
    graph, a, b, c = product()
    left, right = torch.rand(4, 4), torch.rand(4, 4)
    twin = tw.Graph(io_data_type="float32")
    foreign = twin.tensor((1,), uid=a.uid)
    for pack in (
        {a: left, b: right, c: (out := torch.empty(4, 4))},
        {a.uid: left, b.uid: right, c.uid: out},
        {"a": left, "b": right, "c": out},
        {foreign: left, b: right, c: out},
        {None: object(), 10_000: object(), "no such name": 3, a: left, b: right, c: out},
    ):
        out.fill_(float("nan"))
        graph.execute(pack)
        assert torch.allclose(out, left @ right)


def test_dlpack_numpy_and_bare_pointers_bind() -> None:
    graph, a, b, c = product()
    left = np.arange(16, dtype=np.float32).reshape(4, 4)
    memory = (ctypes.c_float * 16)()
    right = torch.eye(4)
    graph.execute({a: left, b: right.data_ptr(), c: ctypes.addressof(memory)})
    assert list(memory) == list(left.flatten())


class Elsewhere:
    """A DLPack object that says it is on a device for which this PyTorch may not be made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not on this device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


REFUSALS: list[tuple[str, Callable[[torch.Tensor], Any], str]] = [
    ("missing", lambda t: None, "no buffer for this input"),
    ("short", lambda t: t[:3], "owns 48 bytes"),
    ("strided short", lambda t: t.flatten()[::2], "owns 60 bytes"),
    ("wrong type", lambda t: t.double(), "data type DOUBLE; expected FLOAT"),
    ("bytes for floats", lambda t: t.view(torch.uint8), "data type UINT8; expected FLOAT"),
    ("not a buffer", lambda t: [1.0] * 16, "got list"),
    ("a bool", lambda t: True, "got bool"),
    ("negative pointer", lambda t: -8, "pointer -8"),
    ("huge pointer", lambda t: 2**64, "pointer 18446744073709551616"),
    ("null pointer", lambda t: 0, "null pointer"),
    ("misaligned pointer", lambda t: t.data_ptr() + 2, "not a multiple of 4 bytes"),
    ("meta device", lambda t: torch.empty(4, 4, device="meta"), "on meta"),
    ("sparse", lambda t: t.to_sparse(), "layout torch.sparse_coo"),
    ("complex", lambda t: t.to(torch.complex64), "not in the vocabulary"),
    (
        "nested",
        lambda t: torch.nested.nested_tensor([t, t]),
        "a nested tensor; expected one of one",
    ),
    ("of a device that torch lacks", lambda t: Elsewhere(t), "DLPack import failed"),
]


@pytest.mark.parametrize(
    ("spoil", "message"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS]
)
def test_a_refusal_names_the_tensor_and_leaves_every_buffer_untouched(
    spoil: Callable[[torch.Tensor], Any], message: str
) -> None:
    graph, a, b, c = product()
    left, right = torch.ones(4, 4), torch.ones(4, 4)
    out = torch.full((4, 4), 7.0)
    with pytest.raises(tw.BindingError, match="'b'") as caught:
        graph.execute({a: left, b: spoil(right), c: out})
    assert message in str(caught.value)
    assert torch.equal(out, torch.full((4, 4), 7.0))


def test_a_transform_that_hides_the_storage_is_refused_by_name() -> None:
    graph, a, b, c = product()
    square, out = torch.ones(4, 4), torch.full((4, 4), 7.0)

    def call(right: torch.Tensor) -> torch.Tensor:
        graph.execute({a: square, b: right, c: out})
        return right.sum()

    for transform in (torch.func.vmap, torch.func.grad):
        given = square.expand(3, 4, 4) if transform is torch.func.vmap else square
        with pytest.raises(tw.BindingError, match="tensor 'b': a tensor without storage"):
            transform(call)(given)
    assert torch.equal(out, torch.full((4, 4), 7.0))


def test_an_output_may_not_overlap_another_operand() -> None:
    graph, a, b, c = product()
    storage = torch.rand(64)
    left, right = storage[:16].view(4, 4), storage[32:48].view(4, 4)
    for start in (0, 8, 24, 40):
        before = storage.clone()
        with pytest.raises(tw.BindingError, match="overlap those of input"):
            graph.execute({a: left, b: right, c: storage[start : start + 16].view(4, 4)})
        assert torch.equal(storage, before)
    # Disjoint slices of one allocation are fine, also the neighbour of an operand.
    graph.execute({a: left, b: right, c: storage[16:32].view(4, 4)})
    assert torch.allclose(storage[16:32].view(4, 4), left @ right)


def test_interleaved_views_of_one_buffer_do_not_overlap() -> None:
    # Columns of one packed buffer, as dQ, dK, dV of packed projections are.
    graph, source, out = scaled_copy((4, 2), (4, 1))
    packed = torch.arange(16.0).view(4, 4)
    expected = packed[:, :2] * 2
    graph.execute({source: packed[:, :2], out: packed[:, 2:]})
    assert torch.equal(packed[:, 2:], expected)
    with pytest.raises(tw.BindingError, match="overlap"):
        graph.execute({source: packed[:, :2], out: packed[:, 1:3]})


def test_in_place_is_allowed_where_the_operation_is_elementwise() -> None:
    graph, source, out = scaled_copy((8,))
    buffer = torch.arange(8.0)
    graph.execute({source: buffer, out: buffer})
    assert torch.equal(buffer, torch.arange(8.0) * 2)
    shifted = torch.zeros(9)
    with pytest.raises(tw.BindingError, match="overlap"):
        graph.execute({source: shifted[:8], out: shifted[1:]})


def test_in_place_is_refused_where_a_later_operation_reads_the_input() -> None:
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    x = graph.tensor((4,), name="x")
    doubled = graph.add(x, x).set_output(True).set_name("doubled")
    graph.mul(doubled, x).set_output(True).set_name("later")
    graph.build()
    buffer = torch.ones(4)
    with pytest.raises(tw.BindingError, match=r"'doubled'.*overlap"):
        graph.execute({"x": buffer, "doubled": buffer, "later": torch.empty(4)})


def test_optional_operands_agree_with_the_declaration() -> None:
    # L7, B9: a buffer for a tensor that is not an output raises; so does a missing output.
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    x = graph.tensor((2, 8), name="x")
    scale = graph.tensor((1, 8), name="scale")
    y, inv = graph.rmsnorm(tw.norm_forward_phase.TRAINING, x, scale, None, graph.tensor_scalar(0.0))
    y.set_output(True).set_name("y")
    graph.build()
    size = graph.get_workspace_size()
    workspace = torch.empty(size, dtype=torch.uint8)
    pack = {"x": torch.ones(2, 8), "scale": torch.ones(1, 8)}
    with pytest.raises(tw.BindingError, match="no buffer for this output"):
        graph.execute(pack, workspace)
    with pytest.raises(tw.BindingError, match="is virtual and was given a buffer"):
        graph.execute({**pack, y: torch.empty(2, 8), inv: torch.empty(2, 1)}, workspace)
    graph.execute({**pack, y: (out := torch.empty(2, 8))}, workspace)
    assert torch.allclose(out, torch.ones(2, 8))


def two_step() -> tuple[Any, dict[str, torch.Tensor]]:
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    a, b = graph.tensor((4, 4), name="a"), graph.tensor((4, 4), name="b")
    graph.relu(graph.matmul(a, b)).set_output(True).set_name("c")
    graph.build()
    return graph, {"a": torch.rand(4, 4), "b": torch.rand(4, 4), "c": torch.empty(4, 4)}


def test_the_workspace_is_sized_exactly_and_checked() -> None:
    graph, pack = two_step()
    assert graph.get_workspace_size() == 64
    with pytest.raises(tw.BindingError, match="workspace: none given; the plan needs 64"):
        graph.execute(pack)
    with pytest.raises(tw.BindingError, match="63 bytes given; the plan needs 64"):
        graph.execute(pack, torch.empty(63, dtype=torch.uint8))
    guarded = torch.full((64 + 64,), 0xAB, dtype=torch.uint8)
    graph.execute(pack, guarded)
    assert torch.all(guarded[64:] == 0xAB), "nothing beyond the stated size is touched"
    assert torch.allclose(pack["c"], torch.relu(pack["a"] @ pack["b"]))


def test_a_workspace_may_start_where_its_address_is_aligned() -> None:
    graph, pack = two_step()
    memory = bytearray(128)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 4
    # The storage starts at an odd address: where the address is even, the offset in it is odd.
    odd = torch.frombuffer(memory, dtype=torch.uint8, offset=first + 1)
    with pytest.raises(tw.BindingError, match=r"workspace: address .* not a multiple of 4 bytes"):
        graph.execute(pack, odd)
    graph.execute(pack, odd[3:])
    assert torch.allclose(pack["c"], torch.relu(pack["a"] @ pack["b"]))


@pytest.mark.parametrize("shrunk", ["source", "out"])
def test_a_storage_that_shrank_is_refused(shrunk: str) -> None:
    # The tensor still tells its old shape; what lies there is no longer its memory.
    graph, _, _ = scaled_copy((4, 4))
    pack = {"source": torch.ones(4, 4), "out": torch.zeros(4, 4)}
    pack[shrunk].untyped_storage().resize_(60)
    with pytest.raises(tw.BindingError, match=f"'{shrunk}': the buffer owns 60 bytes"):
        graph.execute(pack)
    if shrunk == "source":
        assert torch.equal(pack["out"], torch.zeros(4, 4))


def test_arrays_are_taken_at_their_word() -> None:
    # PyTorch's import ends the process over a negative stride, and forgets that one is read-only.
    graph, source, out = scaled_copy((2, 3))
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    result = torch.zeros(2, 3)
    for backward in (numbers[::-1], numbers[:, ::-1]):
        with pytest.raises(tw.BindingError, match=r"'source': an array with strides .* below 0"):
            graph.execute({source: backward, out: result})
    constant = np.zeros((2, 3), dtype=np.float32)
    constant.setflags(write=False)
    with pytest.raises(tw.BindingError, match="'out': a read-only array"):
        graph.execute({source: numbers, out: constant})
    assert not constant.any() and not result.any()
    graph.execute({source: constant, out: result})
    two, pack = two_step()
    scratch = np.zeros(64, dtype=np.uint8)
    two.execute(pack, scratch)
    scratch.setflags(write=False)
    with pytest.raises(tw.BindingError, match="workspace: a read-only array"):
        two.execute(pack, scratch)


@pytest.mark.parametrize("pack", [None, [torch.ones(4, 4)] * 3, torch.ones(3)])
def test_a_pack_that_is_no_mapping_is_refused(pack: Any) -> None:
    graph = product()[0]
    with pytest.raises(tw.BindingError, match=r"variant pack: got .*; expected a mapping"):
        graph.execute(pack)


def test_handles_that_are_gone_or_none_are_refused() -> None:
    graph, source, out = scaled_copy((4, 4))
    pack = {source: torch.ones(4, 4), out: torch.zeros(4, 4)}
    handle = tw.create_handle("cpu")
    graph.execute(pack, None, handle)
    tw.destroy_handle(handle)
    assert repr(handle) == "Handle(device=cpu, destroyed)"
    pack[out].zero_()
    with pytest.raises(tw.BindingError, match="handle: it was destroyed"):
        graph.execute(pack, None, handle)
    with pytest.raises(tw.BindingError, match="handle: got str; expected what"):
        graph.execute(pack, None, "handle")
    assert not pack[out].any()


def test_the_workspace_may_not_overlap_an_operand() -> None:
    # B6: the consumer never runs on an alias; a disjoint part of one allocation passes.
    graph, pack = two_step()
    storage = torch.zeros(256, dtype=torch.float32)
    pack["a"] = storage[16:32].view(4, 4)
    before = storage.clone()
    for start in (8, 16, 31):
        with pytest.raises(tw.BindingError, match="workspace: its bytes"):
            graph.execute(pack, storage[start : start + 16])
    assert torch.equal(storage, before)
    graph.execute(pack, storage[32:48])


def test_uint8_storage_stands_for_eight_bit_types() -> None:
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    x = graph.tensor((16,), data_type=tw.data_type.FP8_E4M3, name="x")
    graph.identity(x).set_output(True).set_name("y").set_data_type("float32")
    graph.build()
    values = torch.tensor([0.5, -2.0, 448.0, 0.0] * 4).to(torch.float8_e4m3fn)
    out = torch.empty(16)
    graph.execute({"x": values.view(torch.uint8), "y": out})
    assert torch.equal(out, values.float())


def test_ragged_capacity_is_what_the_buffer_owns() -> None:
    # B4: the declared dim is (B, H, longest, D); a shorter pool than its offsets say is refused.
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    offset = graph.tensor((3, 1, 1, 1), data_type="int32", name="offset")
    length = graph.tensor((2, 1, 1, 1), data_type="int32", name="length")
    q, k, v = (
        graph.tensor((2, 1, 4, 8), (32, 8, 8, 1), ragged_offset=offset, name=name)
        for name in ("q", "k", "v")
    )
    o, _ = graph.sdpa(q, k, v, use_padding_mask=True, seq_len_q=length, seq_len_kv=length)
    o.set_output(True).set_name("o").set_ragged_offset(offset)
    graph.build()
    tokens = torch.rand(6, 8)
    pack = {
        "q": tokens,
        "k": tokens,
        "v": tokens,
        "offset": torch.tensor([0, 16, 48], dtype=torch.int32),
        "length": torch.tensor([2, 4], dtype=torch.int32),
    }
    graph.execute({**pack, "o": (out := torch.full((6, 8), torch.nan))})
    assert torch.isfinite(out).all()
    for name in ("q", "o"):
        spoiled = {**pack, "o": torch.full((6, 8), 7.0)}
        spoiled[name] = spoiled[name][:5].clone()
        with pytest.raises(tw.BindingError, match=name):
            graph.execute(spoiled)
        assert torch.equal(spoiled["o"], torch.full_like(spoiled["o"], 7.0)), name
    raw = torch.zeros(13, dtype=torch.uint8)[1:]
    with pytest.raises(tw.BindingError, match=r"'offset'.*not a multiple of 4"):
        graph.execute({**pack, "o": out, "offset": raw.data_ptr()})


def test_strided_lengths_are_refused_not_misread() -> None:
    # B4, B12: a declaration of compact lengths is not met by a view that owns too few bytes.
    graph, source, out = scaled_copy((4,))
    wide = torch.arange(8.0)
    result = torch.empty(4)
    graph.execute({source: wide[:4], out: result})
    with pytest.raises(tw.BindingError, match="owns 12 bytes"):
        graph.execute({source: wide[:3], out: result})


def test_a_singleton_axis_may_have_any_stride() -> None:
    # B3: past 2^31 and past what a byte count of the whole could hold.
    for step in (2**31 + 7, 2**40, 2**62):
        graph, source, out = scaled_copy((1, 8), (step, 1))
        buffer, result = torch.arange(8.0), torch.empty(8)
        graph.execute({source: buffer, out: result})
        assert torch.equal(result, buffer * 2)


def test_frames_are_bound_once_and_read_buffers_as_they_are() -> None:
    # L9, L10: replay reads current values; two frames of a plan share nothing.
    graph, source, out = scaled_copy((8,))
    first, second = torch.ones(8), torch.full((8,), 3.0)
    out1, out2 = torch.empty(8), torch.empty(8)
    frame1 = graph.bind({source: first, out: out1})
    frame2 = graph.bind({source: second, out: out2})
    frame1.launch()
    frame2.launch()
    assert torch.equal(out1, first * 2) and torch.equal(out2, second * 2)
    first.fill_(5.0)
    frame1.launch()
    assert torch.equal(out1, first * 2)
    with pytest.raises(tw.BindingError, match="has no streams"):
        frame1.launch(stream=0x10)


def test_operands_that_require_grad_are_used_as_storage() -> None:
    graph, a, b, c = product()
    left = torch.rand(4, 4, requires_grad=True)
    weight = torch.nn.Parameter(torch.rand(4, 4))
    out = torch.empty(4, 4)
    graph.execute({a: left, b: weight, c: out})
    assert torch.allclose(out, (left @ weight).detach()) and not out.requires_grad


def test_autocast_does_not_reach_into_a_launch() -> None:
    graph, a, b, c = product()
    left, right = torch.rand(4, 4), torch.rand(4, 4)
    out, plain = torch.empty(4, 4), torch.empty(4, 4)
    graph.execute({a: left, b: right, c: plain})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph.execute({a: left, b: right, c: out})
    assert torch.equal(out, plain)
