"""Fixtures of the plugin; present where the project uses it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tilewright.testing import notes, tree
from tilewright.testing.draws import Draws
from tilewright.testing.state import SEED, SETTINGS

if TYPE_CHECKING:
    import torch

    from tilewright.launch.handles import Handle
    from tilewright.testing.another_process import AnotherProcess


@pytest.fixture
def draws(request: pytest.FixtureRequest) -> Draws:
    """The draws and dimensions of this test; a failing test prints them for ``--repro``."""
    config = request.config
    item = request.node
    given = config.option.repro
    if given is not None:
        made = Draws(notes.node_id(item), given["seed"], given=given)
    else:
        made = Draws(notes.node_id(item), config.stash[SEED], dims=dict(config.option.dim))
    notes.of(item).draws = made
    return made


@pytest.fixture
def generator(draws: Draws) -> torch.Generator:
    """This test's ``torch.Generator`` on the CPU, seeded by its node id and ``--seed``."""
    return draws.generator


@pytest.fixture
def rng(draws: Draws) -> random.Random:
    """This test's ``random.Random``, seeded by its node id and ``--seed``."""
    return draws.random


@pytest.fixture
def declined(request: pytest.FixtureRequest) -> Callable[[object], NoReturn]:
    """A function that ends the test as declined: a skip that the summary counts by its reason.

    It takes the ``NotSupportedError`` of an engine, or its text.
    """

    def decline(reason: object) -> NoReturn:
        notes.of(request.node).declined = str(reason)
        pytest.skip(f"declined: {reason}")

    return decline


@pytest.fixture
def large_storage(request: pytest.FixtureRequest) -> Iterator[Callable[..., torch.Tensor]]:
    """A function ``large_storage(size_bytes, device="cuda")`` that gives uint8 storage, or skips.

    Only that allocation may skip; the summary counts the tests that got theirs. After the test the
    device has its memory back, for the tests of other workers.
    """
    from tilewright.testing.large_storage import allocate_or_skip

    known = notes.of(request.node)

    def allocate(size_bytes: int, device: str | torch.device = "cuda") -> torch.Tensor:
        known.storage = "skipped"
        storage = allocate_or_skip(size_bytes, device)
        known.storage = "held"
        used.append(storage.device.type)
        return storage

    used: list[str] = []
    yield allocate
    # A dead context is the probe's to find.
    if "cuda" in used and notes.of(request.node).unfit is None:
        import torch

        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def session_handle() -> Iterator[Handle]:
    """The session's one handle, with a stream of its own on a CUDA device. Take ``handle``."""
    import torch

    from tilewright.launch import handles

    made = handles.create_handle()
    new_stream: Any = torch.cuda.Stream
    stream = new_stream(made.device) if made.device.type == "cuda" else None
    handles.set_stream(made, stream)
    yield made
    handles.destroy_handle(made)


@pytest.fixture
def handle(session_handle: Handle) -> Iterator[Handle]:
    """The session's handle; whatever the test binds it to, the next test finds the stream back.

    That holds where a later fixture or the test fails or skips.
    """
    from tilewright.launch import handles

    before = handles.get_stream(session_handle)
    try:
        yield session_handle
    finally:
        handles.set_stream(session_handle, before)


@pytest.fixture(scope="session")
def run_python(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """A function that runs code in a fresh interpreter and returns what it printed.

    ``run_python(code, *arguments, folder=None, timeout_s=300.0)``: the code imports the tree under
    test. It runs in ``folder``, by default a new, empty one. A child that exits with another
    status than 0 fails the test and shows both streams.
    """
    package = request.config.stash[SETTINGS].package
    unchecked = [package] if package is not None else []

    def run(
        code: str, *arguments: str, folder: Path | None = None, timeout_s: float = 300.0
    ) -> str:
        where = folder or tmp_path_factory.mktemp("child")
        # Once a session: a child that resolves the package elsewhere tests another tree.
        first = unchecked.pop() if unchecked else None
        return tree.run_python(code, *arguments, folder=where, package=first, timeout_s=timeout_s)

    return run


@pytest.fixture
def run_gpu_python(run_python: Callable[..., str]) -> Callable[..., str]:
    """A function that runs code on a GPU in a fresh interpreter and returns what it printed.

    ``run_gpu_python(code, *arguments, capabilities=None, folder=None, timeout_s=300.0)``: whether
    there is a GPU, and one of these compute capabilities, is asked here, and the test skips if not.
    The child decides nothing: one that exits with another status than 0, or that ends before its
    last line, fails the test, whatever it says of skipping.
    """
    from tilewright.testing import children

    def run(
        code: str,
        *arguments: str,
        capabilities: Collection[tuple[int, int]] | None = None,
        folder: Path | None = None,
        timeout_s: float = 300.0,
    ) -> str:
        children.require_gpu(capabilities)
        whole = children.to_its_end(code)
        return children.without_end(
            run_python(whole, *arguments, folder=folder, timeout_s=timeout_s)
        )

    return run


@pytest.fixture(scope="module")
def another_process() -> Iterator[AnotherProcess]:
    """Another process for ``detectors.beside_another_process``, on the first device, or a skip.

    It starts at its first use, keeps the device busy only while a detector wants it, and ends with
    the module.
    """
    from tilewright.testing import children
    from tilewright.testing.another_process import AnotherProcess

    children.require_gpu()
    with AnotherProcess("cuda") as made:
        yield made


@pytest.fixture(scope="session")
def copy_source() -> Callable[[Path, Path], Path]:
    """A function (source, target) that copies a source tree without its bytecode caches."""
    return tree.copy_source
