"""The other process works when it is told to, and ends in every case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.testing import another_process, busy_child
from tilewright.testing.another_process import AnotherProcess, AnotherProcessError

pytestmark = [
    pytest.mark.L0,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc of processes"),
]

# A process that does as the program does, but for one thing.
PLAYED = """
import os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    {does}
    print(line.strip(), flush=True)
"""
# Its own child holds the other process' input open when it is killed itself.
KILLED = """
import os, signal, sys, time
from pathlib import Path
from tilewright.testing.another_process import AnotherProcess

with AnotherProcess("cpu") as other, other.busy():
    holder = os.fork()
    if not holder:
        time.sleep(60)
        os._exit(0)
    Path(sys.argv[1]).write_text(f"{other.pid} {holder}")
    os.kill(os.getpid(), signal.SIGKILL)
"""
# It leaves in the middle of a spell that it never ends.
LEFT = """
import sys
from pathlib import Path
from tilewright.testing.another_process import AnotherProcess

other = AnotherProcess("cpu")
spell = other.busy()
spell.__enter__()
Path(sys.argv[1]).write_text(str(other.pid))
"""


def seconds(pid: int) -> float | None:
    """The processor time that a process took, or None if it is gone, or waits to be noticed."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if facts[0] in "ZX":
        return None
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")


def comes(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def taken(pid: int) -> float:
    found = seconds(pid)
    assert found is not None
    return found


def test_it_works_in_spells_and_ends_with_the_body() -> None:
    with AnotherProcess("cpu") as other:
        assert other.pid is None
        with other.busy():
            assert other.pid is not None
            pid = other.pid
            begin = taken(pid)
            assert comes(lambda: taken(pid) > begin + 0.1)
        rest = taken(pid)
        time.sleep(0.2)
        assert taken(pid) <= rest + 0.05
        with other.busy():
            assert comes(lambda: taken(pid) > rest + 0.1)
    assert seconds(pid) is None
    other.close()


def test_it_starts_again_after_its_end() -> None:
    other = AnotherProcess("cpu")
    for _ in range(2):
        with other, other.busy():
            assert other.pid is not None


def test_a_spell_within_a_spell_is_part_of_it() -> None:
    with AnotherProcess("cpu") as other, other.busy():
        assert other.pid is not None
        with other.busy():
            pass
        begin = taken(other.pid)
        assert comes(lambda: taken(other.pid or 0) > begin + 0.1)


def test_spells_of_threads_are_one_after_another() -> None:
    together: list[int] = []
    most: list[int] = []

    def spell() -> None:
        with other.busy():
            together.append(1)
            most.append(len(together))
            time.sleep(0.05)
            together.pop()

    with AnotherProcess("cpu") as other:
        threads = [threading.Thread(target=spell) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert most == [1, 1, 1]


def test_an_exception_ends_a_spell() -> None:
    with AnotherProcess("cpu") as other:
        for _ in range(2):
            with pytest.raises(KeyError), other.busy():
                pid = other.pid
                raise KeyError
        assert other.pid == pid


def test_an_exception_ends_it() -> None:
    with pytest.raises(KeyError), AnotherProcess("cpu") as other, other.busy():
        assert other.pid is not None
        pid = other.pid
        raise KeyError
    assert seconds(pid) is None


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    source, numbers = Path(another_process.__file__).parents[2], tmp_path / "numbers"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(numbers)],
        env={**os.environ, "PYTHONPATH": str(source)},
        check=False,
        timeout=60,
    )
    pid, holder = map(int, numbers.read_text().split())
    try:
        assert done.returncode == -signal.SIGKILL
        assert seconds(holder) is not None
        assert comes(lambda: seconds(pid) is None)
    finally:
        os.kill(holder, signal.SIGKILL)


def test_a_process_that_leaves_in_a_spell_does_not_wait_for_an_answer(tmp_path: Path) -> None:
    source, number = Path(another_process.__file__).parents[2], tmp_path / "number"
    subprocess.run(
        [sys.executable, "-c", LEFT, str(number)],
        env={**os.environ, "PYTHONPATH": str(source)},
        check=True,
        timeout=20,
    )
    assert seconds(int(number.read_text())) is None


def fails(other: AnotherProcess) -> str:
    """What it says when it is wanted and cannot."""
    with pytest.raises(AnotherProcessError) as caught, other.busy():
        pass
    assert other.pid is None
    return str(caught.value)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("sys.exit('no memory')", "it ended with status 1 and did not say 'busy'"),
        ("sys.exit('no memory')", "; its last words: no memory"),
        ("time.sleep(60)", "it did not say 'busy' within 0.3 s"),
        ("line = 'what?'", "it said 'what?' in place of 'busy'"),
        ("os.close(1); time.sleep(60)", "it closed its output and did not say 'busy'"),
        (r"os.write(1, b'\xff\n')", "it said '\N{REPLACEMENT CHARACTER}' in place of 'busy'"),
    ],
)
def test_what_does_not_obey_is_ended_and_told(does: str, words: str) -> None:
    command = [sys.executable, "-c", PLAYED.format(does=does)]
    with AnotherProcess("cpu", command=command, answer_s=0.3) as other:
        assert words in fails(other)
        assert words in fails(other)


def test_one_that_ends_in_its_spell_is_told() -> None:
    with AnotherProcess("cpu") as other:
        with pytest.raises(AnotherProcessError, match="status -9"), other.busy():
            assert other.pid is not None
            os.kill(other.pid, signal.SIGKILL)
        assert "status -9" in fails(other)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/program"], "it cannot be started: "),
        ([sys.executable, "-c", "raise SystemExit('no driver')"], "; its last words: no driver"),
    ],
)
def test_one_that_cannot_start_is_told(command: list[str], words: str) -> None:
    with AnotherProcess("cpu", command=command) as other:
        assert words in fails(other)


def test_no_place_for_its_last_words_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with AnotherProcess("cpu") as other:
        assert "it cannot be started: " in fails(other)


def test_no_thread_to_hear_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with AnotherProcess("cpu") as other:
        assert "it cannot be started: can't start new thread" in fails(other)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks in the folder first")
def test_modules_of_the_folder_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('another queue')")
    monkeypatch.chdir(tmp_path)
    with AnotherProcess("cpu") as other, other.busy():
        assert other.pid is not None


def test_another_device_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_child, "identity", lambda device: "that one")
    with AnotherProcess("cpu") as other:
        assert "it has the device of no name, this one has that one" in fails(other)


def test_a_spell_that_nobody_ends_does() -> None:
    code = "from tilewright.testing import busy_child as b; b._SPELL_S = 0.1; b.main('cpu')"
    command = [sys.executable, "-c", code]
    words = "busy for 0.1 s: nobody said that it is enough"
    with (
        AnotherProcess("cpu", command=command) as other,
        pytest.raises(AnotherProcessError, match=words),
        other.busy(),
    ):
        assert comes(lambda: other.pid is None)
