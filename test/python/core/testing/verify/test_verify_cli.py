"""The command: usage, JSON, the report, and targets of every spelling."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.cli.main import main
from tilewright.testing.detectors import beside
from tilewright.testing.verify.case import long
from tilewright.testing.verify.families import FAMILIES
from tilewright.testing.verify.pictures import error_map
from tilewright.testing.verify.results import Check, Status
from tilewright.testing.verify.running import run_family
from tilewright.testing.verify.subjects import callable_maker

pytestmark = pytest.mark.L0
Verify = Callable[..., Any]

STRANGER = """
import torch

def product(a, b):
    return a @ b

def off(a, b):
    return a @ b * 1.001

def fails(a, b):
    raise RuntimeError("no device")

value = 3
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    path = tmp_path / f"stranger_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(STRANGER)
    return path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "there is no such family; known are attention"),
        (["rope", "--case", "nope"], "there is no such case; known are"),
        (["rope", "--engine", "nope"], "expected one of aten"),
        (["rope", "--target", "nope"], "expected module:callable"),
        (["rope", "--target", "no_such_module:f"], "No module named"),
        (["rope", "--target", "math:no_such_name"], "no_such_name"),
        (["rope", "--target", "math:pi"], "float is not callable"),
        (["--target", "math:sin"], "name one family"),
        (["norms", "--target", "math:sin"], "name one family"),
        (["rope", "--target", "math:sin", "--engine", "aten"], "give one of them"),
        (["rope", "--report", "/dev/null/x"], "cannot be written"),
    ],
)
def test_wrong_usage(verify: Verify, arguments: list[str], words: str) -> None:
    ran = verify(*arguments)
    assert ran.code == 2
    assert words in ran.err
    assert "Traceback" not in ran.err


def test_a_file_that_cannot_be_written_is_told_before_any_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "rope", "--json", "/dev/null/x"]) == 2
    told = capsys.readouterr()
    assert "/dev/null/x: cannot be written" in told.err and not told.out


def test_targets_in_a_file(verify: Verify, stranger: Path) -> None:
    assert verify("matmul", "--target", f"{stranger}:product").code == 0
    ran = verify("matmul", "--target", f"{stranger}:off")
    assert ran.code == 1
    ran = verify("matmul", "--target", f"{stranger}:fails")
    assert ran.code == 1
    assert "it raised RuntimeError: no device" in ran.out


def test_what_a_callable_does_not_take_is_declined(verify: Verify, tmp_path: Path) -> None:
    file = tmp_path / "short_attention.py"
    file.write_text(
        "import torch\n"
        "def f(q, k, v):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(\n"
        "        q, k, v, enable_gqa=True)\n"
    )
    ran = verify("attention", "--target", f"{file}:f")
    declined = {c["case"]: c["text"] for c in ran.checks("declined") if c["rule"] == "values"}
    assert declined["causal"] == "it has no argument 'causal'"
    assert declined["Stats"] == "it has no argument 'return_stats'"
    assert "mask" in declined


def test_json_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "rope", "--engine", "aten", "--json", "-", "--device", "cpu"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["families"] == ["rope"]
    assert document["counts"]["broken"] == 0
    assert sum(document["counts"].values()) == len(document["checks"])
    assert {"family", "case", "rule", "detector", "status", "text"} == set(document["checks"][0])


def test_the_report_needs_nothing_else(verify: Verify, stranger: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "folder", tmp_path / "page.html"):
        target = f"{stranger}:off"
        ran = verify("matmul", "--target", target, "--report", str(place))
        assert ran.code == 1
        path = place if place.suffix else place / "report.html"
        page = path.read_text(encoding="utf-8")
        assert "<h2>Broken</h2>" in page
        assert not re.search(r"(src|href)=\"(?!data:)", page)
        assert "http" not in page
        pictures = re.findall(r"data:image/png;base64,([^\"]+)", page)
        assert len(pictures) >= len(ran.checks("broken"))
        for text in pictures:
            assert_is_png(base64.b64decode(text, validate=True))
        for check in ran.document["checks"]:
            assert check["case"] in page


