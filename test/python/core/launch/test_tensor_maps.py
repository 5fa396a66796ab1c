"""Tensor maps without a GPU: what is declined, what the driver is told, the place in a block."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import pytest

import tilewright as tw
from tilewright.dtypes import DataType
from tilewright.launch import prepared, tensor_maps
from tilewright.launch.prepared import Constant, Operand
from tilewright.launch.tensor_maps import TensorMapEncoder, map_decline_reason, tensor_map

pytestmark = pytest.mark.L0


def declared(dim: Any, stride: Any = None, dtype: str = "bfloat16") -> Any:
    graph = tw.Graph(handle=tw.create_handle("cpu"))
    options = {} if stride is None else {"stride": stride}
    return graph.tensor(dim, data_type=dtype, name="x", **options)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (declared((2, 3, 8), dtype="double"), "DOUBLE has no tensor map"),
        (declared((2, 0, 8)), "extents from 1"),
        (declared((2, 3, 8), (24, 8, 2)), "needs 1 on the last axis"),
        (declared((2, 3, 8), (20, 8, 1)), "axis 0 steps by 40 bytes"),
        (declared((2, 3, 8), (24, 4, 1)), "axis 1 steps by 8 bytes"),
        (declared((2, 3, 8), (0, 8, 1)), "axis 0 steps by 0 bytes"),
        (declared((2, 3, 8), (2**39, 8, 1)), r"below 2\*\*40"),
        (declared((1, 2, 1, 1, 2, 8)), "6 axes"),
    ],
)
def test_what_no_map_describes(tensor: Any, reason: str) -> None:
    found = map_decline_reason(tensor)
    assert found is not None
    with pytest.raises(tw.NotSupportedError, match=f"tensor 'x'.*{reason}"):
        tensor_map(tensor, 0, (1,) * (tensor.rank - 1) + (8,))


def test_alignment_counts_the_batch_stride_only_where_it_is_stepped() -> None:
    # B20: the operand's own width; a singleton axis is exempt.
    assert map_decline_reason(declared((1, 3, 8), (7, 8, 1))) is None
    assert map_decline_reason(declared((2, 3, 8), (28, 8, 1))) is not None
    assert map_decline_reason(declared((2, 3, 8), (28, 8, 1), "float32")) is None
    assert map_decline_reason(declared((2, 3, 16), (48, 16, 1), "fp8_e4m3")) is None
    assert map_decline_reason(declared((2, 3, 16), (48, 8, 1), "fp8_e4m3")) is not None


def test_the_driver_is_told_the_innermost_axis_first_and_wide_steps_whole() -> None:
    step = 2**38 + 8
    made = tensor_map(declared((2, 5, 3, 96), (step, 96, 5 * 96, 1)), 4, (1, 1, 64, 128))
    encoder = TensorMapEncoder(made)
    dim, steps, box, walk = (tuple(array) for array in encoder._arrays)
    assert dim == (96, 3, 5, 2)
    assert steps == (5 * 96 * 2, 96 * 2, step * 2)
    # 128 bytes are swizzled: a row of 128 elements is two boxes of 64, side by side.
    assert box == (64, 64, 1, 1) and walk == (1, 1, 1, 1)
    assert encoder.slot == 4


def test_a_ragged_operand_has_as_many_rows_as_its_buffer_owns() -> None:
    # L5: tokens of 3 heads of 8; the declared batch and length are not the buffer's.
    graph = tw.Graph(handle=tw.create_handle("cpu"))
    offsets = graph.tensor((3, 1, 1, 1), data_type="int32")
    packed = graph.tensor(
        (2, 3, 100, 8), (2400, 8, 24, 1), data_type="bfloat16", ragged_offset=offsets
    )
    made = tensor_map(packed, 0, (1, 1, 64, 8))
    assert made.is_flat and made.dim == (1, 3, 100, 8)
    encoder = TensorMapEncoder(made)
    for tokens in (1, 7, 5000):
        owned = tokens * 3 * 8 * 2
        assert tuple(encoder._flat_dim(owned)) == (8, tokens, 3, 1)
        # The last token's last head may end the buffer early: then that token is none.
        fewer = (8, tokens - 1, 3, 1) if tokens > 1 else (1, 1, 1, 1)
        assert tuple(encoder._flat_dim(owned - 2)) == fewer


class Library:
    """A driver that writes a mark and the address into the map, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def cuTensorMapEncodeTiled(self, place: int, kind: int, rank: int, start: int, *_: Any) -> int:
        return self._write("encode", place, start)

    def cuTensorMapReplaceAddress(self, place: int, start: int) -> int:
        assert ctypes.string_at(place, 6) == b"encode", "a copy of the map that is known"
        return self._write("replace", place, start)

    def _write(self, what: str, place: int, start: int) -> int:
        assert place % 64 == 0
        self.asked.append(what)
        ctypes.memmove(place, b"encode" + bytes(114) + struct.pack("<Q", start), 128)
        return 0


