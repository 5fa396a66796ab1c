"""The check of a result: what counts as wrong, and how tolerances follow the types on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilewright import Graph
from tilewright.cli.checking import OK, WRONG, Tolerance, compare, tolerance_of
from tilewright.oracle import default_tolerance

pytestmark = pytest.mark.L0

EXACT = Tolerance(0.0)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "expected", "tolerance", "verdict"),
    [
        (f64(1.0, 2.0), f64(1.0, 2.0), EXACT, OK),
        (f64(1.0, 2.5), f64(1.0, 2.0), EXACT, WRONG),
        (f64(math.nan), f64(math.nan), EXACT, OK),
        (f64(1.0), f64(math.nan), Tolerance(9.0), WRONG),
        (f64(math.nan), f64(1.0), Tolerance(9.0), WRONG),
        (f64(math.inf), f64(1.0), Tolerance(9.0), WRONG),
        (f64(math.inf), f64(math.inf), EXACT, OK),
        (f64(-math.inf), f64(math.inf), EXACT, WRONG),
        (f64(1e300), f64(math.inf), EXACT, WRONG),
        # The bound grows with the largest magnitude, and does not fall below that of 1.
        (f64(100.0, 0.9), f64(100.0, 0.0), Tolerance(0.01), OK),
        (f64(100.0, 1.1), f64(100.0, 0.0), Tolerance(0.01), WRONG),
        (f64(0.009), f64(0.0), Tolerance(0.01), OK),
        (f64(0.011), f64(0.0), Tolerance(0.01), WRONG),
        # An infinite reference does not widen it.
        (f64(math.inf, 0.5), f64(math.inf, 0.0), Tolerance(0.01), WRONG),
        # A narrow output has a bound an element.
        (f64(448.0, 1.06), f64(448.0, 1.0), Tolerance(0.0, 2**-4, 2**-10), OK),
        (f64(448.0, 1.07), f64(448.0, 1.0), Tolerance(0.0, 2**-4, 2**-10), WRONG),
        (f64(0.0009), f64(0.0), Tolerance(0.0, 2**-4, 2**-10), OK),
        (f64(), f64(), EXACT, OK),
    ],
)
def test_compare(
    got: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, verdict: str
) -> None:
    check = compare(got, expected, tolerance)
    assert check.verdict == verdict
    assert bool(check.detail) == (verdict == WRONG)


def test_the_first_wrong_element_is_told() -> None:
    got = torch.zeros(2, 3, dtype=torch.float64)
    got[1, 2] = 7.0
    check = compare(got, torch.zeros_like(got), Tolerance(0.5))
    assert (check.max_error, check.tolerance) == (7.0, 0.5)
    assert check.detail == "1 of 6 elements differ, first at (1, 2): got 7, expected 0"


def product(output_type: str, intermediate: str = "float32", io: str = "float32") -> Tolerance:
    graph = Graph("g", io, intermediate)
    a, b = graph.tensor((1, 4, 4)), graph.tensor((1, 4, 4))
    out = graph.neg(graph.matmul(a, b)).set_output(True).set_data_type(output_type)
    graph.validate()
    return tolerance_of(graph, out)


def test_the_coarsest_type_on_the_way_decides() -> None:
    assert product("float32") == Tolerance(default_tolerance("FLOAT"))
    assert product("bfloat16") == Tolerance(default_tolerance("BFLOAT16"))
    assert product("float32", "float16") == Tolerance(default_tolerance("HALF"))
    assert product("float64", "float64", "float64") == Tolerance(default_tolerance("DOUBLE"))
    # bfloat16 inputs cost nothing: their products are exact in float32.
    assert product("float32", io="bfloat16") == Tolerance(default_tolerance("FLOAT"))


def test_a_narrow_output_is_held_to_half_a_step() -> None:
    assert product("FP8_E4M3") == Tolerance(default_tolerance("FLOAT"), 2**-4, 2**-10)
    assert product("FP8_E5M2") == Tolerance(default_tolerance("FLOAT"), 2**-3, 2**-17)


def test_integers_are_exact_unless_they_come_from_fractions() -> None:
    assert product("int32") == Tolerance(default_tolerance("FLOAT"), absolute=1.0)
    graph = Graph("g", "int32", "int32")
    a, b = graph.tensor((1, 4, 4)), graph.tensor((1, 4, 4))
    out = graph.matmul(a, b).set_output(True)
    graph.validate()
    assert tolerance_of(graph, out) == EXACT


@pytest.mark.parametrize(
    ("data_type", "of_output"), [("bfloat16", 2 * 2.0**-7), ("float32", 64 * 2.0**-23)]
)
def test_attention_rounds_probabilities_to_the_type_of_v(data_type: str, of_output: float) -> None:
    graph = Graph("g", data_type)
    q, k, v = (graph.tensor((1, 2, 4, 8)) for _ in range(3))
    o, stats = graph.sdpa(q, k, v, generate_stats=True)
    o.set_output(True).set_data_type("float32")
    stats.set_output(True)
    graph.validate()
    assert tolerance_of(graph, o).factor == of_output
    assert tolerance_of(graph, stats).factor == default_tolerance("FLOAT")


def test_eight_bit_probabilities_may_fall_to_the_other_side() -> None:
    graph = Graph("g", "FP8_E4M3")
    q, k, v = (graph.tensor((1, 2, 4, 8)) for _ in range(3))
    scales: list[Any] = [graph.tensor((1, 1, 1, 1), data_type="float32") for _ in range(6)]
    o, _, amax_s, amax_o = graph.sdpa_fp8(q, k, v, *scales)
    for tensor in (o, amax_s, amax_o):
        tensor.set_output(True)
    graph.validate()
    assert tolerance_of(graph, o) == Tolerance(default_tolerance("FP8_E4M3") / 4, 2**-4, 2**-10)
    assert tolerance_of(graph, amax_o) == Tolerance(default_tolerance("FP8_E4M3") / 4)
