"""Every detector holds on the ATen engine, or declines for a reason that is no accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome

pytestmark = pytest.mark.L0

HELD = (
    "alias_refusal",
    "determinism",
    "every_element_written",
    "frame_independence",
    "guards_unchanged",
    "no_silent_fallback",
    "nothing_outside_read",
    "optional_operands",
    "replay_freshness",
    "storage_bound",
    "untouched_on_refusal",
)
DECLINED = {
    "beside_another_process": "needs a GPU, which two processes have in turn",
    "no_allocation": "ALLOCATES_TEMPORARIES",
    "no_synchronization": "on a CPU",
    "stream_order": "no streams",
    "wide_strides": "fixed at declaration",
}
Declare = Callable[[], tuple[Any, dict[str, torch.Tensor]]]


@pytest.fixture(params=["attention", "activated_product"])
def declared(request: pytest.FixtureRequest) -> tuple[Any, dict[str, torch.Tensor]]:
    declare: Declare = request.getfixturevalue(request.param)
    return declare()


@pytest.mark.parametrize("name", HELD)
def test_held(name: str, declared: tuple[Any, dict[str, torch.Tensor]]) -> None:
    verdict = getattr(detectors, f"assert_{name}")(*declared)
    assert verdict.outcome is Outcome.HELD, verdict


@pytest.mark.parametrize("name", DECLINED)
def test_declined_with_the_reason(
    name: str, attention: Callable[[], tuple[Any, dict[str, torch.Tensor]]]
) -> None:
    verdict = getattr(detectors, f"assert_{name}")(*attention())
    assert verdict.outcome is Outcome.DECLINED, verdict
    assert DECLINED[name] in verdict.text


def test_the_lists_name_every_detector() -> None:
    looked_at = {*HELD, *DECLINED, "torn_artifacts_are_misses"}
    assert looked_at == set(detectors._DETECTORS)
    assert {name for name in detectors.__all__ if name.startswith("assert_")} == {
        f"assert_{name}" for name in looked_at
    }


@pytest.mark.parametrize("module_first", [True, False])
def test_names_survive_every_order_of_imports(
    module_first: bool, run_python: Callable[..., str]
) -> None:
    imports = [
        "import importlib, pkgutil, tilewright.testing.detectors as d\n"
        "for m in pkgutil.iter_modules(d.__path__):\n"
        "    importlib.import_module(d.__name__ + '.' + m.name)\n",
        "from tilewright.testing.detectors import *\n",
    ]
    code = "".join(imports if module_first else reversed(imports))
    code += "import tilewright.testing.detectors as d\n"
    code += "print([n for n in d.__all__ if not callable(getattr(d, n))])"
    assert run_python(code) == "[]\n"


def test_a_virtual_tensor_given_a_buffer_is_looked_at(
    activated_product: Callable[[], tuple[Any, dict[str, torch.Tensor]]],
) -> None:
    graph, operands = activated_product()
    assert detectors.graph_subject(graph).declare is not None
    subject = detectors.graph_subject(graph)
    assert subject.declare is not None
    assert subject.declare(operands, {}).virtual == (graph.virtual_tensors()[0].uid,)
