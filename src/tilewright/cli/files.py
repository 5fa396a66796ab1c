"""Files that the commands read and write. No torch here; tensors are in ``tensor_files``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tilewright.cli.exits import fail

if TYPE_CHECKING:
    from tilewright.planning.graph import Graph

TENSOR_SUFFIXES = (".safetensors", ".npz")


def read_bytes(path: Path) -> bytes:
    """The content of a file that must not be empty.

    Raises:
        CommandError: if there is none, it is no regular file, or it cannot be read.
    """
    check_readable(path)
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def check_readable(path: Path) -> None:
    """Require a file that is there, is no directory, and has content.

    Raises:
        CommandError: saying which of these fails.
    """
    try:
        if path.is_dir():
            fail(f"{path}: is a directory; expected a file")
        if path.stat().st_size == 0 and path.is_file():
            fail(f"{path}: the file is empty")
    except (OSError, ValueError) as error:
        fail(f"{path}: {getattr(error, 'strerror', None) or error}")


def check_tensor_suffix(path: Path) -> None:
    """Require a file name whose suffix tells a format of tensors.

    Raises:
        CommandError: naming the known ones.
    """
    if path.suffix not in TENSOR_SUFFIXES:
        accepted = ", ".join(TENSOR_SUFFIXES)
        fail(f"{path}: unknown kind of file {path.suffix!r}; accepted are {accepted}")


def check_writable(path: Path) -> None:
    """Require that a file can be made at ``path``, before any work is spent on its content.

    Raises:
        CommandError: if it is a directory, or its folder is missing or not writable.
    """
    parent = path.parent
    try:
        if path.is_dir():
            fail(f"{path}: is a directory; expected the name of a file to write")
        if not parent.is_dir():
            reason = "is not a directory" if parent.exists() else "does not exist"
            fail(f"{path}: cannot be written: {parent} {reason}")
    except (OSError, ValueError) as error:
        fail(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}")
    if not os.access(parent, os.W_OK):
        fail(f"{path}: cannot be written: no permission to write in {parent}")


@contextlib.contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of ``path`` when the block ends without an error.

    It is written beside ``path`` under a hidden name first, so that a reader, or a process that is
    killed half-way, never leaves a part of a file under the name itself.

    Raises:
        CommandError: if the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        fail(f"{path}: cannot be written: {error.strerror or error}")
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def load_graph(path: Path, **arguments: Any) -> Graph:
    """The graph of a JSON file: the plain form, or what ``Graph.serialize`` wrote.

    The stored plan of the latter is selected if it is offered here. ``arguments`` go to ``Graph``.

    Raises:
        CommandError: if the file cannot be read.
        GraphError: if it holds no graph, or a wrong one.
    """
    text = read_bytes(path)
    from tilewright.errors import GraphError
    from tilewright.graph import json_form
    from tilewright.planning.graph import Graph

    graph = Graph(**arguments)
    try:
        document = json_form.parse(text)
        if "graph" in document and "tilewright_graph" not in document:
            graph.deserialize(text)
        else:
            json_form.fill_from_dict(graph, document)
            graph.validate()
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
    return graph
