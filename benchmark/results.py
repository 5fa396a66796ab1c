"""Result tables: a csv with device, versions and command in its header, printed as well."""

from __future__ import annotations

import csv
import os
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(os.environ.get("TILEWRIGHT_RESULTS", Path(__file__).resolve().parent / "results"))


def device_name() -> str:
    """The GPU's name as a folder name, or cpu."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")


class Table:
    """Rows of one subject; ``write`` puts them under results/<device>/<subject>.csv."""

    def __init__(self, subject: str, command: str) -> None:
        self.subject = subject
        self.command = command
        self.rows: list[dict[str, Any]] = []

    def add(self, **columns: Any) -> None:
        """Add a row; columns are those of the first one."""
        self.rows.append(columns)

    def write(self) -> Path:
        """Write the csv and print it."""
        import torch
        import triton

        folder = RESULTS / device_name()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.subject}.csv"
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        versions = f"torch {torch.__version__}, triton {triton.__version__}"
        with path.open("w", newline="") as file:
            file.write(f"# device: {name}\n# versions: {versions}, ")
            file.write(f"python {sys.version.split()[0]}\n# command: {self.command}\n")
            writer = csv.DictWriter(file, list(self.rows[0]))
            writer.writeheader()
            writer.writerows(self.rows)
        print(path.read_text())
        return path
