"""A clock that stands still while its process does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipeworker.host import awake
from pipeworker.host.awake import Awake


def test_what_passes_while_a_process_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(awake, "time", SimpleNamespace(monotonic=lambda: now))
    clock = Awake(2.0)
    began = clock.look()
    for now in (101.0, 103.0, 103.5):
        assert clock.look() - began == now - 100
    assert not clock.stopped
    now = 163.5
    assert clock.look() - began == 5.5
    assert clock.stopped == 58
    now = 164.5
    assert clock.look() - began == 6.5
    assert clock.stopped == 58
