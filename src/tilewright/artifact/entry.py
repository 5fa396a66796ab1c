"""One stored kernel as bytes: a fixed head, a JSON header, the code.

    head: magic (8), format version (u32), header length (u32), code length (u64), SHA-256 (32)

all little-endian. The SHA-256 is over everything else in the file. It finds damage; it is no
signature: who may write the folder decides what code is loaded from it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from tilewright.artifact.code import KernelCode
from tilewright.records import record

MAGIC = b"TWKERNEL"
FORMAT_VERSION = 1
# No kernel comes near it; a larger file is none of ours and is not read into memory.
MAX_BYTES = 256 * 1024 * 1024

_PREFIX = struct.Struct("<8sIIQ")
_DIGEST_BYTES = 32
HEAD_BYTES = _PREFIX.size + _DIGEST_BYTES
_MAX_THREADS = 1024


class BadEntryError(Exception):
    """Bytes that are no entry; ``reason`` is one of the counters' words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@record(frozen=True)
class Entry:
    """Code with the facts of its key, and a manifest of what made it."""

    facts: Mapping[str, Any]
    manifest: Mapping[str, str]
    code: KernelCode


def encode(entry: Entry) -> bytes:
    """The entry's bytes."""
    code = entry.code
    document = {
        "key": entry.facts,
        "manifest": entry.manifest,
        "code": {
            "name": code.name,
            "threads": code.threads,
            "shared_bytes": code.shared_bytes,
            "compute_capability": list(code.compute_capability),
        },
    }
    header = json.dumps(document, sort_keys=True).encode()
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(header), len(code.image))
    return b"".join((prefix, _checksum(prefix, header, code.image), header, code.image))


def decode(data: bytes) -> Entry:
    """The entry in ``data``.

    Raises:
        BadEntryError: "torn" (empty, cut off, or with a tail), "foreign" (something else),
            "format" (another version of the format), "checksum" (altered).
    """
    if len(data) < HEAD_BYTES:
        known = min(len(data), len(MAGIC))
        raise BadEntryError("torn" if data[:known] == MAGIC[:known] else "foreign")
    prefix = data[: _PREFIX.size]
    magic, version, header_length, image_length = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadEntryError("foreign")
    if version != FORMAT_VERSION:
        raise BadEntryError("format")
    if len(data) != HEAD_BYTES + header_length + image_length:
        raise BadEntryError("torn")
    header = data[HEAD_BYTES : HEAD_BYTES + header_length]
    image = data[HEAD_BYTES + header_length :]
    if data[_PREFIX.size : HEAD_BYTES] != _checksum(prefix, header, image):
        raise BadEntryError("checksum")
    try:
        return _parse(json.loads(header), image)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # Only something else than ``encode`` writes a good checksum over such a header.
        raise BadEntryError("foreign") from error


def _parse(document: Any, image: bytes) -> Entry:
    facts, manifest, code = document["key"], document["manifest"], document["code"]
    name, threads, shared = code["name"], code["threads"], code["shared_bytes"]
    major, minor = code["compute_capability"]
    well_formed = (
        isinstance(facts, dict)
        and isinstance(manifest, dict)
        and isinstance(name, str)
        and all(type(number) is int for number in (threads, shared, major, minor))
        and 1 <= threads <= _MAX_THREADS
        and shared >= 0
        and facts["target"] == [major, minor]
        and bool(image)
    )
    if not well_formed:
        raise ValueError("a header that no writer of ours makes")
    return Entry(facts, manifest, KernelCode(name, image, threads, shared, (major, minor)))


def _checksum(prefix: bytes, header: bytes, image: bytes) -> bytes:
    digest = hashlib.sha256(prefix)
    digest.update(header)
    digest.update(image)
    return digest.digest()
