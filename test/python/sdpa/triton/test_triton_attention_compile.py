"""The backward's kernels and stored draws compile for four targets, with no GPU, in small tiles.

The tiles that are run, which take the compiler long, are those of ``test_triton_attention.py`` and
of ``test_triton_attention_backward.py`` (L1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilewright.artifact.environment import installed_version

pytestmark = pytest.mark.L0

CHILD = """
import tilewright as tw
from tilewright.engines.triton import attention, attention_backward
from tilewright.graph.enums import knob_type as K

ROWS, KEYS = 16, 16

def declare(is_backward):
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q, o, d_o = (graph.tensor((2, 4, ROWS, 16)) for _ in range(3))
    k, v = (graph.tensor((2, 2, KEYS, 16)) for _ in range(2))
    options = dict(attn_scale=0.1)
    if is_backward:
        given = dict(dBias=graph.tensor(), dSink_token=graph.tensor())
        options |= dict(
            bias=graph.tensor((1, 4, ROWS, KEYS)), sink_token=graph.tensor((1, 4, 1, 1)), **given
        )
        stats = graph.tensor((2, 4, ROWS, 1), data_type="float32")
        made = [*graph.sdpa_backward(q, k, v, o, d_o, stats, **options), *given.values()]
    else:
        made = [graph.tensor(name="draws").set_data_type("float32")]
        options["dropout"] = (0.1, graph.tensor_scalar(1), graph.tensor_scalar(2))
        o, _ = graph.sdpa(q, k, v, is_inference=True, rng_dump=made[0], **options)
        made.append(o)
    for tensor in made:
        tensor.set_output(True)
    graph.validate()
    return graph

small = ((K.TILE_M, 16), (K.TILE_N, 16), (K.WARPS, 4), (K.STAGES, 1))
plans = [attention_backward.plan(declare(True), small, 108)]
plans.append(attention.plan(declare(False), small, 108))
kernels = {kernel.spec.name: kernel for plan in plans for kernel in plan.kernels}
del kernels["attention_forward"]
for kernel in kernels.values():
    for target in TARGETS:
        told.append(facts_of(kernel, target))
"""
DIRECT = """
import tilewright as tw
from tilewright.engines.triton import attention, attention_decode_config

# Whether it pays or not.
attention_decode_config.pays_in_registers = lambda *_: True
for rows, page, depth in ((1, 0, 128), (4, 24, 64)):
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q = graph.tensor((2, 8, rows, depth))
    lengths = [graph.tensor((2, 1, 1, 1), data_type="int32") for _ in range(2)]
    options = dict(use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1])
    k, v = (graph.tensor((80, 2, page, depth) if page else (2, 2, 960, depth)) for _ in range(2))
    if page:
        tables = [graph.tensor((2, 1, 40, 1), data_type="int32") for _ in range(2)]
        options |= {f"paged_attention_{x}_table": table for x, table in zip("kv", tables)}
        options["paged_attention_max_seq_len_kv"] = 960
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True, **options)
    o.set_output(True)
    graph.validate()
    kernel = attention.plan(graph, attention.propose(graph, 132)[0].knobs, 132).kernels[0]
    shared = compile_kernel(kernel.spec, (9, 0)).shared_bytes
    told.append(facts_of(kernel, (9, 0)) | {"shared_bytes": shared})
"""


@pytest.mark.skipif(
    not installed_version("triton").startswith(("3.6.", "3.7.")),
    reason="this version of Triton has another Gluon than the kernel is written in",
)
def test_one_warp_exchanges_nothing_through_shared_memory(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    # Registers are multiplied as they were loaded: a layout that had to be changed would show.
    found = compiled_facts(DIRECT)
    assert [facts["kernel"] for facts in found] == ["attention_decode_direct"] * 2
    assert all(facts["threads"] == 32 and facts["shared_bytes"] == 0 for facts in found)


JOINED = DIRECT.replace(
    "for rows, page", "attention_decode_config._joined_runs = lambda *_: 16\nfor rows, page"
)


@pytest.mark.skipif(
    not installed_version("triton").startswith(("3.6.", "3.7.")),
    reason="this version of Triton has another Gluon than the kernel is written in",
)
def test_warps_of_a_program_exchange_nothing_but_what_they_send(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    # A layout that warps would have to change together would show as memory for it.
    found = compiled_facts(JOINED)
    assert [facts["kernel"] for facts in found] == ["attention_decode_joined"] * 2
    assert [facts["threads"] for facts in found] == [64, 32]
    assert all(facts["shared_bytes"] == 0 for facts in found)


PAIRED = JOINED.replace("lambda *_: 16", "lambda *_: 8").replace("(4, 24, 64)", "(2, 24, 64)")


@pytest.mark.skipif(
    not installed_version("triton").startswith(("3.6.", "3.7.")),
    reason="this version of Triton has another Gluon than the kernel is written in",
)
def test_nor_do_those_of_two_sequences(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    found = compiled_facts(PAIRED)
    assert [facts["kernel"] for facts in found] == ["attention_decode_paired"] * 2
    assert [facts["threads"] for facts in found] == [64, 64]
    assert all(facts["shared_bytes"] == 0 for facts in found)


COMBINED = """
import tilewright as tw
from tilewright.engines.triton import attention
from tilewright.graph.enums import knob_type as K

graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
q = graph.tensor((2, 4, 1, 16))
k, v = (graph.tensor((2, 2, 2048, 16)) for _ in range(2))
lengths = [graph.tensor((2, 1, 1, 1), data_type="int32") for _ in range(2)]
options = dict(use_padding_mask=True, seq_len_q=lengths[0], seq_len_kv=lengths[1])
sink = graph.tensor((1, 4, 1, 1))
o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True, sink_token=sink, **options)
o.set_output(True)
graph.validate()
for count, target in ((108, (8, 0)), (132, (9, 0))):
    plans = attention.propose(graph, count)
    knobs = next(plan.knobs for plan in plans if dict(plan.knobs).get(K.SPLIT_K, 0) > 1)
    kernel = attention.plan(graph, knobs, count).kernels[1]
    assert dict(kernel.spec.constants)["IS_DEALT"]
    told.append(facts_of(kernel, target))
"""


def test_runs_that_are_dealt_are_combined_with_a_sink(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    # The interpreter has no types of its own: what changes its type in a loop shows here alone.
    found = [(facts["kernel"], facts["target"]) for facts in compiled_facts(COMBINED)]
    assert found == [("attention_combine", (8, 0)), ("attention_combine", (9, 0))]


TARGETS = ((8, 0), (9, 0), (10, 0), (12, 0))
PARTS = ("backward_prepare", "backward_keys", "backward_rows", "backward_sink", "backward_bias")


def test_every_kernel_compiles_for_four_targets_and_is_called_as_compiled(
    compiled_facts: Callable[..., list[dict[str, Any]]],
) -> None:
    found = {(facts["kernel"], facts["target"]) for facts in compiled_facts(CHILD)}
    assert found == {(f"attention_{part}", t) for part in (*PARTS, "draws") for t in TARGETS}
