"""The store: a folder of entries, one file a kernel or a plan, shared by processes without a lock.

A writer makes a file under a hidden name and renames it, so a reader sees a whole entry or none.
A reader trusts nothing: whatever is wrong with a file makes it a miss. Nothing here raises for
what a disk does; a store that cannot be read or written is one that has nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.artifact.code import KernelCode
from tilewright.artifact.counting import (
    count,
    count_miss,
    count_record_miss,
    count_write_failure,
)
from tilewright.artifact.entry import MAX_BYTES, BadEntryError, Entry, decode, encode
from tilewright.artifact.key import KernelKey, digest_of
from tilewright.artifact.plan_record import decode_record, encode_record
from tilewright.records import record

_SUFFIX = ".twk"
_RECORD_SUFFIX = ".twp"
# Not compiled before they are used: who only loads has no need of them.
_FILE_NAME = r"[0-9a-f]{64}\.tw[kp]"
_DRAFT_NAME = r"\.[0-9a-f]{64}\.[0-9]+\.[0-9a-f]{16}\.tmp"
# A draft this old has lost its writer.
_DRAFT_LIFE_S = 3600.0
# Room is made for more than one entry at a time.
_FILL_AFTER_REMOVAL = 0.9
# A process writes one part in so many of the room that it saw before it looks again: by so little
# may it pass the limit beside others. Looking takes time for every file that is there.
_PARTS_OF_ROOM = 64
# By folder and limit: bytes that this process may write before it looks.
_unseen: dict[tuple[Path, int], int] = {}
_lock = threading.Lock()


@record(frozen=True)
class StoredFile:
    """A file of the store: ``used_ns`` is when it was last written or loaded."""

    path: Path
    size_bytes: int
    used_ns: int
    is_draft: bool


@record(frozen=True)
class Store:
    """A folder of at most ``max_bytes``. The folder is made at the first write."""

    folder: Path
    max_bytes: int

    def path_of(self, key: KernelKey) -> Path:
        """Where the entry of ``key`` is, if there is one."""
        return self.folder / (key.digest() + _SUFFIX)

    def load(self, key: KernelKey) -> tuple[KernelCode | None, str]:
        """(code, "") or (None, the reason of the miss). Counts which."""
        path = self.path_of(key)
        try:
            entry = read_entry(path)
            if entry.facts != key.facts():
                raise BadEntryError("other key")
        except BadEntryError as bad:
            count_miss(bad.reason)
            return None, bad.reason
        # The time of last use, by which room is made. A read-only store does without.
        with contextlib.suppress(OSError):
            os.utime(path)
        count("disk_hits")
        return entry.code, ""

    def load_digest(self, digest: str) -> tuple[KernelCode | None, str]:
        """As ``load``, for code whose key is known by its digest alone. Counts hits only."""
        path = self.folder / (digest + _SUFFIX)
        try:
            entry = read_entry(path)
            if digest_of(entry.facts) != digest:
                raise BadEntryError("other key")
        except BadEntryError as bad:
            # Who has only a digest goes on to ask with the key.
            return None, bad.reason
        with contextlib.suppress(OSError):
            os.utime(path)
        count("disk_hits")
        return entry.code, ""

    def touch(self, digest: str) -> bool:
        """True if there is an entry of this name, which counts as used now. It is not read."""
        path = self.folder / (digest + _SUFFIX)
        try:
            os.utime(path)
        except OSError:
            # A read-only store has it all the same.
            return path.is_file()
        return True

    def load_record(
        self, facts: Mapping[str, Any], is_current: Callable[[Any], bool]
    ) -> tuple[Any, str]:
        """(the document of a plan record, "") or (None, the reason of the miss). Counts which.

        One that is not current is a miss: "stale".
        """
        digest = digest_of(facts)
        path = self.folder / (digest + _RECORD_SUFFIX)
        try:
            document = read_record(path, digest)
            if not is_current(document):
                raise BadEntryError("stale")
        except BadEntryError as bad:
            count_record_miss(bad.reason)
            return None, bad.reason
        with contextlib.suppress(OSError):
            os.utime(path)
        count("record_hits")
        return document, ""

    def has_record(self, facts: Mapping[str, Any], is_current: Callable[[Any], bool]) -> bool:
        """True if there is a whole and current record with this key. Counts nothing."""
        digest = digest_of(facts)
        try:
            return is_current(read_record(self.folder / (digest + _RECORD_SUFFIX), digest))
        except BadEntryError:
            return False

    def save_record(self, facts: Mapping[str, Any], document: Any) -> str:
        """Store a plan record; "" or the reason why it is not stored. Counts which."""
        data = encode_record(facts, document)
        path = self.folder / (digest_of(facts) + _RECORD_SUFFIX)
        reason = "larger than the store" if len(data) > self.max_bytes else self._write(path, data)
        if reason:
            count_write_failure(reason)
        else:
            count("record_writes")
            self._make_room(path, len(data))
        return reason

    def save(self, key: KernelKey, code: KernelCode, manifest: Mapping[str, str]) -> str:
        """Store code; "" or the reason why it is not stored. Counts which."""
        data = encode(Entry(key.facts(), manifest, code))
        if len(data) > min(self.max_bytes, MAX_BYTES):
            reason = "larger than the store"
        else:
            reason = self._write(self.path_of(key), data)
        if reason:
            count_write_failure(reason)
        else:
            count("writes")
            self._make_room(self.path_of(key), len(data))
        return reason

    def files(self) -> list[StoredFile]:
        """Entries and drafts, least recently used first; other files are not ours."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as scan:
            for item in scan:
                is_draft = re.fullmatch(_DRAFT_NAME, item.name) is not None
                if not is_draft and re.fullmatch(_FILE_NAME, item.name) is None:
                    continue
                with contextlib.suppress(OSError):
                    facts = item.stat(follow_symlinks=False)
                    path = self.folder / item.name
                    found.append(StoredFile(path, facts.st_size, facts.st_mtime_ns, is_draft))
        return sorted(found, key=lambda file: (file.used_ns, file.path.name))

    def records(self) -> Iterator[tuple[StoredFile, str]]:
        """Each plan record's file, and what is wrong with it or ""."""
        for file in self.files():
            if file.path.suffix != _RECORD_SUFFIX:
                continue
            try:
                read_record(file.path, file.path.stem)
            except BadEntryError as bad:
                if bad.reason != "absent":
                    yield file, bad.reason
            else:
                yield file, ""

    def entries(self) -> Iterator[tuple[StoredFile, Entry | None, str]]:
        """Each file of code with what it holds, or None and what is wrong with it."""
        for file in self.files():
            if file.path.suffix != _SUFFIX:
                continue
            try:
                entry = read_entry(file.path)
                if digest_of(entry.facts) + _SUFFIX != file.path.name:
                    raise BadEntryError("other key")
            except BadEntryError as bad:
                if bad.reason != "absent":
                    yield file, None, bad.reason
            else:
                yield file, entry, ""

    def remove(self, files: list[StoredFile]) -> int:
        """Remove files; how many went. Another process may have been quicker."""
        gone = 0
        for file in files:
            with contextlib.suppress(OSError):
                file.path.unlink()
                gone += 1
        return gone

    def _write(self, path: Path, data: bytes) -> str:
        draft = path.with_name(f".{path.stem}.{os.getpid()}.{os.urandom(8).hex()}.tmp")
        is_made = False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            descriptor = os.open(draft, flags, 0o644)
            is_made = True
            try:
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)
            # No fsync: after a power loss the checksum tells a file that never reached the disk.
            os.replace(draft, path)
        except OSError as error:
            if is_made:
                with contextlib.suppress(OSError):
                    draft.unlink()
            return _name_of(error)
        return ""

    def _make_room(self, kept: Path, written_bytes: int) -> None:
        """Remove abandoned drafts, then the least recently used entries if there are too many.

        While there was much room when this process last looked, it does not look again.
        """
        place = (self.folder, self.max_bytes)
        with _lock:
            left = _unseen.get(place, 0) - written_bytes
            _unseen[place] = left
        if left >= 0:
            return
        total = self._removed_to_fit(kept)
        with _lock:
            _unseen[place] = max(self.max_bytes - total, 0) // _PARTS_OF_ROOM

    def _removed_to_fit(self, kept: Path) -> int:
        """Bytes that are there after what had to go is gone."""
        files = self.files()
        oldest_ns = time.time_ns() - int(_DRAFT_LIFE_S * 1e9)
        self.remove([file for file in files if file.is_draft and file.used_ns < oldest_ns])
        entries = [file for file in files if not file.is_draft]
        total = sum(file.size_bytes for file in entries)
        if total <= self.max_bytes:
            return total
        going = []
        for file in entries:
            if total <= self.max_bytes * _FILL_AFTER_REMOVAL:
                break
            if file.path != kept:
                going.append(file)
                total -= file.size_bytes
        count("removals", self.remove(going))
        return total


def read_entry(path: Path) -> Entry:
    """The entry in a file.

    Raises:
        BadEntryError: for whatever keeps the file from being one.
    """
    return decode(_read_file(path))


def read_record(path: Path, digest: str) -> Any:
    """The document of the plan record in a file, whose key has this digest.

    Raises:
        BadEntryError: for whatever keeps the file from being that.
    """
    facts, document = decode_record(_read_file(path))
    if digest_of(facts) != digest:
        raise BadEntryError("other key")
    return document


def _read_file(path: Path) -> bytes:
    # Not blocking: a pipe under our name must not stop us.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
                raise BadEntryError("foreign")
            return _read_all(descriptor, facts.st_size)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise BadEntryError("absent") from None
    except OSError as error:
        raise BadEntryError("unreadable") from error


def _read_all(descriptor: int, size: int) -> bytes:
    pieces = []
    while size > 0:
        piece = os.read(descriptor, size)
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _name_of(error: OSError) -> str:
    """The symbol of an error of the system: "ENOSPC"."""
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
