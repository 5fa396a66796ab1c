"""The geometry that the ATen engine tells its library, and which declarations it declines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten.convolution import Geometry, _arithmetic_dtype, _each, _geometry
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0


def record(*dim, data_type="FLOAT"):
    return tilewright.Graph().tensor(dim, data_type=data_type)


def geometry(image, weight, result, **attributes):
    records = (record(*dim) for dim in (image, weight, result))
    return _geometry(SimpleNamespace(**attributes), *records)


# Every extent of an axis differs from those of the others.
IMAGE, WEIGHT = (2, 6, 11, 17, 23), (10, 3, 5, 2, 4)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("pre", [(0, 0, 0), (1, 2, 0), (3, 0, 4)])
@pytest.mark.parametrize("post", [(0, 0, 0), (1, 2, 0), (0, 5, 1)])
def test_result_extents_are_those_of_the_positions_that_fit(spatial, pre, post):
    for stride, dilation in (
        ((1, 1, 1), (1, 1, 1)),
        ((2, 3, 5), (1, 2, 3)),
        ((4, 1, 2), (2, 5, 1)),
    ):
        attributes = {
            "pre_padding": pre[:spatial],
            "post_padding": post[:spatial],
            "stride": stride[:spatial],
            "dilation": dilation[:spatial],
        }
        extents = []
        for axis in range(spatial):
            padded = IMAGE[2 + axis] + pre[axis] + post[axis]
            starts = range(0, padded, stride[axis])
            last = dilation[axis] * (WEIGHT[2 + axis] - 1)
            extents.append(sum(start + last < padded for start in starts))
        image, weight = IMAGE[: 2 + spatial], WEIGHT[: 2 + spatial]
        found = geometry(image, weight, (2, 10, *extents), **attributes)
        assert (found.stride, found.dilation) == (stride[:spatial], dilation[:spatial])
        assert found.groups == 2
        if pre[:spatial] == post[:spatial]:
            assert (found.padding, found.extra) == (pre[:spatial], ())
        else:
            assert found.padding == (0,) * spatial
            assert found.extra == tuple(zip(pre, post, strict=True))[:spatial]
        for axis in range(spatial):
            wrong = list(extents)
            wrong[axis] += 1
            with pytest.raises(NotSupportedError, match="the convolution of"):
                geometry(image, weight, (2, 10, *wrong), **attributes)


def test_what_is_declined():
    good = {"pre_padding": (1,), "post_padding": (1,), "stride": (1,), "dilation": (1,)}
    image, weight, result = (2, 6, 9), (4, 3, 3), (2, 4, 9)
    assert geometry(image, weight, result, **good).groups == 2
    for changed in (
        {"pre_padding": (-1,), "post_padding": (3,)},
        {"pre_padding": (3,), "post_padding": (-1,)},
        {"stride": (0,)},
        {"dilation": (0,)},
    ):
        with pytest.raises(NotSupportedError, match="paddings are at least 0"):
            geometry(image, weight, result, **{**good, **changed})
    # Channels that are no multiple; groups that do not divide the outputs; each alone.
    with pytest.raises(NotSupportedError, match="groups divide"):
        geometry((2, 7, 9), weight, result, **good)
    with pytest.raises(NotSupportedError, match="groups divide"):
        geometry(image, (5, 3, 3), (2, 5, 9), **good)
    for dims in (
        ((2, 6), (4, 3), (2, 4)),
        ((2, 6, 9), (4, 3, 3, 1), (2, 4, 9)),
        ((2, 6, 9), (4, 3, 3), (2, 4, 9, 1)),
        ((2, 6, 1, 1, 1, 1), (4, 3, 1, 1, 1, 1), (2, 4, 1, 1, 1, 1)),
    ):
        with pytest.raises(NotSupportedError, match="1 to 3 spatial axes"):
            geometry(*dims)
    for dims in (((3, 6, 9), weight, result), (image, weight, (2, 6, 9))):
        with pytest.raises(NotSupportedError, match="the convolution of"):
            geometry(*dims, **good)


def test_a_filter_that_does_not_fit_has_no_result():
    assert geometry((2, 6, 4), (4, 6, 5), (2, 4, 0)).groups == 1
    with pytest.raises(NotSupportedError):
        geometry((2, 6, 4), (4, 6, 5), (2, 4, 1))
    # One that just fits has one, whatever the stride.
    geometry((2, 6, 5), (4, 6, 5), (2, 4, 1), stride=(3,))
    assert geometry((2, 0, 5), (4, 0, 5), (2, 4, 1)).groups == 1


def test_paddings_of_one_value_and_of_none():
    assert geometry((1, 1, 5, 6), (1, 1, 3, 3), (1, 1, 7, 8), padding=2).padding == (2, 2)
    found = geometry((1, 1, 5, 6), (1, 1, 3, 3), (1, 1, 5, 7), padding=(1,), post_padding=(1, 2))
    assert found.extra == ((1, 1), (1, 2))
    assert _each(None, 2, 7, "x") == (7, 7) and _each((), 3, 7, "x") == (7, 7, 7)
    assert _each(4, 2, 7, "x") == (4, 4) and _each([5], 2, 7, "x") == (5, 5)
    assert _each([5, 6], 2, 7, "x") == (5, 6)
    with pytest.raises(NotSupportedError, match="expected 2 values"):
        _each([1, 2, 3], 2, 0, "x")


def test_padding_and_cropping_are_inverse():
    extra = ((1, 2), (0, 3), (4, 0))
    given = Geometry((1,) * 3, (0,) * 3, (1,) * 3, 1, extra)
    image = torch.arange(2 * 1 * 3 * 4 * 5.0).view(2, 1, 3, 4, 5)
    padded = given.pad(image)
    assert padded.shape == (2, 1, *given.padded((3, 4, 5))) == (2, 1, 6, 7, 9)
    assert torch.equal(padded[:, :, 1:4, 0:4, 4:9], image)
    assert padded.sum() == image.sum()
    assert torch.equal(given.crop(padded, (3, 4, 5)), image)
    bare = Geometry((1,) * 3, (2,) * 3, (1,) * 3, 1, ())
    assert bare.pad(image) is image and bare.padded((3, 4, 5)) == (3, 4, 5)
    assert bare.crop(image, (1, 1, 1)) is image
    assert bare.arguments == ((1,) * 3, (2,) * 3, (1,) * 3, False, [0, 0, 0], 1)


def test_the_type_of_arithmetic():
    half, single, brain = (record(1, data_type=name) for name in ("HALF", "FLOAT", "BFLOAT16"))
    whole, double = record(1, data_type="INT8"), record(1, data_type="DOUBLE")
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for records, on_cuda, on_cpu in (
        ((half, half), torch.float16, torch.float32),
        ((brain, brain), torch.bfloat16, torch.float32),
        ((half, brain), torch.float32, torch.float32),
        ((half, single), torch.float32, torch.float32),
        ((single, single), torch.float32, torch.float32),
        ((double, half), torch.float64, torch.float64),
        ((whole, whole), torch.float64, torch.float64),
    ):
        assert _arithmetic_dtype(cuda, *records) is on_cuda
        assert _arithmetic_dtype(cpu, *records) is on_cpu
