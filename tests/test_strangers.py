"""Strangers among the stages of a job: it trains as without them."""

from __future__ import annotations

import pytest

from pipeworker.timings import VARIABLE
from support.compare import assert_same
from support.jobs import Jobs, Run, until
from support.sources import JOB
from support.strangers import Strangers, listening

AWAITED = (
    JOB
    + """
    import os, time
    from pathlib import Path
    from pipeworker.worker.transport.links import gloo

    FOLDER, real = Path(__file__).parent, gloo._device

    def device(endpoint):
        "The first port of each worker is open to strangers before a peer may come."
        made = real(endpoint)
        gloo._device = real
        (FOLDER / f"open-{os.getpid()}").touch()
        while not (FOLDER / f"struck-{os.getpid()}").exists():
            time.sleep(0.002)
        return made

    gloo._device = device
"""
)
WORDS = ("--stages", "2", "--microbatches", "4", "--steps", "3", "--backend", "gloo")


def test_a_job_with_strangers_at_its_ports_gives_the_numbers_of_one_without(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "handshake=1.1")
    process, path = jobs.start(*WORDS, source=AWAITED)
    until(lambda: len(list(jobs.folder.glob("open-*"))) == 2)
    strangers = Strangers()
    for opened in jobs.folder.glob("open-*"):
        pid = opened.name.removeprefix("open-")
        (port,) = listening(int(pid))
        strangers.strike(port)
    for opened in jobs.folder.glob("open-*"):
        opened.with_name(opened.name.replace("open", "struck")).touch()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    run = Run(process.returncode, stdout, stderr, path)
    assert strangers.heard()  # gloo took one of them for a stage
    strangers.close()
    for stage in (0, 1):
        assert "somebody who is not the peer connected" in run.log(f"stage-{stage}")
    assert_same(run, jobs.train(*WORDS))
