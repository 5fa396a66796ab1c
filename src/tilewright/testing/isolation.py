"""Whether a run gets a worker process of its own, and if not, why.

The worker is one of pytest-xdist's, injected as ``-n 1`` would, with any number of replacements:
what ends the worker (a signal, an exit, the deadline, a dead device context) ends one test.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tilewright.testing.options import OPT_OUT

# xdist takes a number; this many worker starts do not fit in a run.
UNLIMITED = str(10**9)
# Options under which the process that the user sees must be the one that runs the tests.
_DIRECT = {
    "usepdb": "--pdb",
    "trace": "--trace",
    "collectonly": "--collect-only",
    "setuponly": "--setup-only",
    "setupplan": "--setup-plan",
    "setupshow": "--setup-show",
    "showfixtures": "--fixtures",
    "show_fixtures_per_test": "--fixtures-per-test",
    "stepwise": "--stepwise",
    "stepwise_skip": "--stepwise-skip",
}


def reason_against(config: pytest.Config, environment: Mapping[str, str]) -> str | None:
    """Tell why this run gets no worker injected, or None if it does."""
    option = config.option
    if environment.get(OPT_OUT, "") not in ("", "0"):
        return f"{OPT_OUT} is set"
    if not has_xdist(config):
        return "pytest-xdist is not loaded"
    if option.numprocesses is not None:
        return f"-n {option.numprocesses}"
    if option.dist != "no" or option.tx or option.distload:
        return "--dist or --tx"
    if option.capture == "no":
        return "-s"
    for name, flag in _DIRECT.items():
        if getattr(option, name, False):
            return flag
    return None


def inject(config: pytest.Config) -> None:
    """Make the run one of a single worker that is replaced as often as it dies."""
    config.option.numprocesses = 1
    config.option.dist = "load"
    config.option.tx = ["popen"]
    config.option.maxworkerrestart = UNLIMITED


def lift_restart_limit(config: pytest.Config) -> None:
    """Let an explicit ``-n`` replace workers without end, unless the caller gave a number.

    xdist would stop after four deaths a worker and leave the rest of the tests without outcome.
    """
    if config.option.maxworkerrestart is None:
        config.option.maxworkerrestart = UNLIMITED


def has_xdist(config: pytest.Config) -> bool:
    """True where xdist's plugin is registered, under whatever name."""
    plugins = config.pluginmanager.get_plugins()
    return any(getattr(plugin, "__name__", None) == "xdist.plugin" for plugin in plugins)


def is_worker(config: pytest.Config) -> bool:
    """True in a worker process of xdist."""
    return hasattr(config, "workerinput")


def is_controller(config: pytest.Config) -> bool:
    """True in the process that hands tests to workers. Known from ``pytest_configure`` on."""
    option = config.option
    return (
        not is_worker(config)
        and has_xdist(config)
        and option.dist != "no"
        and bool(option.tx)
        and not option.collectonly
    )
