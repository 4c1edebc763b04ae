"""The lock of a run directory, among processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeworker.record.lock import RunLock, is_locked

HOLDER = """
import os, sys
from pathlib import Path
from pipeworker.record.lock import RunLock

for line in sys.stdin:
    match line.split():
        case ["acquire", path, how]:
            lock = RunLock(Path(path), exclusive=how == "alone")
        case ["share"]:
            lock.share()
        case ["close"]:
            lock.release()
        case ["fork"]:
            if not (child := os.fork()):
                os.read(int(sys.argv[1]), 1)
                os._exit(0)
    print("done", flush=True)
"""


class Holder:
    """Another process, which executes commands on the lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._gate, self._open = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(self._gate)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[self._gate],
        )
        os.close(self._gate)

    def command(self, words: str) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(words.replace("acquire", f"acquire {self._path}") + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        os.close(self._open)  # so does what it has forked
        self.end()
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stdout.read() == ""  # when all that have it are gone
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def holder(path: Path) -> Iterator[Holder]:
    made = Holder(path)
    yield made
    made.close()


def free(path: Path, *, alone: bool) -> bool:
    try:
        RunLock(path, exclusive=alone).release()
    except BlockingIOError:
        return False
    return True


def test_the_lock_is_exclusive_until_it_is_shared(path: Path, holder: Holder) -> None:
    assert free(path, alone=True)
    holder.command("acquire alone")
    assert not free(path, alone=True)
    assert not free(path, alone=False)
    holder.command("share")
    assert not free(path, alone=True)
    ours = RunLock(path, exclusive=False)
    holder.command("close")
    holder.command("acquire shared")
    ours.release()
    ours.release()
    holder.command("close")
    assert free(path, alone=True)


def test_is_locked_does_not_take_the_lock(path: Path, holder: Holder) -> None:
    assert not is_locked(path)
    for how in ("alone", "shared"):
        holder.command(f"acquire {how}")
        assert is_locked(path)
        holder.command("close")
        assert not is_locked(path)
    assert not is_locked(path.parent / "none" / "lock")


def test_the_lock_ends_with_its_process_despite_children(path: Path, holder: Holder) -> None:
    holder.command("acquire alone")
    holder.command("fork")
    assert not free(path, alone=True)
    holder.end()
    assert free(path, alone=True)


def test_the_timeout_lets_another_process_end(path: Path, holder: Holder) -> None:
    holder.command("acquire alone")
    end = threading.Timer(0.1, holder.end)
    end.start()
    RunLock(path, exclusive=True, timeout=60).release()
    end.join()


def test_a_lock_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        RunLock(tmp_path / "file" / "lock", exclusive=True)


def test_every_process_gets_the_lock_on_a_file_system_without_locks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    assert free(path, alone=True)
