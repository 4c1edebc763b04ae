"""Unauthenticated peers at the gloo ports of a job: it trains as without them."""

from __future__ import annotations

import pytest

from pipeworker.timings import VARIABLE
from support.faults.unauthenticated_peers import UnauthenticatedPeers, listening
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, ended, until
from support.real_jobs.sources import JOB
from support.slow import slow

AWAITED = (
    JOB
    + """
    import os, time
    from pathlib import Path
    from pipeworker.worker.transport.links import gloo

    FOLDER, real = Path(__file__).parent, gloo.create_device

    def device(endpoint):
        "The first port of each worker accepts other connections before a peer may come."
        made = real(endpoint)
        gloo.create_device = real
        (FOLDER / f"open-{os.getpid()}").touch()
        while not (FOLDER / f"struck-{os.getpid()}").exists():
            time.sleep(0.002)
        return made

    gloo.create_device = device
"""
)
WORDS = ("--stages", "2", "--microbatches", "4", "--steps", "3", "--backend", "gloo")


@slow
def test_unauthenticated_peers_at_the_ports_of_a_job_change_no_number(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "handshake=1.1")
    process, path = jobs.start(*WORDS, source=AWAITED)
    until(lambda: len(list(jobs.folder.glob("open-*"))) == 2)
    peers = UnauthenticatedPeers()
    for opened in jobs.folder.glob("open-*"):
        pid = opened.name.removeprefix("open-")
        (port,) = listening(int(pid))
        peers.take_places(port)
    for opened in jobs.folder.glob("open-*"):
        opened.with_name(opened.name.replace("open", "struck")).touch()
    run = ended(process, path)
    assert peers.received()  # gloo took one of them for a stage
    peers.close()
    for stage in (0, 1):
        assert "rejected a connection that is not the peer's" in run.log(f"worker-{stage}")
    assert_same(run, jobs.train(*WORDS))
