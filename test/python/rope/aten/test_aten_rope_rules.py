"""Which rotations the ATen engine takes, and each of its elements by the formula."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

import tilewright
from tilewright.engines.aten import rope
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

CPU = torch.device("cpu")


def record(dim, data_type="FLOAT"):
    return tilewright.Graph().tensor(dim, data_type=tilewright.data_type[data_type])


def prepare(kind, x, freqs, out=None, rope_dim=0, output_scale=1.0, freqs_type="FLOAT", **types):
    port = "input" if kind == "rope" else "dY"
    operation = SimpleNamespace(
        kind=kind,
        inputs={port: record(x, **types), "freqs": record(freqs, freqs_type)},
        outputs={"out": record(out or x, **types)},
        rope_dim=rope_dim,
        output_scale=output_scale,
    )
    function = rope.prepare_rope if kind == "rope" else rope.prepare_rope_backward
    return port, function(operation, CPU)


X = (2, 3, 4, 10)


@pytest.mark.parametrize("kind", ["rope", "rope_backward"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("rope_dim", [0, 6, 10, 2])
@pytest.mark.parametrize("form", ["halves", "whole", "one", "batch", "heads"])
def test_elements_by_the_formula(kind, scale, rope_dim, form):
    rotated = rope_dim or X[3]
    half = rotated // 2
    dim = {
        "halves": (1, 1, 4, half),
        "whole": (1, 1, 4, rotated),
        "one": (1, 1, 1, rotated),
        "batch": (2, 1, 4, half),
        "heads": (2, 3, 1, rotated),
    }[form]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(X, generator=generator, dtype=torch.float64)
    # Both halves of an angle tensor need not be equal.
    freqs = torch.randn(dim, generator=generator)
    port, kernel = prepare(kind, X, dim, rope_dim=rope_dim, output_scale=scale, data_type="DOUBLE")
    for in_place in (False, True):
        given = x.clone()
        out = given if in_place else torch.full(X, 99.0, dtype=torch.float64)
        kernel({port: given, "freqs": freqs}, {"out": out})
        for b, h, s, d in itertools.product(*(range(extent) for extent in X)):

            def angle(i, b=b, h=h, s=s):
                place = (min(b, dim[0] - 1), min(h, dim[1] - 1), min(s, dim[2] - 1))
                return freqs[(*place, i if dim[3] == rotated else i % half)].item()

            row = x[b, h, s]
            if d >= rotated:
                expected = row[d]
            elif d < half:
                other = angle(d + half) if kind == "rope_backward" else angle(d)
                sign = 1 if kind == "rope_backward" else -1
                expected = row[d] * math.cos(angle(d)) + sign * row[d + half] * math.sin(other)
            else:
                other = angle(d - half) if kind == "rope_backward" else angle(d)
                sign = -1 if kind == "rope_backward" else 1
                expected = row[d] * math.cos(angle(d)) + sign * row[d - half] * math.sin(other)
            assert out[b, h, s, d] == pytest.approx(float(scale * expected), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("data_type", ["FLOAT", "HALF"])
@pytest.mark.parametrize("kind", ["rope", "rope_backward"])
def test_every_scale_multiplies_all_elements(kind, data_type, scale):
    x = torch.randint(-4, 5, X, generator=torch.Generator().manual_seed(3)).float()
    x = x.half() if data_type == "HALF" else x
    port, kernel = prepare(
        kind, X, (1, 1, 4, 6), rope_dim=6, output_scale=scale, data_type=data_type
    )
    out = torch.full(X, 99.0, dtype=x.dtype)
    # Without an angle nothing turns.
    kernel({port: x, "freqs": torch.zeros(1, 1, 4, 6)}, {"out": out})
    assert torch.equal(out, x * scale)


def test_what_is_declined():
    for x, freqs, rope_dim in (
        ((2, 3, 10), (1, 1, 4, 10), 0),
        ((1, 2, 3, 4, 10), (1, 1, 4, 10), 0),
        ((2, 3, 4, 9), (1, 1, 4, 9), 0),
        (X, (1, 1, 4, 5), 5),
        (X, (1, 1, 4, 12), 12),
        (X, (1, 1, 4, 2), -2),
        ((), (1, 1, 4, 2), 0),
    ):
        with pytest.raises(NotSupportedError, match="an even rope_dim"):
            prepare("rope", x, freqs, rope_dim=rope_dim)
    for freqs in (
        (1, 4, 10),
        (3, 1, 4, 10),
        (1, 2, 4, 10),
        (1, 1, 3, 10),
        (1, 1, 5, 10),
        (1, 1, 4, 4),
        (1, 1, 4, 9),
        (1, 1, 4, 1),
    ):
        with pytest.raises(NotSupportedError, match="expected"):
            prepare("rope", X, freqs)
    with pytest.raises(NotSupportedError, match="keeps its dim"):
        prepare("rope", X, (1, 1, 4, 10), out=(2, 3, 4, 9))
    with pytest.raises(NotSupportedError, match="angles are floating"):
        prepare("rope", X, (1, 1, 4, 10), freqs_type="INT32")
    with pytest.raises(NotSupportedError, match="packed"):
        prepare("rope", X, (1, 1, 4, 10), data_type="FP4_E2M1")
    # Nothing to rotate, whatever the angles are.
    _, kernel = prepare("rope", (2, 0, 4, 9), (1, 1, 1, 1))
    assert kernel({}, {}) is None
