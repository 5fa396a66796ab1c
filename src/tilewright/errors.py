"""The exception tree.

One root, and a leaf for each party that can be at fault: an engine that cannot serve a
graph, a graph that is wrong, a call that does not fit its plan, a device that failed.
"""

from __future__ import annotations


class TilewrightError(Exception):
    """Root of every exception that Tilewright raises on purpose."""


class NotSupportedError(TilewrightError):
    """A typed decline: the graph may be right, but this engine or plan cannot run it.

    The message names the tensor or operation, what was given, and the rule.
    """


class GraphError(TilewrightError, ValueError):
    """The graph is wrong: an attribute is missing, or shapes or types do not fit."""


class BindingError(TilewrightError, ValueError):
    """A call was refused before its first write: an operand does not fit the plan."""


class LaunchError(TilewrightError, RuntimeError):
    """The device, or the code running on it, failed."""


class OracleError(TilewrightError, AssertionError):
    """A result differs from the float64 reference by more than its tolerance."""
