"""Result tables: a csv with device, versions and command in its header; rows are printed."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("TILEWRIGHT_RESULTS", Path(__file__).resolve().parent / "results"))


def device_name() -> str:
    """The GPU's name as a folder name, or cpu."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


# Peers that are no part of PyTorch: the module that is imported, and its package.
PEERS = {"cudnn": "nvidia-cudnn-frontend", "flash_attn.cute": "flash-attn-4"}


def versions() -> str:
    """Of what was measured, and of the peers beside it."""
    import torch
    import triton

    found = [f"torch {torch.__version__}", f"triton {triton.__version__}"]
    found.append(f"python {sys.version.split()[0]}")
    if torch.backends.cudnn.is_available():
        found.append(f"cuDNN {torch.backends.cudnn.version()}")
    for name, package in PEERS.items():
        module = sys.modules.get(name)
        if module is None:
            continue
        version = getattr(module, "__version__", "")
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(package)
        found.append(f"{package} {version}".strip())
    return ", ".join(found)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table that ``Table.write`` wrote."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


class Table:
    """Rows of one subject; ``write`` puts them under results/<device>/<subject>.csv."""

    def __init__(self, subject: str, command: str) -> None:
        self.subject = subject
        self.command = command
        self.rows: list[dict[str, Any]] = []

    def add(self, **columns: Any) -> None:
        """Add a row and print it; columns are those of the first one."""
        if not self.rows:
            print(*columns, sep=",")
        self.rows.append(columns)
        print(*columns.values(), sep=",", flush=True)

    def write(self) -> Path:
        """Write the csv with the rows that there are."""
        import torch

        folder = RESULTS / device_name()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.subject}.csv"
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        with path.open("w", newline="") as file:
            file.write(f"# device: {name}\n# versions: {versions()}\n")
            file.write(f"# command: {self.command}\n")
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        return path
