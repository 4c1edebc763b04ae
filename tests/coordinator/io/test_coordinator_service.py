"""The service that performs the effects of the coordinator's state machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pipeworker.coordinator.effects import Log
from pipeworker.coordinator.events import ParentReads, Tick
from pipeworker.coordinator.service import Service


def test_the_effects_of_a_parent_that_reads_again_are_performed() -> None:
    """A restart may be due just then, as of a job that is to grow."""
    service: Any = object.__new__(Service)
    performed: list[Any] = []
    service._parent_reads, service._parent = True, SimpleNamespace(has_room=False)
    service._job = SimpleNamespace(handle=lambda event, _: [Log(type(event).__name__)])
    service._perform = performed.append
    service._handle(Tick(0.0))
    assert performed == [Log(ParentReads.__name__), Log(Tick.__name__)]
