"""What this machine and installation are, for ``doctor`` and the headers of measurements."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from tilewright._version import __version__

_LIBRARIES = ("torch", "triton", "numpy", "safetensors")


def versions() -> dict[str, str | None]:
    """Versions by name, of Tilewright, Python and the libraries; None for what is not installed."""
    found: dict[str, str | None] = {
        "tilewright": __version__,
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def processor() -> str:
    """The processor's own name, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """The machine's memory, or None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def load() -> str:
    """What else the machine does, as its load average; a measurement's reader wants to know."""
    if not hasattr(os, "getloadavg"):
        return "load unknown"
    return f"load average {os.getloadavg()[0]:.1f}"


def system() -> str:
    """The operating system and the architecture, without the machine's name."""
    return f"{platform.system()} {platform.machine()}"


def describe_cpu() -> str:
    """One line on the CPU and the threads that torch uses."""
    import torch

    return f"cpu ({processor()}, {usable_cores()} cores, torch threads {torch.get_num_threads()})"


def cuda_devices() -> list[dict[str, Any]]:
    """Each CUDA device's index, name, compute capability, multiprocessors and memory."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
            }
        )
    return found
