"""The report on a product with a gated unit blames the right stage and the right columns."""

from __future__ import annotations

import math

import pytest
import torch

from tilewright import ops
from tilewright.errors import OracleError
from tilewright.testing.compare import assert_close
from tilewright.testing.compare_glu import (
    GluFailure,
    explain_glu_failure,
    glu_columns,
    glu_report,
)

pytestmark = pytest.mark.L0

_M, _K, _WIDTH = 6, 24, 96


def _operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return randn(_M, _K), randn(2 * _WIDTH, _K) * _K**-0.5, randn(2 * _WIDTH)


def _epilogue(product: torch.Tensor, layout: str) -> torch.Tensor:
    """u * silu(g), the columns found by slicing blocks, not by the report's own mapping."""
    if layout == "halves":
        u, g = product[:, :_WIDTH], product[:, _WIDTH:]
    else:
        blocks = product.split(32, dim=1)
        u, g = torch.cat(blocks[0::2], 1), torch.cat(blocks[1::2], 1)
    return u * torch.nn.functional.silu(g)


def test_result_columns_read_their_blocks() -> None:
    assert glu_columns(0, 96) == (0, 32)
    assert glu_columns(31, 96) == (31, 63)
    assert glu_columns(32, 96) == (64, 96)
    assert glu_columns(95, 96) == (159, 191)
    assert glu_columns(5, 96, "halves") == (5, 101)
    pairs = [glu_columns(column, 96) for column in range(96)]
    assert sorted(index for pair in pairs for index in pair) == list(range(192))
    # The same as slicing whole blocks.
    index = torch.arange(192).reshape(1, -1)
    blocks = index.split(32, dim=1)
    assert [u for u, _ in pairs] == torch.cat(blocks[0::2], 1)[0].tolist()
    assert [g for _, g in pairs] == torch.cat(blocks[1::2], 1)[0].tolist()
    for column, width, layout in ((96, 96, "halves"), (-1, 96, "halves"), (0, 40, "interleaved32")):
        with pytest.raises(ValueError, match=r"column|width"):
            glu_columns(column, width, layout)
    with pytest.raises(ValueError, match="layout"):
        glu_columns(0, 96, "interleaved16")


@pytest.mark.parametrize("layout", ["halves", "interleaved32"])
def test_the_mapping_is_that_of_the_library(layout: str) -> None:
    x, weight, bias = _operands()
    made = ops.linear(x, weight, bias, glu=layout)
    product = x @ weight.T + bias
    assert_close(made, _epilogue(product, layout), tol=1e-12)
    report = glu_report(made, x, weight, bias=bias, product=product, layout=layout, tol=1e-10)
    assert report.endswith("every element agrees with its independent dot products")


@pytest.mark.parametrize("layout", ["halves", "interleaved32"])
def test_a_wrong_product_is_told_from_a_wrong_epilogue(layout: str) -> None:
    x, weight, bias = _operands()
    right = x @ weight.T + bias
    expected = _epilogue(right, layout)
    options = {"bias": bias, "expected": expected, "layout": layout, "tol": 1e-9}
    u, g = glu_columns(40, _WIDTH, layout)

    product = right.clone()
    product[2, g] += 0.5
    report = glu_report(_epilogue(product, layout), x, weight, product=product, **options)
    assert "1 of 576 elements are wrong" in report
    assert "input wrong in 0 of 1, gate wrong in 1" in report
    assert "exchanged" not in report
    assert "-> the epilogue follows its product; the product is wrong" in report
    assert f"(2, 40): result {_epilogue(product, layout)[2, 40].item():.7g}" in report
    assert f"stored u[{u}] {right[2, u].item():.7g}, g[{g}] {product[2, g].item():.7g}" in report
    assert (
        f"dot products u[{u}] {right[2, u].item():.7g}, g[{g}] {right[2, g].item():.7g}" in report
    )

    product = right.clone()
    product[2, u] += 0.5
    report = glu_report(_epilogue(product, layout), x, weight, product=product, **options)
    assert "input wrong in 1 of 1, gate wrong in 0" in report

    actual = expected.clone()
    actual[3, 40] += 0.25
    report = glu_report(actual, x, weight, product=right, **options)
    assert "input wrong in 0 of 1, gate wrong in 0" in report
    assert "-> the product is right; the epilogue (or its column mapping) is wrong" in report

    product = right.clone()
    product[2, u] += 0.5
    actual = _epilogue(product, layout)
    actual[2, 40] += 0.25
    report = glu_report(actual, x, weight, product=product, **options)
    assert "-> both the product and the epilogue are wrong" in report


