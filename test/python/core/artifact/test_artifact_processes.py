"""Many processes share one store, and some are killed while they write."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROCESSES = 8
KEYS = 24

COMMON = """
import dataclasses, hashlib, json, os, random, signal, sys, time
from pathlib import Path
from tilewright.artifact import counters
from tilewright.artifact.code import KernelCode
from tilewright.artifact.key import KernelKey
from tilewright.artifact.store import Store

def key(number):
    return KernelKey("k", "s", (), (("N", number),), frozenset(), 4, 3, (9, 0), ())

def code(number, size=200_000):
    block = hashlib.sha256(str(number).encode()).digest()
    return KernelCode(f"kernel_{number}", block * (size // 32), 128, 0, (9, 0))
"""

# Each takes the keys in an order of its own: what it finds must be right, else it writes it.
FILL = """
folder, seed, keys, max_bytes = sys.argv[1], *map(int, sys.argv[2:])
store = Store(Path(folder), max_bytes)
draw = random.Random(seed)
# All start at once: at the moment that the last one is there.
open(f"{folder}.here.{seed}", "w").close()
while not os.path.exists(f"{folder}.go"):
    time.sleep(0.001)
for number in draw.sample(range(keys), keys) * 2:
    found, reason = store.load(key(number))
    if found is None:
        assert reason == "absent", reason
        assert store.save(key(number), code(number), {}) == ""
    else:
        assert found == code(number), number
print(json.dumps(dataclasses.asdict(counters())))
"""

# A nursery of writers: each is killed at some moment of its writes, which are made slow.
KILL = """
store, times = Store(Path(sys.argv[1]), 2**30), int(sys.argv[2])
draw = random.Random(0)
KEYS = 4

real = os.write
def slowly(descriptor, data):
    time.sleep(0.0002)
    return real(descriptor, data[:8192])

interrupted = 0
for turn in range(times):
    start, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready, b"x")
        os.write = slowly
        while True:
            for number in range(KEYS):
                store.save(key(number), code(number), {})
    os.read(start, 1)
    os.close(start), os.close(ready)
    time.sleep(draw.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the writer ended on its own"
    drafts = [file for file in store.files() if file.is_draft]
    interrupted += bool(drafts)
    store.remove(drafts)
    for number in range(KEYS):
        found, reason = store.load(key(number))
        assert found == code(number) or (found is None and reason == "absent"), (number, reason)
    if turn % 3 == 0:
        store.remove(store.files())
print(interrupted)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMMON + code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fill(folder: Path, max_bytes: int) -> list[dict[str, int]]:
    children = [start(FILL, folder, seed, KEYS, max_bytes) for seed in range(PROCESSES)]
    try:
        while not all(
            Path(f"{folder}.here.{seed}").exists() or child.poll() is not None
            for seed, child in enumerate(children)
        ):
            time.sleep(0.002)
        Path(f"{folder}.go").touch()
        results = [child.communicate(timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    for child, (_, error) in zip(children, results, strict=True):
        assert child.returncode == 0, error
    return [json.loads(printed) for printed, _ in results]


@pytest.mark.L0
def test_eight_processes_fill_one_empty_store(tmp_path: Path) -> None:
    counts = fill(tmp_path / "store", 2**30)
    assert len(list((tmp_path / "store").iterdir())) == KEYS, "whole entries and no drafts"
    for count in counts:
        assert count["disk_hits"] + count["writes"] == 2 * KEYS
        assert count["disk_hits"] >= KEYS and not count["write_failures"]
    assert sum(count["disk_hits"] for count in counts) > PROCESSES * KEYS, "they shared"


@pytest.mark.L0
def test_eight_processes_in_a_store_that_is_too_small(tmp_path: Path) -> None:
    # Entries go while others look for them: a hit is right, and a miss is an absent file.
    max_bytes = 8 * 200_000
    counts = fill(tmp_path / "store", max_bytes)
    assert sum(count["removals"] for count in counts) > 0
    # Each process may have added one after another's count.
    size = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert size <= max_bytes + PROCESSES * 201_000


@pytest.mark.parametrize(
    "times",
    [pytest.param(20, marks=pytest.mark.L0), pytest.param(200, marks=pytest.mark.L1)],
)
def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path, times: int) -> None:
    nursery = start(KILL, tmp_path / "store", times)
    printed, error = nursery.communicate(timeout=240)
    assert nursery.returncode == 0, error
    assert int(printed) >= times // 4, "too few were killed within a write"
