"""The pytest plugin: its options, marks and hooks. What they do is in the modules beside it.

Installed, it is loaded by its entry point in every pytest run and does nothing until the project's
ini file asks for something (see docs/testing.md). From a source tree: ``-p
tilewright.testing.plugin``. Nothing heavy is imported here, and torch nowhere in the plugin before
a test asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

from tilewright.testing import options
from tilewright.testing.state import SEED, SETTINGS, WHY_DIRECT

_MARKS = (
    "deadline(seconds): time that this test may take, 0 for any; see --deadline",
    "gpu_exclusive: no other test uses this test's devices meanwhile",
    "needs_gpus(n): skip where this run may use fewer than n devices",
    "perf: measures; runs under --perf",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare ini options, and the command line's where the project uses the plugin."""
    options.declare_ini(parser)
    config = pluginmanager.get_plugin("pytestconfig")
    if config is None:
        return
    settings = options.read(config)
    if not settings.any:
        return
    options.declare_options(parser)
    from tilewright.testing import early

    # Conftests come later, and they may import torch.
    early.export_allocator(settings.allocator)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give the run a worker of its own, and let ``--repro`` name the test."""
    settings = options.read(config)
    if not settings.any:
        return
    from tilewright.testing import isolation

    given = config.option.repro
    if given is not None:
        config.args = [str(config.rootpath / given["test"])]
    if not settings.isolation or isolation.is_worker(config):
        return
    reason = isolation.reason_against(config, os.environ)
    if reason is None:
        isolation.inject(config)
    else:
        config.stash[WHY_DIRECT] = reason
        if isolation.has_xdist(config):
            isolation.lift_restart_limit(config)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register marks, and the hooks of this process's part in the run."""
    settings = options.read(config)
    config.stash[SETTINGS] = settings
    if not settings.any:
        return
    from tilewright.testing import early, fixtures, isolation, levels, tree

    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    config.stash[SEED] = _seed(config)
    if settings.package is not None:
        tree.choose(settings.package)
    if settings.levels:
        for name, text in levels.LEVELS.items():
            config.addinivalue_line("markers", f"{name}: {text}")
        if config.option.repro is None:
            levels.choose_default(config)
    if config.option.repro is not None:
        config.option.markexpr = ""
        config.option.keyword = ""
    if not isolation.is_controller(config):
        early.import_in_order(settings.import_first)
    config.pluginmanager.register(fixtures, "tilewright.testing.fixtures")
    config.pluginmanager.register(_Everywhere(settings), "tilewright.testing.everywhere")
    _register_part(config, settings)


def _register_part(config: pytest.Config, settings: options.Settings) -> None:
    from tilewright.testing import controlling, deadline, isolation, running
    from tilewright.testing.ledger import Ledger

    manager = config.pluginmanager
    limit = config.option.deadline
    deadline_s = settings.deadline_s if limit is None else limit
    if not settings.isolation:
        deadline_s = 0.0 if limit is None else limit
    if deadline_s > 0:
        deadline.check_timer_is_free(config)
    if isolation.is_worker(config):
        if "tilewright" in config.workerinput:  # type: ignore[attr-defined]
            part: object = running.in_worker(config, deadline_s)
        else:
            part = running.in_process(config, deadline_s)
        manager.register(part, "tilewright.testing.running")
        return
    ledger = Ledger(config)
    manager.register(ledger, "tilewright.testing.ledger")
    if isolation.is_controller(config):
        controller = controlling.Controlling(config, ledger, config.stash[SEED])
        manager.register(controller, "tilewright.testing.controlling")
    else:
        manager.register(running.in_process(config, deadline_s), "tilewright.testing.running")


def _seed(config: pytest.Config) -> int:
    """The run's seed; 'random' is drawn once, by the controller."""
    told = getattr(config, "workerinput", {}).get("tilewright")
    if told is not None:
        return int(told["seed"])
    given = config.option.seed
    if given is None:
        import secrets

        return secrets.randbelow(2**32)
    return int(given)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is tested, where, and how the run is protected."""
    settings = config.stash[SETTINGS]
    if not settings.any:
        return []
    from tilewright.testing import placement, tree

    lines = []
    if settings.package is not None:
        lines.append(f"package under test: {tree.package_path(settings.package.name)}")
    devices = placement.devices(os.environ)
    models = ", ".join(placement.model_names())
    shown = ",".join(devices) + (f" ({models})" if models else "") if devices else "none (CPU only)"
    lines.append(f"devices: {shown}; seed: {config.stash[SEED]}")
    if settings.isolation:
        limit = config.option.deadline
        limit = settings.deadline_s if limit is None else limit
        reason = config.stash.get(WHY_DIRECT, None)
        worker = "one replaceable worker" if reason is None else f"no worker injected ({reason})"
        lines.append(f"isolation: {worker}; deadline: {f'{limit:g} s' if limit else 'none'}")
    return lines


class _Everywhere:
    """Hooks of controller, workers and undivided runs alike."""

    def __init__(self, settings: options.Settings) -> None:
        self._settings = settings

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Find test files that the default sweep would never collect."""
        if self._settings.audited:
            from tilewright.testing import audit

            audit.check(session.config, self._settings.audited)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Hold each test to exactly one level."""
        report = yield
        if self._settings.levels:
            from tilewright.testing import levels

            levels.check(report)
        return report

    def pytest_collection_finish(self) -> None:
        """See that collection changed nothing that was chosen before it."""
        from tilewright.testing import early, tree

        if self._settings.package is not None:
            tree.check_unchanged(self._settings.package)
        early.check_allocator(self._settings.allocator)
        early.check_order(self._settings.import_first)
