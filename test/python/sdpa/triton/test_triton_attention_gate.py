"""An output gate in Triton's attention against the oracle: interpreted, and compiled on a GPU.

More of it is in ``test_triton_attention_gate_pairs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases.case import Case
from attention_cases.gated import DEVICE, Gated, execute, run_in_warp_groups

import tilewright as tw
from tilewright.engines.triton.attention_config import gates_apart
from tilewright.engines.triton.attention_cost import cost_us, facts_of, ranked_configs
from tilewright.engines.triton.attention_gate import read_graph
from tilewright.engines.triton.attention_spec import AttentionSpec
from tilewright.errors import NotSupportedError

pytestmark = [pytest.mark.L0, pytest.mark.usefixtures("interpreted")]

CASES: list[tuple[Case, dict[str, Any]]] = [
    (Case(stats="log2", sink="same", heads=(4, 2)), {"is_swapped": True, "is_endless": True}),
    (Case(rows=5, keys=2, band="bottom_right", stats="all"), {"gate": "heads"}),
    (Case(layout="stepped", sizes=(40, 72)), {"gate": "columns", "kind": "float32"}),
    (Case(band="causal", values="hidden_nan", lengths="lengths"), {"gate": "heads rows"}),
    (Case(place="ragged", lengths="lengths", band="causal", stats="natural"), {}),
    (Case(dropout="philox", bias="full", sizes=(96, 16)), {"kept": "bfloat16"}),
    # Few queries: in one program a key head, and in runs with a combination behind them.
    (Case(rows=2, keys=50, heads=(4, 2), place="paged_16", lengths="lengths"), {}),
    (Case(rows=1, keys=300, heads=(4, 2), lengths="lengths", stats="log2"), {"kind": "float32"}),
]


@pytest.mark.parametrize(("case", "gate"), CASES, ids=str)
def test_a_gate_behind_attention(case: Case, gate: dict[str, Any]) -> None:
    Gated(case, DEVICE, **gate).run(execute)


def test_a_gate_behind_the_kernel_of_warp_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    # And behind the kernel that makes noted rows again.
    case = Case(rows=33, keys=40, band="causal", values="hidden_nan", sizes=(16, 24))
    run_in_warp_groups(case, monkeypatch)


def test_a_gate_at_an_odd_address_takes_the_plan_behind() -> None:
    declared = Gated(Case(rows=20, keys=33, sizes=(64, 64)), DEVICE, start="unknown")
    gate = next(tensor for tensor in declared.inputs if tensor.name == "gate")
    odd = torch.empty(declared.inputs[gate].numel() + 1, dtype=torch.bfloat16)[1:]
    declared.inputs[gate] = odd.view(gate.dim).copy_(declared.inputs[gate])
    declared.run(execute)


def graph_of(change: Callable[[Any, Any, Any], Any]) -> tuple[Any, Any]:
    """The graph of attention with what ``change`` (graph, O, gate) makes, and its tensors."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32", name="gated")
    q, k, v, gate = (graph.tensor((2, 2, 16, 16), name=name) for name in ("q", "k", "v", "gate"))
    o, _ = graph.sdpa(q, k, v, attn_scale=0.25, is_inference=True, name="attention")
    change(graph, o.set_name("o"), gate).set_output(True)
    graph.validate()
    return graph, (q, k, v, gate)


def both(graph: Any, o: Any, gate: Any) -> Any:
    weight = graph.sigmoid(gate)
    weight.set_output(True)
    return graph.mul(o, weight)


def wide(graph: Any, o: Any, gate: Any) -> Any:
    return graph.mul(o, graph.sigmoid(graph.tensor((1, 2, 16, 16), data_type="float64")))


def own(graph: Any, o: Any, gate: Any) -> Any:
    return graph.mul(o, graph.sigmoid(o))


def squared(graph: Any, o: Any, gate: Any) -> Any:
    weight = graph.sigmoid(gate)
    graph.mul(weight, weight).set_output(True)
    return o


