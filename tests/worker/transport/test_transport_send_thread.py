"""Tasks of the send thread: performed in order, apart from the thread that waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from pipeworker.errors import PeerLost
from pipeworker.host.task_thread import TaskThread
from pipeworker.worker.transport.links.link import Pending
from pipeworker.worker.transport.send_thread import SendTask


class Step:
    """A pending send that notes its wait, and may fail."""

    def __init__(self, name: str, notes: list[str], error: Exception | None = None) -> None:
        self.name, self.notes, self.error = name, notes, error

    def wait(self) -> None:
        self.notes.append(f"waited {self.name}")
        if self.error is not None:
            raise self.error


@pytest.fixture
def send_thread() -> Iterator[TaskThread]:
    before = {*threading.enumerate()}
    made = TaskThread("send")
    yield made
    made.close()
    assert {*threading.enumerate()} <= before


def test_tasks_run_in_order_on_one_other_thread(send_thread: TaskThread) -> None:
    ran: list[tuple[int, str]] = []

    def note(number: int) -> list[Pending]:
        ran.append((number, threading.current_thread().name))
        return []

    tasks = [SendTask(partial(note, n), send_thread) for n in range(20)]
    for task in reversed(tasks):
        task.wait()
    assert ran == [(n, "send") for n in range(20)]


def test_wait_waits_for_all_started_sends(send_thread: TaskThread) -> None:
    notes: list[str] = []
    task = SendTask(lambda: [Step("a", notes), Step("b", notes)], send_thread)
    task.wait()
    assert notes == ["waited a", "waited b"]


def test_a_task_is_issued_once_it_has_run(send_thread: TaskThread) -> None:
    go, reached = threading.Event(), threading.Event()

    def start() -> list[Pending]:
        reached.set()
        go.wait()
        return []

    task = SendTask(start, send_thread)
    reached.wait()
    assert not task.issued
    go.set()
    task.wait()
    assert task.issued


def _raise(error: Exception) -> list[Pending]:
    raise error


def test_wait_raises_the_error_of_a_task(send_thread: TaskThread) -> None:
    failed = SendTask(lambda: _raise(PeerLost("gone")), send_thread)
    fine = SendTask(list, send_thread)
    fine.wait()  # the thread still runs
    for _ in range(2):
        with pytest.raises(PeerLost, match="gone"):
            failed.wait()


def test_wait_raises_the_error_of_a_started_send(send_thread: TaskThread) -> None:
    task = SendTask(lambda: [Step("a", [], PeerLost("closed"))], send_thread)
    with pytest.raises(PeerLost, match="closed"):
        task.wait()


def test_close_performs_submitted_tasks() -> None:
    send_thread = TaskThread("send")
    ran: list[int] = []

    def slow(number: int) -> list[Pending]:
        ran.append(number)
        return []

    tasks = [SendTask(partial(slow, n), send_thread) for n in range(50)]
    send_thread.close()
    assert ran == list(range(50))
    assert all(task.issued for task in tasks)
