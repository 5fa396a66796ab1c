"""The store on one machine: what is whole is found, what is not is a miss and nothing more."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.artifact import counters, current_store
from tilewright.artifact.code import KernelCode
from tilewright.artifact.entry import FORMAT_VERSION, HEAD_BYTES, Entry, decode, encode
from tilewright.artifact.key import KernelKey
from tilewright.artifact.location import DEFAULT_MAX_BYTES, cache_folder
from tilewright.artifact.store import Store, StoredFile
from tilewright.errors import LaunchError

pytestmark = pytest.mark.L0

MakeKey = Callable[..., KernelKey]
MakeCode = Callable[..., KernelCode]
MANIFEST = {"triton": "3.7.1", "ptxas": "12.8"}


def test_what_is_stored_is_found_again(
    store: Store, make_key: MakeKey, make_code: MakeCode
) -> None:
    assert store.load(make_key()) == (None, "absent")
    assert store.save(make_key(), make_code(), MANIFEST) == ""
    assert Store(store.folder, 1).load(make_key()) == (make_code(), "")
    assert store.load(make_key(warps=8)) == (None, "absent")
    ((file, entry, wrong),) = store.entries()
    assert wrong == "" and entry is not None and entry.manifest == MANIFEST
    assert entry.facts == make_key().facts() and file.path == store.path_of(make_key())
    now = counters()
    assert (now.disk_hits, now.writes, now.disk_misses) == (1, 1, {"absent": 2})
    assert now.memory_hits == 0 and now.compiles == 0


def damage(data: bytes) -> dict[str, tuple[bytes, str]]:
    """Name -> (bytes, the reason that the store should find)."""
    facts = decode(data)
    other = Entry({**facts.facts, "warps": 8}, facts.manifest, facts.code)
    elsewhere = KernelCode("k", b"code", 128, 0, (8, 0))
    headerless = struct.pack("<8sIIQ", b"TWKERNEL", FORMAT_VERSION, 2, 1)
    checksum = hashlib.sha256(headerless + b"{}" + b"x").digest()
    nested = b"[" * 100_000
    deep = struct.pack("<8sIIQ", b"TWKERNEL", FORMAT_VERSION, len(nested), 1)
    deep += hashlib.sha256(deep + nested + b"x").digest() + nested + b"x"
    return {
        "empty": (b"", "torn"),
        "a byte": (data[:1], "torn"),
        "half of the head": (data[: HEAD_BYTES // 2], "torn"),
        "only the head": (data[:HEAD_BYTES], "torn"),
        "half": (data[: len(data) // 2], "torn"),
        "the last byte missing": (data[:-1], "torn"),
        "a byte too many": (data + b"\0", "torn"),
        "zeros": (bytes(len(data)), "foreign"),
        "text": (b"not a kernel at all " * 100, "foreign"),
        "a short text": (b"no", "foreign"),
        "another format": (data[:8] + struct.pack("<I", FORMAT_VERSION + 1) + data[12:], "format"),
        "another checksum": (data[:24] + bytes(32) + data[56:], "checksum"),
        "another kernel's entry": (encode(other), "other key"),
        "a target that is not the key's": (encode(Entry(facts.facts, {}, elsewhere)), "foreign"),
        "no key": (headerless + checksum + b"{}x", "foreign"),
        "a header without end": (deep, "foreign"),
    }


DAMAGES = list(
    damage(
        encode(Entry({"target": [9, 0], "warps": 4}, {}, KernelCode("k", b"code", 128, 0, (9, 0))))
    )
)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_written_anew(
    store: Store, make_key: MakeKey, make_code: MakeCode, name: str
) -> None:
    store.save(make_key(), make_code(), MANIFEST)
    path = store.path_of(make_key())
    data, reason = damage(path.read_bytes())[name]
    path.write_bytes(data)
    assert store.load(make_key()) == (None, reason)
    assert counters().disk_misses == {reason: 1}
    ((_, entry, wrong),) = store.entries()
    assert entry is None and wrong == reason
    assert store.save(make_key(), make_code(), MANIFEST) == ""
    assert store.load(make_key()) == (make_code(), "")


def test_any_single_altered_bit_is_a_miss(make_key: MakeKey) -> None:
    code = KernelCode("k", b"code of it", 128, 0, (9, 0))
    data = encode(Entry(make_key().facts(), MANIFEST, code))
    assert decode(data).code == code
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        with pytest.raises(Exception) as refused:
            decode(bytes(altered))
        assert type(refused.value).__name__ == "BadEntryError", position


def test_things_that_are_no_files_are_misses(
    store: Store, make_key: MakeKey, make_code: MakeCode
) -> None:
    path = store.path_of(make_key())
    path.mkdir(parents=True)
    assert store.load(make_key()) == (None, "foreign")
    assert store.save(make_key(), make_code(), MANIFEST) in ("EISDIR", "ENOTEMPTY", "EEXIST")
    assert [file for file in store.files() if file.is_draft] == []
    path.rmdir()
    # A pipe has no writer: opening it must not wait for one.
    os.mkfifo(path)
    assert store.load(make_key()) == (None, "foreign")
    path.unlink()
    path.symlink_to(path)
    assert store.load(make_key()) == (None, "unreadable")


def test_a_folder_that_cannot_be(make_key: MakeKey, make_code: MakeCode, tmp_path: Path) -> None:
    # Below a regular file nothing can be made or read, for root neither.
    (tmp_path / "file").write_bytes(b"")
    store = Store(tmp_path / "file" / "store", 2**20)
    assert store.load(make_key()) == (None, "unreadable")
    assert store.save(make_key(), make_code(), MANIFEST) == "ENOTDIR"
    assert store.files() == [] and list(store.entries()) == []
    assert counters().write_failures == {"ENOTDIR": 1}


@pytest.mark.parametrize("room", [0, 100], ids=["at once", "half-way"])
def test_a_full_disk(
    store: Store,
    make_key: MakeKey,
    make_code: MakeCode,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
) -> None:
    real, left = os.write, [room]

    def write(descriptor: int, data: Any) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, data[: left[0]])
        left[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        reason = store.save(make_key(), make_code(), MANIFEST)
    assert reason == "ENOSPC" and counters().write_failures == {"ENOSPC": 1}
    assert list(store.folder.iterdir()) == [], "the part that was written is gone"
    assert store.load(make_key()) == (None, "absent")


def test_a_read_only_store_serves(
    store: Store, make_key: MakeKey, make_code: MakeCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(make_key(), make_code(), MANIFEST)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    real = os.open

    def open_to_read(path: Any, flags: int, *rest: Any) -> int:
        return real(path, flags, *rest) if flags & os.O_ACCMODE == os.O_RDONLY else refuse()

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_to_read)
        patch.setattr(os, "utime", refuse)
        # Python 3.10's paths hold the function that they found at import.
        patch.setattr(Path, "unlink", refuse)
        assert store.load(make_key()) == (make_code(), "")
        assert store.save(make_key(warps=8), make_code(), MANIFEST) == "EROFS"
        with contextlib.suppress(OSError):
            store.remove(store.files())
    assert store.load(make_key()) == (make_code(), "")


def test_writes_of_a_few_bytes_at_a_time_are_carried_on(
    store: Store, make_key: MakeKey, make_code: MakeCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:77]))
        assert store.save(make_key(), make_code(), MANIFEST) == ""
    assert store.load(make_key()) == (make_code(), "")


def keys_of(make_key: MakeKey, count: int) -> list[KernelKey]:
    return [make_key(constants=(("N", number),)) for number in range(count)]


def test_the_least_recently_used_go_first(
    store: Store, make_key: MakeKey, make_code: MakeCode
) -> None:
    keys = keys_of(make_key, 11)
    for age, key in enumerate(keys[:10]):
        assert store.save(key, make_code(size=1000), MANIFEST) == ""
        os.utime(store.path_of(key), ns=(10**9 * (age + 1),) * 2)
    size = store.path_of(keys[0]).stat().st_size
    assert store.load(keys[0])[0] is not None, "the oldest one is used again"
    bounded = Store(store.folder, 10 * size + size // 2)
    assert bounded.save(keys[10], make_code(size=1000), MANIFEST) == ""
    kept = {number for number, key in enumerate(keys) if store.path_of(key).exists()}
    assert kept == {0, *range(3, 11)}
    assert counters().removals == 2
    assert sum(file.size_bytes for file in store.files()) <= bounded.max_bytes


def test_room_is_looked_for_when_it_may_be_short(
    store: Store, make_key: MakeKey, make_code: MakeCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not at every write: each look takes time for every file that is there.
    looks: list[Store] = []
    every = Store.files

    def noted(self: Store) -> list[StoredFile]:
        looks.append(self)
        return every(self)

    monkeypatch.setattr(Store, "files", noted)
    roomy, keys = Store(store.folder, 2**30), keys_of(make_key, 40)
    for key in keys:
        assert roomy.save(key, make_code(size=1000), MANIFEST) == ""
    assert len(looks) == 1
    size = roomy.path_of(keys[0]).stat().st_size
    short = Store(store.folder, 41 * size)
    for key in keys_of(make_key, 50)[40:]:
        assert short.save(key, make_code(size=1000), MANIFEST) == ""
        assert sum(file.size_bytes for file in every(store)) <= short.max_bytes


def test_an_entry_that_cannot_fit_removes_nothing(
    store: Store, make_key: MakeKey, make_code: MakeCode
) -> None:
    small, large = keys_of(make_key, 2)
    store.save(small, make_code(), MANIFEST)
    assert store.save(large, make_code(size=2**20), MANIFEST) == "larger than the store"
    assert store.load(small)[0] is not None and counters().removals == 0


def test_abandoned_drafts_and_nothing_of_others_is_removed(
    store: Store, make_key: MakeKey, make_code: MakeCode
) -> None:
    store.folder.mkdir()
    old, new = (store.folder / f".{'a' * 64}.1.{digit * 16}.tmp" for digit in "01")
    foreign = store.folder / "notes.txt"
    for path in (old, new, foreign):
        path.write_bytes(b"x" * 2**20)
    for path in (old, foreign):
        os.utime(path, (1, 1))
    store.save(make_key(), make_code(), MANIFEST)
    assert not old.exists() and new.exists() and foreign.exists()
    store.remove(store.files())
    assert list(store.folder.iterdir()) == [foreign]


def test_where_the_store_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen = current_store()
    assert chosen == Store(tmp_path / "store", DEFAULT_MAX_BYTES)
    assert not chosen.folder.exists(), "asking makes nothing"
    monkeypatch.setenv("TILEWRIGHT_CACHE_MAX_BYTES", "1000")
    assert current_store() == Store(tmp_path / "store", 1000)
    for wrong in ("1k", "-1", "٣"):
        monkeypatch.setenv("TILEWRIGHT_CACHE_MAX_BYTES", wrong)
        with pytest.raises(LaunchError, match="TILEWRIGHT_CACHE_MAX_BYTES"):
            current_store()
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    assert current_store() is None


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/tilewright/kernels"),
        ("linux", {"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/tilewright/kernels"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/tilewright/kernels"),
        ("darwin", {}, "home/Library/Caches/tilewright/kernels"),
        ("win32", {"LOCALAPPDATA": "{tmp}/local"}, "local/tilewright/Cache/kernels"),
    ],
)
def test_the_users_own_folder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    variables: dict[str, str],
    expected: str,
) -> None:
    for name in ("TILEWRIGHT_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("tilewright.artifact.location.sys.platform", platform)
        assert cache_folder() == tmp_path / expected


def test_no_home_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_CACHE_DIR")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "home", homeless)
        assert current_store() is None


def test_an_entry_is_plain_data_with_a_readable_header(make_key: MakeKey) -> None:
    data = encode(Entry(make_key().facts(), MANIFEST, KernelCode("k", b"code", 128, 0, (9, 0))))
    start, end = HEAD_BYTES, data.rindex(b"code")
    document = json.loads(data[start:end])
    assert document["manifest"] == MANIFEST and document["key"]["target"] == [9, 0]