DECLINES = {
    "two results": (both, "is an output; of a gated attention the kernels store the product"),
    "a double gate": (wide, "has data type DOUBLE; the kernels take a gate of"),
    "O as its gate": (own, "is no buffer that the graph reads"),
    "a factor of 0 or 1": (
        lambda graph, o, gate: graph.mul(o, graph.sigmoid(gate).set_data_type("bool")),
        "has data type BOOLEAN; the kernels multiply O and the gate's factor in float32",
    ),
    "a double O": (
        lambda graph, o, gate: graph.mul(o.set_data_type("float64"), graph.sigmoid(gate)),
        "tensor 'o' has data type DOUBLE",
    ),
    "a product in 8 bits": (
        lambda graph, o, gate: graph.mul(o, graph.sigmoid(gate)).set_data_type("fp8_e4m3"),
        "has data type FP8_E4M3; .* round to HALF, BFLOAT16, FLOAT",
    ),
    "no gate": (squared, "its operands are not tensor 'o'"),
    "another function": (
        lambda graph, o, gate: graph.mul(o, graph.tanh(gate)),
        "the Triton attention takes a gate, one sigmoid and the product of O with it",
    ),
    "a chain": (
        lambda graph, o, gate: graph.relu(graph.mul(o, graph.sigmoid(gate))),
        "the Triton attention takes a gate, one sigmoid and the product of O with it",
    ),
}


@pytest.mark.parametrize("name", DECLINES)
def test_what_is_no_gate_is_declined_by_name(name: str) -> None:
    change, reason = DECLINES[name]
    graph, _ = graph_of(change)
    with pytest.raises(NotSupportedError, match=reason):
        read_graph(graph)


def test_explain_tells_that_the_gate_is_taken() -> None:
    graph = Gated(Case(rows=3, keys=5, batch=1, sizes=(16, 16)), DEVICE).graph
    verdicts = {v.engine_name: v for v in graph.explain().verdicts}
    assert verdicts["triton"].is_taken and verdicts["aten"].is_taken
    other, _ = graph_of(DECLINES["another function"][0])
    verdicts = {v.engine_name: v for v in other.explain().verdicts}
    assert "one sigmoid and the product of O with it" in verdicts["triton"].reason


def spec_of(length: int, *, has_gate: bool = True, **masks: Any) -> AttentionSpec:
    """16 heads of 128 in 16,384 tokens, as the engine would read it."""
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    dim = (16384 // length, 16, length, 128)
    q, k, v, gate = (graph.tensor(dim) for _ in range(4))
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True, **masks)
    (graph.mul(o, graph.sigmoid(gate)) if has_gate else o).set_output(True)
    graph.validate()
    return read_graph(graph)


def test_the_gate_has_a_kernel_of_its_own_behind_long_loops_of_warp_groups() -> None:
    causal = {"use_causal_mask": True}
    assert gates_apart(spec_of(16384, **causal)) and gates_apart(spec_of(2048))
    assert not gates_apart(spec_of(2048, **causal)) and not gates_apart(spec_of(512))
    assert not gates_apart(spec_of(16384, **causal, sliding_window_length=1024))
    assert not gates_apart(spec_of(16384, has_gate=False, **causal))


def test_a_gate_costs_programs_that_share_a_multiprocessor_more() -> None:
    facts = facts_of(132)
    plain, gated = (spec_of(512, has_gate=gate, use_causal_mask=True) for gate in (False, True))
    dealt, shared = ranked_configs(plain, 132, deals_warps=True)
    assert dealt.is_specialized and shared.is_in_order
    extra = [cost_us(gated, each, facts) - cost_us(plain, each, facts) for each in (dealt, shared)]
    assert 0.0 < extra[0] < extra[1]


COMPILE = """
import tilewright as tw
from tilewright.engines.triton import attention
from tilewright.graph.enums import knob_type as K

graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
q, k, v, gate = (graph.tensor((2, 4, 16, 16)) for _ in range(4))
o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True)
graph.mul(o, graph.sigmoid(gate)).set_output(True)
graph.validate()
small = ((K.TILE_M, 16), (K.TILE_N, 16), (K.WARPS, 4), (K.STAGES, 1))
(kernel,) = attention.plan(graph, small, 108).kernels
assert "gate" in dict(kernel.spec.types)
for target in TARGETS:
    told.append(facts_of(kernel, target))
"""


def test_a_gated_kernel_compiles_for_four_targets(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    found = [(facts["kernel"], facts["target"]) for facts in compiled_facts(COMPILE)]
    targets = ((8, 0), (9, 0), (10, 0), (12, 0))
    assert found == [("attention_forward", target) for target in targets]