def test_the_report_escapes(verify: Verify, stranger: Path, tmp_path: Path) -> None:
    stranger.write_text("def f(a, b):\n    raise ValueError('<script>x</script>')\n")
    ran = verify("matmul", "--target", f"{stranger}:f", "--report", str(tmp_path / "p.html"))
    assert ran.code == 1
    page = (tmp_path / "p.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_brief_prints_findings_only(verify: Verify, stranger: Path) -> None:
    ran = verify("matmul", "--target", f"{stranger}:off", "--brief")
    assert "detectors" not in ran.out
    assert "broken: matmul, batch of 2, odd extents: values" in ran.out
    assert re.search(r"\d+ held, \d+ broken, 0 deviates, \d+ declined", ran.out)


def test_no_bar_where_nobody_watches(verify: Verify) -> None:
    assert verify("rope", "--engine", "aten").err == ""


def test_the_same_seed_gives_the_same_checks(verify: Verify) -> None:
    first, second, other = (
        verify("matmul", "--engine", "aten", "--seed", seed).document["checks"]
        for seed in ("1", "1", "2")
    )
    assert first == second
    assert first != other


def test_levels(verify: Verify) -> None:
    quick = verify("rope", "--engine", "aten").document["checks"]
    more = verify("rope", "--engine", "aten", "--level", "L1").document["checks"]
    assert {c["case"] for c in quick} < {c["case"] for c in more}


def test_nothing_looked_at_is_said(verify: Verify) -> None:
    ran = verify("rope", "--engine", "cudnn")
    checks = ran.document["checks"]
    assert checks and {check["status"] for check in checks} == {"declined"}
    assert ran.code == 4
    assert "nothing was looked at" in ran.out


def test_signatures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--signature"]) == 0
    out = capsys.readouterr().out
    for family in FAMILIES.values():
        assert family.signature in out


def test_case_names_are_unique() -> None:
    for family in FAMILIES.values():
        names = [case.name for case in family.cases]
        assert len(names) == len(set(names))
        assert any(case.is_detected for case in family.cases)


def assert_is_png(data: bytes) -> tuple[int, int, bytes]:
    """Check the signature, the chunks' checksums and the length; width, height and pixels."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    place, size, pixels = 8, (0, 0), b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        body = data[place + 4 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert zlib.crc32(body) == checksum
        if body[:4] == b"IHDR":
            size = struct.unpack(">II", body[4:12])
        if body[:4] == b"IDAT":
            pixels = zlib.decompress(body[4:])
        place += 12 + length
    width, height = size
    assert len(pixels) == height * (1 + 3 * width)
    return width, height, pixels


def test_an_error_map_shows_where() -> None:
    want = torch.zeros(2, 3, 4, dtype=torch.float64)
    got = want.clone()
    got[1, 2, 3] = 5.0
    got[1, 0, 0] = float("nan")
    found = error_map("y", got, want, bound=1.0)
    assert found is not None
    assert found.at == (1,)
    width, height, pixels = assert_is_png(found.png)
    line = 1 + 3 * width
    assert pixels[1:4] == bytes((90, 0, 130))
    last = pixels[(height - 1) * line + 3 * (width - 1) + 1 :][:3]
    assert last[0] > 200 and last[2] < 110
    middle = pixels[(height // 2) * line + 3 * (width // 2) + 1 :][:3]
    assert middle == b"\xff\xff\xff"


def test_a_large_plane_shows_its_worst_elements() -> None:
    want = torch.zeros(700, 300, dtype=torch.float64)
    got = want.clone()
    got[699, 299] = float("inf")
    found = error_map("y", got, want, bound=1.0)
    assert found is not None
    width, height, pixels = assert_is_png(found.png)
    assert (width, height) == (256, 256)
    assert pixels[-3:] == bytes((90, 0, 130))
    assert pixels[1:4] == b"\xff\xff\xff"


def test_no_map_of_what_does_not_fit() -> None:
    assert error_map("y", torch.zeros(2), torch.zeros(3), 1.0) is None
    assert error_map("y", torch.zeros(0), torch.zeros(0), 1.0) is None


def test_statuses_are_documented(root: Path) -> None:
    page = (root / "docs/testing/verify.md").read_text()
    for status in Status:
        assert f"**{status.value}**" in page


def test_calls_beside_another_process_have_to_be_asked_for(verify: Verify) -> None:
    plain = verify("rope", "--engine", "aten")
    assert "beside" not in plain.rules("held") | plain.rules("declined")
    ran = verify("rope", "--engine", "aten", "--beside")
    assert ran.code == 0
    found = {c["case"]: c["text"] for c in ran.checks("declined") if c["rule"] == "beside"}
    reason = "device cpu: needs a GPU, which two processes have in turn"
    assert found == {"long, 4096 positions": reason}
    assert re.search(r"beside +beside another process +declined", ran.out)
    refused = verify("rope", "--case", "long, 4096 positions")
    assert refused.code == 2 and "give --beside too" in refused.err


class Wrong:
    """Gives other results while another process is said to be there."""

    is_busy = False

    def __call__(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        turned = x * freqs.cos() + torch.cat([-second, first], -1) * freqs.sin()
        return turned * (2.0 if self.is_busy else 1.0)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.is_busy = True
        yield
        self.is_busy = False


def test_what_is_wrong_beside_another_process_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Wrong()
    # A call that is interrupted takes longer.
    monkeypatch.setattr(
        beside, "_stopwatch", lambda is_cuda: lambda: lambda: 3.0 if wrong.is_busy else 1.0
    )
    (case,) = (each for each in FAMILIES["rope"].cases if each.name == "angles to 6")
    family = dataclasses.replace(FAMILIES["rope"], cases=(case, long(case)))

    def checks(**options: Any) -> list[Check]:
        made = callable_maker(wrong)
        return [c for found in run_family(family, made, **options) for c in found]

    assert "beside" not in {check.rule for check in checks()}
    check = checks(is_beside=True, other=wrong)[-1]
    assert (check.rule, check.status) == ("beside", Status.BROKEN)
    assert check.text.startswith("y: in ") and "480 of 480 elements" in check.text
    told = {"beside": "It has the device to itself"}
    check = checks(is_beside=True, other=wrong, deviations=told)[-1]
    assert check.status is Status.DEVIATES
    assert check.text.startswith("It has the device to itself. Seen: y: in ")


def test_each_family_has_a_long_case() -> None:
    # The gradient of a convolution takes its forward's extents from a CPU, which takes too long.
    missing = {name for name, f in FAMILIES.items() if not any(c.is_long for c in f.cases)}
    assert missing == {"convolution_backward"}
    for family in FAMILIES.values():
        for case in family.cases:
            assert case.is_long == case.name.startswith("long, ")
