"""A job of one worker that is this very process, in the foreground: for a debugger."""

from __future__ import annotations

from dataclasses import replace

from pipeworker.display.lines import LineDisplay
from pipeworker.display.style import Style
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.ranks.coordinator_process import REPORTED_BY_CALLER, EventListener
from pipeworker.ranks.rank_info import RankInfo
from pipeworker.runs.begin import PreparedRun, RunRequest
from pipeworker.wire.lines import FromCoordinator, Verdict


def check(stages: int | None, replicas: int, *, here: bool) -> None:
    """Raise UsageError unless the job has one worker, and runs `here`: others have no terminal."""
    if not here or replicas != 1 or stages not in (None, 1):
        raise UsageError(
            "--debug: requires one worker on this host, as there is one terminal; use --stages 1, "
            "which gives the same numbers"
        )


def run(request: RunRequest, view: Style) -> int:
    """Run the job's only worker in this process; return the exit status.

    The process keeps its terminal, so the job's output is in no log, and there is no progress bar.
    While the process waits in a debugger, its control thread sends heartbeats.

    Raises:
        UsageError: the request is invalid.
        SystemExit: the job file ended the process.
    """
    from pipeworker.session.session import Session  # which imports torch

    verdicts: list[Verdict] = []

    def listen(prepared: PreparedRun) -> EventListener:
        style = replace(view, origins=prepared.origins)
        display = LineDisplay(prepared.options, prepared.run_dir, style)

        def show(event: FromCoordinator) -> None:
            if event is REPORTED_BY_CALLER:
                return
            if isinstance(event, Verdict):
                verdicts.append(event)
                if event.job_exited:  # the job file has printed its own message
                    return
            display.show(event)

        return show

    try:
        Session(RankInfo.single_process(), None, request, listen=listen).run()
    except (PipeworkerError, KeyboardInterrupt):
        if not verdicts:
            raise
    return verdicts[-1].exit_status
