"""`tilewright run`: exit codes, files in and out, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright import Graph

pytestmark = pytest.mark.L0

FileMaker = Callable[..., Path]
Runner = Callable[..., Any]


def operands() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "A": torch.randn(2, 8, 16, generator=generator),
        "B": torch.randn(2, 16, 4, generator=generator),
    }


def report(ran: Any) -> dict[str, Any]:
    """The one JSON object on standard output, which holds nothing else."""
    document = json.loads(ran.out)
    assert isinstance(document, dict)
    return document


def one_line(ran: Any) -> str:
    """The error message, which is one line and no traceback."""
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("tilewright run: error: ")
    assert ran.out == ""
    return lines[0]


def test_a_right_result_is_0(run: Runner, graph_file: FileMaker) -> None:
    ran = run("run", graph_file())
    assert ran.code == 0
    assert ran.err == ""
    for word in ("C", "2x8x4", "FLOAT", "ok", "plan       aten", "us (median of 10)", "workspace"):
        assert word in ran.out


def test_json_tells_the_plan_the_time_and_each_output(run: Runner, graph_file: FileMaker) -> None:
    ran = run("run", graph_file(), "--json", "--repeat", "3", "--seed", "4")
    document = report(ran)
    assert (ran.code, ran.err) == (0, "")
    assert document["verdict"] == "ok"
    assert document["plan"] == document["engine"] == "aten"
    assert document["launches"] == 3
    assert document["time_us"] > 0
    assert document["seed"] == 4
    assert document["operand_bytes"] == 4 * (2 * 8 * 16 + 2 * 16 * 4 + 2 * 8 * 4)
    [entry] = document["outputs"]
    assert entry["name"] == "C"
    assert entry["dim"] == [2, 8, 4]
    assert 0 <= entry["max_error"] <= entry["tolerance"] < 1e-3


def test_the_seed_decides_the_inputs(run: Runner, graph_file: FileMaker, tmp_path: Path) -> None:
    path = graph_file()
    results = []
    for number, seed in enumerate((1, 1, 2)):
        target = tmp_path / f"{number}.npz"
        assert run("run", path, "--seed", str(seed), "--output", target, "--no-check").code == 0
        results.append(np.load(target)["C"])
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_an_unwritten_output_is_1(
    run: Runner, graph_file: FileMaker, broken_matmul: Callable[..., None]
) -> None:
    broken_matmul(lambda inputs, outputs: None)
    ran = run("run", graph_file(), "--json")
    assert ran.code == 1
    [entry] = report(ran)["outputs"]
    assert entry["verdict"] == "wrong"
    assert entry["max_error"] == "inf"
    assert "64 of 64 elements differ, first at (0, 0, 0): got nan" in entry["detail"]


def test_one_wrong_element_is_1(
    run: Runner, graph_file: FileMaker, broken_matmul: Callable[..., None]
) -> None:
    def multiply(inputs: Any, outputs: Any) -> None:
        torch.matmul(inputs["A"], inputs["B"], out=outputs["C"])
        outputs["C"][1, 2, 3] += 0.01

    broken_matmul(multiply)
    ran = run("run", graph_file())
    assert ran.code == 1
    assert "1 of 64 elements differ, first at (1, 2, 3)" in ran.out
    assert run("run", graph_file(), "--no-check").code == 0


def test_no_check_computes_no_reference(
    run: Runner, graph_file: FileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("the reference was computed")

    monkeypatch.setattr("tilewright.oracle.evaluate", refuse)
    document = report(run("run", graph_file(), "--no-check", "--json"))
    assert document["verdict"] == "unchecked"
    with pytest.raises(RuntimeError, match="was computed"):
        refuse()
    assert run("run", graph_file()).code == 70


def test_an_operation_without_reference_is_4(
    run: Runner, graph_file: FileMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tilewright.oracle import registry

    monkeypatch.delitem(registry._references, "matmul")
    target = tmp_path / "out.npz"
    ran = run("run", graph_file(), "--json", "--output", target)
    assert ran.code == 4
    assert "no reference to check against" in ran.err
    assert report(ran)["verdict"] == "unchecked"
    assert target.exists()
    assert run("run", graph_file(), "--no-check").code == 0


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_tensors_come_from_and_go_to_files(
    run: Runner, graph_file: FileMaker, tmp_path: Path, suffix: str
) -> None:
    given, source, target = operands(), tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    if suffix == ".npz":
        np.savez(source, **{name: tensor.numpy() for name, tensor in given.items()})
    else:
        save_file(given, source)
    assert run("run", graph_file(), "--inputs", source, "--output", target).code == 0
    if suffix == ".npz":
        result = torch.from_numpy(np.load(target)["C"])
    else:
        result = load_file(target)["C"]
    torch.testing.assert_close(result, given["A"] @ given["B"])
    assert list(tmp_path.glob(".*")) == []


def test_a_uid_names_a_tensor_too(run: Runner, graph_file: FileMaker, tmp_path: Path) -> None:
    given = operands()
    save_file({"1": given["A"], "B": given["B"]}, tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    ran = run("run", graph_file(), "--inputs", tmp_path / "in.safetensors", "--output", target)
    assert ran.code == 0, ran.err
    torch.testing.assert_close(load_file(target)["C"], given["A"] @ given["B"])


def test_a_given_tensor_takes_the_declared_strides(
    run: Runner, graph_file: FileMaker, tmp_path: Path
) -> None:
    def build(graph: Graph) -> None:
        a = graph.tensor((2, 8, 16), (200, 1, 9), name="A")
        b = graph.tensor((2, 16, 4), (0, 4, 1), name="B")
        graph.matmul(a, b).set_output(True).set_name("C")

    given = operands()
    given["B"] = given["B"][:1].expand(2, 16, 4).contiguous()
    save_file(given, tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    ran = run("run", graph_file(build), "--inputs", tmp_path / "in.safetensors", "--output", target)
    assert ran.code == 0, ran.err + ran.out
    torch.testing.assert_close(load_file(target)["C"], given["A"] @ given["B"])


def test_bfloat16_goes_through_npz_as_codes(
    run: Runner, graph_file: FileMaker, tmp_path: Path
) -> None:
    given = {name: tensor.to(torch.bfloat16) for name, tensor in operands().items()}
    codes = {name: tensor.view(torch.uint16).numpy() for name, tensor in given.items()}
    np.savez(tmp_path / "in.npz", **codes)
    target = tmp_path / "out.npz"
    path = graph_file(io_data_type="bfloat16")
    assert run("run", path, "--inputs", tmp_path / "in.npz", "--output", target).code == 0
    result = torch.from_numpy(np.load(target)["C"]).view(torch.bfloat16)
    torch.testing.assert_close(result, given["A"] @ given["B"])


def test_outputs_without_a_name_of_their_own_go_by_uid(
    run: Runner, graph_file: FileMaker, tmp_path: Path
) -> None:
    def build(graph: Graph) -> None:
        a, b = graph.tensor((2, 8, 16), name="A"), graph.tensor((2, 16, 4), name="B")
        graph.matmul(a, b).set_output(True).set_uid(70)
        graph.matmul(a, b).set_output(True).set_uid(71).set_name("same")
        graph.matmul(a, b).set_output(True).set_uid(72).set_name("same")

    target = tmp_path / "out.safetensors"
    assert run("run", graph_file(build), "--output", target).code == 0
    assert sorted(load_file(target)) == ["70", "71", "72"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"Q": torch.zeros(2, 8, 16)}, "no input of the graph is named 'Q'; its inputs are A, B"),
        ({"C": torch.zeros(2, 8, 4)}, "no input of the graph is named 'C'"),
        ({"A": torch.zeros(2, 8, 16), "1": torch.zeros(2, 8, 16)}, "by name and by uid"),
        ({"A": torch.zeros(2, 16, 8)}, "has shape (2, 16, 8); expected the declared dim"),
        ({"A": torch.zeros(200)}, "has shape (200,); expected the declared dim (2, 8, 16), or"),
        (
            {"A": torch.zeros(2, 8, 16, dtype=torch.float64)},
            "has data type float64; expected FLOAT",
        ),
        ({"A": torch.zeros(2, 8, 16, dtype=torch.int32)}, "nothing is converted"),
    ],
)
def test_a_tensor_that_does_not_fit_is_2(
    run: Runner,
    graph_file: FileMaker,
    tmp_path: Path,
    given: dict[str, torch.Tensor],
    message: str,
) -> None:
    save_file(given, tmp_path / "in.safetensors")
    ran = run("run", graph_file(), "--inputs", tmp_path / "in.safetensors")
    assert ran.code == 2
    assert message in one_line(ran)


def test_a_graph_file_that_cannot_be_read_is_2(run: Runner, tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.touch()
    for path, message in (
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "is a directory"),
        (empty, "the file is empty"),
        (empty / "below", "Not a directory"),
    ):
        ran = run("run", path)
        assert ran.code == 2
        assert str(path) in one_line(ran)
        assert message in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON document"),
        ("[1]", "expected an object"),
        ("{}", "tilewright_graph is None"),
        ('{"graph": 3}', "is int; expected an object"),
        ("\udcff", "not a JSON document"),
        ("[" * 100_000, "not a JSON document"),
    ],
)
def test_a_file_that_holds_no_graph_is_3(
    run: Runner, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    ran = run("run", path)
    assert ran.code == 3
    assert message in one_line(ran)


def test_a_graph_whose_shapes_do_not_fit_is_3(
    run: Runner, graph_file: FileMaker, tmp_path: Path
) -> None:
    document = json.loads(graph_file().read_text())
    document["tensors"][1]["dim"] = [2, 17, 4]
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    ran = run("run", path)
    assert ran.code == 3
    assert "tensor 'B'" in one_line(ran)


def test_an_engine_that_declines_is_4(run: Runner, graph_file: FileMaker) -> None:
    ran = run("run", graph_file(), "--engine", "triton")
    assert ran.code == 4
    assert "triton" in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_an_unknown_engine_or_device_is_2(run: Runner, graph_file: FileMaker) -> None:
    ran = run("run", graph_file(), "--engine", "magic")
    assert ran.code == 2
    assert "known are aten, triton, hopper, cudnn" in one_line(ran)
    ran = run("run", graph_file(), "--device", "tpu")
    assert ran.code == 2
    assert "expected cpu, cuda or cuda:N" in one_line(ran)
    ran = run("run", graph_file(), "--device", "cuda:99")
    assert ran.code == 2
    assert "CUDA devices" in one_line(ran)
    assert run("run", graph_file(), "--device", "cpu").code == 0


def test_operands_larger_than_the_memory_are_5(run: Runner, graph_file: FileMaker) -> None:
    def build(graph: Graph) -> None:
        a = graph.tensor((1, 2**24, 2**24), name="A")
        graph.matmul(a, graph.tensor((1, 2**24, 1), name="B")).set_output(True)

    ran = run("run", graph_file(build))
    assert ran.code == 5
    assert "bytes of memory" in one_line(ran)


def test_a_stored_plan_is_taken(run: Runner, tmp_path: Path) -> None:
    graph = Graph("stored", "float32")
    a, b = graph.tensor((1, 4, 4), name="A"), graph.tensor((1, 4, 4), name="B")
    graph.matmul(a, b).set_output(True)
    graph.build()
    path = tmp_path / "stored.json"
    path.write_bytes(graph.serialize())
    assert report(run("run", path, "--json"))["plan"] == "aten"
    document = json.loads(graph.serialize())
    document["plan"]["engine"] = 2
    path.write_text(json.dumps(document))
    ran = run("run", path)
    assert ran.code == 4
    assert "engine 'hopper' has no plan" in ran.err
