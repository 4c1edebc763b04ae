"""The descriptions of failures."""

from __future__ import annotations

import signal

import pytest

from pipeworker.facts.failure import describe_exit


@pytest.mark.parametrize("name", ["SIGHUP", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGXCPU", "SIGXFSZ"])
def test_a_signal_is_named(name: str) -> None:
    """SIGXCPU is the one of `ulimit -S -t`; a hard limit kills."""
    assert describe_exit(-signal.Signals[name]) == f"was killed by {name}"


def test_a_signal_without_a_usual_number_is_numbered() -> None:
    assert describe_exit(-40) == "was killed by signal 40"
    assert describe_exit(3) == "exited with status 3"
