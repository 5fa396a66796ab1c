"""No tracked file names a place on somebody's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.L0

ROOT = Path(__file__).resolve().parents[4]
# Home and working folders: a slash, one of the names, a slash, and not the middle of an address.
LOCAL_PATH = re.compile(rb"(?:(?<![\w.~/-])|(?<=file://))/(?:home|root|work|Users)/[\w.~-]")


def tracked_files() -> list[Path]:
    """Return the files that git tracks; without git, those that a source archive holds."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
        return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    return [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]


def local_paths(text: bytes) -> list[tuple[int, str]]:
    """Return (line number, line) of every line that names a local path."""
    return [
        (number, line.decode(errors="replace").strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if LOCAL_PATH.search(line)
    ]


def test_no_file_names_a_local_path() -> None:
    files = [path for path in tracked_files() if path.is_file()]
    assert len(files) > 10
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line[:120]}"
        for path in files
        for number, line in local_paths(path.read_bytes())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("top", ["home", "root", "work", "Users"])
@pytest.mark.parametrize("before", ["", "see ", "'", "file://", "=", "("])
def test_the_check_finds_local_paths(top: str, before: str) -> None:
    line = f"{before}/{top}/someone/project".encode()
    assert local_paths(b"first\n" + line) == [(2, line.decode())]


@pytest.mark.parametrize(
    "line", ["https://example.org/home/x", "a/work/b", "/workspace/x", "or /root", "~/work/x"]
)
def test_the_check_leaves_other_text_alone(line: str) -> None:
    assert local_paths(line.encode()) == []
