"""What the code of a kernel depends on besides the kernel: the compiler, and this library.

The compiler's identity is its version and the digest of its installed files as the installer
recorded them, so nothing large is read: a library of 460 MB would take longer than compiling.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tilewright._version import __version__

_PREFIXES = ("TRITON_", "PTXAS_")
# Of variables that compilers read without our knowing which: rather too many than one too few.
_WIDE_PREFIXES = (
    *_PREFIXES,
    *("ALLOW_", "LLVM_", "MLIR_", "NVPTX_", "AMDGCN_", "DISABLE_", "ENABLE_", "DUMP_", "USE_"),
)
# Where things are kept and what is printed: these do not reach the code.
_IRRELEVANT = frozenset(
    {
        "TRITON_ALWAYS_COMPILE",
        "TRITON_CACHE_AUTOTUNING",
        "TRITON_CACHE_DIR",
        "TRITON_CACHE_MANAGER",
        "TRITON_DUMP_DIR",
        "TRITON_HOME",
        "TRITON_INTERPRET",
        "TRITON_KERNEL_DUMP",
        "TRITON_PRINT_AUTOTUNING",
        "TRITON_STORE_BINARY_ONLY",
    }
)

# Counted up when the same source and compiler come to give other code: see ``compile_kernel``.
_MAKING = "2"


def environment(
    compiler: str, version: str, settings: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """The facts for a key, sorted by name.

    ``compiler`` is the name of its top package, ``settings`` what it says that its code depends
    on besides. Environment variables that may reach the code are found here; one that names a
    file (another assembler) stands for that file's content.
    """
    facts = {
        "tilewright": __version__,
        "making": _MAKING,
        compiler: version,
        f"{compiler} files": _files_digest(compiler),
    }
    facts |= {f"setting {name}": str(value) for name, value in settings.items()}
    for name, value in os.environ.items():
        if name.startswith(_PREFIXES) and name not in _IRRELEVANT:
            facts[f"variable {name}"] = _value(value)
    return tuple(sorted(facts.items()))


def unloaded_environment(compiler: str) -> tuple[tuple[str, str], ...]:
    """The facts for the key of a plan record, without importing the compiler.

    As ``environment``, with every variable that any setting of the compiler may come from.
    """
    facts = {
        "tilewright": __version__,
        "making": _MAKING,
        compiler: installed_version(compiler),
        f"{compiler} files": _files_digest(compiler),
    }
    for name, value in os.environ.items():
        if name.startswith(_WIDE_PREFIXES) and name not in _IRRELEVANT:
            facts[f"variable {name}"] = _value(value)
    return tuple(sorted(facts.items()))


def installed_version(package: str) -> str:
    """The version that a package states in its own file; "" if it is absent. Imports nothing."""
    loaded = getattr(sys.modules.get(package), "__version__", None)
    return _stated_version(package) if loaded is None else str(loaded)


@functools.cache
def _stated_version(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        return ""
    try:
        text = Path(found.origin).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
    for line in text.splitlines():
        name, _, value = line.partition(" = ")
        quote = value[:1]
        if name == "__version__" and quote in ("'", '"') and quote in value[1:]:
            return value[1:].partition(quote)[0]
    return ""


@functools.cache
def _files_digest(package: str) -> str:
    """A digest of the package's files as recorded at its installation, else of their times."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return "absent"
    folder = Path(found.submodule_search_locations[0])
    for name in sorted(os.listdir(folder.parent)):
        if package not in name or not name.endswith(".dist-info"):
            continue
        try:
            lines = (folder.parent / name / "RECORD").read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        own = sorted(line for line in lines if line.startswith(f"{package}/") and "sha256=" in line)
        if any(line.startswith(f"{package}/__init__.py,") for line in own):
            return "recorded " + hashlib.sha256("\n".join(own).encode()).hexdigest()
    return "found " + _listing_digest(folder)


def _listing_digest(folder: Path) -> str:
    """A digest of names, sizes and times: for a compiler that was built in place."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        try:
            facts = path.stat()
        except OSError:
            continue
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _value(text: str) -> str:
    try:
        facts = os.stat(text)
    except (OSError, ValueError):
        return text
    if not os.path.isfile(text):
        return text
    return _content(text, facts.st_size, facts.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _content(path: str, size: int, modified_ns: int) -> str:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError:
        return f"{path} {size} {modified_ns}"
    return "file " + base64.b32encode(digest.digest()).decode().rstrip("=")
