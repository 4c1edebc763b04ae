"""Fixtures of several modules with tests of links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.faults.authentication import timings
from support.in_process.transport import close_connected

SHORT = "handshake=0.25,reconnect=0.2,dial=0.05"


@pytest.fixture(autouse=True)
def _links_are_closed() -> Iterator[None]:
    yield
    close_connected()


@pytest.fixture
def short_handshake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a short time for handshakes."""
    yield from timings(monkeypatch, f"{SHORT},connect=21")


@pytest.fixture
def short_connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set short times for handshakes and for connecting."""
    yield from timings(monkeypatch, f"{SHORT},connect=1.1")


@pytest.fixture
def patient_connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set times in which peers reject each other also on a busy machine."""
    yield from timings(monkeypatch, "handshake=0.7,reconnect=0.2,dial=0.05,connect=3")
