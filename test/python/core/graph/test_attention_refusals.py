"""Wrong attention graphs are refused with a message that says what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graph_cases.attention_sketch import HKV, HQ, SKV, SQ, B, D, Sketch
from graph_cases.wrong_attention import EXTENTS, LENGTHS, MASKS, OPTIONS
from graph_cases.wrong_attention_kinds import BACKWARD, EIGHT_BIT, PAGES

from tilewright.errors import GraphError
from tilewright.graph.tensor import Tensor

pytestmark = pytest.mark.L0

WRONG = {**EXTENTS, **MASKS, **LENGTHS, **OPTIONS, **PAGES, **BACKWARD, **EIGHT_BIT}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_attention_is_refused(name: str) -> None:
    declare, fragments = WRONG[name]
    with pytest.raises(GraphError) as caught:
        declare(Sketch())
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, message


@pytest.mark.parametrize(
    "declare",
    [
        Sketch.sdpa,
        Sketch.paged,
        Sketch.backward,
        Sketch.fp8,
        Sketch.fp8_backward,
        Sketch.mxfp8,
        Sketch.mxfp8_backward,
    ],
    ids=lambda method: method.__name__,
)
def test_the_unchanged_sketches_are_right(declare: Callable[[Sketch], Tensor | None]) -> None:
    """So that each refusal above is due to what its case changes."""
    first = declare(Sketch())
    assert first is not None
    assert first.dim[:3] == (B, HQ, SQ)


def test_two_tensors_of_another_graph_are_refused() -> None:
    sketch, other = Sketch(), Sketch()
    with pytest.raises(GraphError, match="belongs to another graph"):
        sketch.sdpa(k=other.tensor(B, HKV, SKV, D, name="k"))
