"""Drawn inputs make sense together: lengths, offsets, tables, statistics, layouts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_graphs import (
    DEPTH,
    GRAPHS,
    HEADS,
    KEYS,
    KV_HEADS,
    ROWS,
    batchnorm,
    block_scaled_product,
    experts,
    fp8_backward,
    layernorm_backward,
    lengths,
    masked_attention,
    offsets,
    packed,
    packed_tables,
    paged_attention,
    pointwise,
    ragged_attention,
    ragged_backward,
    rope,
)
from safetensors.torch import save_file

from tilewright import Graph
from tilewright.cli.inputs import InputSet, make_inputs
from tilewright.cli.storage import is_sparse, logical_view, new_storage, poison
from tilewright.oracle import evaluate
from tilewright.oracle.layout import load

pytestmark = pytest.mark.L0

FileMaker = Callable[..., Path]

Runner = Callable[..., Any]


def drawn(build: Callable[[Graph], None], seed: int = 0, io: str = "float32") -> tuple[Any, Any]:
    graph = Graph("g", io, "float32")
    build(graph)
    graph.validate()
    return graph, make_inputs(graph, {}, seed)


def buffer(graph: Graph, inputs: InputSet, name: str) -> torch.Tensor:
    [tensor] = [tensor for tensor in graph.inputs() if tensor.name == name]
    return logical_view(tensor, inputs.buffers[tensor.uid])


HALVES = {"ragged_attention", "ragged_backward", "conv_bias_relu", "layernorm_backward"}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_run_on_drawn_inputs_is_right(run: Runner, graph_file: FileMaker, name: str) -> None:
    io = "bfloat16" if name in HALVES else "float32"
    ran = run("run", graph_file(GRAPHS[name], name, io), "--json", "--repeat", "1", "--seed", "3")
    document = json.loads(ran.out)
    assert ran.code == 0, ran.out
    assert document["notes"] == []
    assert {entry["verdict"] for entry in document["outputs"]} == {"ok"}


@pytest.mark.parametrize("seed", range(5))
def test_lengths_and_ragged_offsets_describe_the_same_sequences(seed: int) -> None:
    graph, inputs = drawn(ragged_attention, seed)
    for side, rows, heads in (("q", ROWS, HEADS), ("kv", KEYS, KV_HEADS)):
        found = buffer(graph, inputs, f"seq_len_{side}").flatten()
        assert int(found.min()) >= 1
        assert int(found.max()) == rows
        starts = buffer(graph, inputs, f"off_{side}").flatten()
        assert int(starts[0]) == 0
        assert torch.equal(starts.diff(), found * heads * DEPTH)
        data = inputs.buffers[next(t for t in graph.inputs() if t.name == side[0]).uid]
        assert data.numel() == int(found.sum()) * heads * DEPTH
    rows_of_stats = buffer(graph, inputs, "off_stats").flatten().diff() // HEADS
    assert torch.equal(rows_of_stats, buffer(graph, inputs, "seq_len_q").flatten())


def test_ragged_offsets_of_page_tables_count_the_pages_of_each_sequence() -> None:
    graph, inputs = drawn(packed_tables, 4)
    pages = (buffer(graph, inputs, "seq_len_kv").flatten() + 7) // 8
    for side in "kv":
        starts = buffer(graph, inputs, f"off_{side}_table").flatten()
        assert int(starts[0]) == 0 and torch.equal(starts.diff(), pages)
        (table,) = (t for t in graph.inputs() if t.name == f"{side}_table")
        numbers = inputs.buffers[table.uid]
        assert numbers.numel() == int(pages.sum()) == numbers.unique().numel()


def test_different_seeds_give_different_lengths() -> None:
    found = {
        tuple(buffer(*drawn(ragged_attention, seed), "seq_len_q").flatten().tolist())
        for seed in range(6)
    }
    assert len(found) > 2


def test_one_offset_tensor_for_both_sides_ties_their_lengths() -> None:
    def build(graph: Graph) -> None:
        shared = offsets(graph, "off")
        q = packed(graph, "q", HEADS, ROWS, shared)
        k, v = (packed(graph, n, HEADS, KEYS, shared) for n in "kv")
        o, _ = graph.sdpa(q, k, v, use_padding_mask=True, **lengths(graph))
        o.set_output(True).set_ragged_offset(shared)

    graph, inputs = drawn(build)
    assert torch.equal(buffer(graph, inputs, "seq_len_q"), buffer(graph, inputs, "seq_len_kv"))
    assert int(buffer(graph, inputs, "seq_len_kv").max()) == min(ROWS, KEYS)


def test_one_offset_tensor_for_tokens_of_two_sizes_is_refused(
    run: Runner, graph_file: FileMaker
) -> None:
    def build(graph: Graph) -> None:
        shared = offsets(graph, "off")
        q = packed(graph, "q", HEADS, ROWS, shared)
        k, v = (packed(graph, n, KV_HEADS, ROWS, shared) for n in "kv")
        o, _ = graph.sdpa(q, k, v, use_padding_mask=True, **lengths(graph))
        o.set_output(True).set_ragged_offset(shared)

    ran = run("run", graph_file(build))
    assert ran.code == 2
    assert "tensor 'off'" in ran.err


def test_running_sums_and_a_bound_on_tokens() -> None:
    def build(graph: Graph) -> None:
        q = graph.tensor((8, 2, 50, DEPTH), name="q")
        k, v = (graph.tensor((8, 2, 50, DEPTH), name=n) for n in "kv")
        sums = {
            n: graph.tensor((9, 1, 1, 1), data_type="int64", name=n)
            for n in ("cu_seq_len_q", "cu_seq_len_kv")
        }
        o, _ = graph.sdpa(q, k, v, use_padding_mask=True, max_total_seq_len_q=100, **sums)
        o.set_output(True)

    graph, inputs = drawn(build)
    sums = buffer(graph, inputs, "cu_seq_len_q").flatten()
    assert int(sums[0]) == 0
    assert 50 < int(sums[-1]) <= 100
    assert int(sums.diff().min()) >= 0
    assert int(buffer(graph, inputs, "cu_seq_len_kv").diff(dim=0).max()) == 50


def test_given_lengths_decide_the_offsets(
    run: Runner, graph_file: FileMaker, tmp_path: Path
) -> None:
    graph = Graph("g", "float32", "float32")
    ragged_attention(graph)
    graph.validate()
    given = torch.tensor([5, 0, 24], dtype=torch.int32).reshape(3, 1, 1, 1)
    inputs = make_inputs(graph, {"seq_len_q": given}, 0)
    assert buffer(graph, inputs, "off_q").flatten().tolist() == [0, 320, 320, 1856]
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({"seq_len_q": given}, source)
    path = graph_file(ragged_attention)
    assert run("run", path, "--inputs", source, "--output", target).code == 0


@pytest.mark.parametrize("sides", ["k", "v", "kv"])
def test_given_offsets_of_page_tables_decide_the_lengths(sides: str) -> None:
    graph = Graph("g", "float32", "float32")
    packed_tables(graph)
    graph.validate()
    starts = {"k": [0, 3, 4, 9], "v": [0, 2, 4, 10]}
    given = {
        f"off_{side}_table": torch.tensor(starts[side], dtype=torch.int32).view(4, 1, 1, 1)
        for side in sides
    }
    inputs = make_inputs(graph, given, 0)
    found = buffer(graph, inputs, "seq_len_kv").flatten().tolist()
    # Pages of 8 tokens, 40 at most: what every given table has room for.
    assert found == {"k": [24, 8, 40], "v": [16, 16, 40], "kv": [16, 8, 40]}[sides]


def test_an_offset_that_counts_no_whole_rows_is_refused(run: Runner, graph_file: FileMaker) -> None:
    def build(graph: Graph) -> None:
        packed_tables(graph)
        (table,) = (t for t in graph.operations[0].inputs.values() if t.name == "k_table")
        table.set_ragged_offset_multiplier(3)

    ran = run("run", graph_file(build))
    assert ran.code == 2 and "tensor 'k_table': a step along axis 2 takes 1 elements" in ran.err


def test_lengths_that_the_given_data_cannot_hold_are_5(
    run: Runner, graph_file: FileMaker, tmp_path: Path
) -> None:
    given = {
        "seq_len_q": torch.tensor([5, 6, 24], dtype=torch.int32).reshape(3, 1, 1, 1),
        "q": torch.zeros(10 * HEADS * DEPTH),
    }
    save_file(given, tmp_path / "in.safetensors")
    ran = run("run", graph_file(ragged_attention), "--inputs", tmp_path / "in.safetensors")
    assert ran.code == 5
    assert "q: a sequence of 6 rows" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_page_tables_are_in_range_distinct_and_independent() -> None:
    graph, inputs = drawn(paged_attention)
    tables = [buffer(graph, inputs, f"{side}_table").flatten() for side in "kv"]
    for table in tables:
        assert int(table.min()) >= 0
        assert int(table.max()) < 32
        assert len(set(table.tolist())) == table.numel()
    assert not torch.equal(*tables)
    assert int(buffer(graph, inputs, "seq_len_kv").max()) == KEYS


def test_attention_outputs_of_a_backward_are_those_of_its_forward() -> None:
    """o and stats of the backward equal what the forward gives on the same operands."""
    graph, inputs = drawn(ragged_backward, io="float32")
    names = {t.name: t for t in graph.inputs()}
    forward = Graph("f", "float32", "float32")
    ragged_attention(forward)
    forward.validate()
    operation = forward.operations[0]
    # The same masks as the backward's.
    object.__setattr__(operation, "use_causal_mask_bottom_right", False)
    object.__setattr__(operation, "use_causal_mask", True)
    buffers = {t.uid: inputs.buffers[names[t.name].uid] for t in forward.inputs()}
    expected = evaluate(forward, buffers)
    for name, output, offset in (("o", "O", "off_q"), ("stats", "Stats", "off_stats")):
        record = names[name]
        found = load(record, inputs.buffers[record.uid], buffer(graph, inputs, offset))
        [uid] = [t.uid for t in forward.outputs() if t.name == output]
        want = expected[uid].to(torch.float32)
        rows = buffer(graph, inputs, "seq_len_q").flatten()
        for sequence, count in enumerate(rows.tolist()):
            got_rows, want_rows = found[sequence, :, :count], want[sequence, :, :count]
            assert torch.equal(got_rows, want_rows)
            assert bool((got_rows != 0).any())


def test_a_block_scaled_backward_of_no_queries_is_drawn() -> None:
    graph = Graph("g", "float32", "float32")
    rows, keys = (1, 2, 0, 8), (1, 2, 3, 8)
    dims = {"q": rows, "q_T": rows, "k": keys, "k_T": keys, "v": keys, "dO": rows, "dO_T": rows}
    ports = {name: graph.tensor(dim, data_type="FP8_E4M3") for name, dim in dims.items()}
    ports |= {name: graph.tensor(rows) for name in ("o_f16", "dO_f16")}
    for name, (batch, heads, length, depth) in dims.items():
        scaled = (-(-length // 32), depth) if name.endswith("_T") else (length, 1)
        dim = (batch, heads, *scaled)
        ports[f"descale_{name}"] = graph.tensor(dim, data_type="FP8_E8M0")
    made = graph.sdpa_mxfp8_backward(**ports, stats=graph.tensor((1, 2, 0, 1)))
    for tensor in made:
        tensor.set_output(True)
    graph.validate()
    inputs = make_inputs(graph, {}, 0)
    assert inputs.buffers[ports["q"].uid].numel() == 0
    assert inputs.buffers[ports["k"].uid].numel() == 48


def test_statistics_of_a_norm_backward_are_those_of_its_input() -> None:
    graph, inputs = drawn(layernorm_backward)
    x = buffer(graph, inputs, "x").to(torch.float64)
    mean = x.mean(1, keepdim=True)
    deviation = (x.var(1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
    torch.testing.assert_close(buffer(graph, inputs, "mean"), mean.to(torch.float32))
    torch.testing.assert_close(buffer(graph, inputs, "inv_variance"), deviation.to(torch.float32))


def test_what_cannot_be_derived_is_told() -> None:
    def build(graph: Graph) -> None:
        x, grad = (graph.tensor((12, 40, 1, 1), name=n) for n in ("x", "grad"))
        scale = graph.tensor((1, 40, 1, 1), name="scale")
        mean, deviation = (graph.tensor((12, 1, 1, 1), name=n) for n in ("mean", "inv_variance"))
        virtual = graph.identity(x)
        for result in graph.layernorm_backward(grad, virtual, scale, mean, deviation):
            result.set_output(True)

    graph, inputs = drawn(build)
    [note] = inputs.notes
    assert "mean and inv_variance are random" in note
    assert float(buffer(graph, inputs, "inv_variance").min()) > 0


def test_values_are_in_the_range_of_their_role() -> None:
    graph, inputs = drawn(batchnorm)
    assert float(buffer(graph, inputs, "run_var").min()) > 0
    assert buffer(graph, inputs, "momentum").item() == pytest.approx(0.1)
    graph, inputs = drawn(pointwise)
    assert float(buffer(graph, inputs, "arg").min()) > 0
    assert float(buffer(graph, inputs, "base").min()) > 0
    assert float(buffer(graph, inputs, "den").abs().min()) >= 0.5
    assert set(buffer(graph, inputs, "mask").flatten().tolist()) == {False, True}
    equal = buffer(graph, inputs, "left") == buffer(graph, inputs, "right")
    assert bool(equal.any())
    assert not bool(equal.all())
    graph, inputs = drawn(masked_attention)
    assert buffer(graph, inputs, "attn_scale").item() == pytest.approx(DEPTH**-0.5)
    assert buffer(graph, inputs, "block_mask").dtype is torch.uint8
    graph, inputs = drawn(fp8_backward)
    for name in ("s", "o", "dP"):
        product = 1.0 if name == "o" else buffer(graph, inputs, f"scale_{name}").item()
        assert buffer(graph, inputs, f"descale_{name}").item() * product in (1.0, 0.5)


def test_group_offsets_rise_and_scattered_rows_are_distinct() -> None:
    graph, inputs = drawn(experts)
    starts = buffer(graph, inputs, "offsets").flatten()
    assert int(starts[0]) == 0
    assert bool((starts.diff() >= 0).all())
    assert int(starts[-1]) <= 40
    assert sorted(buffer(graph, inputs, "index").flatten().tolist()) == list(range(40))


def test_block_scales_are_valid_codes() -> None:
    graph, inputs = drawn(block_scaled_product)
    for name in ("a_scale", "b_scale"):
        values = buffer(graph, inputs, name).to(torch.float32)
        assert bool(torch.isfinite(values).all())
        assert float(values.min()) > 0
    powers = torch.log2(buffer(graph, inputs, "b_scale").to(torch.float32))
    assert torch.equal(powers, powers.round())
    assert buffer(graph, inputs, "a").dtype is torch.uint8
    assert len(set(buffer(graph, inputs, "a").tolist())) > 50


def test_angles_rotate_by_position() -> None:
    graph, inputs = drawn(rope)
    freqs = buffer(graph, inputs, "freqs")[0, 0]
    assert torch.equal(freqs[:, :16], freqs[:, 16:])
    torch.testing.assert_close(freqs[:, 0], torch.arange(64.0))
    assert float(freqs[63, 15]) == pytest.approx(63 * 10_000 ** (-15 / 16), rel=1e-6)


def test_numbers_depend_on_the_seed_and_the_uid_alone() -> None:
    generator = torch.random.get_rng_state()
    first = drawn(ragged_attention, 7)[1].buffers
    torch.manual_seed(99)
    second = drawn(ragged_attention, 7)[1].buffers
    third = drawn(ragged_attention, 8)[1].buffers
    torch.random.set_rng_state(generator)
    assert all(torch.equal(first[uid], second[uid]) for uid in first)
    assert any(not torch.equal(first[uid], third[uid]) for uid in first)


def test_storage_has_the_declared_layout_and_alignment() -> None:
    graph = Graph("g", "float32")
    wide = graph.tensor((2, 3), (2**33, 1), alignment_value=4096, name="wide")
    graph.identity(wide).set_output(True).set_stride((3, 1))
    graph.validate()
    # 2**35 bytes of address space, of which two pages are touched.
    buffers = make_inputs(graph, {}, 0).buffers
    assert is_sparse(wide)
    assert buffers[wide.uid].numel() == 2**33 + 3
    assert buffers[wide.uid].data_ptr() % 4096 == 0
    values = logical_view(wide, buffers[wide.uid])
    assert values.stride() == (2**33, 1)
    assert bool((values != 0).all())


@pytest.mark.parametrize("data_type", ["float32", "FP8_E4M3", "FP8_E8M0", "BOOLEAN"])
def test_elements_that_share_a_place_hold_one_value(data_type: str) -> None:
    graph = Graph("g", "float32")
    expanded = graph.tensor((2, 3), (0, 1), data_type)
    graph.identity(expanded).set_output(True)
    graph.validate()
    storage = make_inputs(graph, {}, 0).buffers[expanded.uid]
    assert storage.numel() == 3
    view = logical_view(expanded, storage).to(torch.float32)
    assert torch.equal(view[0], view[1])


@pytest.mark.parametrize(
    "data_type", ["float32", "bfloat16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "int32", "BOOLEAN"]
)
def test_poison_is_no_number_that_a_result_has(data_type: str) -> None:
    graph = Graph("g")
    tensor = graph.tensor((4, 4), data_type=data_type, name="t")
    storage = new_storage(tensor, 16)
    poison(tensor, storage)
    values = storage.to(torch.float64)
    if storage.dtype.is_floating_point:
        assert bool(values.isnan().all())
    else:
        assert float(values[0]) == (1.0 if data_type == "BOOLEAN" else 2**31 - 1)
    assert not math.isnan(float(values.nan_to_num().sum()))


def test_a_graph_with_gigabytes_of_gaps_runs(run: Runner, graph_file: FileMaker) -> None:
    def build(graph: Graph) -> None:
        wide = graph.tensor((2, 3), (2**31 + 5, 1), name="wide")
        graph.neg(wide).set_output(True).set_stride((2**32 + 9, 1)).set_name("negative")

    ran = run("run", graph_file(build), "--json", "--repeat", "1")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["operand_bytes"] == 2 * 6 * 4
    assert document["outputs"][0]["max_error"] == 0.0