def test_exchanged_inputs_and_gates_are_named() -> None:
    x, weight, bias = _operands()
    right = x @ weight.T + bias
    blocks = right.reshape(_M, 3, 2, 32).flip(2).reshape(_M, -1)
    report = glu_report(
        _epilogue(blocks, "interleaved32"), x, weight, bias=bias, product=blocks, tol=1e-9
    )
    assert "-> input and gate of the product are exchanged in" in report
    # In the epilogue alone, the product is blamed for nothing.
    report = glu_report(
        _epilogue(blocks, "interleaved32"), x, weight, bias=bias, product=right, tol=1e-9
    )
    assert "-> the product is right; the epilogue (or its column mapping) is wrong" in report
    assert "exchanged" not in report


def test_wrong_blocks_are_listed_with_the_columns_they_read() -> None:
    x, weight, bias = _operands()
    product = x @ weight.T + bias
    actual = _epilogue(product, "interleaved32")
    actual[:, 64:] += 1.0
    report = glu_report(actual, x, weight, bias=bias, product=product, tol=1e-9)
    assert (
        "columns 64-95: 192 wrong; inputs are the product's columns 128-159, gates 160-191"
        in report
    )
    assert "columns 0-31" not in report


def test_the_report_stays_bounded() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(8, 8, generator=generator), torch.randn(2048, 8, generator=generator)
    report = glu_report(torch.full((8, 1024), math.nan), x, weight)
    assert len(report.split("\n")) <= 40
    assert "8192 of 8192 elements are wrong; 512 examined" in report
    assert "and 24 more blocks" in report
    assert "no stored product was given" in report


@pytest.mark.parametrize("activation", ["silu", "sigmoid", "relu", "gelu", "gelu_tanh", "tanh"])
def test_activations_are_those_of_the_library(activation: str) -> None:
    x, weight, _ = _operands()
    made = ops.linear(3.0 * x, weight, activation=activation, glu="halves")
    report = glu_report(made, 3.0 * x, weight, layout="halves", activation=activation, tol=1e-10)
    assert "every element agrees" in report
    report = glu_report(
        made + 1e-6, 3.0 * x, weight, layout="halves", activation=activation, tol=1e-10
    )
    assert "elements are wrong" in report


def test_the_original_assertion_is_kept() -> None:
    x, weight, bias = _operands()
    product = x @ weight.T + bias
    expected = _epilogue(product, "interleaved32")
    actual = expected.clone()
    actual[1, 7] += 1.0
    with (
        pytest.raises(GluFailure) as caught,
        explain_glu_failure(actual, x, weight, bias=bias, product=product, expected=expected),
    ):
        assert_close(actual, expected, tol=1e-9, name="y")
    message = str(caught.value)
    assert message.startswith("y: 1 of 576 elements")
    assert "GLU report (interleaved32, silu)" in message
    assert type(caught.value.__cause__) is OracleError
    assert isinstance(caught.value, AssertionError)
    # A plain assert as well, and a report that fails does not stand in its way.
    with (
        pytest.raises(GluFailure, match=r"plain(.|\n)*no GLU report: weight: shape"),
        explain_glu_failure(actual, x, weight[:5]),
    ):
        raise AssertionError("plain")


def test_what_passes_and_what_is_no_assertion_go_through() -> None:
    x, weight, _ = _operands()
    actual = torch.zeros(_M, _WIDTH)
    with explain_glu_failure(actual, x, weight):
        pass
    with pytest.raises(KeyError), explain_glu_failure(actual, x, weight):
        raise KeyError("other")


def test_shapes_and_names_are_checked() -> None:
    x, weight, bias = _operands()
    actual = torch.zeros(_M, _WIDTH)
    for changes, message in (
        ({"bias": bias[:3]}, "bias: shape"),
        ({"product": actual}, "product: shape"),
        ({"expected": weight}, "expected: shape"),
        ({"activation": "swish"}, "activation"),
        ({"layout": "none"}, "layout"),
    ):
        with pytest.raises(ValueError, match=message):
            glu_report(actual, x, weight, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two axes"):
        glu_report(actual[0], x, weight)
