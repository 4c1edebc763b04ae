"""The times at which an interrupt takes effect in a process of the user's, and in the launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import local
from pipeworker.host.signals import (
    USUAL,
    deferred_interrupt,
    handle_before_job,
    reported_interrupt,
    restore_ends,
)


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """Other libraries of the test process may have set a handler of their own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_interrupt_is_reported_and_the_second_takes_effect() -> None:
    reports: list[str] = []

    def report() -> bool:
        reports.append("first")
        return True

    with reported_interrupt(report):
        with deferred_interrupt():
            interrupt()
            assert not reports
        assert reports == ["first"]
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert reports == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_end_that_raises_as_an_interrupt_is_reported_too() -> None:
    """So it does before a job starts, and in one that runs in the foreground."""
    reports: list[int] = []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with reported_interrupt(lambda: not reports.append(1)):  # type: ignore[func-returns-value]
            signal.raise_signal(signal.SIGTERM)
            assert reports == [1]
            with pytest.raises(KeyboardInterrupt):
                interrupt()
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_that_cannot_be_reported_takes_effect() -> None:
    with pytest.raises(KeyboardInterrupt), reported_interrupt(lambda: False):
        interrupt()


def test_a_handler_of_the_users_stays() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        with reported_interrupt(lambda: pytest.fail("reported")):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]


def test_signals_are_handled_before_a_job_unless_they_are_already() -> None:
    handled = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in handled}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
        handle_before_job()
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        restore_ends()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_after_the_verdict_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A second one does not wait for the terminal, and leaves out what follows."""
    performed: list[str] = []

    def finish(verdict: Any) -> None:
        performed.append("show")
        for _ in range(times):
            interrupt()

    verdict = SimpleNamespace(exit_status=0)
    launch = SimpleNamespace(run=lambda: verdict, finish=finish, has_begun=True)
    checkpoints = SimpleNamespace(remove_leftovers=lambda: performed.append("remove"))
    prepared: Any = SimpleNamespace(
        run_dir=SimpleNamespace(
            checkpoints=checkpoints, remove_partial_files=lambda: performed.append("partial")
        ),
        close=lambda *_, **__: performed.append("close"),
    )
    view: Any = None
    monkeypatch.setattr(local, "Launch", lambda *_: launch)
    assert local.run(prepared, view, ()) == 0
    assert performed == ["show", "remove", "partial", "close"][: 4 if times == 1 else 1]


def test_a_second_interrupt_takes_effect_at_once() -> None:
    def save() -> None:
        with deferred_interrupt():
            interrupt()
            with pytest.raises(KeyboardInterrupt):
                interrupt()

    with pytest.raises(KeyboardInterrupt):  # the first one, at the end
        save()


@pytest.mark.parametrize("context", [deferred_interrupt, lambda: reported_interrupt(lambda: True)])
def test_handlers_are_put_back_after_an_error_and_left_alone_outside_the_main_thread(
    context: Callable[[], AbstractContextManager[None]],
) -> None:
    entered: list[Any] = []

    def enter() -> None:
        with context():
            entered.append(signal.getsignal(signal.SIGINT))

    with pytest.raises(ZeroDivisionError), context():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.default_int_handler]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # under nohup
    try:
        with deferred_interrupt([signal.SIGHUP]):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_handler_that_raises_takes_effect_after_the_context(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    done = []

    def update() -> None:
        with deferred_interrupt(USUAL):
            signal.raise_signal(number)
            done.append("update")

    try:
        with pytest.raises(KeyboardInterrupt):
            update()
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert done


INTERRUPTED_IMPORT = """
import signal
import sys

class Interrupts:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "launcher.local":
            type("Owner", (), {"attribute": Interrupts()})

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Finder())
sys.argv = ["pipeworker", "status"]
from pipeworker.__main__ import script

script()
"""


def test_an_interrupt_of_an_import_ends_the_command() -> None:
    """Python 3.11 would make a RuntimeError of an exception here, whose traceback it would show."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (130, "")
