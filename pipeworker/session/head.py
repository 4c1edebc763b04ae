"""How the ranks of a job find its coordinator, which rank 0 starts.

The other ranks learn its address, and the token when ``PIPEWORKER_TOKEN`` is not set, from the
store at which the ranks meet.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from pipeworker.environment import timings
from pipeworker.errors import NotMet, PipeworkerError, RecordError, of_status
from pipeworker.record.rundir import write_summary
from pipeworker.session.begin import Begun
from pipeworker.session.place import Place, await_others
from pipeworker.session.processes import coordinator
from pipeworker.wire.keys import TOKEN_VARIABLE, new_token
from pipeworker.wire.lines import Bound, Configuration, FromCoordinator, Interrupt, Verdict, Warned
from pipeworker.wire.messages import StepResult
from pipeworker.wire.sockets import WORKER, check_room

Hear = Callable[[FromCoordinator], None]
"""Is given what the coordinator says."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The coordinator as a rank knows it; `head` on rank 0 alone."""

    endpoint: str
    token: str
    head: Head | None = None


def meet(
    place: Place,
    name: str,
    begin: Callable[[], Begun],
    listen: Callable[[Begun], Hear],
) -> Meeting:
    """Start the coordinator on rank 0, learn of it on the others.

    Args:
        name: of the job among those that meet at the same store.
        begin: begins the run; called on rank 0 alone.
        listen: given the run, gives who is told what the coordinator says.

    Raises:
        UsageError: the ranks cannot meet.
        NotMet: nor would they elsewhere: one is gone.
        PipeworkerError: the coordinator did not start.
    """
    token = os.environ.get(TOKEN_VARIABLE)
    if place.world == 1:
        _check_room(place)
        token = token or new_token()
        begun = begin()
        head = Head(begun, token, "127.0.0.1", _told(begun, listen))
        return Meeting(head.endpoint, token, head)
    store = place.store()
    key = f"pipeworker/{place.restart}/{name}"
    if place.rank:
        _check_room(place)
        try:
            await_others(lambda: store.check([f"{key}/endpoint"]))
        except (RuntimeError, TimeoutError) as error:
            raise NotMet(f"rank 0 did not start the job: {error}") from None
        endpoint = store.get(f"{key}/endpoint").decode()
        if not endpoint:
            status, _, text = store.get(f"{key}/error").decode().partition(" ")
            raise of_status(int(status))(text)
        return Meeting(endpoint, token or store.get(f"{key}/token").decode())
    try:
        _check_room(place)
        begun = begin()
        hear = _told(begun, listen)
        if not token:
            token = new_token()
            store.set(f"{key}/token", token)
            _warn(
                f"{TOKEN_VARIABLE} is not set: the token goes through torchrun's store, which "
                "anyone who reaches its port can read",
                hear,
            )
        head = Head(begun, token, place.coordinator_address(), hear)
    except PipeworkerError as error:  # the others are waiting
        store.set(f"{key}/error", f"{error.exit_status} {error}")
        store.set(f"{key}/endpoint", "")
        raise
    store.set(f"{key}/endpoint", head.endpoint)
    return Meeting(head.endpoint, token, head)


def _told(begun: Begun, listen: Callable[[Begun], Hear]) -> Hear:
    """Who listens, and has been told how the run begins."""
    hear = listen(begun)
    for text in begun.warnings:
        _warn(text, hear)
    return hear


def _warn(text: str, hear: Hear) -> None:
    with suppress(OSError):  # that nobody reads it shows again
        hear(Warned(text))


def _check_room(place: Place) -> None:
    try:
        check_room(*WORKER)
    except OSError as error:
        raise PipeworkerError(f"rank {place.rank} cannot start: {error.strerror}") from None


class Head:
    """Rank 0's coordinator: a child process, and a thread that passes on what it says."""

    def __init__(self, begun: Begun, token: str, host: str, hear: Hear) -> None:
        self._hear = hear
        self._begun = begun
        self._started = time.monotonic()
        self._steps = 0
        self._verdict: Verdict | None = None
        self._unheard = False
        options, run_dir = begun.options.to_json(), str(begun.run_dir.path)
        try:
            self._coordinator = coordinator()
            self._coordinator.say(Configuration(options, run_dir, token, host, starter=0))
            self.endpoint = self._bound()
        except PipeworkerError:
            begun.close()
            raise
        self._listener = threading.Thread(target=self._listen, name="coordinator", daemon=True)
        self._listener.start()

    def _bound(self) -> str:
        while True:
            events, more = self._coordinator.hear()
            for event in events:
                if isinstance(event, Bound):
                    return event.endpoint
                if isinstance(event, Verdict):
                    self._coordinator.finish(timings().leave)
                    raise PipeworkerError(event.error or event.status)
            if not more:
                self._coordinator.finish(timings().leave)
                raise PipeworkerError(
                    "the coordinator did not start: see its log in the run directory"
                )

    def _listen(self) -> None:
        """Pass on what the coordinator says until it ends."""
        more = True
        while more:
            events, more = self._coordinator.hear()
            for event in events:
                if isinstance(event, Verdict):
                    self._verdict = event
                if isinstance(event, StepResult):
                    self._steps = event.step
                self._tell(event)

    def _tell(self, event: FromCoordinator) -> None:
        """Show something; a terminal that is gone ends the job as an interrupt does."""
        try:
            self._hear(event)
        except OSError:
            if not self._unheard and self._verdict is None:
                self._coordinator.say(Interrupt())
            self._unheard = True

    def finish(self, status: int) -> int:
        """Let the coordinator speak its verdict and end; returns the job's exit status.

        Args:
            status: what it is when there is no verdict.
        """
        self._listener.join(timings().verdict)
        silent = self._listener.is_alive()
        self._coordinator.hang_up()
        self._coordinator.finish(timings().leave)
        if self._verdict is None:
            how = "has not answered" if silent else "was killed"
            self._say_ourselves(status or 1, f"the coordinator (pid {self._coordinator.pid}) {how}")
        self._begun.close()
        assert self._verdict
        return self._verdict.exit_status

    def _say_ourselves(self, status: int, error: str) -> None:
        """The verdict that the coordinator could not speak."""
        seconds, options = time.monotonic() - self._started, self._begun.options
        workers = options.stages * options.replicas
        verdict = Verdict("failed", status, self._steps, seconds, (0,) * workers, 0.0, error)
        self._verdict = verdict
        try:
            write_summary(self._begun.run_dir, verdict, options.stages)
        except OSError as failed:
            self._tell(Warned(str(RecordError(self._begun.run_dir.summary, failed))))
        self._tell(verdict)
