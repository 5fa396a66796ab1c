"""``tilewright cache``: what the store of compiled kernels holds, and whether it is whole."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from tilewright.cli import options, output
from tilewright.cli.exits import ExitCode

if TYPE_CHECKING:
    from tilewright.artifact.store import Store


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand."""
    parser = subparsers.add_parser(
        "cache",
        help="list, verify or clear the store of compiled kernels",
        description="Look after the store of compiled kernels (TILEWRIGHT_CACHE_DIR).",
    )
    parser.add_argument(
        "action",
        choices=("list", "verify", "clear"),
        help="list its entries; read every one and tell what is damaged; remove them all",
    )
    options.add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> ExitCode:
    """Run the subcommand; WRONG_RESULT if an entry is damaged, or would not be removed."""
    from tilewright.artifact.location import cache_folder, current_store

    store = current_store()
    document: dict[str, Any] = {
        "folder": str(cache_folder()),
        "enabled": store is not None,
        "max_bytes": None if store is None else store.max_bytes,
    }
    code = ExitCode.OK
    if arguments.action == "clear":
        code = _clear(store, document)
    else:
        entries = [] if store is None else _entries(store)
        document["bytes"] = sum(entry["bytes"] for entry in entries)
        bad = [entry for entry in entries if entry["wrong"]]
        if arguments.action == "verify":
            document |= {"good": len(entries) - len(bad), "damaged": bad}
            code = ExitCode.WRONG_RESULT if bad else ExitCode.OK
        else:
            document["entries"] = entries
    if arguments.json:
        output.print_json(document)
    else:
        _print(arguments.action, document)
    return code


def _clear(store: Store | None, document: dict[str, Any]) -> ExitCode:
    files = [] if store is None else store.files()
    removed = 0 if store is None else store.remove(files)
    left = 0 if store is None else len(store.files())
    document |= {"removed": removed, "left": left}
    return ExitCode.WRONG_RESULT if left else ExitCode.OK


def _entries(store: Store) -> list[dict[str, Any]]:
    listed = []
    for file, entry, wrong in store.entries():
        manifest = {} if entry is None else dict(entry.manifest)
        listed.append(
            {
                "file": file.path.name,
                "bytes": file.size_bytes,
                "used": _time(file.used_ns),
                "kernel": "" if entry is None else entry.code.name,
                "manifest": manifest,
                "wrong": wrong,
            }
        )
    for file, wrong in store.records():
        listed.append(
            {
                "file": file.path.name,
                "bytes": file.size_bytes,
                "used": _time(file.used_ns),
                "kernel": "(a plan)",
                "manifest": {},
                "wrong": wrong,
            }
        )
    return listed


def _time(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(nanoseconds / 1e9))


def _print(action: str, document: dict[str, Any]) -> None:
    if not document["enabled"]:
        output.print_lines(["the store is disabled (TILEWRIGHT_CACHE=0, or no home folder)"])
        return
    if action == "clear":
        lines = [f"{document['folder']}: removed {document['removed']} files"]
        if document["left"]:
            lines.append(f"{document['left']} files are there still")
        output.print_lines(lines)
        return
    if action == "verify":
        bad = document["damaged"]
        output.print_lines(
            [f"{document['folder']}: {document['good']} entries good, {len(bad)} damaged"]
            + [f"{entry['file']}: {entry['wrong']}" for entry in bad]
        )
        return
    rows = [
        (
            entry["file"][:12],
            entry["kernel"] or f"({entry['wrong']})",
            entry["manifest"].get("target", ""),
            entry["manifest"].get("triton", ""),
            output.format_bytes(entry["bytes"]),
            entry["used"],
        )
        for entry in document["entries"]
    ]
    output.print_table(
        f"{document['folder']}: {output.format_bytes(document['bytes'])} of "
        f"{output.format_bytes(document['max_bytes'])}",
        ("entry", "kernel", "target", "triton", "size", "last used"),
        rows,
        numeric=("size",),
    )
