"""Plan records as bytes: what planning found for a graph, stored beside the kernels' code.

    head: magic (8), format version (u32), body length (u32), SHA-256 of the rest (32)

all little-endian; the body is JSON, {"key": facts, "record": document}. As with code, the checksum
finds damage and is no signature.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from tilewright.artifact.entry import BadEntryError

MAGIC = b"TWRECORD"
FORMAT_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_HEAD_BYTES = _PREFIX.size + _DIGEST_BYTES


def encode_record(facts: Mapping[str, Any], document: Any) -> bytes:
    """The bytes of a record.

    Raises:
        TypeError: if the facts or the document are no plain JSON values.
    """
    body = json.dumps({"key": facts, "record": document}, sort_keys=True).encode()
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(body))
    return prefix + _checksum(prefix, body) + body


def decode_record(data: bytes) -> tuple[Mapping[str, Any], Any]:
    """(the facts of its key, the document).

    Raises:
        BadEntryError: "torn", "foreign", "format" or "checksum", as for code.
    """
    if len(data) < _HEAD_BYTES:
        known = min(len(data), len(MAGIC))
        raise BadEntryError("torn" if data[:known] == MAGIC[:known] else "foreign")
    magic, version, length = _PREFIX.unpack(data[: _PREFIX.size])
    if magic != MAGIC:
        raise BadEntryError("foreign")
    if version != FORMAT_VERSION:
        raise BadEntryError("format")
    body = data[_HEAD_BYTES:]
    if len(body) != length:
        raise BadEntryError("torn")
    if data[_PREFIX.size : _HEAD_BYTES] != _checksum(data[: _PREFIX.size], body):
        raise BadEntryError("checksum")
    try:
        parsed = json.loads(body)
        facts, document = parsed["key"], parsed["record"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadEntryError("foreign") from error
    if not isinstance(facts, dict):
        raise BadEntryError("foreign")
    return facts, document


def _checksum(prefix: bytes, body: bytes) -> bytes:
    digest = hashlib.sha256(prefix)
    digest.update(body)
    return digest.digest()
