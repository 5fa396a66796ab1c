"""Which devices a run may use, and which of them each worker takes first.

The caller's CUDA_VISIBLE_DEVICES is a bound: workers see its devices and no others, each with
another one in front, so that ``cuda:0`` differs from worker to worker while a test of several
devices still finds them all. Devices are counted without the driver: collection touches none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tilewright.testing.options import DEVICES

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NODES = Path("/dev")
_MODELS = Path("/proc/driver/nvidia/gpus")


def devices(environment: Mapping[str, str], nodes: Path = _NODES) -> tuple[str, ...]:
    """Tokens of the devices that this run may use, as CUDA_VISIBLE_DEVICES would list them.

    TILEWRIGHT_DEVICES, where it is set, says which there are, for systems whose device files do
    not tell. As the driver does, the list ends at the first entry that names no device.
    """
    told = environment.get(DEVICES)
    if told is not None:
        present = _tokens(told)
    else:
        count = sum(1 for path in nodes.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        present = tuple(str(index) for index in range(count))
    asked = environment.get(VISIBLE)
    if asked is None or not present:
        return present
    allowed = []
    for token in _tokens(asked):
        # A UUID (GPU-..., MIG-...) is the caller's word; an index must exist.
        if token.lstrip("-").isdigit() and token not in present:
            break
        allowed.append(token)
    return tuple(allowed)


def of_worker(index: int, available: tuple[str, ...]) -> tuple[str, ...]:
    """The devices of worker ``index``: all, beginning with another one than its neighbours'."""
    if not available:
        return ()
    first = index % len(available)
    return available[first:] + available[:first]


def environment_of_worker(index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """What to set for worker ``index``; nothing where there is at most one device."""
    available = devices(environment)
    if len(available) < 2:
        return {}
    order = ",".join(of_worker(index, available))
    told = {DEVICES: order} if DEVICES in environment else {}
    return {VISIBLE: order, **told}


def model_names(folder: Path = _MODELS) -> tuple[str, ...]:
    """Distinct names of the devices that the kernel driver lists; empty where it lists none."""
    names = set()
    for path in folder.glob("*/information"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE)
        if match:
            names.add(match[1])
    return tuple(sorted(names))


def _tokens(text: str) -> tuple[str, ...]:
    return tuple(token for part in text.split(",") if (token := part.strip()))
