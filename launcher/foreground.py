"""A job of one worker that is this very process, in the foreground: for a debugger."""

from __future__ import annotations

from dataclasses import replace

from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.session.begin import Asked, Begun
from pipeworker.session.head import UNSAID, Hear
from pipeworker.session.place import Place
from pipeworker.session.show.plain import Show
from pipeworker.session.show.view import View
from pipeworker.wire.lines import FromCoordinator, Verdict


def check(stages: int | None, replicas: int, *, here: bool) -> None:
    """That there is one worker, on this host.

    Raises:
        UsageError: there are others, which have no terminal.
    """
    if not here or replicas != 1 or stages not in (None, 1):
        raise UsageError(
            "--debug is for one worker on this host, since there is one terminal: say --stages 1, "
            "which gives the same numbers"
        )


def run(asked: Asked, view: View) -> int:
    """Be the worker to the end of the job; returns the exit status.

    The process keeps its terminal, so what the job prints is not in a log, nor is there a progress
    bar. While it waits in a debugger its control thread says that it lives.

    Raises:
        UsageError: something is wrong with what is asked for.
        SystemExit: the job ended itself.
    """
    from pipeworker.session.session import Session  # which imports torch

    verdicts: list[Verdict] = []

    def listen(begun: Begun) -> Hear:
        shown = replace(view, origins=begun.origins)
        show = Show(begun.options, str(begun.run_dir.path), shown)

        def hear(event: FromCoordinator) -> None:
            if event is UNSAID:
                return
            if isinstance(event, Verdict):
                verdicts.append(event)
                if event.own:  # it has been heard
                    return
            show.hear(event)

        return hear

    try:
        Session(Place.alone(), None, asked, listen=listen).run()
    except (PipeworkerError, KeyboardInterrupt):
        if not verdicts:
            raise
    return verdicts[-1].exit_status
