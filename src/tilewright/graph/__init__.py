"""The declarative layer: tensors, operations, inference, checks, JSON. Pure Python, no torch.

The vocabulary also has a function of this name: ``with tilewright.graph(handle) as (g, _)``. The
module itself is callable, so that module and function are one object in every import order.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, handle: Any = None, **keywords: Any) -> Any:
        """A context manager that yields (graph, handle): a new graph on ``handle``."""
        from tilewright.vocabulary import declare_graph

        return declare_graph(handle, **keywords)


sys.modules[__name__].__class__ = _CallablePackage
