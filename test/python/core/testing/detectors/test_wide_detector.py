"""L4: twins whose indices are cut to 32 bits read or write the decoy."""

from __future__ import annotations

import pytest
import torch

from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome
from tilewright.testing.detectors.sparse import untouched_bytes
from tilewright.testing.detectors.subject import Layout
from tilewright.testing.detectors.wide import STRIDES, wide_layout, wide_operand

pytestmark = pytest.mark.L0
Given = dict[str, torch.Tensor]
Out = torch.Tensor | None


def cut(value: int, bits: int, *, signed: bool) -> int:
    value %= 2**bits
    return value - 2**bits if signed and value >= 2 ** (bits - 1) else value


def read(tensor: torch.Tensor, unit: int, *, signed: bool) -> torch.Tensor:
    """Each row (the last axis) from an address that is cut to 32 bits in units of bytes."""
    out = torch.empty(tensor.shape)
    for i in range(tensor.shape[0]):
        for j in range(tensor.shape[1]):
            offset = (i * tensor.stride(0) + j * tensor.stride(1)) * unit
            start = tensor.storage_offset() + cut(offset, 32, signed=signed) // unit
            out[i, j] = tensor.as_strided((tensor.shape[2],), (1,), start)
    return out


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("which", ["a", "b"])
def test_a_narrow_index_reads_the_decoy(
    unit: int, signed: bool, which: str, operands: Given
) -> None:
    def narrow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if which == "a":
            return read(a, unit, signed=signed) + b
        return a + read(b, unit, signed=signed)

    with pytest.raises(AssertionError, match=f"L4 wide strides: .*{which} with a stride of"):
        detectors.assert_wide_strides(narrow, operands)


@pytest.mark.parametrize("stride", [2**30, 2**32, 2**38])
def test_wide_indices_hold(stride: int, operands: Given) -> None:
    verdict = detectors.wide_strides(lambda a, b: a + b, operands, strides=(stride,))
    assert verdict.outcome is Outcome.HELD
    assert "4 layouts" in verdict.text


def test_a_narrow_write_is_seen(operands: Given) -> None:
    def narrow(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
        out = torch.empty_like(a) if out is None else out
        for i in range(a.shape[0]):
            for j in range(a.shape[1]):
                offset = cut(i * out.stride(0) + j * out.stride(1), 32, signed=False)
                start = out.storage_offset() + offset
                out.as_strided((8,), (1,), start).copy_(a[i, j] + b[i, j])
        return out

    with pytest.raises(AssertionError, match="result out with a stride of"):
        detectors.assert_wide_strides(narrow, operands)


def test_a_write_of_both_is_seen(operands: Given) -> None:
    def sloppy(a: torch.Tensor, b: torch.Tensor, out: Out = None) -> torch.Tensor:
        out = torch.empty_like(a) if out is None else out
        if out.stride(0) > 2**31:
            start = out.storage_offset() + cut(out.stride(0), 32, signed=False)
            out.as_strided((8,), (1,), start).zero_()
        return torch.add(a, b, out=out)

    with pytest.raises(AssertionError, match="cut to 32 bits were written"):
        detectors.assert_wide_strides(sloppy, operands, strides=(2**32,))


def test_terabytes_take_no_memory() -> None:
    wide = wide_operand(Layout((4, 8), (8, 1), torch.float32, torch.device("cpu")), 0, 2**40)
    assert wide.flat.nbytes > 12 * 2**40
    wide.view.fill_(1.0)
    assert float(wide.view.sum()) == 32.0


def test_decoys_are_no_elements() -> None:
    layout = Layout((3, 4, 8), (32, 8, 1), torch.float32, torch.device("cpu"))
    for axis in (0, 1):
        wide = wide_operand(layout, axis, 2**32)
        wide.flat[wide.decoys] = 1.0
        assert len(wide.decoys) > 0
        assert float(wide.view.abs().sum()) == 0.0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("stride", [2**29 + 2**28, 2**30, 2**31 - 64, 2**32])
def test_each_cut_address_is_a_decoy(stride: int, unit: int, signed: bool) -> None:
    layout = Layout((6, 8), (8, 1), torch.float32, torch.device("cpu"))
    wide = wide_operand(layout, 0, stride)
    base, step = wide.view.storage_offset(), wide.view.stride(0)
    right = {row * step + column for row in range(6) for column in range(8)}
    room = range(-base, wide.flat.numel() - base)
    led = {cut(offset * unit, 32, signed=signed) // unit for offset in right} - right
    # With the strides that the detector takes every cut leads elsewhere; with others not each does.
    assert led or stride not in STRIDES
    expected = {place for place in led if place in room}
    assert expected <= set((wide.decoys - base).tolist())


def test_the_layout_is_told() -> None:
    assert wide_layout((2, 3, 8), 0, 2**32) == (2**32 + 64, 8, 1)
    assert wide_layout((2, 3, 8), 1, 2**32) == (8, 2**32 + 64, 1)


def test_too_much_is_declined(operands: Given) -> None:
    verdict = detectors.wide_strides(lambda a, b: a + b, operands, strides=(2**45,))
    assert verdict.outcome is Outcome.DECLINED
    with pytest.raises(MemoryError, match="no room"):
        untouched_bytes(2**62)
