"""Whose a run directory is, among processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeworker.record.lock import Lock, held

HOLDER = """
import os, sys
from pathlib import Path
from pipeworker.record.lock import Lock

for line in sys.stdin:
    match line.split():
        case ["take", path, how]:
            lock = Lock(Path(path), alone=how == "alone")
        case ["share"]:
            lock.share()
        case ["close"]:
            lock.close()
        case ["fork"]:
            if not (child := os.fork()):
                os.read(int(sys.argv[1]), 1)
                os._exit(0)
    print("done", flush=True)
"""


class Holder:
    """Another process, which does what it is told."""

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

    def tell(self, words: str) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(words.replace("take", f"take {self._path}") + "\n")
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
        Lock(path, alone=alone).close()
    except BlockingIOError:
        return False
    return True


def test_who_begins_is_alone_and_shares_it_then(path: Path, holder: Holder) -> None:
    assert free(path, alone=True)
    holder.tell("take alone")
    assert not free(path, alone=True)
    assert not free(path, alone=False)
    holder.tell("share")
    assert not free(path, alone=True)
    ours = Lock(path, alone=False)
    holder.tell("close")
    holder.tell("take shared")
    ours.close()
    ours.close()
    holder.tell("close")
    assert free(path, alone=True)


def test_whether_it_is_held_is_asked_without_taking_it(path: Path, holder: Holder) -> None:
    assert not held(path)
    for how in ("alone", "shared"):
        holder.tell(f"take {how}")
        assert held(path)
        holder.tell("close")
        assert not held(path)
    assert not held(path.parent / "none" / "lock")


def test_it_ends_with_its_process_whatever_that_has_forked(path: Path, holder: Holder) -> None:
    holder.tell("take alone")
    holder.tell("fork")
    assert not free(path, alone=True)
    holder.end()
    assert free(path, alone=True)


def test_who_holds_it_is_given_time_to_end(path: Path, holder: Holder) -> None:
    holder.tell("take alone")
    end = threading.Timer(0.1, holder.end)
    end.start()
    Lock(path, alone=True, seconds=60).close()
    end.join()


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Lock(tmp_path / "file" / "lock", alone=True)


def test_a_file_system_without_locks_keeps_nobody_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    assert free(path, alone=True)
