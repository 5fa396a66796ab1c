"""L12: loaders that crash on, or believe, a damaged file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tilewright.testing import detectors
from tilewright.testing.detectors import Outcome

pytestmark = pytest.mark.L0


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    body = json.dumps({"name": "kernel", "code": "AAAA"}).encode()
    path = tmp_path / "artifact"
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    return path


def checked(path: Path) -> Any:
    digest, _, body = path.read_bytes().partition(b"\n")
    return json.loads(body) if hashlib.sha256(body).hexdigest().encode() == digest else None


def crashing(path: Path) -> Any:
    return json.loads(path.read_bytes().partition(b"\n")[2])


def trusting(path: Path) -> Any:
    try:
        return crashing(path)
    except ValueError:
        return None


def test_a_checked_file_holds(stored: Path) -> None:
    before = stored.read_bytes()
    assert detectors.torn_artifacts_are_misses(checked, stored).outcome is Outcome.HELD
    assert stored.read_bytes() == before


def test_a_crash_is_seen(stored: Path) -> None:
    with pytest.raises(AssertionError, match="JSONDecodeError"):
        detectors.assert_torn_artifacts_are_misses(crashing, stored)


def test_a_damaged_file_that_is_believed_is_seen(stored: Path) -> None:
    with pytest.raises(AssertionError, match="it was loaded"):
        detectors.assert_torn_artifacts_are_misses(trusting, stored)


def test_a_store_that_never_hits_is_seen(stored: Path) -> None:
    with pytest.raises(AssertionError, match="undamaged file is a miss"):
        detectors.assert_torn_artifacts_are_misses(lambda path: None, stored)
