"""Tilewright runs graphs of tensor operations.

``import tilewright`` is lazy: it loads neither torch nor triton. Names are found in the module
that ``_EXPORTS`` tells, at first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from tilewright._version import __version__ as __version__

_EXPORTS = {
    "Graph": "tilewright.planning.graph",
    "pygraph": "tilewright.planning.graph",
    "Tensor": "tilewright.graph.tensor",
    "data_type": "tilewright.vocabulary",
    "DataType": "tilewright.dtypes",
    "DeviceProperties": "tilewright.planning.devices",
    "Handle": "tilewright.launch.handles",
    "TilewrightError": "tilewright.errors",
    "NotSupportedError": "tilewright.errors",
    "GraphError": "tilewright.errors",
    "BindingError": "tilewright.errors",
    "LaunchError": "tilewright.errors",
    "cudnnGraphNotSupportedError": "tilewright.vocabulary",
    **dict.fromkeys(
        (
            "heur_mode",
            "build_plan_policy",
            "norm_forward_phase",
            "reduction_mode",
            "diagonal_alignment",
            "attention_implementation",
            "tensor_reordering",
            "moe_grouped_matmul_mode",
            "reshape_mode",
            "scalar_type",
            "behavior_note",
            "numeric_note",
            "knob_type",
        ),
        "tilewright.graph.enums",
    ),
    **dict.fromkeys(
        ("create_handle", "destroy_handle", "set_stream", "get_stream"),
        "tilewright.vocabulary",
    ),
    **dict.fromkeys(
        (
            "backend_version",
            "backend_version_string",
            "get_last_error_string",
            "create_kernel_cache",
            "create_device_properties",
            "jit",
            "graph_cache",
        ),
        "tilewright.vocabulary",
    ),
}
# Submodules that are part of the public surface. "graph" is both the declarative package and the
# vocabulary's context manager: the package is callable (see tilewright.graph).
_SUBMODULES = (
    "ops",
    "nn",
    "oracle",
    "integrations",
    "graph",
    "engines",
    "artifact",
    "testing",
    "cli",
)

__all__ = sorted([*_EXPORTS, *_SUBMODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"tilewright.{name}")
    raise AttributeError(f"module 'tilewright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
