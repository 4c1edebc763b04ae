"""The process that carries an agent's lines, such as ssh, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.local import AgentProcess
from launcher.spec import Host, RemoteAgent
from pipeworker.errors import RecordError
from support.real_jobs.jobs import until


@pytest.mark.parametrize(
    ("introduced", "end", "found"),
    [
        (False, "exit 255", (255, "Welcome to host b")),
        (True, "exit 255", (255, "")),
        (True, "echo Connection closed >&2; exit 255", (255, "Connection closed")),
    ],
)
def test_what_is_printed_before_an_agent_runs_is_no_reason_for_its_end(
    tmp_path: Path, introduced: bool, end: str, found: tuple[int, str]
) -> None:
    log = tmp_path / "b.log"
    script = f"echo Welcome to host b >&2; read line; {end}"
    agent = AgentProcess(RemoteAgent(Host("b", 1), ("sh", "-c", script)), log)
    until(lambda: log.read_text() == "Welcome to host b\n")
    if introduced:
        agent.introduced()
    agent.process.close_input()
    assert agent.finish(60.0) == found


def test_a_log_that_cannot_be_written_is_an_error_of_the_run(tmp_path: Path) -> None:
    log = tmp_path / "none" / "b.log"
    with pytest.raises(RecordError, match=r"b\.log: cannot be written: No such file or directory"):
        AgentProcess(RemoteAgent(Host("b", 1), ("true",)), log)
