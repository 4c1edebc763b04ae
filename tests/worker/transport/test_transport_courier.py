"""Errands: performed in order, away from the thread that waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from pipeworker.errors import PeerLost
from pipeworker.worker.transport.courier import Courier, Errand
from pipeworker.worker.transport.links.link import Pending


class Step:
    """A pending that notes its wait, and may fail in it."""

    def __init__(self, name: str, notes: list[str], error: Exception | None = None) -> None:
        self.name, self.notes, self.error = name, notes, error

    def wait(self) -> None:
        self.notes.append(f"waited {self.name}")
        if self.error is not None:
            raise self.error


@pytest.fixture
def courier() -> Iterator[Courier]:
    made = Courier()
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_errands_run_in_order_on_one_other_thread(courier: Courier) -> None:
    ran: list[tuple[int, str]] = []

    def note(number: int) -> list[Pending]:
        ran.append((number, threading.current_thread().name))
        return []

    errands = [courier.submit(partial(note, n)) for n in range(20)]
    for errand in reversed(errands):
        errand.wait()
    assert ran == [(n, "courier") for n in range(20)]


def test_waiting_waits_for_all_that_was_started(courier: Courier) -> None:
    notes: list[str] = []
    errand = courier.submit(lambda: [Step("a", notes), Step("b", notes)])
    errand.wait()
    assert notes == ["waited a", "waited b"]


def test_an_errand_is_issued_once_it_has_run(courier: Courier) -> None:
    go, reached = threading.Event(), threading.Event()

    def start() -> list[Pending]:
        reached.set()
        go.wait()
        return []

    errand = courier.submit(start)
    reached.wait()
    assert not errand.issued
    go.set()
    errand.wait()
    assert errand.issued


def _raise(error: Exception) -> list[Pending]:
    raise error


def test_an_error_comes_out_where_the_errand_is_waited_for(courier: Courier) -> None:
    failed = courier.submit(lambda: _raise(PeerLost("gone")))
    fine = courier.submit(list)
    fine.wait()  # the thread lives on
    for _ in range(2):
        with pytest.raises(PeerLost, match="gone"):
            failed.wait()


def test_an_error_of_what_was_started_comes_out_too(courier: Courier) -> None:
    errand = courier.submit(lambda: [Step("a", [], PeerLost("closed"))])
    with pytest.raises(PeerLost, match="closed"):
        errand.wait()


def test_close_performs_what_was_submitted() -> None:
    courier = Courier()
    ran: list[int] = []

    def slow(number: int) -> list[Pending]:
        ran.append(number)
        return []

    errands: list[Errand] = [courier.submit(partial(slow, n)) for n in range(50)]
    courier.close()
    assert ran == list(range(50))
    assert all(errand.issued for errand in errands)