def test_a_known_map_is_written_anew_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(tensor_maps, "driver", lambda: library)
    encoder = TensorMapEncoder(tensor_map(declared((2, 3, 8)), 0, (1, 2, 8)))
    for start in (4096, 8192, 4096):
        made = encoder.encode(start, start + 96, 0)
        assert len(made) == 128 and struct.unpack("<Q", made[-8:]) == (start,)
    assert library.asked == ["encode", "replace", "replace"]
    # Where the map depends on how much a buffer owns, another extent is another map.
    graph = tw.Graph(handle=tw.create_handle("cpu"))
    offsets = graph.tensor((3, 1, 1, 1), data_type="int32")
    packed = graph.tensor((2, 1, 9, 8), (72, 8, 8, 1), data_type="half", ragged_offset=offsets)
    library.asked.clear()
    encoder = TensorMapEncoder(tensor_map(packed, 0, (1, 1, 8, 8)))
    for start, owned in ((4096, 160), (8192, 160), (8192, 320)):
        encoder.encode(start, start + owned, 0)
    assert library.asked == ["encode", "replace", "encode"]


@pytest.mark.parametrize("owned", [0, 2, 46])
@pytest.mark.parametrize("start", [0, 4096, 4098])
def test_the_map_of_a_packed_operand_without_a_row_leads_to_memory_of_ours(
    start: int, owned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A copy begins at row 0 whatever a sequence has, and behind an empty buffer may be no memory.
    library = Library()
    monkeypatch.setattr(tensor_maps, "driver", lambda: library)
    monkeypatch.setattr(tensor_maps, "nothing", lambda device_index: 16 * (7 + device_index))
    graph = tw.Graph(handle=tw.create_handle("cpu"))
    offsets = graph.tensor((3, 1, 1, 1), data_type="int32")
    packed = graph.tensor((2, 3, 9, 8), (72, 8, 24, 1), data_type="half", ragged_offset=offsets)
    encoder = TensorMapEncoder(tensor_map(packed, 0, (1, 1, 8, 8)))
    made = encoder.encode(start, start + owned, 2)
    assert struct.unpack("<Q", made[-8:]) == (16 * 9,)
    # And a row is a row.
    encoder.encode(8192, 8192 + 48, 2)
    assert library.asked == ["encode", "encode"]


def test_a_thread_that_has_no_context_gets_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    # The driver encodes no map, and writes no address into one, where no context is current.
    # Afterwards the thread has none, as before.
    library, contexts = Library(), []

    def refused(*_: Any) -> int:
        return 0 if contexts else 201

    @contextlib.contextmanager
    def device_context(device_index: int) -> Iterator[None]:
        contexts.append(device_index)
        yield
        assert contexts.pop() == 3

    monkeypatch.setattr(tensor_maps, "driver", lambda: library)
    monkeypatch.setattr(tensor_maps, "device_context", device_context)
    encoder = TensorMapEncoder(tensor_map(declared((2, 3, 8)), 0, (1, 2, 8)))
    for name in ("cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress"):
        write = getattr(Library, name)
        monkeypatch.setattr(
            Library, name, lambda self, *a, write=write: refused() or write(self, *a)
        )
    for start in (4096, 8192):
        made = encoder.encode(start, start + 96, 3)
        assert struct.unpack("<Q", made[-8:]) == (start,) and not contexts
    assert library.asked == ["encode", "replace"]


@pytest.mark.parametrize("start", [0, 8, 4098])
def test_an_address_that_no_map_takes_is_refused_before_the_driver(start: int) -> None:
    encoder = TensorMapEncoder(tensor_map(declared((2, 3, 8)), 0, (1, 2, 8)))
    with pytest.raises(tw.BindingError, match=rf"'x': address {start:#x}.*multiple of 16"):
        encoder.encode(start, start + 48, 0)


def test_a_map_is_followed_by_its_extents_and_steps() -> None:
    made = tensor_map(declared((2, 3, 8)), 1, (1, 2, 8))
    types, arguments = prepared._expanded(
        ["*fp32", "tensordesc<bf16[1, 2, 8],...>", "i32"], [Operand(0), made, Constant(7)]
    )
    assert types[2:] == ["i32"] * 3 + ["i64"] * 3 + ["i32"]
    assert arguments[2:] == [Constant(value) for value in (2, 3, 8, 24, 8, 1, 7)]
    assert struct.calcsize("<" + prepared._FORMATS[types[1]]) == 128
    assert made.data_type is DataType.BFLOAT16
