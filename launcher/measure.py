"""A job that only finds the facts of the layers of a network: the start of `launch`, no step."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from launcher import local
from launcher.spec import Host, RemoteAgent
from pipeworker.coordinator.job import SLOTS
from pipeworker.coordinator.service import recorded_facts
from pipeworker.display.style import Style
from pipeworker.errors import PipeworkerError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.job.interval import END
from pipeworker.job.options import Options
from pipeworker.record.lock import RunLock
from pipeworker.record.rundir import RunDir
from pipeworker.runs.begin import PreparedRun


def measure(options: Options) -> NetworkFacts:
    """Return the facts of the network that a job with these options would train, on this host.

    Raises:
        SystemExit: the job failed, and has said why.
    """
    slots = SLOTS if options.max_restarts else 1
    options = replace(
        options,
        plan_only=True,
        balance=None,
        max_restarts=0,
        checkpoint_every=END,
    )
    with tempfile.TemporaryDirectory(prefix="pipeworker-") as folder:
        place = RunDir(Path(folder))
        for made in (place.checkpoints.path, place.coordinator_log().parent):
            made.mkdir()
        lock = RunLock(place.lock, exclusive=False)
        prepared = PreparedRun(options, RunDir.open(place.path), lock, ExitStack())
        agents = (RemoteAgent(Host("", options.workers)),)
        if status := local.run(prepared, Style(quiet=True), agents):
            sys.exit(status)
        found = recorded_facts(place)
    if found is None:
        raise PipeworkerError("plan: the facts of the layers were not recorded")
    return replace(found, copies=slots) if found.copies else found
