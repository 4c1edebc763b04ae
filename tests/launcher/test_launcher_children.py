"""How long a process of the launcher's may be silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from launcher.children import Child, meeting_place
from launcher.run import Launch
from pipeworker.timings import Timings
from pipeworker.wire.lines import Beat, Bound, Verdict


def test_what_a_host_says_before_it_is_ready_does_not_end_its_time_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    process: Any = SimpleNamespace(pid=1, hear=lambda: ([], True))
    child: Child[Any, Any] = Child(process, "it", patience=3, start=15, clock=lambda: now)
    now = 10
    child.hear()
    child.goes_on_starting()
    assert not child.has_spoken
    now = 25
    assert child.silence(now) == ""
    now = 26
    assert child.silence(now) == "it (pid 1) has not answered for 15 s"
    child.hear()
    now = 29
    assert child.silence(now) == ""
    now = 30
    assert child.silence(now) == "it (pid 1) has not answered for 3 s"


@pytest.mark.parametrize(
    ("callers", "place"),
    [
        (["", "127.0.0.1", "::1"], "127.0.0.1"),
        (["", "10.0.0.1", "10.0.0.1"], "10.0.0.1"),
        (["10.0.0.1", "10.1.0.1"], "0.0.0.0"),
        (["10.0.0.1", "fd00::1"], "::"),
        (["192.0.2.1"], "0.0.0.0"),  # a router's, which passes on what comes, or a host's between
        (["2001:db8::1"], "::"),
    ],
)
def test_the_coordinator_listens_where_all_hosts_reach_it(callers: list[str], place: str) -> None:
    assert meeting_place(callers, lambda address: address in ("10.0.0.1", "fd00::1")) == place


def test_who_spoke_while_the_launcher_was_stopped_is_not_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It looks at the clock, is stopped for long, and then sees who has been silent."""
    killed: list[str] = []

    class Process:
        pid = 1

        def hear(self) -> tuple[list[Any], bool]:
            return [], True

        def kill(self) -> None:
            killed.append("killed")

    now = 10.0
    process: Any = Process()
    launch = Launch.__new__(Launch)
    launch._agents, launch._verdict = [], None
    launch._coordinator = coordinator = Child(
        process, "it", patience=3, start=15, clock=lambda: now
    )
    coordinator.hear()
    looked, now = 12.0, 112.0
    assert launch._are_alive(looked)
    coordinator.hear()  # what it has said meanwhile
    assert launch._are_alive(now)
    assert not killed
    assert not launch._are_alive(now + 4)
    assert killed == ["killed"]
    assert launch._failure == "it (pid 1) has not answered for 3 s"


def test_a_coordinator_that_has_ended_meanwhile_is_not_called_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher was stopped, and reads all at once: where it listened, and why it ended."""
    verdict = Verdict("failed", 1, 0, 1.0, (0, 0), 0.0, "the launcher has not answered for 3 s")
    said = [Bound("tcp://127.0.0.1:1"), Beat(3.0), verdict]
    launch = Launch.__new__(Launch)
    process: Any = SimpleNamespace(pid=1, hear=lambda: (said, True))
    launch._coordinator = Child(process, "it", patience=3, start=15, clock=lambda: 0.0)
    launch._timings, launch._verdict, launch._failure = Timings(), None, ""

    def reaches() -> bool:
        raise AssertionError("nobody listens there any more")

    monkeypatch.setattr(launch, "_reaches", reaches)
    assert launch._hear_coordinator()
    assert launch._verdict == verdict
