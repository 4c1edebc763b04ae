"""A clock that does not count the time during which its process was suspended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeworker.host import suspend_clock
from pipeworker.host.suspend_clock import SuspendAwareClock


def test_suspended_time_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(suspend_clock, "time", SimpleNamespace(monotonic=lambda: now))
    clock = SuspendAwareClock(2.0)
    began = clock.now()
    for now in (101.0, 103.0, 103.5):
        assert clock.now() - began == now - 100
    assert not clock.suspended
    now = 163.5
    assert clock.now() - began == 5.5
    assert clock.suspended == 58
    now = 164.5
    assert clock.now() - began == 6.5
    assert clock.suspended == 58
