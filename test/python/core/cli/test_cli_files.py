"""Files of the command line: broken ones are told in one line, and none is left half-written."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tilewright.cli.exits import CommandError
from tilewright.cli.files import atomic_writer, check_writable
from tilewright.cli.tensor_files import read_tensors, write_tensors

pytestmark = pytest.mark.L0

FileMaker = Callable[..., Path]
Runner = Callable[..., Any]


def npz_bytes(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def zip_bytes(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return stream.getvalue()


WHOLE = save({"A": torch.ones(2, 8, 16)})
ARCHIVE = npz_bytes(A=np.ones((2, 8, 16), dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.safetensors", b"", "the file is empty"),
        ("a.safetensors", WHOLE[:-1], "cut short"),
        ("a.safetensors", WHOLE[:20], "cut short"),
        ("a.safetensors", WHOLE[:4], "cut short"),
        ("a.safetensors", b"\xff" * 64, "not a safetensors file"),
        ("a.npz", b"", "the file is empty"),
        ("a.npz", ARCHIVE[:-1], "cut short"),
        ("a.npz", ARCHIVE[:100], "cut short"),
        ("a.npz", b"not a zip archive", "not an npz archive"),
        ("a.npz", zip_bytes(A=b"\x93NUMPY"), "not an npz archive"),
        ("a.npz", zip_bytes(A=b"no array"), "not an npz archive"),
        ("a.npz", npz_bytes(A=np.array([{}], dtype=object)), "Object arrays"),
        ("a.npz", npz_bytes(A=np.array(["text"])), "not an npz archive"),
        ("a.txt", b"1 2 3", "unknown kind of file '.txt'"),
    ],
    # An archive holds the time it was made at, which must not get into the test's name.
    ids=lambda value: f"{len(value)}_bytes" if isinstance(value, bytes) else None,
)
def test_a_broken_input_file_is_told_in_one_line(
    run: Runner, graph_file: FileMaker, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    ran = run("run", graph_file(), "--inputs", path)
    assert ran.code == 2
    assert ran.out == ""
    [line] = ran.err.splitlines()
    assert line.startswith(f"tilewright run: error: {path}: ")
    assert message in line


def test_a_single_array_is_no_archive(run: Runner, graph_file: FileMaker, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    ran = run("run", graph_file(), "--inputs", tmp_path / "a.npz")
    assert ran.code == 2
    assert "expected an npz archive" in ran.err


@pytest.mark.parametrize("where", ["missing/o.npz", "file/o.npz", "folder.npz", "o.txt", "o"])
def test_an_output_that_cannot_be_written_is_2_before_any_work(
    run: Runner,
    graph_file: FileMaker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    (tmp_path / "file").write_text("a file where a folder should be")
    (tmp_path / "folder.npz").mkdir()

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("a graph was loaded")

    monkeypatch.setattr("tilewright.cli.files.load_graph", refuse)
    ran = run("run", graph_file(), "--output", tmp_path / where)
    assert ran.code == 2
    [line] = ran.err.splitlines()
    assert where in line


def test_a_folder_without_write_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The superuser may write anywhere, so the system's answer is replaced.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CommandError, match="no permission"):
        check_writable(tmp_path / "o.npz")


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "plain": base,
        "view": base.T,
        "half": base.to(torch.float16),
        "bf16": base.to(torch.bfloat16),
        "fp8": base.to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3),
        "flags": base > 3,
        "empty": torch.zeros(0, 5),
        "a/b c": torch.ones(1),
        "file": torch.ones(2),
    }
    for suffix in ("safetensors", "npz"):
        path = tmp_path / f"all.{suffix}"
        write_tensors(path, tensors, {"graph": "g"})
        found = read_tensors(path)
        assert sorted(found) == sorted(tensors)
        for name, tensor in tensors.items():
            same = found[name] if suffix == "safetensors" else found[name].view(tensor.dtype)
            assert torch.equal(same.to(torch.float64), tensor.to(torch.float64)), name


def test_equal_tensors_give_equal_files(tmp_path: Path) -> None:
    for suffix in ("safetensors", "npz"):
        first, second = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
        for path in (first, second):
            write_tensors(path, {"a": torch.ones(3)}, {})
        assert first.read_bytes() == second.read_bytes()


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "o.bin"
    path.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), atomic_writer(path) as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_killed_run_leaves_no_part_of_a_file(graph_file: FileMaker, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    target.write_bytes(b"old")
    # The child stops for good when its data is written and before the file takes its name.
    code = (
        "import os, sys, time\n"
        "def stop(descriptor):\n"
        "    print('written', flush=True)\n"
        "    time.sleep(120)\n"
        "os.fsync = stop\n"
        "from tilewright.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    arguments = ["run", str(graph_file()), "--output", str(target), "--no-check"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "written\n"
    finally:
        child.kill()
        assert child.wait(60) == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    assert [path for path in tmp_path.glob("out*") if path != target] == []
