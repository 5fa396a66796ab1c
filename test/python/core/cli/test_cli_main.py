"""The command line as a whole: help is quick, usage errors are 2, bugs are told apart."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.cli.exits import ExitCode
from tilewright.cli.main import build_parser, main
from tilewright.cli.verify import _Progress

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
COMMANDS = ("run", "plans", "explain", "compile", "cache", "doctor", "bench", "verify", "red")
FileMaker = Callable[..., Path]
Runner = Callable[..., Any]


def tilewright(
    *arguments: str | Path, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own; modules of the folder ``path`` come first there."""
    places = [str(path)] if path else []
    places += [place for place in (os.environ.get("PYTHONPATH"),) if place]
    return subprocess.run(
        [sys.executable, "-m", "tilewright.cli.main", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert f"usage: tilewright {command}" in capsys.readouterr().out


def test_help_needs_nothing_heavy(run_python: Callable[..., str]) -> None:
    code = (
        "import sys\nfrom tilewright.cli.main import build_parser\n"
        "build_parser().format_help()\n"
        "heavy = ('torch', 'triton', 'numpy', 'rich', 'safetensors', 'matplotlib')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    assert run_python(code) == "[]\n"


@pytest.mark.parametrize("command", ["plans", "explain", "run", "bench", "doctor"])
def test_a_torch_that_is_not_there_is_named(
    command: str, tmp_path: Path, graph_file: FileMaker
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')\n")
    files = [graph_file()] if command in ("plans", "explain", "run") else []
    found = tilewright(command, *files, path=tmp_path)
    assert found.returncode == ExitCode.CALL_FAILED, found.stderr
    assert found.stderr == f"tilewright {command}: error: torch cannot be imported: none here\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["run"],
        ["run", "g.json", "--seed", "-1"],
        ["run", "g.json", "--seed", "x"],
        ["run", "g.json", "--repeat", "0"],
        ["run", "g.json", "--unknown"],
        ["explain", "g.json", "--device-properties", "H200"],
        ["explain", "g.json", "--device-properties", "sm_9"],
        ["bench", "--rounds", "0"],
    ],
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error: " in printed.err


def test_a_bug_is_70_with_a_traceback(
    run: Runner, graph_file: FileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tilewright.cli.files.load_graph", fail)
    ran = run("run", graph_file())
    assert ran.code == ExitCode.INTERNAL == 70
    assert "Traceback" in ran.err
    assert "ZeroDivisionError: a bug" in ran.err


def test_an_interrupt_is_130(
    run: Runner, graph_file: FileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.cli.files.load_graph", interrupt)
    assert run("run", graph_file()).code == 130


def test_the_process_ends_with_the_code(graph_file: FileMaker, tmp_path: Path) -> None:
    right = tilewright("run", graph_file(), "--json")
    assert right.returncode == 0, right.stderr
    assert json.loads(right.stdout)["verdict"] == "ok"
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    for path, code in ((wrong, 3), (tmp_path / "none.json", 2)):
        done = tilewright("run", path, "--json")
        assert done.returncode == code
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_error(
    graph_file: FileMaker, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["plans", str(graph_file()), *options]) == 0
    # The interpreter has nothing left to flush when it ends.
    assert sys.stdout is None
    with contextlib.suppress(BrokenPipeError):
        stream.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_standard_output_is_2_and_one_line(
    graph_file: FileMaker, options: list[str]
) -> None:
    command = [sys.executable, "-m", "tilewright.cli.main", "plans", str(graph_file()), *options]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.returncode == 2
    assert done.stderr == (
        "tilewright plans: error: standard output: cannot be written: No space left on device\n"
    )


def test_a_closed_standard_output_is_no_error(
    graph_file: FileMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(graph_file())
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["plans", path]) == 0
    assert main(["plans", path, "--json"]) == 0


def test_a_closed_standard_error_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["bench", "matmul-execute", "--rounds", "1"]) == 0
    with _Progress(2) as progress:  # Of verify, which takes longer.
        progress.advance("first")


def test_the_exit_codes_are_documented() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    help_text = build_parser().format_help()
    for code in ExitCode:
        assert f"| {int(code)} |" in text
        if code < 10:
            assert f"  {int(code)}  " in help_text


def test_every_option_is_documented() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    parser = build_parser()
    [subparsers] = [a for a in parser._actions if a.dest == "command"]
    assert sorted(subparsers.choices or {}) == sorted(COMMANDS)
    for command in COMMANDS:
        section = text.split(f"## tilewright {command}\n")[1].split("\n## ")[0]
        for action in subparsers.choices[command]._actions:  # type: ignore[index,call-overload]
            for option in action.option_strings:
                if option not in ("-h", "--help"):
                    assert f"`{option}" in section, f"{command} {option}"
